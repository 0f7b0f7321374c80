"""Floating-point operations of a model, and the work that a process did in a step.

Operations are those that the model needs, as for "model FLOPs utilization" (Chowdhery et al. 2022,
https://arxiv.org/abs/2204.02311 , appendix B). What activation checkpointing computes a second time
does not count. Per token:

    forward                        2 N + 4 sum over layers of (heads x head size) x keys attended to
    backward, trained weights      4 N
    backward, frozen weights       2 N      (the gradient goes through them, but none is theirs)
    backward, attention            2.5 times forward, as FlashAttention counts it

N are the weights that multiply a token: all of the language model, the head included. Of experts
only those that a token is routed to count. Embeddings that are no head, and encoders of images, do
not. A shared prefix counts once, and keys are counted causally and within a sliding window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from agenttrain.engines.language_model import encoder_weights
from agenttrain.tracking.cards import peak_tflops
from agenttrain.tracking.machine import GB
from agenttrain.training.batch import Microbatch
from agenttrain.training.quantization import numbers_of
from agenttrain.training.segments import Segment

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts in configs of transformers."""
USED_EXPERTS = ("num_experts_per_tok", "top_k_experts")
"""Names of the number of experts that a token is routed to."""
WITHOUT_KEYS = ("linear_attention", "conv", "moe")
"""Types of layers that attend to no earlier key."""
TERA = 1e12
SLIDING = ("sliding_attention", "hybrid_sliding")
"""Types of layers that attend to a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Counts a model's operations over packed tokens."""

    trained: float
    """Number of weights with a gradient that each token is multiplied by."""
    frozen: float
    """Number of weights without a gradient that each token is multiplied by."""
    widths: Mapping[int | None, int]
    """Heads x head size, summed over the attention layers with a window of this length. None: they
    attend to the whole sequence."""

    def forward(self, tokens: int, segments: Sequence[Segment]) -> float:
        """Return the operations of a forward pass over `tokens`, which lie in `segments`.

        `tokens` may be more than those of the segments: padding is multiplied too.
        """
        return 2 * (self.trained + self.frozen) * tokens + self._attention(segments)

    def training(self, tokens: int, segments: Sequence[Segment]) -> float:
        """Return the operations of a forward and a backward pass.

        A weight costs 2 forward, 2 for the gradient of its input and, if trained, 2 for its own.
        Attention's backward pass costs 2.5 times its forward pass.

        Example: 2 tokens of one segment, 100 trained weights, one layer of width 4 have
        6 x 100 x 2 + 3.5 x 4 x 4 x (1 + 2 keys) = 1368.
        """
        weights = (6 * self.trained + 4 * self.frozen) * tokens
        return weights + 3.5 * self._attention(segments)

    def _attention(self, segments: Sequence[Segment]) -> float:
        """Return the operations of attention, forward: queries x keys and weights x values."""
        products = sum(
            width * sum(_keys(segment, window) for segment in segments)
            for window, width in self.widths.items()
        )
        return 2 * 2.0 * products  # of keys and of values, each a multiplication and an addition


def _keys(segment: Segment, window: int | None) -> int:
    """Return the number of (query, key) pairs of a segment whose tokens see its prefix."""
    before = segment.prefix_length
    return _keys_until(before + segment.length, window) - _keys_until(before, window)


def _keys_until(length: int, window: int | None) -> int:
    """Return the (query, key) pairs of a sequence: 1 + 2 + … + length, each at most the window."""
    ramp = length if window is None else min(length, window)
    return ramp * (ramp + 1) // 2 + (length - ramp) * ramp


def count_operations(model: PreTrainedModel) -> Operations:
    """Return the counter of a model, from its weights' sizes and its config.

    The operations of a token are counted by the numbers that it is multiplied by. So weights are
    left out that multiply no token: embeddings, of which a row is looked up, and encoders, which
    read images and not tokens. An embedding that is tied to the head is the head's matrix, and
    counts.
    """
    config: Any = model.config.get_text_config()
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    head: Any = model.get_output_embeddings()
    uncounted = {id(w) for w in (*embeddings, *encoder_weights(model).values())}
    # An embedding that is tied to the head counts after all.
    uncounted -= {id(weight) for weight in (head.parameters() if head is not None else ())}
    used_share = _share_of_experts(config)
    # Elements of each weight that is stored in 4 bits, by name: two are in a byte of the parameter.
    in_4_bits = numbers_of(model)
    totals = {True: 0.0, False: 0.0}  # elements of weights, by whether they have a gradient
    for name, weight in model.named_parameters():  # a tied weight comes once
        if id(weight) in uncounted:
            continue
        share = used_share if ".experts." in name else 1.0
        totals[weight.requires_grad] += in_4_bits.get(name, weight.numel()) * share
    return Operations(trained=totals[True], frozen=totals[False], widths=_widths(config))


def _share_of_experts(config: Any) -> float:
    """Return the share of a layer's experts that a token is routed to; 1 without experts."""
    count = next((n for name in EXPERTS if (n := getattr(config, name, None))), None)
    used = next((n for name in USED_EXPERTS if (n := getattr(config, name, None))), None)
    return used / count if count and used else 1.0


