"""Memory that training takes, computed from a model's config without allocating its weights.

The model is on the meta device: its weights have shapes and no content. The activations held for
the backward pass are those that autograd saves in a forward pass over fake tensors, with the
model's own code and the attention of training. Shapes: T tokens of a microbatch, H hidden,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.optim import SGD, Muon, Optimizer
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel
from transformers.integrations import moe

from agenttrain.engines.language_model import backbone, language_model, model_class
from agenttrain.training.attention import PackedTree, packing
from agenttrain.training.config import (
    ActivationCheckpointing,
    LoraSettings,
    OptimizerConfig,
)
from agenttrain.training.equal_layers import equal_layers_run_twice
from agenttrain.training.head import CPU_TILE, GPU_TILE
from agenttrain.training.lora import add_lora, add_saved_adapters
from agenttrain.training.optimizers import MasterWeights, build_optimizer
from agenttrain.training.quantization import quantize
from agenttrain.training.recomputation import possible_levels, recomputed_modules
from agenttrain.training.segments import one_after_the_other
from agenttrain.training.sharding import layers

FLOAT32_BYTES = 4
"""Bytes of a number in float32."""
RESERVE = 3 * 2**29
"""Bytes of a GPU for its context, workspaces, and gaps that the allocator cannot fill. Assumed."""
STEP_COUNT = 4
"""Bytes of AdamW's step counter, one per parameter."""
LAYER_GRADIENTS = 4 / 3
"""Peak of a layer's backward pass relative to the bytes that its forward pass saved; measured 1.2
to 1.3 on a small Qwen3."""
TILES = 3
"""Tiles of logits at once: the product, unless it is kept, and two computed from it."""
TRACED, TRACED_SCORES = 256, 2048
"""Tokens of the longer of two traced rollouts; longer ones are extrapolated linearly. The second is
for models whose scores are held in memory: only from there on is the growth linear."""


def empty_model(
    config: Any,
    dtype: torch.dtype,
    lora: LoraSettings,
    adapters: Path | None = None,
    *,
    double: bool | None = None,
) -> PreTrainedModel:
    """Return a config's model without storage, with adapters of `lora` or those in a folder.

    `double` is None for a base that is not in 4 bits. True: the scales of the 4 bits are stored in
    8 bits; False: in float32.
    """
    with init_empty_weights(include_buffers=True):
        model = model_class(config.model_type).from_config(config, dtype=dtype)
        if double is not None:
            quantize(model, double=double)
        if adapters is not None:
            add_saved_adapters(model, adapters)
        if lora.rank:
            add_lora(model, lora)
            # peft casts new adapters to the format of their layer only beside real weights, not on
            # the meta device. Adapters in a folder have their file's format.
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)
    return model


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all parameters. Tied ones count once."""
    return sum(p.nbytes for p in model.parameters())


@dataclass(frozen=True, slots=True, kw_only=True)
class Updating:
    """Bytes that an optimizer update holds beside the weights."""

    gradients: int
    """In the format of the weights. Weights with a float32 copy have a float32 gradient too."""
    masters: int
    """Float32 copies of weights in another format."""
    moments: int
    """Two for AdamW, one for Muon, none for SGD."""


def updating(model: PreTrainedModel, config: OptimizerConfig) -> Updating:
    """Return the bytes of a model's gradients and of its optimizer's state."""
    optimizer = build_optimizer(model, config)
    master_pairs = optimizer.pairs if isinstance(optimizer, MasterWeights) else []
    masters = sum(master.nbytes for _, master in master_pairs)
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return Updating(gradients=gradients + masters, masters=masters, moments=_moments(optimizer))


def _moments(optimizer: Optimizer) -> int:
    """Return the bytes of an optimizer's state, once it has made an update."""
    parts = getattr(optimizer, "parts", None)
    if parts is not None:  # several optimizers in one
        return sum(map(_moments, parts))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, SGD):
        return 0
    if isinstance(optimizer, Muon):
        return sum(p.nbytes for p in parameters)
    return sum(2 * p.nbytes + STEP_COUNT for p in parameters)  # AdamW


