"""The engine gets the policy's weights."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from transformers import PreTrainedModel

from agenttrain.engine.base import Engine
from agenttrain.training.policy import Policy


async def sync(policy: Policy, engine: Engine, version: int, *, shared: bool = True) -> None:
    """Every token that `engine` samples from now on is of weights `version`.

    `shared`: the engine samples from `policy.model` itself, so that nothing needs to be sent and
    the engine only forgets what it cached.
    """
    await engine.update(() if shared else named_weights(policy.model), version)


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight by the name that transformers saves it under, tied ones under each name."""
    for name, tensor in model.state_dict().items():
        yield name, tensor.detach()
