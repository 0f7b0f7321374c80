"""Common prefixes: which sequences share them, their layout, and that nothing else changes."""

from __future__ import annotations

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_families import tiny_family
from training_cases import rollout
from transformers import LlamaConfig, LlamaForCausalLM

from agenttrain.training.batch import Microbatch, make_sequences, pack
from agenttrain.training.config import SharePrefix
from agenttrain.training.logprobs import Scorer
from agenttrain.training.prefixes import Branch, grow, least_prefix
from agenttrain.training.segments import Segment, positions
from agenttrain.types import Completion, Finish, Origin, Rollout, Trajectory

CPU = torch.device("cpu")


def answer(prompt: list[int], own: list[int], *, group: str = "g0", sample: int = 0) -> Rollout:
    return rollout([(Origin.prompt, prompt), (Origin.sampled, own)], group=group, sample=sample)


def test_the_layout_of_a_shared_prompt() -> None:
    rollouts = [
        answer([7, 8, 9], [20, 2], sample=0),
        answer([7, 8, 9], [30, 31, 2], sample=1),
        answer([5, 6], [40, 41, 42, 2], group="g1"),
    ]
    (microbatch,) = pack([make_sequences(one)[0] for one in rollouts], 100, CPU, least=1)
    # starts, the longest first:  g1-0 | the prompt of g0;  then what follows: g0-1 | g0-0
    # ids        5 6 40 41 42  2 | 7 8 9 | 30 31  2 | 20  2
    # position   0 1  2  3  4  5 | 0 1 2 |  3  4  5 |  3  4
    # packed at  0 1  2  3  4  5 | 6 7 8 |  9 10 11 | 12 13
    assert microbatch.token_ids_T.tolist() == [5, 6, 40, 41, 42, 2, 7, 8, 9, 30, 31, 2, 20, 2]
    assert microbatch.segments == (
        Segment(0, 6),
        Segment(6, 3),
        Segment(9, 3, Segment(6, 3)),
        Segment(12, 2, Segment(6, 3)),
    )
    assert positions(microbatch.segments).tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 3, 4]
    assert [sequence.rollout.rollout_id for sequence in microbatch.sequences] == [
        "g1-0",
        "g0-1",
        "g0-0",
    ]
    # the prompt's last token is where both rollouts' first sampled token comes from
    assert microbatch.targets_S.tolist() == [1, 2, 3, 4, 8, 9, 10, 8, 12]
    assert microbatch.labels_S.tolist() == [40, 41, 42, 2, 30, 31, 2, 20, 2]


def test_the_layout_of_a_system_prompt_that_groups_share() -> None:
    rollouts = [
        answer([7, 8, 10, 11], [20, 2], sample=0),
        answer([7, 8, 10, 11], [30, 31, 2], sample=1),
        answer([7, 8, 12], [40, 2], group="g1", sample=0),
        answer([7, 8, 12], [40, 50, 2], group="g1", sample=1),
        answer([5, 6], [2], group="g2"),
    ]
    (microbatch,) = pack([make_sequences(one)[0] for one in rollouts], 100, CPU, least=2)
    # 12 alone would be too short for a branch; with the sampled 40 after it, it is none.
    # roots, the longest first:  g2-0 | 7 8;  then  10 11 | 12 40;  then g0-1 | g0-0;  g1-1 | g1-0
    # ids        5 6 2 | 7 8 | 10 11 | 12 40 | 30 31  2 | 20  2 | 50  2 |  2
    # position   0 1 2 | 0 1 |  2  3 |  2  3 |  4  5  6 |  4  5 |  4  5 |  4
    # packed at  0 1 2 | 3 4 |  5  6 |  7  8 |  9 10 11 | 12 13 | 14 15 | 16
    ids = [5, 6, 2, 7, 8, 10, 11, 12, 40, 30, 31, 2, 20, 2, 50, 2, 2]
    assert microbatch.token_ids_T.tolist() == ids
    system = Segment(3, 2)
    first, second = Segment(5, 2, system), Segment(7, 2, system)
    assert microbatch.segments == (
        Segment(0, 3),
        system,
        first,
        second,
        Segment(9, 3, first),
        Segment(12, 2, first),
        Segment(14, 2, second),
        Segment(16, 1, second),
    )
    position = [0, 1, 2, 0, 1, 2, 3, 2, 3, 4, 5, 6, 4, 5, 4, 5, 4]
    assert positions(microbatch.segments).tolist() == position
    named = [sequence.rollout.rollout_id for sequence in microbatch.sequences]
    assert named == ["g2-0", "g0-1", "g0-0", "g1-1", "g1-0"]
    # 40 was sampled in both rollouts of g1: it has two targets at the position of 12
    assert microbatch.targets_S.tolist() == [1, 6, 9, 10, 6, 12, 7, 8, 14, 7, 8]
    assert microbatch.labels_S.tolist() == [2, 30, 31, 2, 20, 2, 40, 50, 2, 40, 2]
    assert microbatch.sequence_S.tolist() == [0, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4]