def lacks_reserve(peak: int, others: int, total: int) -> bool:
    """Return True if a GPU of `total` bytes has no reserve beside the tensors of an update.

    `peak` are the bytes of tensors that the allocator has measured. `others` are the bytes outside
    the allocator: the context, and other processes.
    """
    return peak + max(others, RESERVE) > total


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes of activations at a level of checkpointing, without the head."""

    kept: int
    """Held from the forward pass to the backward pass."""
    recomputed: int
    """The most that a recomputed module holds while its part of the backward pass runs."""


class SavedActivations:
    """Activations of a forward pass over a rollout, by the level of checkpointing.

    A level of activation checkpointing names the modules whose activations are dropped after the
    forward pass, and computed again in the backward pass. Call this with a rollout's number of
    tokens. `autocast` is the format in which layers compute.

    The bytes are measured by a trace: a forward pass over tensors without values. Long rollouts are
    not traced. Their bytes are extrapolated linearly from two shorter ones: activations have a size
    for each token, and fused attention holds no scores. With a soft cap scores are held. Then the
    two traced rollouts are longer (TRACED_SCORES).
    """

    def __init__(self, model: PreTrainedModel, autocast: torch.dtype | None) -> None:
        self._model, self._autocast = model, autocast
        # With a soft cap no fused kernel computes attention: its scores are held in memory. The
        # longer of the two traced rollouts has so many tokens, the other one half of them.
        softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
        self._longest = TRACED if softcap is None else TRACED_SCORES
        self._traced: dict[int, dict[ActivationCheckpointing, Activations]] = {}
        """Tokens of a rollout -> bytes at each level. Cached, because a trace takes a while."""

    def __call__(
        self, tokens: int, level: ActivationCheckpointing = ActivationCheckpointing.none
    ) -> Activations:
        """Return the bytes for a rollout of that many tokens; long ones are extrapolated."""
        longest, half = self._longest, self._longest // 2
        if tokens <= longest:
            return self._trace(tokens)[level]
        short, full = self._trace(half)[level], self._trace(longest)[level]

        def extrapolate(half_bytes: int, full_bytes: int) -> int:
            bytes_per_token = (full_bytes - half_bytes) / (longest - half)
            return full_bytes + round(bytes_per_token * (tokens - longest))

        return Activations(
            kept=extrapolate(short.kept, full.kept),
            recomputed=extrapolate(short.recomputed, full.recomputed),
        )

    def _trace(self, tokens: int) -> dict[ActivationCheckpointing, Activations]:
        """Return the bytes that autograd saves in a forward pass, at each level (cached).

        The tensors are fake: they have shapes and formats, but no values and no memory.

        One pass measures all levels of activation checkpointing. No module is really recomputed: a
        `_LevelCount` for each level gets every tensor that autograd saves, and decides whether it
        would be kept at its level.
        """
        if tokens in self._traced:
            return self._traced[tokens]
        net = backbone(self._model)
        mode = FakeTensorMode()
        with mode:
            state = {name: _fake(tensor) for name, tensor in net.state_dict(keep_vars=True).items()}
            # `state_dict` lacks the buffers that are not persistent.
            state |= {name: _fake(tensor) for name, tensor in net.named_buffers()}
        weights = list(state.values())
        counts = {
            level: _LevelCount(weights, recomputed_modules(self._model, level))
            for level in possible_levels(self._model, compiled=False)
        }
        skipped_bytes = self._run_forward(tokens, net, state, mode, counts)
        self._traced[tokens] = {
            level: Activations(
                kept=count.kept + skipped_bytes[level], recomputed=count.most_recomputed
            )
            for level, count in counts.items()
        }
        return self._traced[tokens]

    def _run_forward(
        self,
        tokens: int,
        net: nn.Module,
        state: dict[str, Tensor],
        mode: FakeTensorMode,
        counts: Mapping[ActivationCheckpointing, _LevelCount],
    ) -> Mapping[Any, int]:
        """Run a forward pass with the fake weights `state`; `counts` count what autograd saves.

        To save time only two layers of each kind of equal layers run. Returns the bytes that the
        others, which are skipped, would have added to each level's count.
        """
        tree = _made_tree(tokens)
        with mode:
            ids = torch.zeros(1, tokens, dtype=torch.long)
            positions = torch.arange(tokens)[None]

        def save(tensor: Tensor) -> Tensor:
            """Count a tensor that autograd saves, at all levels."""
            for count in counts.values():
                count.add(tensor)
            return tensor

        def kept_bytes() -> dict[ActivationCheckpointing, int]:
            return {level: count.kept for level, count in counts.items()}

        autocast = self._autocast
        cast = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
        keywords = {"position_ids": positions, **tree.keywords(self._model)}
        hooks = saved_tensors_hooks(save, lambda tensor: tensor)
        limited = equal_layers_run_twice(layers(language_model(self._model)), kept_bytes)
        with ExitStack() as stack:
            # First the changes to the model, while tensors are real: packed attention, equal layers
            # that are skipped.
            stack.enter_context(packing(self._model))
            skipped = stack.enter_context(limited)
            for count in counts.values():  # hooks that notice when recomputed modules run
                stack.enter_context(count.watching())
            # Then the modes of its forward pass: fake tensors, experts that a trace can run,
            # autocast, and the hook for each tensor that autograd saves.
            for context in (mode, _traceable_experts(), cast, hooks):
                stack.enter_context(context)
            functional_call(net, state, (ids,), keywords)
        return skipped.saved_bytes


def _made_tree(tokens: int) -> PackedTree:
    """Return the layout of one sequence, with the parts that layers read from it.

    `PackedTree` makes these when they are first read. A trace would read them in FakeTensorMode,
    but they depend on values, which fake tensors lack.
    """
    tree = PackedTree(one_after_the_other([tokens]), torch.device("cpu"))
    parts_for_layers = (tree.blocks, tree.recurrent.waves)
    assert all(parts_for_layers)  # one block and one wave at least
    return tree


class _LevelCount:
    """Bytes of the storages that autograd would hold at one level of activation checkpointing.

    At a level some modules are recomputed: only their inputs are kept for the backward pass, and
    what they save inside exists only while their own part of it runs. So storages belong to one of
    two groups: those kept from the forward pass on, and those of the recomputed module that is
    running. A storage counts once, and weights do not count.
    """

    def __init__(self, weights: Sequence[Tensor], recomputed: Sequence[nn.Module]) -> None:
        """Count nothing yet. `recomputed` are modules of which none is in another."""
        self.kept = 0
        """Bytes held for the backward pass: inputs of recomputed modules, and what others save."""
        self.most_recomputed = 0
        """The most bytes that a recomputed module saves beside its inputs."""
        self._modules = recomputed
        # A storage's id is its address, `_cdata`. Several tensors may share a storage.
        self._weight_ids = {tensor.untyped_storage()._cdata for tensor in weights}
        self._kept: dict[int, torch.UntypedStorage] = {}
        """Storages whose bytes are in `kept`, by their ids. Holding them keeps the ids unique."""
        self._module: dict[int, torch.UntypedStorage] | None = None
        """Storages that the running recomputed module has saved, by their ids. `_end` sums their
        bytes. None: no such module is running."""

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that autograd saves: as kept, or inside a recomputed module as its own."""
        self._count(tensor, self._kept if self._module is None else self._module)

    def _count(self, tensor: Tensor, group: dict[int, torch.UntypedStorage]) -> None:
        """Add the storage of a tensor to `group`, unless it is counted already or a weight's.

        `group` is one of two dictionaries. The bytes of storages in `_kept` are added to `kept` at
        once. Those in `_module` are summed by `_end`, because the largest sum of a module counts.
        """
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._weight_ids or address in self._kept or address in group:
            return
        group[address] = storage
        if group is self._kept:
            self.kept += storage.nbytes()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notice in the block when recomputed modules begin and end."""
        handles = []
        for module in self._modules:
            handles.append(module.register_forward_pre_hook(self._begin, with_kwargs=True))
            handles.append(module.register_forward_hook(self._end))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, module: nn.Module, args: Any, keywords: Any) -> None:
        """Count the inputs of a recomputed module as kept."""
        for tensor in tree_leaves((args, keywords)):
            if isinstance(tensor, Tensor):
                self._count(tensor, self._kept)
        self._module = {}

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Compare the bytes of a recomputed module with those of the earlier ones."""
        assert self._module is not None
        module_bytes = sum(storage.nbytes() for storage in self._module.values())
        self.most_recomputed = max(self.most_recomputed, module_bytes)
        self._module = None


