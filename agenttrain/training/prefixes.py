"""Prefix trees: tokens at the start of several sequences of a step are computed once.

Sequences that begin with the same tokens have the same hidden states there. The system prompt of a
run is the same in all of its rollouts, the prompt of a task in the rollouts of its group, and a
conversation that branches has a history in common. Three sequences, of which the first two share
``a b c`` and all share ``a``::

    a b c d          a ─┬─ b c ─┬─ d
    a b c e f           │       └─ e f
    a g                 └─ g

A branch that is too short is not worth an attention call of its own: its tokens are then repeated
in the branches that follow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

from agenttrain.utils.arrays import common_prefix

CALL_FLOPS = 18e6
"""Cost of one more attention call per layer, forward and backward, as the arithmetic that a CPU
core could do in that time. Measured at hidden size 128 with groups of 6 and 90 tokens after the
prompt: sharing a prompt of 10 / 20 / 40 tokens takes 1.08 / 0.92 / 0.83 times as long as not."""
TOKEN_FLOPS = 72
"""Operations of a token in a layer per squared hidden size: 12 H^2 weights, for each 2 operations
forward and 4 backward."""


def least_prefix(hidden_size: int) -> int:
    """Return the length of the shortest branch that is worth computing once.

    In every layer, a sequence that shares a prefix saves the prefix's tokens and costs one more
    attention call. Example: 4 tokens at hidden size 256, 62 at 64.
    """
    return 1 + int(CALL_FLOPS / (TOKEN_FLOPS * hidden_size**2))


DEEPEST = 100
"""Levels of a tree. Sequences that would branch deeper are repeated from there on: the functions
over trees are recursive."""
KEYS_PER_TOKEN = 16
"""Keys that count as much as a token in the budget: attention repeats the keys and values of a
prefix for every branch after it. They are 1/30 (grouped queries) to 1/10 of what a token keeps for
the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Neighbouring tokens that are computed once, for all sequences that end here or below."""

    start: int
    """Position of the first token in each of these sequences."""
    end: int
    """Position after the last token."""
    ending: tuple[int, ...] = ()
    """Indices of the sequences that end with this branch."""
    children: tuple[Branch, ...] = ()
    """Branches that follow this one, those of the longest sequences first."""

    @property
    def tokens(self) -> int:
        """Number of tokens of this branch and those below it, as the budget counts them."""
        # Attention repeats the keys of the tokens up to `end` for this branch. They may cost more
        # than its own tokens.
        cost = max(self.end - self.start, self.end // KEYS_PER_TOKEN)
        return cost + sum(child.tokens for child in self.children)

    @property
    def longest(self) -> int:
        """Length of the longest sequence."""
        return max((child.longest for child in self.children), default=self.end)

    @property
    def first(self) -> int:
        """Index of a sequence that contains this branch."""
        return self.ending[0] if self.ending else self.children[0].first


def grow(ids: Sequence[Tensor], least: int | None) -> list[Branch]:
    """Return the prefix trees of sequences with these token ids, those with the longest first.

    A branch of fewer than `least` tokens is not shared: its tokens are repeated in the branches
    below it. With `least` None no branch is shared. Neither is any below DEEPEST levels, because
    the recursion has to end. Sequences of equal length keep their order.

    Example: ``a b c d``, ``a b c e f`` and ``a g`` are one tree if `least` is 1::

        a ─┬─ b c ─┬─ d
           │       └─ e f
           └─ g
    """
    if least is None:
        roots = (Branch(start=0, end=len(ids_T), ending=(i,)) for i, ids_T in enumerate(ids))
        return sorted(roots, key=lambda branch: -branch.end)
    # Sorted by their bytes, sequences with a common prefix are neighbours.
    arrays = [ids_T.numpy() for ids_T in ids]
    order = sorted(range(len(ids)), key=lambda index: arrays[index].tobytes())
    # Tokens that each sequence has in common with the one before it in this order.
    common = [0, *(common_prefix(arrays[a], arrays[b]) for a, b in pairwise(order))]

    def branches(places: range, start: int, depth: int = 0) -> Iterator[Branch]:
        """Yield the branches of the sequences at these `places` of the sorted order.

        Their first `start` tokens are equal and belong to branches above. ``common[p]`` is the
        number of first tokens that the sequences at places p - 1 and p have in common. A branch of
        fewer than `least` tokens is not shared.

        Example: ``a b c d``, ``a b c e f`` and ``a g`` are in sorted order, and `common` is 0 3 1.
        Places 0 1 2 share ``a``. After it they have two parts, 0 1 with ``b c`` in common, and 2.
        """
        if len(places) == 1 or depth == DEEPEST:  # one sequence, or nothing is shared from here on
            for index in (order[place] for place in places):
                yield Branch(start=start, end=len(ids[index]), ending=(index,))
            return
        # Tokens that all have in common. Places whose sequence shares no more than these with the
        # one before begin a new part.
        shared = min(common[place] for place in places[1:])
        part_starts = [places.start, *(p for p in places[1:] if common[p] == shared)]
        parts = [range(a, b) for a, b in pairwise([*part_starts, places.stop])]
        if shared < start + least:  # too short to share: repeated in the branches below
            for part in parts:
                yield from branches(part, start, depth + 1)
            return
        # Sequences of just these tokens end with this branch. Such a sequence has no more tokens
        # in common with its neighbours, so it is a part by itself, and nothing is left of it below.
        ending = [place for place in places if len(ids[order[place]]) == shared]
        longer_parts = [part for part in parts if part.start not in ending]
        children = (b for part in longer_parts for b in branches(part, shared, depth + 1))
        yield Branch(
            start=start,
            end=shared,
            ending=tuple(sorted(order[place] for place in ending)),
            children=tuple(_by_length(children)),
        )

    return _by_length(branches(range(len(ids)), 0)) if ids else []


def _by_length(branches: Iterable[Branch]) -> list[Branch]:
    """Sort branches by their longest sequence, the longest first."""
    return sorted(branches, key=lambda branch: (-branch.longest, branch.first))


def cut(branches: Iterable[Branch], budget: int, above: int = 0) -> list[tuple[Branch, ...]]:
    """Divide siblings into runs of at most `budget` tokens, including `above` tokens before them.

    `pack` makes a microbatch of each run.

    A branch that is too long is divided among several runs, each of which repeats the branch's own
    tokens. A sequence over the budget is a run by itself. Branches of similar length are in one
    run.

    Example: a branch of 2 tokens with children of 3, 3 and 2 has 10 tokens. With a budget of 8 it
    becomes two runs: the branch with children of 3 and 3, and one branch of 2 + 2 tokens.

    First each branch that is too long becomes several that fit, with some of its children each:
    the children are divided by this function, with the branch's own tokens `above` them. Then the
    fitting branches fill one run after the other.
    """
    fitting: list[Branch] = []
    for branch in branches:
        if above + branch.tokens <= budget or not branch.children:
            fitting.append(branch)
            continue
        # Sequences that end with the branch are to be in one run only: the first.
        ending = branch.ending
        for run in cut(branch.children, budget, above + branch.end - branch.start):
            if len(run) == 1 and not ending:
                # Of this run only one child has the branch before it. Nothing is shared there, so
                # that both become one branch, which begins where the parent does.
                fitting.append(replace(run[0], start=branch.start))
            else:
                fitting.append(replace(branch, ending=ending, children=run))
            ending = ()
    runs: list[list[Branch]] = [[]]
    tokens = above
    for branch in _by_length(fitting):
        # An empty run takes any branch, also one over the budget.
        if runs[-1] and tokens + branch.tokens > budget:
            runs.append([])
            tokens = above
        runs[-1].append(branch)
        tokens += branch.tokens
    return [tuple(run) for run in runs]
