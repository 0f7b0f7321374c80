"""Log-probabilities and entropies of sampled tokens; no other position gets a logit.

The last hidden states of packed rollouts come from one forward pass, or from one per segment for a
model that packing would change. Those at positions whose next token was sampled are gathered, and
only they meet the language-model head. Shapes: T all tokens of a microbatch, S sampled tokens,
H hidden, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agenttrain.engines.language_model import backbone
from agenttrain.engines.mixers import has_mixers
from agenttrain.engines.routers import RouteReplay, find_routers
from agenttrain.engines.soft_cap import keep_soft_cap
from agenttrain.engines.vision import Vision
from agenttrain.training.attention import (
    PackedTree,
    UnsupportedAttention,
    exclude_from_compilation,
    has_kernel,
    no_search_for_packing,
    packing,
)
from agenttrain.training.batch import Microbatch, SequenceKey, TrainingSequence, pack, stand_in
from agenttrain.training.compilation import compiled_layers
from agenttrain.training.config import LEVELS, ActivationCheckpointing, SharePrefix
from agenttrain.training.context_group import ContextGroup
from agenttrain.training.context_parallel import pack_together
from agenttrain.training.context_tree import Split, fill, split_tree
from agenttrain.training.head import LogitTransform, linear_logprobs
from agenttrain.training.images import hidden_with_images
from agenttrain.training.kernels import Kernel, counting_calls
from agenttrain.training.prefixes import least_prefix
from agenttrain.training.recomputation import possible_levels, recomputed_modules, recomputing
from agenttrain.training.recurrent import MixerCall, kernel_gap, recorded_calls, relative_gap
from agenttrain.training.segments import Segment, one_after_the_other, packed_positions, positions
from agenttrain.training.selection import Repeat, Repeats
from agenttrain.training.sharding import release_gathered
from agenttrain.training.transfers import to_device
from agenttrain.training.world import World
from agenttrain.types import AgenttrainError

Value = TypeVar("Value")

LOGIT_BYTES = 4
"""Bytes of a logit in fp32, in which logits are normalised."""
MEGABYTE = 2**20
EXACT = (torch.float32, torch.float64)
"""Formats in which two ways to compute the same hidden states agree to 1e-4."""
CHUNK_LOGITS = 2**24
"""Most logits at once of a head that is more than a linear layer (64 MiB in fp32)."""


class UnsupportedModel(AgenttrainError):
    """The model cannot be trained here. The message gives the reason and the remedy."""


class Scorer(nn.Module):
    """Module that maps a microbatch to (logprobs_S, entropy_S), both fp32.

    The policy, its reference and a teacher have one each. It is a Module so that accelerate can
    wrap it. The entropy carries a gradient only with `entropy_grad`.

    `choose_layout` tries which of these gives the model's own results, and takes the first:

    1. one forward pass per microbatch, with torch's varlen kernel: one attention call per layer
    2. one forward pass per microbatch, with attention block by block
    3. one forward pass per segment, with a warning

    Callers then `pack` sequences, and call the module with the microbatches inside `ready`.

    Activation checkpointing has a `level`: how many activations backward passes compute again
    instead of keeping them. `recompute` sets it, also inside `ready`, and `next_level` is the next
    one that saves more memory.

    With a context group (`context`) several processes compute one microbatch together. Its share
    for this process is `Microbatch.context`, and `split` is the tree of segments cut over them.
    """

    packed: bool
    """True if several rollouts are computed in one forward pass."""
    varlen: bool
    """True if layers that support it use torch's varlen kernel."""
    kernels: Counter[Kernel]
    """Attention calls of the trial by kernel."""
    replay: RouteReplay | None = None
    """Replaces the experts of routers by those of the rollouts. None: routers choose."""
    level: ActivationCheckpointing
    """Activations that backward passes compute again; change it by `recompute`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        logits_budget_mb: int,
        share_prefix: SharePrefix = SharePrefix.auto,
        entropy_grad: bool = False,
        compile: bool = False,
        defer: bool = False,
        key: str = "model.path",
        vision: Vision | None = None,
        replays_routes: bool = False,
        level: ActivationCheckpointing = ActivationCheckpointing.none,
    ) -> None:
        """Prepare a model to score sequences as sampled at `temperature`.

        - `logits_budget_mb`: logits up to this size are kept for the backward pass. Larger ones are
          computed again there.
        - `share_prefix`: whether tokens that several sequences begin with are computed once.
        - `entropy_grad`: the entropy carries a gradient.
        - `compile`: layers are compiled by torch.
        - `key`: the setting that names the model, for errors.
        - `vision` reads the model's images.
        - `replays_routes`: forward passes use the experts that a microbatch has.
        - `level`: the activations that backward passes compute again.
        - `defer`: the caller calls `choose_layout`, once the model is on its device and sharded. It
          runs the model, and so needs the weights in their final place.
        """
        super().__init__()
        keep_soft_cap(model)  # which some versions of transformers would drop
        self.model = model
        self.vision = vision
        self.transform = replace(logit_transform(model), temperature=temperature)
        self.logits_budget_mb = logits_budget_mb
        self.entropy_grad = entropy_grad
        self.use_compile = compile
        self.lengths = length_limits(model)
        self._share_prefix, self._key = share_prefix, key
        self._replays_routes = replays_routes
        self._recomputation: ExitStack | None = None
        """Inside `ready`: the stack that holds the context `recomputing`, which makes modules
        compute their activations again. `recompute` replaces the context there. Else None."""
        self.recompute(level)
        if not defer:
            self.choose_layout(model.device)

    def recompute(self, level: ActivationCheckpointing) -> None:
        """Compute the activations of `level` again in all following backward passes.

        Raises ConfigError if the model has no such modules.
        """
        self._recomputed = recomputed_modules(self.model, level)  # modules, none inside another
        self.level = level
        if self._recomputation is not None:  # inside `ready`: take out the former level's hooks
            self._recomputation.close()
            self._recomputation.enter_context(recomputing(self._recomputed))

    def next_level(self) -> ActivationCheckpointing | None:
        """Return the next level that the model supports. None: there is none."""
        # Experts that are replayed in one pass per segment rule out recomputation: it runs after
        # the passes, with the experts of the last one (`_check_passes`).
        if self.replay is not None and not self.packed:
            return None
        levels = possible_levels(self.model, compiled=self.use_compile)
        return next((x for x in levels if LEVELS.index(x) > LEVELS.index(self.level)), None)

    def inside(self, function: Callable[[PreTrainedModel], Value]) -> Value:
        """Call a function with the model while its weights are gathered.

        FSDP2 gathers sharded weights for this method as it does for `forward`.
        """
        return function(self.model)

    def choose_layout(
        self,
        device: torch.device,
        world: World | None = None,
        autocast: AbstractContextManager[None] | None = None,
        context: ContextGroup | None = None,
    ) -> None:
        """Set `packed`, `varlen`, `least_shared`, `kernels`, `replay` by a trial.

        Kernels are counted, and compiled layers compared, under `autocast`, as training computes.
        `context` are the processes that compute microbatches together, if there are any. Raises
        UnsupportedModel and UnknownRouters.
        """
        # `inside` calls a function of the model while its sharded weights are gathered.
        model, inside = self.model, self.inside
        check_head(model, device=device, inside=inside, key=self._key)
        # This also sets `self.varlen`. Attention over several processes has kernels of its own.
        why_not_packed = self._choose_packing(
            device, world or World(), may_use_varlen=context is None
        )
        self.packed = why_not_packed is None
        name = type(model).__name__
        if context is not None:
            check_context(self, why_not_packed, device, context, world or World())
        if why_not_packed is not None and self._share_prefix is SharePrefix.always:
            raise UnsupportedModel(
                f"training.share_prefix=always: {name} cannot be packed: {why_not_packed}. Set "
                "training.share_prefix=auto."
            )
        if why_not_packed is not None:
            warnings.warn(
                f"{name} is trained with one forward pass per rollout: {why_not_packed}.",
                stacklevel=3,
            )
        # Least length of a shared prefix. None: prefixes are never shared.
        self.least_shared: int | None = None
        if self.packed and self._share_prefix is SharePrefix.always:
            self.least_shared = 1
        elif self.packed and self._share_prefix is SharePrefix.auto:
            self.least_shared = least_prefix(model.config.get_text_config().hidden_size)
        if self._replays_routes:
            # It depends on `packed`. Before the trial, which takes time.
            self._check_passes(name)
            # Raises UnknownRouters if the model's routers are of no class that can be replayed.
            self.replay = RouteReplay(inside(find_routers))
        self._run_trial(device, autocast, context)
        # The varlen kernel takes 16 bits: in float32 without autocast no layer called it.
        self.varlen = self.varlen and Kernel.varlen in self.kernels
        release_gathered(self)  # the trials gathered sharded weights

    def _run_trial(
        self,
        device: torch.device,
        autocast: AbstractContextManager[None] | None,
        context: ContextGroup | None,
    ) -> None:
        """Compute a few made-up tokens in the chosen layout, packed or not.

        Attention calls are counted by kernel in `self.kernels`, which shows whether a layer used
        the varlen kernel, and whether one has only a slow kernel (`check_kernels`). Compiled layers
        are run too, and compared with the same layers uncompiled.
        """
        # Processes that compute one microbatch together need two tokens each (`fill`).
        segments = TRIAL if context is None else fill(TRIAL, context.size)
        ids_T = trial_ids(self.model, device, segments)
        split = None if context is None else split_tree(segments, context)
        if split is not None:  # this process's tokens only
            ids_T = ids_T[split.tree.packed_positions().to(device)]
        with self._ready(), autocast or nullcontext():
            with torch.no_grad(), counting_calls() as self.kernels:
                # `inside`: with the sharded weights gathered.
                hidden_TH = self.inside(lambda _: self._hidden(ids_T, segments, split))
            if self.use_compile:  # settings refuse it beside a `context`
                self._check_compiled(ids_T, hidden_TH)

    def _check_passes(self, name: str) -> None:
        """Raise UnsupportedModel if recomputed layers would replay the wrong experts.

        The experts to replay are set before each forward pass. Without packing there are several
        passes, all before the backward pass, in which recomputed layers would get the last pass's
        experts.
        """
        if not self.packed and self._recomputed:
            raise UnsupportedModel(
                f"algorithm.router_replay=rollout: {name} is trained with one forward pass per "
                f"rollout, and training.activation_checkpointing={self.level} computes them again "
                "together. Set training.activation_checkpointing=none, or "
                "algorithm.router_replay=off."
            )

    def _choose_packing(
        self, device: torch.device, world: World, *, may_use_varlen: bool
    ) -> str | None:
        """Set `varlen` to True if packing works with it, else to False.

        Return None if packing works in either way, else why it does not. All processes pack in the
        same way, because all of them must run as many passes.
        """
        has_varlen = may_use_varlen and has_kernel(device)
        all_have_kernel = all(world.gather([has_varlen], "whether there is a kernel"))
        # The varlen kernel first: it computes attention in one call per layer.
        candidates = (True, False) if all_have_kernel else (False,)
        reason = None
        for varlen in candidates:
            self.varlen = varlen
            local = why_not_packed(self.model, varlen=varlen, device=device, inside=self.inside)
            reasons = world.gather([local], "the trial of how rollouts are computed")
            reason = next((reason for reason in reasons if reason is not None), None)
            if reason is None:
                break
        return reason

    def _check_compiled(self, ids_T: Tensor, hidden_TH: Tensor) -> None:
        """Run the trial forward and backward with compiled layers, which compiles them.

        Raises UnsupportedModel if that fails, or if the hidden states differ from `hidden_TH`,
        which the same layers gave uncompiled for the segments `TRIAL`.
        """
        # Packed attention is called as it is: its layout changes with the microbatch, and it would
        # be compiled again for each. From here on, because the next line compiles.
        exclude_from_compilation()
        trainable = [weight for weight in self.model.parameters() if weight.requires_grad]
        try:
            with torch.enable_grad(), compiled_layers(self.model):
                compiled_TH = self._hidden(ids_T, TRIAL)
                if trainable:
                    torch.autograd.grad(compiled_TH.float().sum(), trainable, allow_unused=True)
            gap = (compiled_TH.detach() - hidden_TH).abs().max() / hidden_TH.abs().max()
            reason = f"its hidden states differ by {gap.item():.2g} (relative)"
        except Exception as error:  # torch's compiler raises whatever its parts raise
            gap, reason = torch.tensor(torch.inf), f"{type(error).__name__}: {error}"
        tolerance = 1e-4 if hidden_TH.dtype in EXACT else 5e-2  # in float32 or float64, else
        # Not `gap > …`: NaN has to count as a difference.
        if not gap.item() <= tolerance:
            raise UnsupportedModel(
                f"training.compile=true: {type(self.model).__name__} cannot be compiled: {reason}. "
                "Set training.compile=false."
            )

    def copy_layout(self, source: Scorer) -> None:
        """Take over what `choose_layout` set in a scorer whose model differs only in its weights.

        `replay` is not taken over: the reference's routers choose their experts themselves.
        """
        self.varlen, self.packed, self.kernels = source.varlen, source.packed, source.kernels
        self.least_shared = source.least_shared

    def pack(
        self, sequences: Sequence[TrainingSequence], token_budget: int, device: torch.device
    ) -> list[Microbatch]:
        """Pack sequences into microbatches of at most `token_budget` tokens.

        Common prefixes are shared where that pays. Their tokens then count once. Sequences whose
        lengths have different rotary frequencies never share a microbatch.
        """
        by_kind: dict[tuple[int, ...], list[TrainingSequence]] = {}
        for sequence in sequences:
            by_kind.setdefault(self.lengths.kind(sequence.length), []).append(sequence)
        microbatches: list[Microbatch] = []
        for same_kind in by_kind.values():
            microbatches += pack(same_kind, token_budget, device, least=self.least_shared)
        # The one with the most tokens first, as in `pack`.
        return sorted(microbatches, key=lambda microbatch: -microbatch.token_ids_T.numel())

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Prepare the model for calls of `forward` and their backward passes in the block.

        Dropout is off, and packed attention, compiled layers, replayed experts and recomputed
        modules are installed as far as they are used. At the end everything is as before, and
        gathered weights are dropped.
        """
        layers = compiled_layers(self.model) if self.use_compile else nullcontext()
        # Recomputation is entered after the layers are compiled: it wraps the forward pass that a
        # layer has then, so that a compiled layer is recomputed in its compiled form.
        with self._ready(), layers, ExitStack() as recomputation:
            recomputation.enter_context(recomputing(self._recomputed))
            self._recomputation = recomputation  # for `recompute`, if it is called in the block
            try:
                yield
            finally:
                self._recomputation = None

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Switch dropout off, and install packed attention and replayed experts for the block.

        `ready` adds compiled layers and recomputation.
        """
        training = self.model.training
        # With dropout the policy would not be the one that sampled.
        self.model.eval()
        try:
            replaying = nullcontext() if self.replay is None else self.replay.installed(self.model)
            packed = packing(self.model) if self.packed else nullcontext()
            with replaying, packed, no_search_for_packing():
                yield
        finally:
            self.model.train(training)
            release_gathered(self)

    def forward(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return the logprob of every sampled token and the entropy at its position, [S] each."""
        images, share = microbatch.images, microbatch.context
        if self.replay is not None:
            self.replay.load(microbatch.routes_TLK)
        if share is not None:  # several processes compute the microbatch together
            hidden_TH = packed_hidden(
                self.model, microbatch.token_ids_T, microbatch.segments, split=share.split
            )
            scores = self._score(hidden_TH, share.targets, share.labels_s)
            return share.exchange(*scores)
        if images is None:
            hidden_TH = self._hidden(microbatch.token_ids_T, microbatch.segments)
        else:
            assert self.vision is not None
            hidden_TH = hidden_with_images(
                self.model,
                self.vision,
                microbatch,
                images,
                packed=self.packed,
                varlen=self.varlen,
                begin=self._begin_segment,
            )
        return self._score(hidden_TH, microbatch.targets, microbatch.labels_S)

    def _score(
        self, hidden_TH: Tensor, targets: Repeats, labels_S: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies of the labels, [S] each.

        `targets` select the states that predict the sampled tokens `labels_S`.
        """
        return head_logprobs(
            Repeat.apply(hidden_TH, targets),
            self.model.get_output_embeddings(),
            labels_S,
            transform=self.transform,
            logits_budget_mb=self.logits_budget_mb,
            entropy_grad=self.entropy_grad,
            compile=self.use_compile,
        )

    def _hidden(
        self, token_ids_T: Tensor, segments: Sequence[Segment], split: Split | None = None
    ) -> Tensor:
        """Return the last hidden states of packed segments, [T, H].

        With `split` ids and states are those of this process's tokens.
        """
        if self.packed:
            return packed_hidden(self.model, token_ids_T, segments, varlen=self.varlen, split=split)
        return separate_hidden(self.model, token_ids_T, segments, begin=self._begin_segment)

    def _begin_segment(self, places_T: Tensor) -> None:
        """Prepare the forward pass over the tokens at these packed positions."""
        if self.replay is not None:
            self.replay.select(places_T)


def check_context(
    scorer: Scorer,
    why_not_packed: str | None,
    device: torch.device,
    context: ContextGroup,
    world: World,
) -> None:
    """Raise UnsupportedModel in all processes unless the model can be computed by several together.

    Hidden states and gradients of a trial are compared with those of one process. `why_not_packed`
    is the reason why rollouts cannot be packed, if there is one.
    """
    model, name = scorer.model, type(scorer.model).__name__
    reason = why_not_packed
    if reason is None and (scorer.lengths.long or scorer.lengths.dynamic):
        reason = "its rotary frequencies depend on the longest position of a forward pass"
    if reason is None:
        was_training = model.training
        model.eval()
        try:
            with packing(model):
                local = _why_not_split(scorer, device, context)
        finally:
            model.train(was_training)
        reasons = world.gather([local], "the trial of context parallel")
        reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None:
        raise UnsupportedModel(
            f"distributed.context_parallel={context.size}: {name} cannot be computed by several "
            f"processes together: {reason}. Set distributed.context_parallel=1."
        )


def _why_not_split(scorer: Scorer, device: torch.device, context: ContextGroup) -> str | None:
    """Return why this model is computed wrongly by several processes; None if it is not.

    The test is a short made-up tree of sequences, the trial. Each process computes all of it alone,
    and then its part of it together with the other processes of `context`. Hidden states and
    gradients of the part must agree with those of the same tokens computed alone.

    T tokens of the tree, t of them this process's part.
    """
    model = scorer.model
    segments = fill(trial_segments(model), context.size)  # at least two tokens for each process
    ids_T = trial_ids(model, device, segments)
    split = split_tree(segments, context)
    places_t = split.tree.packed_positions().to(device)  # of this process's tokens
    compute_part = partial(packed_hidden, split=split)

    def hidden(forward: HiddenFunction, ids: Tensor) -> Tensor:
        """Return the hidden states that `forward` computes, for all T ids or for this part's t.

        `forward` is `packed_hidden` for the tree alone, or `compute_part`, which takes the ids of
        the part but the segments of the whole tree: the processes cut it by them.
        """
        with torch.no_grad():
            states: Tensor = scorer.inside(lambda model: forward(model, ids, segments))
        return states

    def gradient(forward: HiddenFunction, ids: Tensor) -> Tensor:
        """Return the gradient of a sum of these states with respect to the tokens' embeddings.

        Computed together, a process sums its own states only. But tokens of other processes attend
        to its tokens, and the backward pass adds what their states contribute. So the result is the
        gradient of the sum over all T states, as for the tree alone.
        """
        of_embeddings: Tensor = scorer.inside(partial(_input_gradient, forward, ids, segments))
        return of_embeddings

    is_exact, reason = True, None
    # (what is compared, how it is computed, tolerances in `EXACT` formats and in others)
    for name, compute, tolerances in (
        ("hidden states", hidden, (1e-4, 5e-2)),
        ("gradients", gradient, (EXACT_GRADIENT_GAP, GRADIENT_GAP)),
    ):
        alone = compute(packed_hidden, ids_T)
        together = compute(compute_part, ids_T[places_t])
        # Once False it stays so: gradients may be in float32 although FSDP2 computed the states in
        # a shorter format.
        is_exact = is_exact and alone.dtype in EXACT
        tolerance = tolerances[0] if is_exact else tolerances[1]
        # Relative to the largest value of all T tokens: this process may have only two of them,
        # whose gradients are so small that rounding alone would be a large share of them.
        gap = ((together - alone[places_t]).abs().max() / alone.abs().max()).item()
        # No early return: the other processes need this one in the passes with gradients.
        if reason is None and not gap <= tolerance:  # NaN counts as a difference
            reason = f"its {name} differ by {gap:.2g} (relative)"
    return reason


def pack_evenly(
    scorer: Scorer,
    sequences: Sequence[TrainingSequence],
    token_budget: int,
    device: torch.device,
    peers: World | None,
    context: ContextGroup | None = None,
) -> list[Microbatch]:
    """Pack sequences, into the same number of microbatches in every process of `peers`.

    Processes that hold a part of each weight gather them together in every forward pass. So those
    with fewer microbatches get stand-ins, which add nothing to the loss. With `peers` None other
    processes take no part in the passes. With a `context` its members pack their sequences
    together.
    """

    def pack(sequences: Sequence[TrainingSequence]) -> list[Microbatch]:
        if context is not None:
            return pack_together(scorer.pack, sequences, token_budget, device, context)
        return scorer.pack(sequences, token_budget, device) if sequences else []

    microbatches = pack(sequences)
    if peers is not None:
        count = int(peers.max(len(microbatches), "the number of microbatches"))
        microbatches += pack([stand_in()]) * (count - len(microbatches))
    return microbatches


def score_microbatches(
    scorer: Any, microbatches: Iterable[Microbatch]
) -> dict[SequenceKey, tuple[Tensor, Tensor]]:
    """Return (logprobs_S, entropy_S) of each sequence by its key, on the CPU, detached."""
    with scorer.ready(), torch.no_grad():
        scored = [(microbatch.sequences, scorer(microbatch)) for microbatch in microbatches]
    scores: dict[SequenceKey, tuple[Tensor, Tensor]] = {}
    # Copied only after the last forward pass is queued: a copy to the host waits for all of them.
    for sequences, values in scored:
        lengths = [sequence.sampled_length for sequence in sequences]
        pieces = [values_S.cpu().split(lengths) for values_S in values]
        for sequence, logprobs_S, entropy_S in zip(sequences, *pieces, strict=True):
            if sequence.sampled_length:  # not a stand-in
                scores[sequence.key] = (logprobs_S, entropy_S)
    return scores


def head_logprobs(
    hidden_SH: Tensor,
    head: nn.Module,
    labels_S: Tensor,
    *,
    transform: LogitTransform,
    logits_budget_mb: int,
    entropy_grad: bool = False,
    compile: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(transform(head(hidden))) at the labels, and the entropies, [S] each.

    S sampled tokens, H hidden, V vocabulary. A plain linear head is fused with the softmax. Its
    logits are kept for the backward pass if they are within `logits_budget_mb`, else computed again
    there. Any other head (LoRA, hooks, a sharded weight) is called as a module, on chunks of
    tokens: at most CHUNK_LOGITS logits at once, computed again in the backward pass whatever the
    budget, and never compiled.
    """
    # accelerate and others replace `forward` on the instance.
    has_hooks = head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head)
    if type(head) is nn.Linear and not has_hooks and not isinstance(head.weight, DTensor):
        logits = labels_S.numel() * head.out_features
        return linear_logprobs(
            hidden_SH,
            head.weight,
            head.bias,
            labels_S,
            transform,
            keep=logits * LOGIT_BYTES <= logits_budget_mb * MEGABYTE,
            entropy_grad=entropy_grad,
            compile=compile,
        )
    # Classes of heads store the size of the vocabulary in different places: call the head to see.
    with torch.no_grad():
        vocabulary = head(hidden_SH[:1]).shape[-1]
    size = max(1, CHUNK_LOGITS // vocabulary)

    def score_chunk(hidden_SH: Tensor, labels_S: Tensor) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies of some tokens; the backward pass calls this again."""
        output_SV = head(hidden_SH)
        logits_SV = transform(output_SV.to(torch.promote_types(torch.float32, output_SV.dtype)))
        logprobs_SV = logits_SV.log_softmax(-1)
        # Without an entropy bonus its graph would hold [S, V] more for nothing.
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropy_S = -(logprobs_SV.exp() * logprobs_SV).sum(-1)
        return logprobs_SV.gather(-1, labels_S[:, None])[:, 0], entropy_S

    parts = [
        # A head in evaluation mode draws no random number (`recomputing`).
        checkpoint(score_chunk, hidden, labels, use_reentrant=False, preserve_rng_state=False)
        for hidden, labels in zip(hidden_SH.split(size), labels_S.split(size), strict=True)
    ]
    chunk_logprobs, chunk_entropies = zip(*parts, strict=True)
    return torch.cat(chunk_logprobs), torch.cat(chunk_entropies)


def logit_transform(model: PreTrainedModel) -> LogitTransform:
    """Return how the model's config says to make logits of the head's output, at temperature 1."""
    config: Any = model.config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling"):
        value = getattr(config, name, None)
        factor = 1.0 if value is None else float(value)
        # The last one is a divisor, except in HyperCLOVA X.
        divides = name == "logits_scaling" and config.model_type != "hyperclovax"
        scale *= 1 / factor if divides else factor
    return LogitTransform(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))


def check_head(
    model: PreTrainedModel,
    *,
    device: torch.device | None = None,
    inside: Inside | None = None,
    key: str = "model.path",
) -> None:
    """Raise UnsupportedModel unless head and `logit_transform` give the model's own logits.

    Otherwise training would silently use wrong logits. `inside` calls a function of the model while
    its weights are gathered. `key` is the setting that names the model.
    """
    token_ids_T = torch.arange(4, device=device or model.device)

    def compute_both(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
        """Return the model's logits, and those that training would compute."""
        logits_TV = model(input_ids=token_ids_T[None], use_cache=False).logits[0]
        hidden_TH = separate_hidden(model, token_ids_T, one_after_the_other([4]))
        return logits_TV, logit_transform(model)(model.get_output_embeddings()(hidden_TH))

    with torch.no_grad():
        logits_TV, training_TV = compute_both(model) if inside is None else inside(compute_both)
    gap = (logits_TV - training_TV).abs().max().item()
    if not logits_TV.isfinite().all():
        raise UnsupportedModel(
            f"{key}: {type(model).__name__} gives logits that are no finite numbers: its weights "
            "hold NaN or infinity, or are too large for its number format. Copy the model again, "
            "or set model.dtype=float32."
        )
    if not gap <= 1e-2 * logits_TV.abs().max().item():  # not `gap > …`: NaN is a difference
        raise UnsupportedModel(
            f"{key}: {type(model).__name__} changes its logits after the language-model head "
            f"(by up to {gap:.3g}) in a way that training does not know of. Choose another model."
        )


Inside = Callable[[Callable[[PreTrainedModel], Any]], Any]
"""Calls a function of the model with the model's weights gathered."""


def packed_hidden(
    model: PreTrainedModel,
    token_ids_T: Tensor,
    segments: Sequence[Segment],
    *,
    varlen: bool = False,
    split: Split | None = None,
) -> Tensor:
    """Return the last hidden states of packed segments by one forward pass, [T, H].

    Call it inside `packing(model)`. Positions count from 0 in each sequence. With `varlen`, torch's
    varlen kernel is used, which the device must have. With `split` the ids and the result are those
    of this process's tokens.
    """
    device = token_ids_T.device
    position_ids = positions(segments) if split is None else split.tree.positions()
    output = backbone(model)(
        input_ids=token_ids_T[None],
        position_ids=to_device(position_ids[None], device),
        **PackedTree(segments, device, use_varlen=varlen, split=split).keywords(model),
    )
    return output.last_hidden_state[0]


def separate_hidden(
    model: PreTrainedModel,
    token_ids_T: Tensor,
    segments: Sequence[Segment],
    *,
    begin: Callable[[Tensor], object] = lambda places_T: None,
) -> Tensor:
    """Return the last hidden states of packed segments by one forward pass each, [T, H].

    Segments may share a prefix, which is packed once. A pass runs a segment after its prefix, with
    the model's own attention. `begin` is called before it with the packed positions of its tokens:
    where experts were recorded, the model is then given those of these positions.
    """
    pieces = []
    for segment in segments:
        # Of the prefix, then of the segment.
        places_T = to_device(packed_positions(segment), token_ids_T.device)
        begin(places_T)
        sequence_T = token_ids_T[places_T]
        output = backbone(model)(input_ids=sequence_T[None], use_cache=False)
        pieces.append(output.last_hidden_state[0, segment.prefix_length :])
    return torch.cat(pieces)


PROMPT = Segment(9, 6)
TRIAL = (Segment(0, 9), PROMPT, Segment(15, 5, PROMPT), Segment(20, 3, PROMPT))
"""A sequence of its own, and two that share the six tokens of their prompt."""
CHUNK = 64
"""Tokens that scans of delta rules compute at once, in transformers and in fla."""
LONGEST_CROSSED = 1024
"""Longest window or chunk that the trial crosses."""
EXACT_GRADIENT_GAP, GRADIENT_GAP = 1e-3, 0.2
"""Most difference of gradients, relative, in `EXACT` formats and in others. Right ones of 13
families of recurrent models differ by up to 2e-6 and 0.05."""


def trial_segments(model: PreTrainedModel) -> tuple[Segment, ...]:
    """Return the segments of the trial: `TRIAL`, or longer ones for a window or for scans.

    The trial is a short made-up tree of sequences. Computing it shows whether a model gives packed
    sequences the same hidden states as separate ones. `TRIAL` is a sequence of its own, and a
    prompt of six tokens with two branches. The longer tree::

        alone | prompt ─┬─ branch
                        └─ single ── last

    Its prompt is longer than the model's sliding window, and than a chunk, the tokens that a scan
    computes at once.
    """
    config: Any = model.config.get_text_config()
    chunk = _scan_chunk(model)
    window = getattr(config, "sliding_window", None) or 0
    # Length that the prompt exceeds. A window or chunk that is too long for a trial is left out.
    crossed = max(length for length in (0, chunk, window) if length <= LONGEST_CROSSED)
    if crossed <= PROMPT.length:
        return TRIAL
    alone = TRIAL[0]
    prompt = Segment(start=alone.end, length=crossed + PROMPT.length)
    branch = Segment(start=prompt.end, length=2, parent=prompt)  # shorter than a convolution
    single = Segment(start=branch.end, length=1, parent=prompt)
    # Starts from the state after the single token and is longer than a chunk. Without scans: any
    # few tokens.
    last_length = chunk + 2 if chunk else 5
    last = Segment(start=single.end, length=last_length, parent=single)
    return (alone, prompt, branch, single, last)


def gradient_segments(model: PreTrainedModel) -> tuple[Segment, ...]:
    """Return the segments of the trial's passes with gradients: `TRIAL`, or a tree for scans.

    The trial is a short made-up tree of sequences, which a model computes packed and separately.
    These segments are short and cross no window: passes with gradients keep their activations.
    Recurrent layers get a tree with the ways in which a state may pass from segment to segment. It
    begins, as `_has_leak` expects, with a sequence of its own and a prompt with two branches::

        alone | prompt ─┬─ branch
                        └─ single ── crossing ── last
    """
    chunk = _scan_chunk(model)
    if not chunk:
        return TRIAL
    alone, prompt = TRIAL[:2]
    branch = Segment(start=prompt.end, length=2, parent=prompt)  # shorter than a convolution
    single = Segment(start=branch.end, length=1, parent=prompt)  # a state after a single token
    # Starts from a state, and is longer than the tokens that a scan computes at once.
    crossing = Segment(start=single.end, length=chunk + 2, parent=single)
    # Starts from the state at the end of `crossing`. Five tokens: any few.
    last = Segment(start=crossing.end, length=5, parent=crossing)
    return (alone, prompt, branch, single, crossing, last)


def _scan_chunk(model: PreTrainedModel) -> int:
    """Return how many tokens the model's scans compute at once, or 0 without recurrent layers."""
    if not has_mixers(model):
        return 0
    config: Any = model.config.get_text_config()
    names = ("chunk_size", "mamba_chunk_size")
    return max(CHUNK, *(getattr(config, name, None) or 0 for name in names))


def trial_ids(
    model: PreTrainedModel, device: torch.device, segments: Sequence[Segment] = TRIAL
) -> Tensor:
    """Return the token ids of a trial, [T]."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return torch.arange(segments[-1].end, device=device) * 7 % vocabulary


def why_not_packed(
    model: PreTrainedModel,
    *,
    varlen: bool = False,
    device: torch.device | None = None,
    inside: Inside | None = None,
) -> str | None:
    """Try packing on a few tokens; return why it changes the model's results, or None.

    Four things are tested, on short made-up trees of sequences:

    - the hidden states of one packed pass are those of a pass per segment (`trial_segments`)
    - no rollout's states depend on its neighbours, by exact zeros of gradients (`_has_leak`)
    - in a recurrent model the gradients agree too, because it could carry its state from one
      rollout into the next. These passes have shorter trees (`gradient_segments`), which save
      memory, with the ways in which a state passes from segment to segment.
    - a package's kernel for recurrent layers computes what transformers' own code does. Raises
      UnsupportedModel otherwise.

    With `varlen` the packed pass uses torch's varlen kernel. `inside` calls a function of the model
    while its weights are gathered.
    """
    device = device or model.device
    inside = inside or (lambda function: function(model))
    # The varlen kernel takes 16 bits: float32 weights reach it under autocast only.
    needs_cast = varlen and model.dtype is torch.float32
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=needs_cast)
    segments = trial_segments(model)  # for hidden states
    token_ids_T = trial_ids(model, device, segments)
    tree = gradient_segments(model)  # for gradients and leaks
    tree_ids_T = trial_ids(model, device, tree)
    in_one_pass = partial(packed_hidden, varlen=varlen)
    gradients: list[Tensor] = []  # of the separate passes, then of the packed one
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), autocast:
            separate_TH = inside(lambda model: separate_hidden(model, token_ids_T, segments))
            if has_mixers(model):
                gradients.append(
                    inside(partial(_input_gradient, separate_hidden, tree_ids_T, tree))
                )
            with packing(model):
                with recorded_calls() as calls:  # of recurrent mixers, to check their kernels
                    packed_TH = inside(lambda model: in_one_pass(model, token_ids_T, segments))
                if gradients:
                    gradients.append(
                        inside(partial(_input_gradient, in_one_pass, tree_ids_T, tree))
                    )
                leaks = _has_leak(inside, in_one_pass, tree_ids_T, tree)
    except UnsupportedAttention as error:
        return str(error)
    except TypeError as error:
        return f"its forward pass does not take packed input ({error})"
    except RuntimeError as error:
        if not varlen:
            raise
        return f"the kernel for sequences of any length fails ({error})"
    finally:
        model.train(was_training)
    _check_mixer_kernels(calls)
    exact = packed_TH.dtype in EXACT and not needs_cast
    tolerance = 1e-4 if exact else 5e-2
    # In 16 bits single tokens of a long text may go to other experts: compare means.
    by_means = segments is not TRIAL and not exact
    gap = _measure_hidden_gap(packed_TH.float(), separate_TH.float(), by_means=by_means)
    # Not `gap > tolerance`: NaN has to count as a difference.
    if not gap <= tolerance:
        return f"packed, its hidden states differ by {gap:.2g} (relative; at most {tolerance:g})"
    if leaks:
        return "packed, a rollout's hidden states depend on its neighbours"
    if gradients:
        gap = relative_gap(*gradients)
        if not gap <= (EXACT_GRADIENT_GAP if exact else GRADIENT_GAP):
            return f"packed, its gradients differ by {gap:.2g} (relative)"
    return None


def _measure_hidden_gap(packed_TH: Tensor, separate_TH: Tensor, *, by_means: bool) -> float:
    """Return the relative difference of hidden states: of their largest numbers, or `by_means`."""
    difference_TH, size_TH = (packed_TH - separate_TH).abs(), separate_TH.abs()
    if by_means:
        return (difference_TH.mean() / size_TH.mean()).item()
    return (difference_TH.max() / size_TH.max()).item()


def _check_mixer_kernels(calls: Mapping[str, MixerCall]) -> None:
    """Raise UnsupportedModel if a kernel differs from transformers' code of the same function."""
    for name, call in calls.items():
        gap = kernel_gap(call)
        if gap is not None and not gap <= GRADIENT_GAP:  # NaN counts as a difference
            raise UnsupportedModel(
                f"model.path: the installed kernel for {name} gives other results or gradients "
                f"than transformers' own code (by {gap:.2g}, relative). Upgrade or uninstall its "
                "package: fla-core, causal-conv1d or mamba-ssm."
            )


HiddenFunction = Callable[[PreTrainedModel, Tensor, Sequence[Segment]], Tensor]
"""`packed_hidden` or `separate_hidden`."""


@torch.enable_grad()
def _input_gradient(
    hidden: HiddenFunction,
    token_ids_T: Tensor,
    segments: Sequence[Segment],
    model: PreTrainedModel,
    *,
    start: int = 0,
) -> Tensor:
    """Return the gradient of a sum of hidden states with respect to the embeddings, [T, H].

    It shows whether packing is right: the gradients of a packed pass must agree with those of
    separate passes, and states from packed position `start` on must not depend on tokens of another
    sequence before it. Hidden states before `start` are left out of the sum.

    A hook adds a tensor of zeros to the embeddings, and the gradient is taken with respect to that
    tensor.
    """
    table = model.get_input_embeddings()
    zeros_TH = table.weight.new_zeros(len(token_ids_T), table.weight.shape[1]).requires_grad_()
    # Packed positions of the tokens of each forward pass, in the order of the passes.
    positions_of_passes = [torch.arange(len(token_ids_T))]
    if hidden is separate_hidden:  # it runs one pass for each segment
        positions_of_passes = [packed_positions(segment) for segment in segments]
    passes = iter(positions_of_passes)

    def add_zeros(_module: nn.Module, _inputs: Any, embeddings: Tensor) -> Tensor:
        """Add the zeros of the next pass's tokens: the hook is called once in each pass."""
        return embeddings + zeros_TH[next(passes).to(zeros_TH.device)]

    hook = table.register_forward_hook(add_zeros)
    try:
        hidden_TH = hidden(model, token_ids_T, segments)
    finally:
        hook.remove()
    # Different weights: the sum of a normalised state may be constant, without a gradient.
    weights_H = torch.linspace(-1, 1, hidden_TH.shape[1], device=hidden_TH.device)
    (gradient_TH,) = torch.autograd.grad((hidden_TH[start:] * weights_H).sum(), zeros_TH)
    return gradient_TH


def _has_leak(
    inside: Inside, forward: HiddenFunction, token_ids_T: Tensor, tree: Sequence[Segment]
) -> bool:
    """Return True if packed hidden states depend on tokens that are not before them in a sequence.

    `tree` begins with a rollout, and a prompt with two branches after it. `forward` computes it
    packed. `inside` calls a function of the model with the model's weights gathered.
    """
    rollout, _, branch, sibling, *_ = tree
    # Nothing after the rollout may depend on it: not the prompt and its branches, which begin at
    # `rollout.end`. And nothing from the second branch on may depend on the first one.
    return any(
        # One `inside` for each, because a backward pass frees the weights that FSDP2 gathered.
        inside(partial(_depends_on, forward, token_ids_T, tree, start, earlier))
        for start, earlier in ((rollout.end, rollout), (sibling.start, branch))
    )


def _depends_on(
    hidden: HiddenFunction,
    token_ids_T: Tensor,
    segments: Sequence[Segment],
    start: int,
    earlier: Segment,
    model: PreTrainedModel,
) -> bool:
    """Return True if hidden states from position `start` on depend on the segment `earlier`.

    This compares gradients, not hidden states. A short convolution or a state may carry over less
    than the rounding of bfloat16, but its gradient is not exactly zero.
    """
    gradient_TH = _input_gradient(hidden, token_ids_T, segments, model, start=start)
    return bool(gradient_TH[earlier.start : earlier.end].any())


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLimits:
    """Lengths beyond which a model changes its rotary frequencies (LongRoPE, dynamic scaling).

    transformers chooses by the last position of a forward pass, so that a short rollout packed with
    a long one would get other frequencies than alone. Only rollouts of one kind share a pass.
    """

    long: tuple[int, ...] = ()
    """Limits with one set of frequencies for everything longer."""
    dynamic: tuple[int, ...] = ()
    """Limits with a set of frequencies for each longer length."""

    def kind(self, length: int) -> tuple[int, ...]:
        """Return the kind of a length: equal for lengths with the same rotary frequencies.

        With LongRoPE (`self.long`) all lengths above a limit share one other set of frequencies.
        With dynamic scaling (`self.dynamic`) every length above a limit has a set of its own.

        Examples: with long=(4096,), lengths 10 and 4096 are (0,), 4097 and 9000 are (1,). With
        dynamic=(4096,), lengths 10 and 4096 are (0,), 4097 is (1,), and 9000 is (4904,).
        """
        return (
            *(int(length > limit) for limit in self.long),
            *(max(length - limit, 0) for limit in self.dynamic),
        )


def length_limits(model: PreTrainedModel) -> LengthLimits:
    """Return the lengths above which a model's config changes its rotary frequencies (RoPE).

    Other types of RoPE than LongRoPE and dynamic scaling use the same frequencies for sequences of
    any length: they have no limit.
    """
    config: Any = model.config.get_text_config()
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    # One dict for all layers, or one for each type of layer.
    by_layer_type = [parameters] if "rope_type" in parameters else parameters.values()
    ropes = [rope for rope in by_layer_type if isinstance(rope, Mapping)]
    kinds = [(str(rope.get("rope_type")), rope) for rope in ropes]
    return LengthLimits(
        long=tuple(
            rope["original_max_position_embeddings"] for kind, rope in kinds if kind == "longrope"
        ),
        dynamic=tuple(config.max_position_embeddings for kind, _ in kinds if "dynamic" in kind),
    )
