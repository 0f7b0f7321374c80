"""Weight sync: send the policy's weights to the engine and check that they arrived.

The check is a probe: a text whose log-probabilities the policy and the engine must agree on.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agenttrain.engines.base import (
    Engine,
    Forgetful,
    ModelNames,
    OwnNumberFormat,
    Quantized,
    Replicated,
    Separate,
)
from agenttrain.engines.broadcast import WeightForm
from agenttrain.engines.config import Sampling
from agenttrain.engines.mixers import stays_float32
from agenttrain.engines.registry import names_with
from agenttrain.training.config import WeightSyncConfig
from agenttrain.training.file_names import in_files, on_meta, one_by_one, piece_by_piece
from agenttrain.training.gathering import gather_by_layer
from agenttrain.training.lora import (
    PEFT,
    adapted_weights,
    adapter_weights,
    base_name,
    delta,
    is_adapted,
)
from agenttrain.training.merge_check import check_merging
from agenttrain.training.policy import Policy
from agenttrain.training.quantization import full_state
from agenttrain.training.sharding import is_sharded
from agenttrain.types import AgenttrainError

PROBE_TOKENS = 128
"""Tokens of the probe's prompt; as many are sampled after it."""
STEP = 7919
"""A prime, so that the ids of a probe without a prompt spread over the whole vocabulary."""
EXACT_TOLERANCE = 1e-3
"""Limit of the largest gap in float32 on a CPU, where kernels agree to 1e-5."""
TOLERANCE = 0.1
"""Limit of the mean gap and of its 90 % quantile elsewhere: 16-bit kernels differ by roundings of
1/256 in every layer, float32 kernels of a GPU by the roundings of TF32."""
GROWTH = 5
"""Limit of the gap as a multiple of the first sync's, if that is above the tolerance. As a policy
learns, the probe becomes less likely and gaps grow with that."""
FAR = 10
"""Multiple of the tolerance from which on the gap of a single token is warned of."""


