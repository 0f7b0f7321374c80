"""Packing: literal layouts, budgets, order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import rollout, with_tool

from agenttrain.training.batch import make_blocks, make_sequences, pack, split
from agenttrain.training.segments import Segment, one_after_the_other
from agenttrain.types import LedgerError, Origin

CPU = torch.device("cpu")


def of_length(length: int, sample: int = 0):
    return make_sequences(
        rollout([(Origin.prompt, [7] * (length - 1)), (Origin.sampled, [8])], sample=sample)
    )[0]


def test_targets_are_the_positions_before_sampled_tokens() -> None:
    sequence = make_sequences(with_tool())[0]
    # ids       7 8 9 10  20 21 2  30 31  40 41 42  30 3   22 2
    # position  0 1 2 3   4  5  6  7  8   9  10 11  12 13  14 15
    assert sequence.targets_S.tolist() == [3, 4, 5, 13, 14]
    assert sequence.token_ids_T[sequence.targets_S + 1].tolist() == [20, 21, 2, 22, 2]
    assert sequence.length == 16
    assert sequence.sampled_length == 5


def test_a_packed_microbatch() -> None:
    short = make_sequences(
        rollout([(Origin.prompt, [5, 6]), (Origin.sampled, [9, 2])], logprob=-0.5)
    )[0]
    long = make_sequences(with_tool(logprob=-0.25))[0]
    (microbatch,) = pack([short, long], 100, CPU)
    # 16 tokens of the longer rollout first, then 5 6 9 2
    assert microbatch.segments == (Segment(0, 16), Segment(16, 4))
    assert microbatch.token_ids_T[16:].tolist() == [5, 6, 9, 2]
    assert microbatch.targets_S.tolist() == [3, 4, 5, 13, 14, 17, 18]
    assert microbatch.labels_S.tolist() == [20, 21, 2, 22, 2, 9, 2]
    assert microbatch.sequence_S.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert microbatch.behaviour_S.tolist() == [-0.25] * 5 + [-0.5] * 2


def test_the_largest_microbatch_comes_first_and_the_budget_holds() -> None:
    sequences = [of_length(length) for length in (5, 60, 45, 50, 120)]
    microbatches = pack(sequences, 100, CPU)
    # longest first: 120 alone (over the budget), 60, then 50 + 45 + 5 = 100, which outweighs 60
    lengths = [
        [sequence.length for sequence in microbatch.sequences] for microbatch in microbatches
    ]
    assert lengths == [[120], [50, 45, 5], [60]]


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=12), budget=st.integers(2, 80))
def test_packing_keeps_every_rollout_whole(lengths: list[int], budget: int) -> None:
    sequences = [of_length(length, sample) for sample, length in enumerate(lengths)]
    microbatches = pack(sequences, budget, CPU)
    packed = [sequence for microbatch in microbatches for sequence in microbatch.sequences]
    assert sorted(sequence.rollout.sample for sequence in packed) == list(range(len(lengths)))
    for microbatch in microbatches:
        tokens = microbatch.token_ids_T.numel()
        assert (
            tokens
            == microbatch.segments[-1].end
            == sum(sequence.length for sequence in microbatch.sequences)
        )
        assert tokens <= budget or len(microbatch.sequences) == 1
        lengths = [sequence.length for sequence in microbatch.sequences]
        assert microbatch.segments == one_after_the_other(lengths)


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_blocks_gather_and_scatter_are_inverse(lengths: list[int]) -> None:
    segments = one_after_the_other(lengths)
    packed = torch.arange(sum(lengths))
    blocks = make_blocks(segments, CPU)
    parts = packed.split([block.tokens for block in blocks])
    pairs = zip(blocks, parts, strict=True)
    back = torch.cat([part[block.gather][block.scatter] for block, part in pairs])
    assert back.tolist() == packed.tolist()
    assert sum(block.segments for block in blocks) == len(lengths)
    for block in blocks:
        assert block.gather.numel() == block.segments * block.length


def test_a_prefix_may_stand_in_the_middle_of_a_block() -> None:
    # p p p of the second block's segment are the last three tokens of the first block
    prefix = Segment(3, 3)
    segments = [Segment(0, 3), prefix, Segment(6, 2, prefix), Segment(8, 1, prefix)]
    first, second, third = make_blocks(segments, CPU)
    assert (first.start, first.tokens, first.segments) == (0, 6, 2)
    for block in (second, third):
        assert block.prefix == ((0, 3, 6),)
    one, two = make_blocks([Segment(0, 8), Segment(8, 7)], CPU)[0], make_blocks(segments, CPU)[0]
    assert (one.padding.tolist(), two.padding.tolist()) == ([15], [])
    assert one.gather.tolist() == [*range(15), 14]
    assert one.scatter.tolist() == [*range(15)]


def test_groups_are_split_whole() -> None:
    assert split("abcde", 2) == ["abc", "de"]
    assert split("ab", 3) == ["a", "b", ""]
    assert split("", 2) == ["", ""]


def test_a_sampled_token_needs_one_before_it() -> None:
    with pytest.raises(LedgerError, match="position 0"):
        make_sequences(rollout([(Origin.sampled, [9, 2])]))[0]
