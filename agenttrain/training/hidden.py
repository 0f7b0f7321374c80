"""Last hidden states of packed rollouts, in one forward pass or in one per rollout.

Shapes: T tokens of all rollouts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agenttrain.training.attention import UnsupportedAttention, packing
from agenttrain.training.layout import Segment, make_blocks, positions
from agenttrain.training.varlen import make_varlen

Inside = Callable[[Callable[[PreTrainedModel], Any]], Any]
"""Caller of a function of the model, with the model's weights gathered."""


def backbone(model: PreTrainedModel) -> torch.nn.Module:
    """The model without its head, which some (Llama4) do not have where `base_model` looks."""
    return model.model if model.base_model is model else model.base_model


def packed_hidden(
    model: PreTrainedModel,
    token_ids_T: Tensor,
    segments: Sequence[Segment],
    *,
    varlen: bool = False,
) -> Tensor:
    """Run one forward pass within `packing(model)`, [T, H]; positions count from 0 per rollout.

    `varlen`: by the kernel for sequences of any length, which the device has to have.
    """
    device = token_ids_T.device
    keywords = {"varlen": make_varlen(segments, device)} if varlen else {}
    output = backbone(model)(
        input_ids=token_ids_T[None],
        position_ids=positions(segments)[None].to(device),
        blocks=make_blocks(segments, device),
        use_cache=False,
        **keywords,
    )
    return output.last_hidden_state[0]


def separate_hidden(
    model: PreTrainedModel, token_ids_T: Tensor, segments: Sequence[Segment]
) -> Tensor:
    """Run one forward pass per segment after its prefix, [T, H], with the model's own attention."""
    pieces = []
    for segment in segments:
        prefix_T = token_ids_T[segment.prefix : segment.prefix + segment.prefix_length]
        own_T = token_ids_T[segment.start : segment.end]
        output = backbone(model)(input_ids=torch.cat((prefix_T, own_T))[None], use_cache=False)
        pieces.append(output.last_hidden_state[0, segment.prefix_length :])
    return torch.cat(pieces)


TRIAL = (Segment(0, 9), Segment(9, 6), Segment(15, 5, 9, 6), Segment(20, 3, 9, 6))
"""A rollout alone, and two that share the six tokens of their prompt."""


def trial_ids(model: PreTrainedModel, device: torch.device) -> Tensor:
    """Tokens of the trial, [T]."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return torch.arange(TRIAL[-1].end, device=device) * 7 % vocabulary


def why_not_packed(
    model: PreTrainedModel,
    *,
    varlen: bool = False,
    device: torch.device | None = None,
    inside: Inside | None = None,
) -> str | None:
    """Try packing and return the reason why it would change the model's results, if it does.

    Layers that keep a state along the sequence (linear attention, SSM) carry it from one rollout
    into the next, and attention may ask for what `packed_attention` refuses. `varlen`: as
    `packed_hidden`, whose kernel may also fail on this device. `device` is where the model computes
    (None: where its weights are), and `inside` runs a function of it where its weights are whole.
    """
    device = device or model.device
    inside = inside or (lambda function: function(model))
    # The kernel is for 16 bits: weights in float32 reach it under autocast only.
    cast = varlen and model.dtype is torch.float32
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=cast)
    token_ids_T = trial_ids(model, device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), autocast:
            separate_TH = inside(lambda model: separate_hidden(model, token_ids_T, TRIAL))
            with packing(model):
                packed_TH = inside(
                    lambda model: packed_hidden(model, token_ids_T, TRIAL, varlen=varlen)
                )
                mixed = any(
                    # One pass each: a backward pass ends what FSDP2 keeps gathered for it.
                    inside(partial(_mixes, token_ids_T, varlen=varlen, after=after, other=other))
                    for after, other in ((TRIAL[0].end, TRIAL[0]), (TRIAL[3].start, TRIAL[2]))
                )
    except UnsupportedAttention as error:
        return str(error)
    except TypeError as error:
        return f"its forward pass does not take packed input ({error})"
    except RuntimeError as error:
        if not varlen:
            raise
        return f"the kernel for sequences of any length fails ({error})"
    finally:
        model.train(training)
    exact = packed_TH.dtype in (torch.float32, torch.float64) and not cast
    allowed = 1e-4 if exact else 5e-2
    packed_TH, separate_TH = packed_TH.float(), separate_TH.float()
    gap = (packed_TH - separate_TH).abs().max().item() / separate_TH.abs().max().item()
    # Not `>`: a gap that is not a number is a difference too.
    if not gap <= allowed:
        return f"packed, its hidden states differ by {gap:.2g} (relative; at most {allowed:g})"
    return "packed, a rollout's hidden states depend on its neighbours" if mixed else None


@torch.enable_grad()
def _mixes(
    token_ids_T: Tensor, model: PreTrainedModel, *, varlen: bool, after: int, other: Segment
) -> bool:
    """Return whether hidden states from position `after` on have a gradient from `other`, a segment
    of another rollout.

    What a short convolution or a state carries over may be less than bfloat16 rounds, which a
    comparison of hidden states has to allow; a gradient is exactly zero or there is a way.
    """
    embedded: list[Tensor] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _, __, output: embedded.append(output.requires_grad_())
    )
    try:
        hidden_TH = packed_hidden(model, token_ids_T, TRIAL, varlen=varlen)
    finally:
        hook.remove()
    weights_H = torch.linspace(-1, 1, hidden_TH.shape[1], device=hidden_TH.device)
    loss = (hidden_TH[after:] * weights_H).sum()
    (slope,) = torch.autograd.grad(loss, embedded[0], allow_unused=True)
    return slope is not None and bool(slope[0, other.start : other.end].any())