class StaleWeights(AgenttrainError):
    """After a weight sync the engine does not hold the policy's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Distance between two models' log-probabilities of a text's tokens, in nats."""

    mean: float
    q90: float
    """90 % quantile. Wrong weights raise it. A few tokens for which a mixture of experts took
    another route, several nats apart, do not."""
    max: float

    def metrics(self) -> dict[str, float]:
        """Return the gap as metrics."""
        return {
            "weight_sync/gap": self.mean,
            "weight_sync/gap_q90": self.q90,
            "weight_sync/gap_max": self.max,
        }

    def __str__(self) -> str:
        return f"{self.max:.3g} (mean {self.mean:.3g}, 90 % quantile {self.q90:.3g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSeconds:
    """Seconds of the parts of a weight sync.

    A part that only queues work on a GPU is short, and the part that waits for it is long.
    """

    send: float
    """The policy's weights were gathered, merged, cast and named."""
    load: float
    """The engine ended or held its requests, and took the weights."""
    probe: float
    """Policy and engine scored the probe; at the first sync it was sampled too."""

    def metrics(self) -> dict[str, float]:
        """Return the seconds as metrics."""
        return {
            "time/sync_send_s": self.send,
            "time/sync_load_s": self.load,
            "time/sync_probe_s": self.probe,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncProbe:
    """Result of a weight sync: log-probabilities of a text that is the same for the whole run.

    `sync` compares those of the policy with those of the engine (`gap`), and returns the probe. The
    trainer passes it to the next `sync` as `before`, which also compares each with its own from
    then: scores of new weights must differ.
    """

    token_ids: tuple[int, ...]
    start: int
    """Index in `token_ids` of the first token that the engine sampled. The gap begins with it."""
    policy_T: Tensor
    """Log-probability of every token after the first: index i is that of token i + 1."""
    engine_T: Tensor
    first: Gap | None = None
    """Gap of the first sync. None: this is the first sync's probe, see `gap`."""
    warned: bool = False
    """True once the user was warned of a token whose gap is `FAR` times the tolerance."""
    seconds: SyncSeconds | None = None
    """Seconds of the sync that made the probe. None: it was made by no sync."""

    def metrics(self) -> dict[str, float]:
        """Return gap and seconds as metrics."""
        return {**self.gap.metrics(), **(self.seconds.metrics() if self.seconds else {})}

    @property
    def scores(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The policy's and the engine's log-probabilities as plain numbers."""
        return tuple(self.policy_T.tolist()), tuple(self.engine_T.tolist())

    @property
    def gap(self) -> Gap:
        """Gap between policy and engine over the sampled tokens, from `start` on.

        Example: 3 tokens, `start` 1, policy [-1, -2], engine [-1.1, -2]: mean 0.05, 90 % quantile
        0.09, max 0.1.
        """
        # The first token has no log-probability: that of token `start` is at start - 1.
        first_sampled = self.start - 1
        gap_T = (self.engine_T - self.policy_T).abs()[first_sampled:]
        mean, q90, top = gap_T.mean(), gap_T.quantile(0.9), gap_T.max()
        return Gap(mean=mean.item(), q90=q90.item(), max=top.item())


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCheck:
    """Checks an engine's log-probabilities of the probe after a weight sync.

    The probe is a text that both policy and engine score. The engine has the policy's weights if
    their scores agree, and if both changed since the last sync.

    It holds plain values, and is callable, so that `Replicated.verify` can send it to the process
    that has the engine and call it there with each copy's scores.
    """

    token_ids: tuple[int, ...]
    start: int
    """Index of the first token that the engine sampled."""
    policy: tuple[float, ...]
    """The policy's log-probability of every token after the first."""
    first: Gap | None
    """Gap of the first sync. None: this is the first."""
    warned: bool
    """True once the user was warned of a single token whose gap is large. It goes into the probe
    that the check makes."""
    before: tuple[tuple[float, ...], tuple[float, ...]] | None
    """The policy's and the engine's log-probabilities at the last sync (`SyncProbe.scores`). None
    if the engine's may be the same as then: there was no sync, or rounding hides small changes."""
    version: int
    """Policy version, for errors."""
    tolerance: float
    """Limit of the gap, in nats."""
    exact: bool
    """True: the largest gap of a token has to be within the tolerance. False: the mean gap or its
    90 % quantile."""
    growth: float
    """Unless `exact`, a gap within this multiple of the first sync's is fine, too."""

    def __call__(self, scores: Sequence[float]) -> str | None:
        """Return the problem with an engine's scores. None: it holds the policy's weights."""
        try:
            self.check(scores)
        except StaleWeights as error:
            return str(error)
        return None

    def check(self, scores: Sequence[float]) -> SyncProbe:
        """Return the probe with the engine's scores.

        Raises StaleWeights in two cases: the engine's scores are too far from the policy's, or,
        given the scores `before`, the policy's changed since then and the engine's did not at all.

        Too far: with `exact` the largest gap of a token is above the tolerance. Otherwise mean and
        90 % quantile are both above it, and above `growth` times those of the first sync.
        """
        probe = SyncProbe(
            token_ids=self.token_ids,
            start=self.start,
            policy_T=torch.tensor(self.policy),
            engine_T=torch.tensor(scores),
            first=self.first,
            warned=self.warned,
        )
        gap, first, tolerance = probe.gap, self.first, self.tolerance
        gaps_and_limits = [(gap.max, tolerance)]
        if not self.exact:
            first_gap = first or Gap(mean=0.0, q90=0.0, max=0.0)
            gaps_and_limits = [
                (gap.mean, max(tolerance, self.growth * first_gap.mean)),
                (gap.q90, max(tolerance, self.growth * first_gap.q90)),
            ]
        # `any`: mean or quantile within its limit is agreement, because wrong weights raise both.
        # Not `value > limit`: NaN must not count as agreement.
        if not any(value <= limit for value, limit in gaps_and_limits):
            raise StaleWeights(
                f"weight sync {self.version}: the engine's log-probabilities of a fixed sequence "
                f"differ from the policy's by up to {gap}"
                f"{f'; at the first sync {first}' if first else ''}; "
                f"weight_sync.tolerance={tolerance:g}. It does not hold the policy's weights: do "
                "engine and trainer know the same model, in the same format (engine.dtype, "
                "engine.quantization)?"
            )
        if self.before is None:
            return probe
        # Gaps cannot show that weights are a step old: a step may change less than bfloat16 kernels
        # differ. But new weights change some bits of the engine's scores. Only if the policy's
        # changed for most tokens: a smaller step might change none of the engine's.
        former_policy_T, former_engine_T = (torch.tensor(values) for values in self.before)
        moved_T = (probe.policy_T - former_policy_T).abs()
        engine_unchanged = torch.equal(probe.engine_T, former_engine_T)
        if moved_T.count_nonzero() > len(moved_T) / 2 and engine_unchanged:
            # The remedy names engines that sample from the trainer's own weights: without a sync.
            raise StaleWeights(
                f"weight sync {self.version}: the policy's log-probabilities of a fixed sequence "
                f"moved by up to {moved_T.max().item():.3g} and the engine's not by a bit: the new "
                f"weights did not reach it. resume=… {names_with(own_weights=False)} continues "
                "without it"
            )
        return probe


async def sync(
    policy: Policy,
    engine: Engine,
    version: int,
    config: WeightSyncConfig,
    before: SyncProbe | None = None,
    *,
    prompt_ids: Sequence[int] = (),
) -> SyncProbe | None:
    """Give `engine` the policy's weights, with which it samples from now on as version `version`.

    An engine that samples from `policy.sampler` itself only drops its caches, and the result is
    None. An engine with a copy of the weights is sent them. Then policy and engine both score the
    probe, a text that stays the same, and the results are compared. If the engine sleeps
    (`Separate.sleep`), its `update` wakes it.

    Raises WrongMerge at the first sync if merged adapters do not compute what the adapters do.
    Raises StaleWeights if the engine's log-probabilities of the probe differ from the policy's, and
    if they did not change since the last sync (`before`) although the policy's did. The second
    check is left out where the engine's copy is rounded, as a quantised one is: there they may stay
    the same. With several copies it is raised if all of them fail.

    The probe's text is that of the last sync. At the first sync the engine samples it after the end
    of `prompt_ids`, so that it is as likely as the texts of the run. Without a prompt it is a fixed
    sequence. All processes of a run call this together.
    """
    if not isinstance(engine, Separate):
        policy.refresh_sampler()
        await engine.update((), version)
        return None
    if torch.cuda.is_available():
        # The engine's thread reads the weights on its own stream, which does not wait for the
        # optimizer's.
        torch.cuda.synchronize()
    has_adapters = is_adapted(policy.model)
    as_adapters = engine.takes_adapters and has_adapters
    dtype = engine.dtype if isinstance(engine, OwnNumberFormat) else policy.model.dtype
    stopwatch = Stopwatch()
    start = time.perf_counter()
    await engine.update(_weights_for(engine, policy.model, dtype, stopwatch), version)
    loaded = time.perf_counter()

    # Check the weights: both sides score the probe.
    # Weights on the CPU may be offloaded, and computed on a GPU.
    on_cpu = policy.model.device.type == "cpu" and not torch.cuda.is_available()
    exact = on_cpu and policy.model.dtype == dtype == torch.float32
    tolerance = config.tolerance or (EXACT_TOLERANCE if exact else TOLERANCE)
    # Without a tolerance of the user's, a gap may also be `growth` times that of the first sync: as
    # the policy learns, the probe becomes less likely, and gaps grow with that.
    growth = GROWTH if config.tolerance is None else 0
    # Merging adapters, casting and quantising round small changes away: equal scores of the engine
    # then prove nothing.
    has_merged_adapters = has_adapters and not as_adapters
    was_cast = not as_adapters and dtype != policy.model.dtype
    is_quantized = isinstance(engine, Quantized) and engine.quantized
    was_rounded = has_merged_adapters or was_cast or is_quantized
    # Probe of the last sync, if the engine's new scores must differ from those then.
    must_differ_from = None if was_rounded else before
    token_ids, first_sampled = await _probe_text(policy, engine, before, prompt_ids)

    def score() -> list[float]:
        """Return the policy's log-probabilities of the probe."""
        if is_sharded(policy.model):  # only the scorer's passes gather all weights
            return policy.probe_logprobs(token_ids)
        return policy_logprobs(policy.model, token_ids)

    if before is None and has_merged_adapters:
        check_merging(policy.model, score)
    policy_T = score()
    probe_check = ProbeCheck(
        token_ids=tuple(token_ids),
        start=first_sampled,
        policy=tuple(policy_T),
        # The gap of the first sync. If `before` is of the first sync itself, its `first` is None:
        # take its own gap.
        first=None if before is None else before.first or before.gap,
        warned=bool(before and before.warned),
        before=None if must_differ_from is None else must_differ_from.scores,
        version=version,
        tolerance=tolerance,
        exact=exact,
        growth=growth,
    )
    if isinstance(engine, Replicated):
        probe = probe_check.check(await engine.verify(token_ids, probe_check))
    else:
        probe = probe_check.check(await engine.score(token_ids))
    if not exact and not probe.warned and probe.gap.max > FAR * tolerance:
        warnings.warn(
            f"weight sync {version}: the engine's log-probability of a token of the probe is "
            f"{probe.gap}: as it may be for a mixture of experts, where a token took another "
            "route; otherwise check sampling/logprob_gap",
            RuntimeWarning,
            stacklevel=2,
        )
        probe = replace(probe, warned=True)
    seconds = SyncSeconds(
        send=stopwatch.seconds,
        load=loaded - start - stopwatch.seconds,
        probe=time.perf_counter() - loaded,
    )
    return replace(probe, seconds=seconds)


@dataclass(slots=True)
class Stopwatch:
    """Adds up the seconds that making weights takes, while an engine reads them."""

    seconds: float = 0.0

    def measure(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights."""
        iterator = iter(weights)
        while True:
            start = time.perf_counter()
            weight = next(iterator, None)
            self.seconds += time.perf_counter() - start
            if weight is None:
                return
            yield weight
            del weight  # it may be a copy, which must not outlive the engine's use of it


def _weights_for(
    engine: Separate, model: PreTrainedModel, dtype: torch.dtype, stopwatch: Stopwatch
) -> Iterable[tuple[str, Tensor]]:
    """Return the weights that a sync sends to `engine`, under the names that it takes."""
    if isinstance(engine, ModelNames) and engine.model_names:  # not those of the model's files
        return stopwatch.measure(named_weights(model, dtype))
    if not (engine.takes_adapters and is_adapted(model)):
        return PolicyWeights(model, dtype, stopwatch)
    # The adapters are sent alone, except to an engine that has lost the base weights.
    if isinstance(engine, Forgetful) and engine.lacks_base:
        base = checkpoint_weights(model, dtype, merged=False)
        return stopwatch.measure(chain(base, checkpoint_adapters(model)))
    return stopwatch.measure(checkpoint_adapters(model))


async def _probe_text(
    policy: Policy, engine: Engine, before: SyncProbe | None, prompt_ids: Sequence[int]
) -> tuple[Sequence[int], int]:
    """Return the probe's ids, and the index of the first id whose score is compared.

    The probe is a text that policy and engine score after each sync, to see that they have the same
    weights. The probe of the last sync, `before`, is used again. At the first sync the engine
    samples one after `prompt_ids`; what it sampled is compared. Without a prompt it is a fixed
    sequence. All of that is compared from index 1 on: the first id has no score.
    """
    if before:
        return before.token_ids, before.start
    if not prompt_ids:
        vocabulary = policy.model.get_input_embeddings().weight.shape[0]
        end = min(PROBE_TOKENS, engine.max_context - 1)
        # Multiples of a prime: ids from all over the vocabulary.
        return [index * STEP % vocabulary for index in range(1, end)], 1
    # The end of the prompt, and as many sampled tokens. Not more, because engines hold the
    # probabilities of the whole vocabulary for each token.
    total = min(2 * PROBE_TOKENS, engine.max_context - 1)
    prompt = list(prompt_ids[-min(PROBE_TOKENS, total // 2) :])
    sampling = Sampling(max_tokens=total - len(prompt), seed=0)
    completion = await engine.generate(prompt, sampling, session="probe")
    await engine.release("probe")
    return [*prompt, *completion.token_ids], len(prompt)


def policy_logprobs(model: PreTrainedModel, token_ids: Sequence[int]) -> list[float]:
    """Return the log-probability of every id after the first, by a plain forward pass."""
    was_training = model.training
    model.eval()
    ids_T = torch.tensor(token_ids, device=model.device)
    try:
        with torch.no_grad():
            logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].float()
    finally:
        model.train(was_training)
    return logits_TV.log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0].tolist()


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    """The policy's weights by their names in a checkpoint, adapters merged into them.

    An iterable of (name, tensor). Each iteration gathers sharded weights anew, so that an engine
    may iterate again. `forms` says in advance what an iteration yields.
    """

    model: PreTrainedModel
    dtype: torch.dtype
    """Format that weights are cast to, except those that always stay in float32."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Gather all weights. All processes do so together."""
        return self.stopwatch.measure(checkpoint_weights(self.model, self.dtype))

    def forms(self) -> list[WeightForm]:
        """Return name, format and shape of each weight that iteration yields, without gathering.

        Made of tensors on the meta device, which have a shape and a format, but no values.
        """
        meta_weights: dict[str, Tensor] = {}
        # Merged adapters change no name and no shape.
        for name, part in _own_parts(self.model, self.dtype, merged=False):
            # This process's part of a sharded weight is a DTensor, whose shape is the weight's. One
            # at a time, because a part may be a cast copy.
            meta_weights |= on_meta({base_name(name): part})
        # Names and shapes of the files: one weight may be several tensors there, as experts are.
        pieces = _checkpoint_pieces(self.model, meta_weights.items())
        return [WeightForm(name, piece.dtype, tuple(piece.shape)) for name, piece in pieces]


def checkpoint_weights(
    model: PreTrainedModel, dtype: torch.dtype | None = None, *, merged: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of `named_weights` under the names and in the pieces of the model's files.

    Engines that read such files know no other names: some skip others without a word.
    """
    yield from _checkpoint_pieces(model, named_weights(model, dtype, merged=merged))


def checkpoint_adapters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters by peft's names, in which modules have the names of the model's files."""
    for name, tensor in adapter_weights(model).items():
        for file_name, weight in piece_by_piece(model, name.removeprefix(PEFT), tensor):
            yield f"{PEFT}{file_name}", weight


def named_weights(
    model: PreTrainedModel, dtype: torch.dtype | None = None, *, merged: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight) of every weight, named as in the model without adapters.

    A tied weight comes under each of its names. Adapters are merged, one weight at a time, or left
    out if not `merged`. Either way the engine gets a model without adapters. With `dtype`, weights
    in the model's format are cast to it, except those that always stay in float32. Sharded weights
    are gathered layer by layer, after the cast, so every process has to consume the iterator.
    """
    for name, tensor in gather_by_layer(model, _own_parts(model, dtype, merged)):
        yield base_name(name), tensor


def _checkpoint_pieces(
    model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under the names and in the pieces of the model's files (`in_files`).

    They are converted one at a time, or all together if a piece is made of several weights.
    """
    if one_by_one(model):
        for name, tensor in weights:
            yield from piece_by_piece(model, name, tensor)
    else:
        yield from in_files(model, dict(weights)).items()


def _own_parts(
    model: PreTrainedModel, dtype: torch.dtype | None, merged: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight) of every weight, but of a sharded weight only this process's part.

    If `merged`, a layer's adapters are added to its weight, else left out. `dtype` is the format to
    cast to; None: no cast.
    """
    in_fp32: set[str] = set()  # names of modules whose weights the model keeps in float32
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        in_fp32.update(getattr(model, attribute, None) or ())
    adapter_layers = adapted_weights(model) if merged and is_adapted(model) else {}
    for name, tensor in full_state(model):
        if "lora_" in name:
            continue
        layer = adapter_layers.get(base_name(name))
        if layer is not None:
            tensor = tensor + delta(layer, tensor).to(tensor.dtype)
        keeps_format = stays_float32(name) or not in_fp32.isdisjoint(name.split("."))
        if dtype and tensor.dtype == model.dtype and not keeps_format:
            tensor = tensor.to(dtype)
        yield name, tensor.detach()
