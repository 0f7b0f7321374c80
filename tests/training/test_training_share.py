"""A group's common prompt: which rollouts share it, their layout, and that nothing else changes."""

from __future__ import annotations

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import rollout

from agenttrain.training.batch import (
    Segment,
    bundle_sequences,
    least_prompt,
    make_sequences,
    pack,
    positions,
)
from agenttrain.training.config import SharePrefix
from agenttrain.training.logprobs import Scorer
from agenttrain.types import Origin, Rollout

CPU = torch.device("cpu")


def answer(prompt: list[int], own: list[int], *, group: str = "g0", sample: int = 0) -> Rollout:
    return rollout([(Origin.prompt, prompt), (Origin.sampled, own)], group=group, sample=sample)


def test_the_layout_of_a_shared_prompt() -> None:
    rollouts = [
        answer([7, 8, 9], [20, 2], sample=0),
        answer([7, 8, 9], [30, 31, 2], sample=1),
        answer([5, 6], [40, 41, 42, 2], group="g1"),
    ]
    bundles = bundle_sequences([make_sequences(one)[0] for one in rollouts], share=True)
    (microbatch,) = pack(bundles, 100, CPU)
    # starts, the longest first:  g1-0 | the prompt of g0;  then what follows: g0-1 | g0-0
    # ids        5 6 40 41 42  2 | 7 8 9 | 30 31  2 | 20  2
    # position   0 1  2  3  4  5 | 0 1 2 |  3  4  5 |  3  4
    # packed at  0 1  2  3  4  5 | 6 7 8 |  9 10 11 | 12 13
    assert microbatch.token_ids_T.tolist() == [5, 6, 40, 41, 42, 2, 7, 8, 9, 30, 31, 2, 20, 2]
    assert microbatch.segments == (
        Segment(0, 6),
        Segment(6, 3),
        Segment(9, 3, 6, 3),
        Segment(12, 2, 6, 3),
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


def test_only_rollouts_of_one_group_and_one_prompt_share() -> None:
    rollouts = [
        answer([7, 8, 9], [20, 2], sample=0),
        answer([7, 8, 9], [21, 2], group="g1"),
        answer([7, 8], [9, 2], sample=1),
        answer([7, 8, 9], [22, 2], sample=2),
    ]
    sequences = [make_sequences(one)[0] for one in rollouts]
    shared = [
        [sequence.rollout.rollout_id for sequence in b.sequences]
        for b in bundle_sequences(sequences, share=True)
    ]
    assert shared == [["g0-0", "g0-2"], ["g1-0"], ["g0-1"]]
    assert [b.shared for b in bundle_sequences(sequences, share=True)] == [3, 0, 0]
    assert all(b.shared == 0 for b in bundle_sequences(sequences, share=True, least=4))
    assert all(b.shared == 0 for b in bundle_sequences(sequences, share=False))


def test_a_shared_prompt_counts_once_in_the_budget() -> None:
    sequences = [make_sequences(answer([7] * 10, [8, 2], sample=sample))[0] for sample in range(5)]
    bundles = bundle_sequences(sequences, share=True)
    # 10 + 5 x 2 = 20 tokens
    assert [m.token_ids_T.numel() for m in pack(bundles, 20, CPU)] == [20]
    # 10 + 3 x 2 = 16 and 10 + 2 x 2 = 14: the prompt stands in each part
    assert [m.token_ids_T.numel() for m in pack(bundles, 17, CPU)] == [16, 14]
    # one rollout of 12 each: nothing to share
    alone = pack(bundles, 13, CPU)
    assert [m.segments for m in alone] == [(Segment(0, 12),)] * 5


def test_a_short_prompt_is_not_worth_sharing_in_a_small_model() -> None:
    # 18e6 operations of a call over 72 x 64^2 = 294,912 of a token in a layer: 61.04
    assert least_prompt(64) == 62
    assert least_prompt(4096) == 1


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


@settings(max_examples=12, deadline=None)
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
        sampled = torch.tensor(one.trajectories[0].loss_mask).nonzero()[:, 0]
        labels = ids[index][sampled]
        of_one = logprobs[index, sampled - 1, labels]
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
    sequences = [
        make_sequences(answer([7] * prompt, [8, 2], sample=sample))[0] for sample in range(2)
    ]
    (microbatch,) = scorer.pack(sequences, 1000, CPU)
    assert (microbatch.token_ids_T.numel() == prompt + 4) is shared