def letters(*sequences: str) -> list[torch.Tensor]:
    return [torch.tensor([ord(letter) for letter in one]) for one in sequences]


def test_a_prefix_tree() -> None:
    # a b c d          a -+- b c -+- d
    # a b c e f           |       +- e f
    # a g                 +- g
    (tree,) = grow(letters("abcd", "abcef", "ag"), least=1)
    last, longer = Branch(start=3, end=4, ending=(0,)), Branch(start=3, end=5, ending=(1,))
    shared = Branch(start=1, end=3, children=(longer, last))
    alone = Branch(start=1, end=2, ending=(2,))
    assert tree == Branch(start=0, end=1, children=(shared, alone))
    assert tree.tokens == 7
    # a alone is too short: it is repeated before b c and before g
    (long, short) = grow(letters("abcd", "abcef", "ag"), least=2)
    assert (long.start, long.end, short.start, short.end, short.ending) == (0, 3, 0, 2, (2,))


def test_sequences_may_end_within_others_and_be_equal() -> None:
    (tree,) = grow(letters("ab", "abab", "ab"), least=1)
    assert tree == Branch(
        start=0, end=2, ending=(0, 2), children=(Branch(start=2, end=4, ending=(1,)),)
    )
    apart = grow(letters("ab", "abab", "ab"), least=3)
    assert [branch.ending for branch in apart] == [(1,), (0,), (2,)]
    assert grow([], least=1) == []


def test_only_prefixes_that_are_long_enough_are_shared() -> None:
    rollouts = [
        answer([7, 8, 9], [20, 2], sample=0),
        answer([7, 8, 9], [21, 2], group="g1"),
        answer([7, 8], [9, 2], sample=1),
        answer([5, 8, 9], [22, 2], sample=2),
    ]
    sequences = [make_sequences(one)[0] for one in rollouts]

    def tokens(least: int | None) -> int:
        (microbatch,) = pack(sequences, 100, CPU, least=least)
        return microbatch.token_ids_T.numel()

    # 5 + 5 + 4 + 5; without the 7 8 9 of two of them
    assert [tokens(least) for least in (None, 4, 3, 1)] == [19, 19, 13, 13]


def test_what_attention_repeats_counts_in_the_budget() -> None:
    # 64 shared tokens; 8 sequences of one more token each count 65 // 16 = 4, so 64 + 4 x 4 = 80
    made = [make_sequences(answer([7] * 64, [8 + s], sample=s))[0] for s in range(8)]
    assert [len(m.sequences) for m in pack(made, 80, CPU, least=1)] == [4, 4]
    assert [len(m.sequences) for m in pack(made, 96, CPU, least=1)] == [8]