def _widths(config: Any) -> dict[int | None, int]:
    """Return heads x head size of attention layers, summed by window.

    Example: 20 layers of a width of 2,048 with a window of 1,024 and 4 without have ``{1024: 40960,
    None: 8192}``.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        is_used = window is not None and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if is_used else "full_attention"] * config.num_hidden_layers
    widths: Counter[int | None] = Counter()
    for layer, kind in enumerate(kinds):
        if kind not in WITHOUT_KEYS:
            widths[window if kind in SLIDING else None] += _width(config, layer, kind)
    return dict(widths)


def _width(config: Any, layer: int, kind: str) -> int:
    """Return heads x head size of an attention layer; 0 where a config does not say it."""
    # Gemma 4's full attention has larger heads: by a config of each layer, or `global_head_dim`.
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[layer]
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):  # a model without attention, or a list
        return 0
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if kind == "full_attention":
        size = getattr(config, "global_head_dim", None) or size
    return heads * int(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Work of one training process in a step."""

    computed_tokens: int = 0
    """Tokens of its forward passes, shared prefixes once; those without a backward pass too."""
    trained_tokens: int = 0
    """Sampled tokens of its updates that had a gradient; each epoch counts."""
    operations: float = 0.0
    """Floating-point operations that the model needed for them."""
    peak_tflops: float | None = None
    """Dense bf16 peak of its card; None: not known."""
    peak_gb: float | None = None
    """Most memory that torch's allocator has handed out so far; None without a GPU."""
    update_peak_gb: float | None = None
    """The same during the step's updates alone."""


def card_name(device: torch.device) -> str:
    """Return the driver's name of a GPU."""
    return torch.cuda.get_device_name(device)


@dataclass(slots=True)
class WorkCounter:
    """Adds up the work of a step in this process.

    The policy calls `add` for each forward pass, and the trainer `take` at the end of the step.
    """

    operations: Operations
    device: torch.device
    _computed: int = 0
    """Tokens of forward passes since the last `take`."""
    _trained: int = 0
    """Sampled tokens of backward passes since then: the targets that this process has."""
    _operations_done: float = 0.0
    _peak: int = 0
    """Most bytes of the GPU's allocator before its statistics were last reset."""
    _update_peak: int = 0
    """Most bytes of it during the last step's updates."""

    def begin_update(self) -> None:
        """Begin to measure the peak of a step's updates, apart from rollouts and weight syncs."""
        self._reset_peak()

    def end_update(self) -> int:
        """Return the peak since `begin_update`, in bytes of the allocator. 0 without a GPU."""
        self._update_peak = self._reset_peak()
        return self._update_peak

    def _reset_peak(self) -> int:
        """Return the allocator's peak since the last call."""
        if self.device.type != "cuda":
            return 0
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._peak = max(self._peak, peak)
        return peak

    def add(self, microbatch: Microbatch, *, backward: bool) -> None:
        """Count a forward pass, and a backward pass with `backward`."""
        tokens = microbatch.token_ids_T.numel()
        count = self.operations.training if backward else self.operations.forward
        share = microbatch.context  # this process's share, if a context group computes it together
        processes = 1 if share is None else share.split.group.size
        # `token_ids_T` are this process's tokens alone, but `segments` those of the whole group,
        # and attention is counted by segments. So count the group's work, of about as many tokens
        # for each member, and take an equal part of it.
        self._operations_done += count(tokens * processes, microbatch.segments) / processes
        self._computed += tokens
        self._trained += microbatch.targets_S.numel() if backward else 0

    def take(self, peak: float | None = None) -> StepWork:
        """Return the work since the last call.

        `peak` is the card's peak in TFLOP/s. None: looked up by the card's name, and None on a CPU.
        """
        peak_gb = update_peak_gb = None
        if self.device.type == "cuda":
            self._reset_peak()
            peak_gb, update_peak_gb = self._peak / GB, self._update_peak / GB
            peak = peak or peak_tflops(card_name(self.device))
        work = StepWork(
            computed_tokens=self._computed,
            trained_tokens=self._trained,
            operations=self._operations_done,
            peak_tflops=peak,
            peak_gb=peak_gb,
            update_peak_gb=update_peak_gb,
        )
        self._computed, self._trained, self._operations_done = 0, 0, 0.0
        return work


def work_metrics(works: Sequence[StepWork], train_s: float) -> dict[str, float]:
    """Return the metrics of the work of all training processes in `train_s` seconds.

    Example: two processes that did 30e12 operations each in 1 second, on cards of 100 TFLOP/s:
    ``perf/mfu`` is 0.3.
    """
    metrics = {
        "tokens/trained": float(sum(work.trained_tokens for work in works)),
        "tokens/computed": float(sum(work.computed_tokens for work in works)),
    }
    rates = [work.peak_tflops for work in works if work.peak_tflops is not None]
    if len(rates) == len(works) and train_s > 0:
        done = sum(work.operations for work in works)
        metrics["perf/mfu"] = done / (train_s * sum(rates) * TERA)
    peaks = [work.peak_gb for work in works if work.peak_gb is not None]
    if peaks:
        metrics["perf/peak_gb"] = max(peaks)
        metrics["perf/update_peak_gb"] = max(work.update_peak_gb or 0.0 for work in works)
    return metrics
