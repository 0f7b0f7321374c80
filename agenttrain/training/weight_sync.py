"""Weight sync: send the policy's weights to the engine, and check that it holds them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import PreTrainedModel

from agenttrain.engines.base import Engine, Forgetful, OwnNumberFormat, Separate
from agenttrain.training.config import WeightSyncConfig
from agenttrain.training.lora import ADAPTER, adapter_weights, is_adapted
from agenttrain.training.policy import Policy
from agenttrain.training.sharding import full_tensor, is_sharded
from agenttrain.types import AgenttrainError, Sampling

PROBE_TOKENS = 128
"""Tokens of the probe's prompt, and as many after it."""
STEP = 7919
"""A prime: the ids of a probe without a prompt wander over the whole vocabulary."""
EXACT_TOLERANCE = 1e-3
"""For the largest gap in float32 on a CPU, where kernels agree to 1e-5."""
TOLERANCE = 0.1
"""For the mean gap and its 90 % quantile anywhere else: kernels of 16 bits differ by a rounding of
1/256 in every layer, those of a GPU in float32 by what TF32 rounds."""
GROWTH = 5
"""How many times its gap of the first sync an engine may have that is over the tolerance: a text
grows less likely while a policy learns, and gaps grow with that."""
FAR = 10
"""Tolerances from which on a single token is warned of."""


class StaleWeights(AgenttrainError):
    """After a weight sync the engine does not sample from the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Distance of log-probabilities, in nats, over the tokens of a text."""

    mean: float
    q90: float
    """90 % quantile: a few tokens for which a mixture of experts took another route, which is
    several nats apart, do not move it; wrong weights do."""
    max: float

    @classmethod
    def of(cls, policy_T: Tensor, engine_T: Tensor) -> Gap:
        """Example: policy [-1, -2], engine [-1.1, -2]: mean 0.05, 90 % quantile 0.09, max 0.1."""
        gap_T = (engine_T - policy_T).abs()
        mean, q90, top = gap_T.mean(), gap_T.quantile(0.9), gap_T.max()
        return cls(mean=mean.item(), q90=q90.item(), max=top.item())

    def metrics(self) -> dict[str, float]:
        """The gap under the names that metrics.jsonl has for it."""
        return {
            "weight_sync/gap": self.mean,
            "weight_sync/gap_q90": self.q90,
            "weight_sync/gap_max": self.max,
        }

    def __str__(self) -> str:
        return f"{self.max:.3g} (mean {self.mean:.3g}, 90 % quantile {self.q90:.3g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Result of a weight sync: log-probabilities of a text that stays the same for a run."""

    token_ids: tuple[int, ...]
    start: int
    """The gap is that of the tokens from here on, which the engine sampled."""
    policy_T: Tensor
    """Log-probability of every token after the first."""
    engine_T: Tensor
    first: Gap | None = None
    """The gap of the first sync, where this is a later one."""
    warned: bool = False
    """True once a token far from the policy was warned of."""

    @property
    def gap(self) -> Gap:
        """Gap of the sampled tokens."""
        first = self.start - 1
        return Gap.of(self.policy_T[first:], self.engine_T[first:])


async def sync(
    policy: Policy,
    engine: Engine,
    version: int,
    config: WeightSyncConfig,
    before: Probe | None = None,
    *,
    prompt_ids: Sequence[int] = (),
    expect_change: bool = True,
) -> Probe | None:
    """Give `engine` the policy's weights: all that it samples from now on is of weights `version`.

    An engine that samples from `policy.sampler` itself only forgets what it cached. One with
    weights of its own is sent them, and then scores a text, which is returned: StaleWeights if the
    policy's log-probabilities of it are others, or if they moved since `before`, the sync before
    this one, and the engine's did not, where weights that change `moves` it.

    The text is that of `before`. The first time the engine samples it after the end of
    `prompt_ids`, so that it is as likely as what the run samples; without them it is a fixed
    sequence. All processes of a run do it together.
    """
    if not isinstance(engine, Separate):
        policy.refresh_sampler()
        await engine.update((), version)
        return None
    if torch.cuda.is_available():
        # The engine's thread reads the weights on a stream of its own, which does not wait for the
        # optimizer's.
        torch.cuda.synchronize()
    adapted = is_adapted(policy.model)
    as_adapters = engine.takes_adapters and adapted
    dtype = engine.dtype if isinstance(engine, OwnNumberFormat) else policy.model.dtype
    if not as_adapters:
        weights = named_weights(policy.model, dtype)
    elif isinstance(engine, Forgetful) and engine.lacks_base:
        base = named_weights(policy.model, dtype, merged=False)
        weights = chain(base, adapter_weights(policy.model).items())
    else:
        weights = iter(adapter_weights(policy.model).items())
    await engine.update(weights, version)
    probe = await _probed(policy, engine, before, prompt_ids)
    on_cpu = policy.model.device.type == "cpu" and not torch.cuda.is_available()
    exact = on_cpu and policy.model.dtype == dtype == torch.float32
    tolerance = config.tolerance or (EXACT_TOLERANCE if exact else TOLERANCE)
    growth = GROWTH if config.tolerance is None else 0
    # In fewer bits than the policy's, merged with adapters or cast, small changes are rounded away.
    same_bits = as_adapters or not (adapted or dtype != policy.model.dtype)
    moved_from = before if expect_change and same_bits else None
    _check(probe, moved_from, version, tolerance, exact=exact, growth=growth)
    if not exact and not probe.warned and probe.gap.max > FAR * tolerance:
        warnings.warn(
            f"weight sync {version}: the engine's log-probability of a token of the probe is "
            f"{probe.gap}: as it may be for a mixture of experts, where a token took another "
            "route; else look at sampling/logprob_gap",
            RuntimeWarning,
            stacklevel=2,
        )
        probe = replace(probe, warned=True)
    return probe


