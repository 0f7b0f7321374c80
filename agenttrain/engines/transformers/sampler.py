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
    """Sampling settings of a batch's rows, as tensors. Valid until a row joins or leaves."""

    temperature_B1: Tensor
    """1 for greedy rows: their logprobs are those of the unscaled distribution."""
    greedy_B1: Tensor
    draws: bool
    """True: some row is not greedy."""
    filtered_F: Tensor | None
    """Indices of the rows with a filter. None: no row has one, so nothing is sorted."""
    top_k_F1: Tensor
    """inf: no limit."""
    top_p_F1: Tensor
    min_p_F1: Tensor


def make_tensors(samplings: Sequence[Sampling], device: torch.device) -> SamplingTensors:
    """Return the settings of a batch as tensors, one row for each of `samplings`."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

    greedy = [s.temperature == 0 for s in samplings]
    filtered = [
        i
        for i, s in enumerate(samplings)
        if not greedy[i] and (s.top_p < 1 or s.top_k > 0 or s.min_p > 0)
    ]
    filters = [samplings[i] for i in filtered]
    return SamplingTensors(
        temperature_B1=column([s.temperature or 1.0 for s in samplings]),
        greedy_B1=torch.tensor(greedy, device=device).unsqueeze(1),
        draws=not all(greedy),
        filtered_F=torch.tensor(filtered, device=device) if filtered else None,
        top_k_F1=column([s.top_k or float("inf") for s in filters]),
        top_p_F1=column([s.top_p for s in filters]),
        min_p_F1=column([s.min_p for s in filters]),
    )


def draw_noise(seed: int, count: int) -> list[float]:
    """Return `count` uniforms in [0, 1), one per token: the sampling noise of one request."""
    # Python's generator uses all 63 bits of a seed. torch's generator on a CPU uses the lower 32.
    uniform = Random(seed % 2**63).random
    return [uniform() for _ in range(count)]


def sample(
    logits_BV: Tensor, settings: SamplingTensors, uniforms: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Sample one token per row; return (token ids [B], their logprobs [B], float32).

    `settings` has the rows' temperatures and filters: F of the B rows have a filter (`filtered_F`),
    and if all rows are greedy nothing is drawn. Logprobs are those of the distribution after
    temperature and filters. A row's uniform selects the token by the inverse of the cumulative
    distribution: probabilities (0.2, 0.5, 0.3) and uniform 0.6 give token 1. Logits that are not
    finite give a logprob that is not finite.
    """
    scores_BV = logits_BV.float() / settings.temperature_B1
    if settings.filtered_F is not None:
        scores_BV[settings.filtered_F] = _filter(scores_BV[settings.filtered_F], settings)
    logprobs_BV = scores_BV.log_softmax(-1)
    ids_B1 = scores_BV.argmax(-1, keepdim=True)
    if settings.draws:
        device = logprobs_BV.device
        # float32 sums over a large vocabulary would misplace the tail; MPS has nothing wider.
        wide = torch.float32 if device.type == "mps" else torch.float64
        cumulative_BV = logprobs_BV.exp().cumsum(-1, dtype=wide)
        total_B1 = cumulative_BV[:, -1:]
        target_B1 = torch.tensor(uniforms, dtype=wide, device=device).unsqueeze(1) * total_B1
        # The search returns the first token whose cumulative probability is above the target. If
        # the target were the total, none would be: in float32 a uniform may round to 1. So the
        # target is at most the number just below the total.
        target_B1 = torch.minimum(target_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
        drawn_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
        # Nothing is above NaN either: the index would lie behind the vocabulary.
        drawn_B1.clamp_(max=logprobs_BV.shape[1] - 1)
        ids_B1 = torch.where(settings.greedy_B1, ids_B1, drawn_B1)
    return ids_B1.squeeze(1), logprobs_BV.gather(1, ids_B1).squeeze(1)


def _filter(scores_FV: Tensor, settings: SamplingTensors) -> Tensor:
    """Set scores outside top-k to -inf, then those outside top-p or below min-p.

    F rows of scores, each with its own settings. top-p drops a token if the tokens before it, in
    falling order of probability, already have probability top-p.
    """
    sorted_FV, order_FV = scores_FV.sort(stable=True, dim=-1, descending=True)
    rank_V = torch.arange(scores_FV.shape[1], device=scores_FV.device)
    sorted_FV = sorted_FV.masked_fill(rank_V >= settings.top_k_F1, -torch.inf)
    probabilities_FV = sorted_FV.softmax(-1)
    before_FV = probabilities_FV.cumsum(-1) - probabilities_FV
    # The sum before the last tokens may round to 1, and top_p=1 drops nothing.
    drop_FV = (before_FV >= settings.top_p_F1) & (settings.top_p_F1 < 1)
    drop_FV |= probabilities_FV < settings.min_p_F1 * probabilities_FV[:, :1]
    drop_FV[:, 0] = False  # the most probable token always stays
    kept_FV = sorted_FV.masked_fill(drop_FV, -torch.inf)
    return torch.empty_like(scores_FV).scatter_(1, order_FV, kept_FV)