def _fake(tensor: Tensor) -> Tensor:
    """Return a tensor like this one. Inside FakeTensorMode it has no storage."""
    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
    return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def _traceable_experts() -> Iterator[None]:
    """Multiply experts by transformers' own operation, which saves the same tensors.

    The `grouped_mm` of torch 2.13 takes real tensors in float32, but fake ones in bfloat16 alone.
    """
    usable = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *args: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = usable


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedLayer:
    """How many numbers (elements of tensors) a layer's cache holds of a sequence."""

    token: int = 0
    """Numbers of each token: its keys and values."""
    window: int | None = None
    """Most tokens whose keys and values are held. None: all."""
    convolution: int = 0
    """Numbers of the last inputs of convolutions, whatever the sequence's length, in the model's
    format."""
    recurrence: int = 0
    """Numbers of the recurrent states, whatever the sequence's length, in float32."""


def cached_layers(model: PreTrainedModel) -> list[CachedLayer]:
    """Return what each layer's cache holds of a sequence.

    Example: 2 heads of size 64 in 3 layers: ``[CachedLayer(token=256)] * 3``.
    """
    net = backbone(model)
    # To save time only two layers of each kind run. The others are skipped, so that their caches
    # stay empty. `twins`: index of a skipped layer -> index of an equal one that ran.
    limited = equal_layers_run_twice(layers(language_model(model)))
    with limited as equal_layers, FakeTensorMode(), _traceable_experts(), torch.no_grad():
        # The model may be on the meta device. Fake tensors have no memory either, and all of a
        # forward pass must be fake.
        state: Mapping[str, Tensor] = {
            name: _fake(t) for name, t in (*net.named_parameters(), *net.named_buffers())
        }
        cache = DynamicCache(config=model.config)
        ids = torch.zeros(1, 2, dtype=torch.long)  # any few tokens: results are per token
        keywords = {"past_key_values": cache, "use_cache": True}
        functional_call(net, dict(state), (ids,), keywords)
        measured = []
        for index, layer_cache in enumerate(cache.layers):
            filled_index = equal_layers.twins.get(index, index)
            measured.append(_measure_cache(layer_cache, cache.layers[filled_index]))
        return measured


