"""The reference: the frozen model that the KL penalty compares the policy with."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from agenttrain.algorithms.config import AlgorithmConfig
from agenttrain.algorithms.config import Reference as Kind
from agenttrain.training.batch import Microbatch
from agenttrain.training.logprobs import Scorer
from agenttrain.training.lora import BaseScorer, is_adapted
from agenttrain.training.sharding import Sharding, assign
from agenttrain.training.wrapping import shard

SYNCED_ADAPTERS = (
    "algorithm.reference=synced: the reference of a model with adapters is the model without them, "
    "which cannot follow; set algorithm.reference=frozen"
)


class ReferencePolicy(Protocol):
    """Model that scores sequences and is not trained."""

    def ready(self) -> AbstractContextManager[None]:
        """Prepare the model for calls in the block."""

    def __call__(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies of the sampled tokens, [S] each."""

    def copy_layout(self, scorer: Scorer) -> None:
        """Compute as the policy's scorer does, once `choose_layout` has run on that."""

    def follow(self, policy: torch.nn.Module, step: int) -> None:
        """Update the reference after step `step`, if it follows the policy at all."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint; None if there is none."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""


class _Fixed:
    """Reference that never changes; a resumed run makes it again, so it has no state."""

    def follow(self, policy: torch.nn.Module, step: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return None."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


class AdaptersOff(_Fixed, BaseScorer):
    """The policy with its adapters switched off."""

    def copy_layout(self, scorer: Scorer) -> None:
        """Do nothing: the reference is that scorer."""


class FrozenCopy(_Fixed):
    """The policy as it was when the run began."""

    def __init__(self, scorer: Scorer, accelerator: Any, sharding: Sharding | None = None) -> None:
        self._scorer: Scorer = copy.deepcopy(scorer).requires_grad_(False)
        if sharding is None:
            self._scorer = accelerator.prepare_model(self._scorer, evaluation_mode=True)
        else:
            shard(self._scorer, accelerator, sharding)

    def copy_layout(self, scorer: Scorer) -> None:
        """Compute as the policy's scorer does."""
        self._scorer.copy_layout(scorer)

    def ready(self) -> AbstractContextManager[None]:
        """Prepare the model for calls in the block."""
        return self._scorer.ready()

    def __call__(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies of the sampled tokens, [S] each."""
        logprobs_S, entropy_S = self._scorer(microbatch)
        return logprobs_S, entropy_S


class SyncedCopy(FrozenCopy):
    """A copy that is mixed with the policy every N steps.

    TR-DPO, https://arxiv.org/abs/2404.09656: reference = mixup * policy + (1 - mixup) * reference.
    """

    def __init__(
        self,
        scorer: Scorer,
        accelerator: Any,
        sharding: Sharding | None = None,
        *,
        every: int,
        mixup: float,
    ) -> None:
        super().__init__(scorer, accelerator, sharding)
        self._every, self._mixup = every, mixup

    def follow(self, policy: torch.nn.Module, step: int) -> None:
        """Mix after every N-th step."""
        if step % self._every:
            return
        own = dict(self._scorer.model.named_parameters())
        with torch.no_grad():
            for name, weight in policy.named_parameters():
                own[name].lerp_(weight.to(own[name].dtype), self._mixup)

    def state_dict(self) -> dict[str, Any] | None:
        """Return its weights, which no other part of a checkpoint has."""
        return {name: weight.detach() for name, weight in self._scorer.model.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the weights of `state_dict()`."""
        for name, weight in self._scorer.model.named_parameters():
            assign(weight, state[name])


def make_reference(
    scorer: Scorer, accelerator: Any, config: AlgorithmConfig, sharding: Sharding | None = None
) -> ReferencePolicy | None:
    """Return the configured reference; None without a KL penalty.

    Raises ValueError for a synced reference of a model with adapters.
    """
    if config.beta == 0:
        return None
    adapted = is_adapted(scorer.model)
    if config.reference is Kind.synced:
        if adapted:
            raise ValueError(SYNCED_ADAPTERS)
        every, mixup = config.ref_sync_steps, config.ref_mixup
        return SyncedCopy(scorer, accelerator, sharding, every=every, mixup=mixup)
    return AdaptersOff(scorer) if adapted else FrozenCopy(scorer, accelerator, sharding)