def test_a_shared_prompt_counts_once_in_the_budget() -> None:
    sequences = [
        make_sequences(answer([7] * 10, [8 + sample, 2], sample=sample))[0] for sample in range(5)
    ]
    # 10 + 5 x 2 = 20 tokens
    assert [m.token_ids_T.numel() for m in pack(sequences, 20, CPU, least=1)] == [20]
    # 10 + 3 x 2 = 16 and 10 + 2 x 2 = 14: the prompt stands in each part
    assert [m.token_ids_T.numel() for m in pack(sequences, 17, CPU, least=1)] == [16, 14]
    # one rollout of 12 each: nothing to share
    alone = pack(sequences, 13, CPU, least=1)
    assert [m.segments for m in alone] == [(Segment(0, 12),)] * 5


def test_a_short_prefix_is_not_worth_sharing_in_a_small_model() -> None:
    # 18e6 operations of a call over 72 x 64^2 = 294,912 of a token in a layer: 61.04
    assert least_prefix(64) == 62
    assert least_prefix(4096) == 1


def results(model: torch.nn.Module, rollouts: list[Rollout], share: SharePrefix, budget: int):
    """rollout_id -> logprobs, and the gradient of their sum, in which every token has a weight."""
    scorer = Scorer(model, temperature=0.8, logits_budget_mb=1024, share_prefix=share)
    model.zero_grad()
    found = {}
    with scorer.ready():
        for microbatch in scorer.pack([make_sequences(one)[0] for one in rollouts], budget, CPU):
            logprobs_S, _ = scorer(microbatch)
            (logprobs_S * (1 + microbatch.labels_S % 5)).sum().backward()
            parts = logprobs_S.detach().split(
                [sequence.sampled_length for sequence in microbatch.sequences]
            )
            ids = [sequence.rollout.rollout_id for sequence in microbatch.sequences]
            found.update(zip(ids, parts, strict=True))
    return found, {name: p.grad.clone() for name, p in model.named_parameters()}


IDS = st.integers(7, 250)
GROUPS = st.lists(
    st.tuples(
        st.lists(IDS, min_size=1, max_size=40),
        st.lists(st.lists(IDS, min_size=1, max_size=30), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=12)
@given(groups=GROUPS, budget=st.integers(20, 400), window=st.sampled_from([None, 6]))
def test_shared_is_packed_is_padded(groups, budget: int, window: int | None) -> None:
    """Loss and gradients: shared = packed apart = other microbatches = transformers, padded."""
    windowed = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    model = tiny.model(**(windowed if window else {}))
    rollouts = [
        answer(prompt, own, group=f"g{g}", sample=sample)
        for g, (prompt, answers) in enumerate(groups)
        for sample, own in enumerate(answers)
    ]
    expected, gradient = padded(model, rollouts)
    largest = max(g.abs().max() for g in gradient.values())
    for share, tokens in (
        (SharePrefix.always, 10_000),
        (SharePrefix.always, budget),
        (SharePrefix.never, budget),
    ):
        found, other = results(model, rollouts, share, tokens)
        for rollout_id, logprobs in expected.items():
            assert torch.allclose(found[rollout_id], logprobs, atol=1e-5)
        for name, g in gradient.items():
            # With one token to attend to, queries and keys have no gradient but rounding.
            assert (other[name] - g).abs().max() <= 1e-5 * g.abs().max() + 1e-6 * largest, name


FEW_IDS = st.lists(st.integers(7, 9), min_size=1, max_size=3)
"""So few that random sequences have many prefixes in common."""
CONVERSATIONS = st.lists(
    st.lists(st.tuples(st.sampled_from(Origin), FEW_IDS), max_size=4), min_size=1, max_size=8
)


@settings(max_examples=25)
@given(
    conversations=CONVERSATIONS,
    budget=st.integers(5, 100),
    least=st.integers(1, 4),
    window=st.sampled_from([None, 3]),
)
def test_random_trees_are_one_by_one(conversations, budget, least, window) -> None:
    """Loss and gradient in float64, and every sampled token of every rollout once."""
    # Its norms compute in the format of their inputs; most others in float32.
    model = tiny_family("Starcoder2").double()
    model.config.sliding_window = window
    rollouts = [
        rollout([(Origin.prompt, [7]), *spans, (Origin.sampled, [7])], sample=sample)
        for sample, spans in enumerate(conversations)
    ]
    sequences = [make_sequences(one)[0] for one in rollouts]

    packed, labels, gradient = weighted(model, pack(sequences, budget, CPU, least=least))
    microbatches = [pack([sequence], 1, CPU)[0] for sequence in sequences]
    alone, expected, separate = weighted(model, microbatches)
    assert labels == expected
    for one, sequence in zip(rollouts, sequences, strict=True):
        spans = one.trajectories[0].sampled_spans()
        assert labels[sequence.key] == [token for span in spans for token in span.token_ids]
    assert abs(packed - alone) <= 1e-9 * abs(alone)
    largest = max(float(g.abs().max()) for g in separate)
    for own, other in zip(gradient, separate, strict=True):
        assert (own - other).abs().max() <= 1e-9 * largest


def test_the_layout_of_a_branch() -> None:
    one = answer([7, 8], [20, 21, 2])
    summary = one.branch(0, 3, role="summary")
    sampled(summary, [40, 2])
    made = make_sequences(one)
    assert [sequence.key for sequence in made] == [("g0-0", 0), ("g0-0", 1)]
    # ids         7 8 20 40 2, of which 20 is trained in main only
    assert made[1].token_ids_T.tolist() == [7, 8, 20, 40, 2]
    assert made[1].targets_S.tolist() == [2, 3]
    (microbatch,) = pack(made, 100, CPU, least=1)
    # ids        7 8 20 | 21 2 | 40 2
    # packed at  0 1  2 |  3 4 |  5 6
    prefix = Segment(0, 3)
    assert microbatch.segments == (prefix, Segment(3, 2, prefix), Segment(5, 2, prefix))
    assert microbatch.targets_S.tolist() == [1, 2, 3, 2, 5]
    assert microbatch.labels_S.tolist() == [20, 21, 2, 40, 2]


BRANCHES = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.floats(0, 1),
        st.lists(st.tuples(st.sampled_from(Origin), FEW_IDS), min_size=1, max_size=3),
    ),
    max_size=5,
)
"""Of each trajectory after the first: which parent, where in it, and spans of its own."""