def _measure_cache(layer_cache: Any, filled_cache: Any) -> CachedLayer:
    """Return how many numbers a layer's cache holds; `CachedLayer` says in which format each is.

    `filled_cache` is `layer_cache` itself. If the layer was skipped (of equal layers only two run),
    its own cache is empty, and `filled_cache` is that of an equal layer.
    """

    def count_numbers(name: str) -> int:
        """Return the numbers of an attribute that has states by their names, if it exists."""
        states: Mapping[Any, Tensor | None] = getattr(filled_cache, name, {})
        return sum(state.numel() for state in states.values() if state is not None)

    keys, values = (getattr(filled_cache, name, None) for name in ("keys", "values"))
    return CachedLayer(
        # Keys and values are [1, heads, tokens, head size]: numbers of one token.
        token=sum(t.shape[1] * t.shape[3] for t in (keys, values) if t is not None),
        window=layer_cache.sliding_window if getattr(layer_cache, "is_sliding", False) else None,
        convolution=count_numbers("conv_states"),
        recurrence=count_numbers("recurrent_states"),
    )


def head_bytes(
    model: PreTrainedModel, tokens: int, *, budget_mb: int, autocast: bool, device: str
) -> int:
    """Return the peak bytes of `tokens` sampled tokens' logprobs and their backward pass.

    As `head.py` computes them: tile by tile, a tile being some tokens and some entries of the
    vocabulary. The logits of all tiles are kept for the backward pass if they are within
    `budget_mb`.
    """
    head: Any = model.get_output_embeddings()
    entries, hidden = head.weight.shape
    number_bytes = 2 if autocast else head.weight.element_size()  # of one number of the products
    max_tile_tokens, tile_logits = CPU_TILE if device == "cpu" else GPU_TILE
    tile_tokens = max(1, min(max_tile_tokens, tokens))
    tile_entries = min(entries, max(1, tile_logits // tile_tokens))
    tile_bytes = tile_tokens * tile_entries * FLOAT32_BYTES
    logits_bytes, budget_bytes = tokens * entries * FLOAT32_BYTES, budget_mb * 2**20
    kept_bytes = min(logits_bytes, budget_bytes)
    # A tile needs three tensors: its logits, and two computed from them. Kept logits are counted in
    # `kept_bytes` already.
    is_kept = logits_bytes <= budget_bytes
    tiles_bytes = (TILES - 1 if is_kept else TILES) * tile_bytes
    trained_numbers = head.weight.numel() if head.weight.requires_grad else 0
    gradient_bytes = trained_numbers * FLOAT32_BYTES
    # At the end the weight's gradient, summed in float32, is cast to another format beside it.
    cast_bytes = trained_numbers * number_bytes if number_bytes != FLOAT32_BYTES else 0
    # Hidden states in the format of the products, and their gradient in float32.
    states_bytes = tokens * hidden * (number_bytes + FLOAT32_BYTES)
    # When the gradient is cast, the last tile is freed already: only the larger one counts.
    return kept_bytes + gradient_bytes + max(tiles_bytes, cast_bytes) + states_bytes
