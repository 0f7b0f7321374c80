"""A process's part of a forward pass of several, and the way of its results to their owners.

S sampled tokens of a microbatch, s of them this process's to compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agenttrain.training.context_tree import Split
from agenttrain.training.selection import Repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextShare:
    """A process's part of the forward pass over a microbatch of its group.

    The group computes a microbatch of all members' rollouts together, each member a part of the
    tokens. So a process computes logprobs of other processes' rollouts, and needs those of its own
    rollouts from the others: `exchange` sends each to the process with the rollout.

    The microbatch has S sampled tokens. Of these this process computes s, at indices `places_s`,
    and its own rollouts have those at indices `own_places`.
    """

    split: Split
    """The packed tree, with the processes that compute it together."""
    targets: Repeats
    """Indices, among all tokens that this process computes, of the s whose next token was
    sampled."""
    labels_s: Tensor
    """Ids of these sampled tokens."""
    places_s: Tensor
    """Indices of these sampled tokens among the group's S."""
    own_places: Tensor
    """Indices, among the group's S, of the sampled tokens of this process's rollouts."""
    sampled: int
    """S."""

    def exchange(self, logprobs_s: Tensor, entropy_s: Tensor) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies of this process's rollouts, from those it has computed.

        All members of the group call it together.
        """
        logprobs, entropy = _ToOwners.apply(torch.stack((logprobs_s, entropy_s)), self)
        # Stacked with the logprobs, entropies get a gradient even where the caller wants none.
        return logprobs, entropy if entropy_s.requires_grad else entropy.detach()


class _ToOwners(torch.autograd.Function):
    """Send values of tokens from the processes that computed them to those with the rollouts.

    `values_2s` are the logprobs and entropies of the s sampled tokens that this process computed.
    Among the S sampled tokens of the group (`sampled`), `places_s` are the indices of these tokens,
    and `own_places` those of the tokens of this process's rollouts.
    """

    @staticmethod
    def forward(ctx: Any, values_2s: Tensor, share: ContextShare) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies of the tokens of this process's rollouts.

        `values_2s` has logprobs (row 0) and entropies (row 1) of the s sampled tokens that this
        process computed, of any member's rollouts. S are all sampled tokens of the group, of which
        `share.own_places` are those of this process's rollouts, whoever computed them.
        """
        ctx.share = share
        # Each token is computed by one process and is 0 in the others, so the sum is its value.
        values_2S = values_2s.new_zeros(2, share.sampled)
        values_2S[:, share.places_s] = values_2s
        logprobs_S, entropy_S = share.split.group.add(values_2S)  # an all-reduce
        places = share.own_places
        return logprobs_S.index_select(0, places), entropy_S.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of `values_2s`, [2, s], from the processes with the tokens' rollouts.

        The way back of `forward`. `gradients` are those of its two results, the logprobs and
        entropies of this process's rollouts, which any member may have computed. They go to the
        members that did, and this process gets those of the s tokens that it computed
        (`places_s`). S: all sampled tokens of the group. 2: logprobs and entropies.
        """
        share: ContextShare = ctx.share
        gradient_2S = gradients[0].new_zeros(2, share.sampled)
        # A token's gradient comes from the process with its rollout alone.
        gradient_2S[:, share.own_places] = torch.stack(gradients)
        return share.split.group.add(gradient_2S).index_select(1, share.places_s), None
