"""Logits to tokens: every row of a batch with its own temperature, filters and noise.

B rows, V vocabulary, F rows with a filter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from agenttrain.engines.config import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTensors:
    """Sampling settings of a batch's rows, as tensors; they hold until a row joins or leaves."""

    temperature_B1: Tensor
    """1 for greedy rows: their logprobs are those of the unscaled distribution."""
    greedy_B1: Tensor
    sampling: bool
    """True: some row is not greedy."""
    filtered_F: Tensor | None
    """Indices of the rows with a filter; None: there are none, and nothing is sorted."""
    top_k_F1: Tensor
    top_p_F1: Tensor
    min_p_F1: Tensor


def plan(samplings: Sequence[Sampling], device: torch.device) -> SamplingTensors:
    """Return the tensors of a batch with these rows."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

    greedy = [s.temperature == 0 for s in samplings]
    filtered = [
        i
        for i, s in enumerate(samplings)
        if not greedy[i] and (s.top_p < 1 or s.top_k > 0 or s.min_p > 0)
    ]
    chosen = [samplings[i] for i in filtered]
    return SamplingTensors(
        temperature_B1=column([s.temperature or 1.0 for s in samplings]),
        greedy_B1=torch.tensor(greedy, device=device).unsqueeze(1),
        sampling=not all(greedy),
        filtered_F=torch.tensor(filtered, device=device) if filtered else None,
        top_k_F1=column([s.top_k or float("inf") for s in chosen]),
        top_p_F1=column([s.top_p for s in chosen]),
        min_p_F1=column([s.min_p for s in chosen]),
    )


def noise(seed: int, count: int) -> list[float]:
    """Return `count` uniforms in [0, 1): the sampling noise of one request, one number a token.

    From Python's generator, which reads all 63 bits of a seed: torch's on a CPU reads the lower 32.
    """
    uniform = Random(seed % 2**63).random
    return [uniform() for _ in range(count)]


def sample(
    logits_BV: Tensor, plan: SamplingTensors, uniforms: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Draw one token a row: (token ids [B], logprobs [B] float32 of the distribution drawn from).

    The token is the one whose stretch of the cumulative distribution holds the row's uniform, e.g.
    probabilities (0.2, 0.5, 0.3) and uniform 0.6 give token 1. Logits that are not finite give a
    logprob that is not.
    """
    scores_BV = logits_BV.float() / plan.temperature_B1
    if plan.filtered_F is not None:
        scores_BV[plan.filtered_F] = _filter(scores_BV[plan.filtered_F], plan)
    logprobs_BV = scores_BV.log_softmax(-1)
    ids_B1 = scores_BV.argmax(-1, keepdim=True)
    if plan.sampling:
        device = logprobs_BV.device
        # float32 sums over a large vocabulary would misplace the tail; MPS has nothing wider.
        wide = torch.float32 if device.type == "mps" else torch.float64
        cumulative_BV = logprobs_BV.exp().cumsum(-1, dtype=wide)
        total_B1 = cumulative_BV[:, -1:]
        target_B1 = torch.tensor(uniforms, dtype=wide, device=device).unsqueeze(1) * total_B1
        # A uniform may round to 1 in float32, and the total lies past every token.
        target_B1 = torch.minimum(target_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
        drawn_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
        drawn_B1.clamp_(max=logprobs_BV.shape[1] - 1)
        ids_B1 = torch.where(plan.greedy_B1, ids_B1, drawn_B1)
    return ids_B1.squeeze(1), logprobs_BV.gather(1, ids_B1).squeeze(1)


def _filter(scores_FV: Tensor, plan: SamplingTensors) -> Tensor:
    """Set to -inf the tokens outside top-k; of the others, those outside top-p or below min-p."""
    sorted_FV, order_FV = scores_FV.sort(stable=True, dim=-1, descending=True)
    rank_V = torch.arange(scores_FV.shape[1], device=scores_FV.device)
    sorted_FV = sorted_FV.masked_fill(rank_V >= plan.top_k_F1, -torch.inf)
    probabilities_FV = sorted_FV.softmax(-1)
    before_FV = probabilities_FV.cumsum(-1) - probabilities_FV
    drop_FV = (before_FV >= plan.top_p_F1) & (plan.top_p_F1 < 1)
    drop_FV |= probabilities_FV < plan.min_p_F1 * probabilities_FV[:, :1]
    drop_FV[:, 0] = False
    kept_FV = sorted_FV.masked_fill(drop_FV, -torch.inf)
    return torch.empty_like(scores_FV).scatter_(1, order_FV, kept_FV)