async def _probed(
    policy: Policy, engine: Engine, before: Probe | None, prompt_ids: Sequence[int]
) -> Probe:
    """Score the run's probe by the policy and by the engine; without `before`, make the probe."""
    token_ids: Sequence[int]
    if before:
        token_ids, start = before.token_ids, before.start
    elif not prompt_ids:
        token_ids, start = probe_ids(policy.model, engine.max_context), 1
    else:
        # Short, for an engine keeps the probabilities of the whole vocabulary at each token.
        room = min(2 * PROBE_TOKENS, engine.max_context - 1)
        prompt = list(prompt_ids[-min(PROBE_TOKENS, room // 2) :])
        sampling = Sampling(max_tokens=room - len(prompt), seed=0)
        completion = await engine.generate(prompt, sampling, session="probe")
        await engine.release("probe")
        token_ids, start = [*prompt, *completion.token_ids], len(prompt)
    policy_T = (
        policy.probe_logprobs(token_ids)
        if is_sharded(policy.model)
        else policy_logprobs(policy.model, token_ids)
    )
    assert isinstance(engine, Separate)
    engine_T = torch.tensor(await engine.score(token_ids))
    return Probe(
        token_ids=tuple(token_ids),
        start=start,
        policy_T=torch.tensor(policy_T),
        engine_T=engine_T,
        first=before.first or before.gap if before else None,
        warned=bool(before and before.warned),
    )


def _check(
    probe: Probe,
    before: Probe | None,
    version: int,
    tolerance: float,
    *,
    exact: bool,
    growth: float,
) -> None:
    """Raise StaleWeights for a gap over the tolerance and over `growth` times the first sync's.

    With `before` also if the policy moved since then and the engine did not by a bit.
    """
    gap, first = probe.gap, probe.first
    pairs = [(gap.max, tolerance)]
    if not exact:
        begun = first or Gap(mean=0.0, q90=0.0, max=0.0)
        pairs = [
            (gap.mean, max(tolerance, growth * begun.mean)),
            (gap.q90, max(tolerance, growth * begun.q90)),
        ]
    # Not `>`: a gap that is not a number is no agreement.
    if not any(value <= limit for value, limit in pairs):
        raise StaleWeights(
            f"weight sync {version}: the engine's log-probabilities of a fixed sequence differ "
            f"from the policy's by up to {gap}{f'; at the first sync {first}' if first else ''}; "
            f"weight_sync.tolerance={tolerance:g}. It does not hold the policy's weights: do "
            "engine and trainer know the same model, in the same format (engine.dtype, "
            "engine.vllm.quantization)?"
        )
    if before is None:
        return
    # One step changes little, less than kernels differ in bfloat16: but it changes something.
    moved_T = (probe.policy_T - before.policy_T).abs()
    if moved_T.count_nonzero() > len(moved_T) / 2 and torch.equal(probe.engine_T, before.engine_T):
        raise StaleWeights(
            f"weight sync {version}: the policy's log-probabilities of a fixed sequence moved by "
            f"up to {moved_T.max().item():.3g} and the engine's not by a bit: the new weights did "
            "not reach it. resume=… engine=transformers goes on without it"
        )


async def rest(engine: Engine) -> None:
    """Let an engine with weights of its own give its memory back before the policy is updated."""
    if isinstance(engine, Separate):
        await engine.rest()


def probe_ids(model: PreTrainedModel, max_context: int) -> list[int]:
    """A fixed sequence of ids from all over the vocabulary."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return [index * STEP % vocabulary for index in range(1, min(PROBE_TOKENS, max_context - 1))]


def policy_logprobs(model: PreTrainedModel, token_ids: Sequence[int]) -> list[float]:
    """Log-probability of every id after the first, by a plain forward pass."""
    training = model.training
    model.eval()
    ids_T = torch.tensor(token_ids, device=model.device)
    try:
        with torch.no_grad():
            logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].float()
    finally:
        model.train(training)
    return logits_TV.log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0].tolist()


def named_weights(
    model: PreTrainedModel, dtype: torch.dtype | None = None, *, merged: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Every weight by the name that transformers saves it under, tied ones under each name.

    Adapters are merged, one weight at a time, or left out where not `merged`: the engine gets a
    model without them. Weights in the model's number format are cast to `dtype`, if it is given;
    those that the model keeps in float32 stay. Sharded weights are gathered one at a time, after
    the cast: every process has to take them all.
    """
    in_fp32: set[str] = set()
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        in_fp32.update(getattr(model, attribute, None) or ())
    modules = dict(model.named_modules()) if is_adapted(model) else {}
    for name, tensor in model.state_dict().items():
        owner, _, kind = name.rpartition(".")
        if "lora_" in name:
            continue
        layer = modules.get(owner.removesuffix(".base_layer"))
        if merged and isinstance(layer, LoraLayer) and kind == "weight":
            adapted: Any = layer  # peft's class for linear layers, which alone has the method
            tensor = tensor + adapted.get_delta_weight(ADAPTER).to(tensor.dtype)
        if dtype and tensor.dtype == model.dtype and in_fp32.isdisjoint(name.split(".")):
            tensor = tensor.to(dtype)
        yield name.replace(".base_layer.", "."), full_tensor(tensor.detach())
