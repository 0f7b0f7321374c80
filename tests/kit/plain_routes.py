"""The experts that a model chooses by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from agenttrain.engines.routers import find_routers, intercepting


def plain_routes(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """[T, L, K] The experts that a plain forward pass chooses; zeros in layers without experts."""
    routers = find_routers(model)
    experts_TLK = torch.zeros((len(ids), routers.layers, routers.top_k), dtype=torch.long)

    def record(router, experts) -> None:
        experts_TLK[:, router.layer] = experts.reshape(len(ids), -1)

    with torch.no_grad(), intercepting(model, routers.routers, record):
        model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return experts_TLK
