"""Last hidden states of packed rollouts, in one forward pass or in one per rollout.

Shapes: T tokens of all rollouts, H hidden; rollout b is tokens bounds[b] … bounds[b + 1] - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agenttrain.training.attention import UnsupportedAttention, make_blocks, packing


def packed_hidden(model: PreTrainedModel, token_ids_T: Tensor, bounds: Sequence[int]) -> Tensor:
    """[T, H] of one forward pass, within `packing(model)`; positions count from 0 per rollout."""
    lengths = [end - start for start, end in pairwise(bounds)]
    position_ids_T = torch.cat([torch.arange(length) for length in lengths])
    output = model.base_model(
        input_ids=token_ids_T[None],
        position_ids=position_ids_T[None].to(token_ids_T.device),
        blocks=make_blocks(bounds, token_ids_T.device),
        use_cache=False,
    )
    return output.last_hidden_state[0]


def separate_hidden(model: PreTrainedModel, token_ids_T: Tensor, bounds: Sequence[int]) -> Tensor:
    """[T, H] of one forward pass per rollout, with the model's own attention."""
    pieces = [_hidden(model, token_ids_T[start:end]) for start, end in pairwise(bounds)]
    return torch.cat(pieces)


def _hidden(model: PreTrainedModel, token_ids_T: Tensor) -> Tensor:
    return model.base_model(input_ids=token_ids_T[None], use_cache=False).last_hidden_state[0]


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Why packing would change the model's results, found by trying; None if it does not.

    Layers that keep a state along the sequence (linear attention, SSM) carry it from one rollout
    into the next, and attention may ask for what `packed_attention` refuses.
    """
    bounds = (0, 9, 14)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    token_ids_T = torch.arange(bounds[-1], device=model.device) * 7 % vocabulary
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            separate_TH = separate_hidden(model, token_ids_T, bounds)
            with packing(model):
                packed_TH = packed_hidden(model, token_ids_T, bounds)
    except UnsupportedAttention as error:
        return str(error)
    except TypeError as error:
        return f"its forward pass does not take packed input ({error})"
    finally:
        model.train(training)
    return _difference(packed_TH.float(), separate_TH.float(), model.dtype)


def _difference(packed_TH: Tensor, separate_TH: Tensor, dtype: torch.dtype) -> str | None:
    gap = (packed_TH - separate_TH).abs().max().item() / separate_TH.abs().max().item()
    allowed = 1e-4 if dtype is torch.float32 else 5e-2
    if gap <= allowed:
        return None
    return f"packed, its hidden states differ by {gap:.2g} (relative; at most {allowed:g})"
