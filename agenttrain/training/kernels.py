"""Attention kernels: which one torch chooses for given states, and which ones a run uses.

torch's `scaled_dot_product_attention` falls back silently to `math`, which holds every score. On a
GPU that happens with a mask and fewer key/value heads than query heads, and with head sizes that
are no multiple of 8. Shapes: B sequences, h heads (k of keys and values), m queries, n keys, d head
size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from agenttrain.types import AgenttrainError

MULTIPLE = 8
"""The memory-efficient kernel takes head sizes that are multiples of this, in every format."""
MOST_MATH_TOKENS = 8192
"""Longest rollout, in tokens, whose attention scores may be held in a GPU's memory."""


class Kernel(StrEnum):
    """Implementation that computes attention."""

    varlen = "varlen"
    """torch's `varlen_attn`, FlashAttention for sequences of any lengths: `attention.py`."""
    flash = "flash"
    cudnn = "cudnn"
    efficient = "efficient"
    tiles = "tiles"
    """Products of matrices, tile by tile: `partial_attention.py`."""
    math = "math"
    """Products of matrices, with all scores in memory."""


BACKENDS = {
    SDPBackend.FLASH_ATTENTION: Kernel.flash,
    SDPBackend.CUDNN_ATTENTION: Kernel.cudnn,
    SDPBackend.EFFICIENT_ATTENTION: Kernel.efficient,
}
"""Kernels by torch's name. Every other backend counts as `math`."""


class SlowAttention(AgenttrainError):
    """On this GPU, attention would hold all of its scores in memory."""


def disable_cudnn_attention() -> None:
    """Take cuDNN out of torch's choice of attention kernels, for the whole process.

    cuDNN builds a plan for every new shape, up to a second each, and the shapes of rollouts hardly
    repeat: every decode step has one more key, every microbatch other lengths. torch prefers it on
    Hopper and Blackwell (https://github.com/modelscope/FunASR/issues/3704 measured the same).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def is_restrictive(device: torch.device) -> bool:
    """Return True if fused kernels of the device refuse some masks, sizes or formats."""
    return device.type != "cpu"


def sdpa_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool
) -> Kernel:
    """Return the kernel that torch chooses for queries [B, h, m, d] over keys [B, k, n, d]."""
    if query.device.type not in ("cpu", "cuda"):  # torch cannot be asked
        return Kernel.math
    choice: int = torch._fused_sdp_choice(
        query, key, value, mask, 0.0, causal, enable_gqa=query.shape[1] != key.shape[1]
    )
    return BACKENDS.get(SDPBackend(choice), Kernel.math)


def in_format(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states in autocast's format, if autocast is on.

    torch itself casts them only after it has chosen a kernel, by the format from before.
    """
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def fit(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """Return (query, key, value, scale) for the same attention in a form that a fused kernel takes.

    Without a `mask` the attention is causal.

    Where torch would choose `math`, keys and values are repeated for the heads of their queries,
    and heads are padded with zeros, which change no score. The attention's output is then as wide
    as the padded values.
    """
    query, key, value = in_format(query, key, value)
    if sdpa_kernel(query, key, value, mask, causal=mask is None) is not Kernel.math:
        return query, key, value, scale
    size = query.shape[-1]
    scale = size**-0.5 if scale is None else scale
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (state.repeat_interleave(groups, dim=1) for state in (key, value))
    if padding := -size % MULTIPLE:
        query, key, value = (pad(state, (0, padding)) for state in (query, key, value))
    return query, key, value, scale


_used: Counter[Kernel] | None = None
"""Calls in the innermost block of `counting_calls`. None outside one."""


def count_call(kernel: Kernel) -> None:
    """Count a call of a kernel inside `counting_calls`."""
    if _used is not None:
        _used[kernel] += 1


class _Counting(TorchFunctionMode):
    """Counts the kernels that torch's attention chooses, in a model's own calls of it too."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch; count the kernel first if it is attention."""
        keywords = keywords or {}
        if function is scaled_dot_product_attention:
            # With the signature of torch's function, so that Python finds the arguments it needs
            # whether they are given by position or by name.
            def chosen_kernel(
                query: Tensor,
                key: Tensor,
                value: Tensor,
                attn_mask: Tensor | None = None,
                dropout_p: float = 0.0,
                is_causal: bool = False,
                **_: Any,
            ) -> Kernel:
                """Return the kernel that torch chooses for these arguments.

                Scale and dropout have no influence: models are in evaluation mode here.
                """
                states = in_format(query, key, value)  # as autocast casts them within the call
                return sdpa_kernel(*states, attn_mask, causal=is_causal)

            count_call(chosen_kernel(*arguments, **keywords))
        return function(*arguments, **keywords)


@contextmanager
def counting_calls() -> Iterator[Counter[Kernel]]:
    """Count the attention calls of the block by kernel."""
    global _used
    outer, _used = _used, Counter()  # `count_call` counts in `_used`
    try:
        with _Counting():
            yield _used
    finally:
        _used = outer


def kernel_names(kernels: Collection[Kernel]) -> str:
    """Return the kernels as one word: ``varlen``, ``efficient,flash``, or ``none``."""
    return ",".join(sorted(kernels)) or "none"


def check_kernels(kernels: Collection[Kernel], device: torch.device, tokens: int) -> None:
    """Raise SlowAttention if the scores of long rollouts would be held in a GPU's memory."""
    if device.type != "cuda" or Kernel.math not in kernels or tokens <= MOST_MATH_TOKENS:
        return
    raise SlowAttention(
        f"training/kernel={kernel_names(kernels)}: on this GPU torch has no fused attention for "
        "what the model asks for (a soft cap of its scores, a format, or a size of its heads), "
        f"and every score of up to {tokens:,} tokens would be held in memory. Set "
        "model.dtype=bfloat16 or training.mixed_precision=bf16; or "
        "training.token_budget and rollout.max_completion_tokens to at most "
        f"{MOST_MATH_TOKENS}; or choose another model."
    )
