"""Logits to tokens: hand-computed distributions, filters, noise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttrain.engines.config import Sampling
from agenttrain.engines.transformers import sampler

CPU = torch.device("cpu")


def draw(rows, samplings, uniforms):
    """Ids and probabilities for rows of probabilities."""
    logits = torch.tensor(rows).log()
    ids, logprobs = sampler.sample(logits, sampler.make_tensors(samplings, CPU), uniforms)
    return ids.tolist(), logprobs.exp().tolist()


def test_a_uniform_picks_the_token_whose_stretch_holds_it():
    row = [0.2, 0.5, 0.3]  # cumulative 0.2, 0.7, 1.0
    uniforms = [0.0, 0.19, 0.21, 0.69, 0.71, 1 - 2**-53]
    ids, probabilities = draw([row] * 6, [Sampling()] * 6, uniforms)
    assert ids == [0, 0, 1, 1, 2, 2]
    assert probabilities == pytest.approx([0.2, 0.2, 0.5, 0.5, 0.3, 0.3])


def test_a_token_without_probability_is_never_drawn():
    # 1.0 is what a uniform just below it rounds to in float32.
    ids, _ = draw([[0.0, 1.0, 0.0]] * 3, [Sampling()] * 3, [0.0, 0.5, 1.0])
    assert ids == [1, 1, 1]


def test_temperature_scales_before_the_softmax():
    # squares at T = 0.5: 0.04, 0.25, 0.09 of 0.38
    _, probabilities = draw([[0.2, 0.5, 0.3]], [Sampling(temperature=0.5)], [0.5])
    assert probabilities == pytest.approx([0.25 / 0.38])


def test_greedy_takes_the_likeliest_with_its_unscaled_probability():
    filtered = Sampling(temperature=0, top_k=1)
    assert draw([[0.2, 0.5, 0.3]], [filtered], [0.99]) == ([1], pytest.approx([0.5]))


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), {1: 0.5, 2: 0.3}),
        (Sampling(top_p=0.5), {1: 0.5}),
        (Sampling(top_p=0.51), {1: 0.5, 2: 0.3}),
        (Sampling(min_p=0.35), {1: 0.5, 2: 0.3}),  # at least 0.35 * 0.5 = 0.175
        (Sampling(min_p=0.7), {1: 0.5}),  # at least 0.35
        # top-p of what top-k left: 0.625 of (0.625, 0.375) is enough for 0.6
        (Sampling(top_k=2, top_p=0.6), {1: 0.5}),
    ],
)
def test_filters_keep_the_likeliest_and_renormalise(sampling, kept):
    total = sum(kept.values())
    uniforms = [i / 50 for i in range(50)]
    ids, probabilities = draw([[0.15, 0.5, 0.3, 0.05]] * 50, [sampling] * 50, uniforms)
    assert set(ids) == set(kept)
    assert probabilities == pytest.approx([kept[i] / total for i in ids])


def test_rows_of_one_batch_keep_their_own_settings():
    settings_ = [Sampling(), Sampling(top_k=1), Sampling(temperature=0), Sampling(temperature=0.5)]
    ids, probabilities = draw([[0.2, 0.5, 0.3]] * 4, settings_, [0.9] * 4)
    assert ids == [2, 1, 1, 2]
    assert probabilities == pytest.approx([0.3, 1.0, 0.5, 0.09 / 0.38])


def test_logits_that_are_not_finite_show_in_the_logprob():
    logits = torch.tensor([[0.0, math.nan], [0.0, 1.0]])
    ids, logprobs = sampler.sample(logits, sampler.make_tensors([Sampling()] * 2, CPU), [0.5, 0.5])
    assert not math.isfinite(logprobs[0]) and math.isfinite(logprobs[1])
    assert max(ids.tolist()) <= 1


def test_noise_depends_on_seed_and_position_only():
    long = sampler.draw_noise(7, 20)
    assert sampler.draw_noise(7, 5) == long[:5]
    assert sampler.draw_noise(8, 5) != long[:5]
    assert all(0 <= u < 1 for u in sampler.draw_noise(-(2**70) + 3, 100))


def test_noise_depends_on_all_63_bits_of_a_seed():
    seeds = [7, *(7 ^ (1 << bit) for bit in range(63))]
    assert len({tuple(sampler.draw_noise(seed, 3)) for seed in seeds}) == 64


@settings(max_examples=50)
@given(
    st.lists(st.floats(-20, 20), min_size=2, max_size=40),
    st.integers(0, 2**53 - 1),
    st.sampled_from([Sampling(), Sampling(top_p=0.7), Sampling(top_k=3), Sampling(min_p=0.1)]),
)
def test_the_drawn_tokens_stretch_holds_the_uniform(logits, numerator, sampling):
    uniform = numerator / 2**53
    plan = sampler.make_tensors([sampling], CPU)
    ids, logprobs = sampler.sample(torch.tensor([logits]), plan, [uniform])
    order = torch.tensor(logits).double().sort(descending=True, stable=True)
    probabilities = order.values.softmax(0)
    keep = [i for i in range(len(logits)) if not sampling.top_k or i < sampling.top_k]
    keep = [i for i in keep if probabilities[:i].sum() < sampling.top_p + 1e-6]
    keep = [i for i in keep if probabilities[i] >= sampling.min_p * probabilities[0] - 1e-6]
    kept = {int(order.indices[i]): float(probabilities[i]) for i in keep}
    token = int(ids[0])
    total = sum(kept.values())
    before = sum(p for i, p in kept.items() if i < token) / total
    assert before - 1e-5 <= uniform <= before + kept[token] / total + 1e-5
    assert float(logprobs[0]) == pytest.approx(math.log(kept[token] / total), abs=1e-4)
