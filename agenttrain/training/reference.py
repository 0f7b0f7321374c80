"""The reference: the frozen model that the KL penalty compares the policy with."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from agenttrain.algorithms.config import AlgorithmConfig
from agenttrain.training.batch import Microbatch
from agenttrain.training.logprobs import Scorer
from agenttrain.training.lora import adapter_parameters, changes_nothing, is_adapted
from agenttrain.training.sharding import Sharding, assign, give_storage, local_part
from agenttrain.training.wrapping import shard
from agenttrain.types import ConfigError

SYNCED_ADAPTERS = (
    "algorithm.kl.reference.sync_steps: the reference of a model with adapters is the model as the "
    "run began, and two sets of adapters cannot be mixed; leave it out"
)


@dataclass(slots=True, eq=False)
class ReferencePolicy:
    """Scorer of a frozen model. It needs no checkpoint: a resumed run makes an equal one again.

    In a step the policy calls it inside `ready`, and `follow` at the end.
    """

    scorer: Scorer

    def ready(self) -> AbstractContextManager[None]:
        """Prepare the model for calls in the block."""
        return self.scorer.ready()

    def __call__(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies of the sampled tokens, [S] each.

        The reference's routers choose their experts themselves.
        """
        logprobs_S, entropy_S = self.scorer(replace(microbatch, routes_TLK=None))
        return logprobs_S, entropy_S

    def follow(self, policy: torch.nn.Module, step: int) -> None:
        """Update the reference after step `step`, if it follows the policy at all."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint. None: there is none."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""


class AdaptersOff(ReferencePolicy):
    """The policy without its adapters, which is the policy at its start."""

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Switch the adapters off for the block, so that calls score with the untrained model."""
        model: Any = self.scorer.model
        # peft changes which weights have a gradient when it switches adapters off and on.
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model.disable_adapters()
        try:
            with self.scorer.ready():
                yield
        finally:
            model.enable_adapters()
            for parameter in trainable:
                parameter.requires_grad_(True)


@dataclass(slots=True, eq=False)
class LoadedAdapters(ReferencePolicy):
    """The policy with the adapters that it was loaded with. `scorer` is the policy's own."""

    loaded: dict[str, Tensor]
    """Name -> copy of the adapter's weight, in host memory and not sharded."""

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Put the loaded adapters into the model for the block."""
        adapters = adapter_parameters(self.scorer.model)
        # Clones, because `assign` writes into the weights themselves.
        current = {name: weight.detach().clone() for name, weight in adapters.items()}
        try:
            for name, weight in adapters.items():
                assign(weight, self.loaded[name])
            with self.scorer.ready():
                yield
        finally:
            for name, weight in adapters.items():
                assign(weight, current[name])


@dataclass(slots=True, eq=False)
class SyncedCopy(ReferencePolicy):
    """Copy of the policy that follows it (https://arxiv.org/abs/2404.09656).

    Every `every` steps: reference = mixup * policy + (1 - mixup) * reference.
    """

    every: int
    """Steps from one mix to the next."""
    mixup: float

    def follow(self, policy: torch.nn.Module, step: int) -> None:
        """Mix the policy's weights in after every `every`-th step."""
        if step % self.every:
            return
        reference = dict(self.scorer.model.named_parameters())
        with torch.no_grad():
            for name, weight in policy.named_parameters():
                reference[name].lerp_(weight.to(reference[name].dtype), self.mixup)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the mixed weights, which no other part of a checkpoint has."""
        return {name: weight.detach() for name, weight in self.scorer.model.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the weights of `state_dict()`."""
        for name, weight in self.scorer.model.named_parameters():
            assign(weight, state[name])


def copy_weights(reference: ReferencePolicy, policy: Scorer) -> None:
    """Give a reference on the meta device the weights of the policy, part by part."""
    scorer = reference.scorer
    if scorer is policy:  # adapters are switched off or exchanged, and there is no copy
        return
    device = next(local_part(weight).device for weight in policy.parameters())
    give_storage(scorer, device)
    with torch.no_grad():
        for target, weight in zip(scorer.parameters(), policy.parameters(), strict=True):
            local_part(target).copy_(local_part(weight))


def make_reference(
    scorer: Scorer, accelerator: Any, config: AlgorithmConfig, sharding: Sharding | None = None
) -> ReferencePolicy | None:
    """Return the configured reference: the policy as it is now. None without a KL penalty.

    Without adapters the reference is a copy of the policy. If the policy is still on the meta
    device, `copy_weights` fills the copy later. With adapters both share the base weights: new
    adapters are switched off for the reference, and those of an earlier training are copied. Raises
    ConfigError for a synced reference of a model with adapters.
    """
    if config.kl is None:
        return None
    synced = config.kl.reference
    if is_adapted(scorer.model):
        if synced is not None:
            raise ConfigError(SYNCED_ADAPTERS)
        if changes_nothing(scorer.model):  # the adapters are new
            return AdaptersOff(scorer)
        adapters = adapter_parameters(scorer.model)
        loaded = {name: weight.detach().cpu().clone() for name, weight in adapters.items()}
        return LoadedAdapters(scorer, loaded=loaded)
    frozen_scorer: Scorer = copy.deepcopy(scorer).requires_grad_(False)
    if sharding is None:
        # evaluation_mode: in the precision of training, but not in DDP.
        frozen_scorer = accelerator.prepare_model(frozen_scorer, evaluation_mode=True)
    else:
        shard(frozen_scorer, accelerator, sharding)
    if synced is not None:
        return SyncedCopy(frozen_scorer, every=synced.sync_steps, mixup=synced.mixup)
    return ReferencePolicy(frozen_scorer)
