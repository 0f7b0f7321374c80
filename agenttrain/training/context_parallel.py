"""Context parallel: the members of a group compute the packed trees of their sequences together.

Each process keeps its rollouts, their losses and their metrics. The members send each other only
the token ids, and pack them into the same microbatches. Of each microbatch a process computes its
part of the tokens, the head included, and the log-probabilities go to the process that has the
rollout. Two processes with a rollout each, of which the longer one is `a`::

    packed             a a a a a a a a | b b b b
    computed by        0 0 0 1 1 1 1 1   1 0 0 0
    loss, metrics of   rank 0            rank 1

Shapes: T tokens of a microbatch, t of them this process's; S sampled tokens, s of them this
process's to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agenttrain.training.batch import (
    Microbatch,
    SequenceRoutes,
    TrainingSequence,
    stand_in,
)
from agenttrain.training.context_group import ContextGroup
from agenttrain.training.context_share import ContextShare
from agenttrain.training.context_tree import fill, split_tree
from agenttrain.training.selection import make_repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """The part of a sequence that the other members of a group need for its forward pass.

    The members of a group are the processes that compute microbatches together (context parallel).
    Each packs all sequences of the group, but has the loss of its own ones only.
    """

    token_ids_T: Tensor
    targets_S: Tensor
    routes: SequenceRoutes | None

    def as_sequence(self) -> TrainingSequence:
        """Return a sequence with these tokens, whose loss another member computes.

        It is packed like this process's own, and `_own_share` then drops what belongs to its loss.
        So the fields for the loss only have to be there: `stand_in()` gives the rollout, and
        `behaviour_S`, the engine's logprobs, are S zeros, one for each target.
        """
        return replace(
            stand_in(),
            token_ids_T=self.token_ids_T,
            targets_S=self.targets_S,
            routes=self.routes,
            behaviour_S=torch.zeros(len(self.targets_S)),
            ref_logprobs_S=None,
        )


Pack = Callable[[Sequence[TrainingSequence], int, torch.device], list[Microbatch]]
"""`Scorer.pack`: packs sequences into microbatches of at most that many tokens."""


def pack_together(
    pack: Pack,
    sequences: Sequence[TrainingSequence],
    token_budget: int,
    device: torch.device,
    group: ContextGroup,
) -> list[Microbatch]:
    """Return this process's parts of the microbatches of all sequences of its group.

    The members send each other their sequences, and all pack the same microbatches. Every member
    computes a part of the tokens of each, about `token_budget` at most, so that a microbatch may
    have `token_budget` tokens for each member. It gets the loss of its own sequences only. Empty if
    no member has a sequence.
    """
    tokens = [
        _Tokens(token_ids_T=s.token_ids_T, targets_S=s.targets_S, routes=s.routes)
        for s in sequences
    ]
    members = group.gather((token_budget, tokens))
    # In the same order in every process, so that all pack the same microbatches.
    all_sequences: list[TrainingSequence] = []
    for rank, (_, member_tokens) in enumerate(members):
        if rank == group.rank:
            all_sequences += sequences
        else:
            all_sequences += [received.as_sequence() for received in member_tokens]
    if not all_sequences:
        return []
    # Budgets differ if sequences are scored one by one, after gradients that were not finite: the
    # budget is then the length of the member's sequence.
    budget = max(budget for budget, _ in members) * group.size
    # Objects, not equal values: the others' sequences were made anew in `as_sequence`.
    own_ids = {id(sequence) for sequence in sequences}
    packed = pack(all_sequences, budget, device)
    return [_own_share(microbatch, own_ids, group) for microbatch in packed]


def _own_share(microbatch: Microbatch, own_ids: set[int], group: ContextGroup) -> Microbatch:
    """Return this process's part of a microbatch of its group.

    The part joins two selections of the group's microbatch:

    - the forward pass: the t tokens that this process computes, of any member's sequences, and
      their routes. Of them s are followed by a sampled token, whose logprob it computes.
    - the loss: the sampled tokens of this process's sequences, whose Python ids are `own_ids`.
      Other members compute some of their logprobs, which `ContextShare` brings here.

    Suffixes say what a tensor has an entry for: T packed tokens of the group, S sampled tokens of
    the group, B its sequences; t and s those that this process computes. The `own_…` are those of
    its sequences. In the result S and B stand for its sequences alone.
    """
    device = microbatch.token_ids_T.device
    microbatch = _fill(microbatch, group.size)
    split = split_tree(microbatch.segments, group)
    positions_t = split.tree.packed_positions()
    # Index of each token among those that this process computes. -1: another one computes it.
    index_T = torch.full((len(microbatch.token_ids_T),), -1)
    index_T[positions_t] = torch.arange(len(positions_t))
    packed_targets_S = microbatch.targets_S.cpu()
    targets_S = index_T[packed_targets_S]  # index among the t tokens, or -1
    # Indices among the group's sampled tokens: of those that this process computes (`places_s`),
    # and of those of its sequences (`own_places`).
    places_s = (targets_S >= 0).nonzero()[:, 0]
    is_own_B = torch.tensor([id(sequence) in own_ids for sequence in microbatch.sequences])
    sequence_S = microbatch.sequence_S.cpu()
    own_places = is_own_B[sequence_S].nonzero()[:, 0]
    share = ContextShare(
        split=split,
        targets=make_repeats(targets_S[places_s], device),
        labels_s=microbatch.labels_S[places_s.to(device)],
        places_s=places_s.to(device),
        own_places=own_places.to(device),
        sampled=len(targets_S),
    )
    own_targets = make_repeats(packed_targets_S[own_places], device)
    own_places, positions_t = own_places.to(device), positions_t.to(device)
    sequences = tuple(sequence for sequence in microbatch.sequences if id(sequence) in own_ids)
    ref_logprobs_S = microbatch.ref_logprobs_S  # only this process's own sequences have any
    weights_B = microbatch.weights_B[is_own_B.to(device)]
    if not sequences:
        # All in this microbatch are of other members. A loss needs a sequence: one without a token.
        sequences, weights_B = (stand_in(),), microbatch.weights_B.new_zeros(1)
        ref_logprobs_S = microbatch.behaviour_S.new_zeros(0)
    # Index of each sequence of this process among `sequences`; the others' values are not used.
    own_index_B = (is_own_B.cumsum(0) - 1).to(device)
    routes_TLK = microbatch.routes_TLK
    return replace(
        microbatch,
        sequences=sequences,
        token_ids_T=microbatch.token_ids_T[positions_t],
        targets=own_targets,
        labels_S=microbatch.labels_S[own_places],
        behaviour_S=microbatch.behaviour_S[own_places],
        sequence_S=own_index_B[microbatch.sequence_S[own_places]],
        advantages_S=microbatch.advantages_S[own_places],
        weights_B=weights_B,
        ref_logprobs_S=ref_logprobs_S,
        routes_TLK=None if routes_TLK is None else routes_TLK[positions_t],
        context=share,
    )


def _fill(microbatch: Microbatch, processes: int) -> Microbatch:
    """Return a microbatch of at least two tokens for each process, as each computes two chunks.

    Tokens that are missing are added as a sequence of their own, without a loss.
    """
    segments = fill(microbatch.segments, processes)
    ids_T, routes_TLK = microbatch.token_ids_T, microbatch.routes_TLK
    missing = segments[-1].end - len(ids_T)
    if not missing:
        return microbatch
    if routes_TLK is not None:
        # -1: routers choose the experts of the added tokens.
        added = routes_TLK.new_full((missing, *routes_TLK.shape[1:]), -1)
        routes_TLK = torch.cat((routes_TLK, added))
    return replace(
        microbatch,
        token_ids_T=torch.cat((ids_T, ids_T.new_zeros(missing))),
        segments=segments,
        routes_TLK=routes_TLK,
    )