@settings(max_examples=15)
@given(branches=BRANCHES, budget=st.integers(5, 60), least=st.integers(1, 3))
def test_random_branches_are_one_by_one(branches, budget: int, least: int) -> None:
    """Trajectories that branch from one another: loss, gradient, and sampled tokens once."""
    one = answer([7, 8], [7, 9, 8])
    for which, where, spans in branches:
        parent = one.trajectories[int(which * (len(one.trajectories) - 1))]
        branch = one.branch(parent.index, 1 + int(where * (parent.length - 1)))
        for origin, ids in spans:
            if origin is Origin.sampled:
                sampled(branch, ids)
            else:
                branch.append_context(ids, Origin.tool)
    sequences = make_sequences(one)
    model = tiny_family("Starcoder2").double()
    packed, labels, gradient = weighted(model, pack(sequences, budget, CPU, least=least))
    microbatches = [pack([sequence], 1, CPU)[0] for sequence in sequences]
    alone, expected, separate = weighted(model, microbatches)
    assert labels == expected
    assert sum(map(len, labels.values())) == one.sampled_length
    assert abs(packed - alone) <= 1e-9 * abs(alone)
    largest = max(float(g.abs().max()) for g in separate)
    for own, other in zip(gradient, separate, strict=True):
        assert (own - other).abs().max() <= 1e-9 * largest


def sampled(trajectory: Trajectory, ids: list[int]) -> None:
    completion = Completion(
        token_ids=tuple(ids),
        logprobs=(-1.0,) * len(ids),
        finish=Finish.stop,
        versions=((0, len(ids)),),
    )
    trajectory.append_sampled(completion, trajectory.token_ids)


