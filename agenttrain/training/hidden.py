"""Last hidden states of packed rollouts, in one forward pass or in one per rollout.

Shapes: T tokens of all rollouts, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agenttrain.training.attention import UnsupportedAttention, packing
from agenttrain.training.layout import Segment, make_blocks, positions
from agenttrain.training.varlen import make_varlen


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
    """[T, H] of one forward pass, within `packing(model)`; positions count from 0 per rollout.

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
    """[T, H] of one forward pass per segment after its prefix, with the model's own attention."""
    pieces = []
    for segment in segments:
        prefix_T = token_ids_T[segment.prefix : segment.prefix + segment.prefix_length]
        own_T = token_ids_T[segment.start : segment.end]
        output = backbone(model)(input_ids=torch.cat((prefix_T, own_T))[None], use_cache=False)
        pieces.append(output.last_hidden_state[0, segment.prefix_length :])
    return torch.cat(pieces)


TRIAL = (Segment(0, 9), Segment(9, 6), Segment(15, 5, 9, 6), Segment(20, 3, 9, 6))
"""A rollout alone, and two that share the six tokens of their prompt."""


def why_not_packed(model: PreTrainedModel, *, varlen: bool = False) -> str | None:
    """Why packing would change the model's results, found by trying; None if it does not.

    Layers that keep a state along the sequence (linear attention, SSM) carry it from one rollout
    into the next, and attention may ask for what `packed_attention` refuses. `varlen`: as
    `packed_hidden`, whose kernel may also fail on this device.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    # The kernel is for 16 bits: weights in float32 reach it under autocast only.
    cast = varlen and model.dtype is torch.float32
    autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=cast)
    token_ids_T = torch.arange(TRIAL[-1].end, device=model.device) * 7 % vocabulary
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), autocast:
            separate_TH = separate_hidden(model, token_ids_T, TRIAL)
            with packing(model):
                packed_TH = packed_hidden(model, token_ids_T, TRIAL, varlen=varlen)
                mixed = _mixes(model, token_ids_T, varlen=varlen)
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
    exact = model.dtype in (torch.float32, torch.float64) and not cast
    gap = _difference(packed_TH.float(), separate_TH.float(), 1e-4 if exact else 5e-2)
    return gap or ("packed, a rollout's hidden states depend on its neighbours" if mixed else None)


@torch.enable_grad()
def _mixes(model: PreTrainedModel, token_ids_T: Tensor, *, varlen: bool) -> bool:
    """Whether one rollout of the trial has a gradient from another's tokens.

    What a short convolution or a state carries over may be less than bfloat16 rounds, which
    `_difference` has to allow; a gradient is exactly zero or there is a way.
    """
    embedded: list[Tensor] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _, __, output: embedded.append(output.requires_grad_())
    )
    try:
        hidden_TH = packed_hidden(model, token_ids_T, TRIAL, varlen=varlen)
    finally:
        hook.remove()
    alone, _, first, second = TRIAL
    weights_H = torch.linspace(-1, 1, hidden_TH.shape[1], device=hidden_TH.device)
    for own_TH, other in ((hidden_TH[alone.end :], alone), (hidden_TH[second.start :], first)):
        loss = (own_TH * weights_H).sum()
        (slope,) = torch.autograd.grad(loss, embedded[0], retain_graph=True, allow_unused=True)
        if slope is not None and slope[0, other.start : other.end].any():
            return True
    return False


def _difference(packed_TH: Tensor, separate_TH: Tensor, allowed: float) -> str | None:
    gap = (packed_TH - separate_TH).abs().max().item() / separate_TH.abs().max().item()
    if gap <= allowed:
        return None
    return f"packed, its hidden states differ by {gap:.2g} (relative; at most {allowed:g})"