def weighted(model: torch.nn.Module, microbatches: list[Microbatch]):
    """Sum of logprobs, each times 1 + its rollout's sample; labels by sequence; the gradient."""
    scorer = Scorer(model, temperature=0.8, logits_budget_mb=1024)
    model.zero_grad()
    total, labels = 0.0, {}
    with scorer.ready():
        for microbatch in microbatches:
            logprobs_S, _ = scorer(microbatch)
            weights_B = torch.tensor([1 + one.rollout.sample for one in microbatch.sequences])
            loss = (logprobs_S * weights_B[microbatch.sequence_S]).sum()
            loss.backward()
            total += loss.item()
            lengths = [one.sampled_length for one in microbatch.sequences]
            parts = microbatch.labels_S.split(lengths)
            for one, own_S in zip(microbatch.sequences, parts, strict=True):
                assert one.key not in labels
                labels[one.key] = own_S.tolist()
    return total, dict(sorted(labels.items())), [p.grad.clone() for p in model.parameters()]


def padded(model: torch.nn.Module, rollouts: list[Rollout]):
    """The same by transformers' own attention over one padded batch with full logits."""
    model.zero_grad()
    ids = [torch.tensor(one.trajectories[0].token_ids) for one in rollouts]
    batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(sequence) for sequence in ids], batch_first=True
    )
    logprobs = (model(batch, attention_mask=mask).logits / 0.8).log_softmax(-1)
    found, total = {}, torch.zeros(())
    for index, one in enumerate(rollouts):
        places = torch.tensor(one.trajectories[0].loss_mask).nonzero()[:, 0]
        labels = ids[index][places]
        of_one = logprobs[index, places - 1, labels]
        total = total + (of_one * (1 + labels % 5)).sum()
        found[one.rollout_id] = of_one.detach()
    total.backward()
    return found, {name: p.grad.clone() for name, p in model.named_parameters()}


def test_the_same_rollouts_are_packed_the_same_way_every_time() -> None:
    model = tiny.model()
    rollouts = [answer([7] * 40, [8 + s, 9, 2], sample=s) for s in range(4)]
    runs = [results(model, rollouts, SharePrefix.always, 60) for _ in range(2)]
    for name, gradient in runs[0][1].items():
        assert torch.equal(gradient, runs[1][1][name])


@pytest.mark.parametrize(("prompt", "shared"), [(200, False), (260, True)])
def test_auto_shares_long_prompts(prompt: int, shared: bool) -> None:
    model = tiny.model()  # hidden size 32: prompts of 245 tokens and more
    scorer = Scorer(model, temperature=1.0, logits_budget_mb=1)
    sequences = [make_sequences(answer([7] * prompt, [8 + s, 2], sample=s))[0] for s in range(2)]
    (microbatch,) = scorer.pack(sequences, 1000, CPU)
    assert (microbatch.token_ids_T.numel() == prompt + 4) is shared


@pytest.mark.slow
def test_two_threads_repeat_a_gradient_to_the_bit() -> None:
    """Sequences of unlike lengths that share the positions of sampled tokens."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(0, 512, (count,), generator=draw).tolist()

    rollouts = []
    for group in range(3):
        prompt, common = ids(60), ids(20)
        rollouts += [
            answer(prompt, [*common, *ids(10 + 7 * i)], group=f"g{group}", sample=i)
            for i in range(8)
        ]
    scorer = Scorer(model, temperature=1.0, logits_budget_mb=64, share_prefix=SharePrefix.auto)
    sequences = [make_sequences(one)[0] for one in rollouts]
    (microbatch,) = scorer.pack(sequences, 10**6, CPU)
    weights = torch.randn(microbatch.targets_S.numel(), generator=draw)
    threads, gradients = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        for _ in range(12):
            model.zero_grad()
            with scorer.ready():
                (scorer(microbatch)[0] * weights).sum().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, gradients[0]) for one in gradients)


def test_a_tree_has_an_end() -> None:
    """Histories that are each edited a little later than the one before: 400 levels."""
    comb = [
        torch.tensor([*range(20 * level), 10_000 + level, *range(30)]) for level in range(1, 401)
    ]
    trees = grow(comb, least=2)
    indices, stack = [], list(trees)
    while stack:
        branch = stack.pop()
        indices += branch.ending
        stack += branch.children
    assert sorted(indices) == list(range(400))
