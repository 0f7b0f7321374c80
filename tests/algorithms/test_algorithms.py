"""Losses and gradients: their definition in plain Python, difference quotients, properties."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from loss_cases import config
from loss_python import BONUS, FIXED_LENGTH, python_loss

from agenttrain.algorithms.config import (
    Aggregation,
    AlgorithmConfig,
    Behaviour,
    CorrectionConfig,
    CorrectionLevel,
    CorrectionMode,
    KlEstimator,
    KlPlace,
)
from agenttrain.algorithms.loss import LossInputs, extremes, policy_loss
from agenttrain.algorithms.losses import (
    kl_estimate,
    token_weights,
    top_entropy_mask,
)
from agenttrain.algorithms.objectives.base import ObjectiveInputs, importance_ratio
from agenttrain.algorithms.objectives.clip import ClipSettings, clip
from agenttrain.algorithms.objectives.config import Ratio, build_objective
from agenttrain.settings.compose import Source, compose_run, hydra_session

CONF = Path(__file__).parents[2] / "conf" / "algorithm"


@cache
def settings_of(preset: str) -> AlgorithmConfig:
    with hydra_session(Source()):
        return compose_run(["experiment=none", f"algorithm={preset}"], Source()).config.algorithm


# gigpo's loss is grpo's, and with its advantages not everything goes that is added here
PRESETS = [file.stem for file in sorted(CONF.glob("*.yaml")) if file.stem != "gigpo"]
# with every preset: what can be added to it
ADDED: dict[str, dict] = {
    "bare": {},
    "kl": {"kl": {"beta": 0.3}},
    "corrected": {
        "behaviour": Behaviour.recomputed,
        "correction": {"level": "token", "max": 1.2, "min": 0.8},
    },
    "masked": {"off_policy_threshold": 0.1, "entropy": {"bonus": 0.1}},
}

numbers = st.floats(-2, 0, allow_nan=False, width=32)
shifts = st.floats(-0.5, 0.5, allow_nan=False, width=32)


@st.composite
def batches(draw: st.DrawFn) -> list[dict]:
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        new = draw(st.lists(numbers, min_size=1, max_size=4))
        old = [x + draw(shifts) for x in new]
        rows.append(
            {
                "new": new,
                "at": new,
                "old": old,
                "ref": [x + draw(shifts) for x in new],
                "engine": [x + draw(shifts) for x in old],
                "entropy": [draw(shifts) + 0.5 for _ in new],
                "kept": [draw(st.booleans()) for _ in new],
                "advantage": draw(st.sampled_from([-1.5, -0.25, 0.0, 0.5, 2.0])),
            }
        )
    return rows


LOWS, HIGHS, RATIOS = (st.sampled_from(values) for values in ([0.1, 0.2], [0.2, 0.28], Ratio))
objectives = st.one_of(
    st.builds(build_objective, st.just("clip"), low=LOWS, high=HIGHS, ratio=RATIOS),
    st.builds(
        build_objective, st.just("clip"), low=LOWS, high=HIGHS, dual=st.just(1.5), ratio=RATIOS
    ),
    st.builds(build_objective, st.just("cispo"), high=HIGHS, ratio=RATIOS),
    st.builds(build_objective, st.just("sapo"), ratio=RATIOS),
    st.builds(build_objective, st.just("geometric_mean"), low=LOWS, high=HIGHS),
    st.builds(build_objective, st.sampled_from(["vespo", "reinforce"])),
)
penalties = st.sampled_from(
    [
        {},
        {"kl": {"beta": 0.3}},
        {"kl": {"beta": 0.3, "estimator": KlEstimator.k2}},
        {"kl": {"beta": 0.3, "estimator": KlEstimator.k1, "bias_correction": True}},
        {"kl": {"beta": 0.3, "bias_correction": True}},
    ]
)
corrections = st.fixed_dictionaries(
    {
        "behaviour": st.just(Behaviour.recomputed),
        "correction": st.builds(
            CorrectionConfig,
            level=st.sampled_from(CorrectionLevel),
            mode=st.sampled_from(CorrectionMode),
            max=st.sampled_from([1.0, 1.1, 1.3]),
            min=st.sampled_from([None, 0.6, 0.95]),
        ),
    }
)


@st.composite
def configs_of(draw: st.DrawFn) -> AlgorithmConfig:
    """Settings that have a meaning together."""
    chosen_ = draw(objectives)
    settings_ = {**draw(penalties), **draw(st.one_of(st.just({}), corrections))}
    if getattr(chosen_.settings, "ratio", Ratio.token) is not Ratio.token:
        assume(not settings_.get("kl", {}).get("bias_correction"))
    level = settings_["correction"].level if "correction" in settings_ else None
    assume(not (chosen_.name == "vespo" and level is CorrectionLevel.geometric))
    return config(
        objective=chosen_,
        aggregation=draw(st.sampled_from(Aggregation)),
        off_policy_threshold=draw(st.sampled_from([None, -0.1, 0.2])),
        entropy={"bonus": draw(st.sampled_from([0.0, 0.1]))},
        **settings_,
    )


configs = configs_of()


def tensor_inputs(rows: list[dict], settings_: AlgorithmConfig, whole: list[dict]) -> LossInputs:
    """Our inputs for `rows`, a part of the update `whole`."""

    def packed(key: str) -> torch.Tensor:
        return torch.tensor([x for row in rows for x in row[key]], dtype=torch.float64)

    lengths = torch.tensor([len(row["new"]) for row in rows])
    return LossInputs(
        logprobs_S=packed("new").requires_grad_(),
        behaviour_S=packed("old"),
        engine_S=packed("engine"),
        ref_logprobs_S=packed("ref"),
        entropy_S=packed("entropy").requires_grad_(),
        kept_S=packed("kept").bool(),
        sequence_S=torch.repeat_interleave(torch.arange(len(rows)), lengths),
        advantages_S=torch.tensor(
            [row["advantage"] for row in rows for _ in row["new"]], dtype=torch.float64
        ),
        weights_B=token_weights(
            lengths,
            settings_.aggregation,
            tokens=sum(len(row["new"]) for row in whole),
            rollouts=len(whole),
            fixed_length=FIXED_LENGTH,
        ),
        bonus=BONUS * settings_.has_bonus,
    )


@settings(max_examples=150)
@given(rows=batches(), settings_=configs)
def test_loss_is_its_definition(rows: list[dict], settings_: AlgorithmConfig) -> None:
    loss, _ = policy_loss(tensor_inputs(rows, settings_, rows), settings_)
    assert loss.item() == pytest.approx(python_loss(rows, settings_), abs=1e-10, rel=1e-10)


@settings(max_examples=60)
@given(rows=batches(), settings_=configs, cut=st.integers(0, 4), seed=st.integers(0, 99))
def test_neither_order_nor_microbatches_change_the_loss(
    rows: list[dict], settings_: AlgorithmConfig, cut: int, seed: int
) -> None:
    inputs = tensor_inputs(rows, settings_, rows)
    whole, _ = policy_loss(inputs, settings_)
    (gradient,) = torch.autograd.grad(whole, inputs.logprobs_S)
    by_row = dict(zip(map(id, rows), gradient.split([len(r["new"]) for r in rows]), strict=True))
    shuffled = random.Random(seed).sample(rows, len(rows))
    total = 0.0
    for part in (shuffled[:cut], shuffled[cut:]):
        if part:
            inputs = tensor_inputs(part, settings_, rows)
            loss, _ = policy_loss(inputs, settings_)
            total += loss.item()
            (found,) = torch.autograd.grad(loss, inputs.logprobs_S)
            expected = torch.cat([by_row[id(row)] for row in part])
            assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-12, rel=1e-9)
    assert total == pytest.approx(whole.item(), abs=1e-11, rel=1e-9)


ROWS = [
    {
        "new": [-0.5, -1.0, -0.2],
        "old": [-0.65, -0.9, -0.7],
        "ref": [-0.4, -1.3, -0.3],
        "engine": [-0.6, -1.2, -0.72],
        "entropy": [0.9, 1.4, 0.2],
        "kept": [1, 1, 0],
        "advantage": 1.5,
    },
    {
        "new": [-1.1, -0.3],
        "old": [-0.9, -0.45],
        "ref": [-1.0, -0.6],
        "engine": [-0.9, -0.4],
        "entropy": [0.5, 0.7],
        "kept": [0, 1],
        "advantage": -0.75,
    },
]


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("preset", PRESETS)
def test_gradient_is_the_difference_quotient(preset: str, added: str) -> None:
    settings_ = replace(settings_of(preset), **ADDED[added])
    rows = [{**row, "at": row["new"]} for row in ROWS]
    inputs = tensor_inputs(rows, settings_, rows)
    loss, _ = policy_loss(inputs, settings_)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs_S)
    h = 1e-6
    for index, (row, token) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]):
        quotients = []
        for step in (h, -h):
            moved = [{**r, "new": list(r["new"])} for r in rows]
            moved[row]["new"][token] += step
            quotients.append(python_loss(moved, settings_))
        difference = (quotients[0] - quotients[1]) / (2 * h)
        assert gradient[index].item() == pytest.approx(difference, abs=1e-8)
    # GSPO's and LUSPO's narrow clips leave nothing of these rows.
    assert gradient.abs().max() > 0 or preset in ("gspo", "luspo")


@settings(max_examples=40)
@given(settings_=configs)
def test_a_loss_reads_no_value_on_the_host(settings_: AlgorithmConfig) -> None:
    """Tensors on the meta device have no values: `item`, `bincount` and selections by mask raise.

    On a GPU these wait for all queued work.
    """
    inputs = cut_inputs([1, 3, 1], settings_, [0.0] * 8)
    tensors = {field.name: getattr(inputs, field.name) for field in fields(inputs) if field.init}
    tensors |= dict.fromkeys(("ref_logprobs_S", "entropy_S"), inputs.behaviour_S)
    tensors |= {"kept_S": inputs.behaviour_S < 0, "bonus": 0.1}
    on_meta = {
        name: value.detach().to("meta").requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in tensors.items()
    }
    loss, metrics = policy_loss(LossInputs(**on_meta), settings_)
    loss.backward()
    assert loss.shape == ()
    assert {part.shape for part in metrics.values()} <= {(2,)}


def test_extremes_leave_out_what_is_no_number() -> None:
    nan, inf = math.nan, math.inf
    for values, lowest, highest in (
        ([[3.0, nan], [-2.0, 1.0]], -2.0, 3.0),
        ([nan, inf], inf, inf),
        ([nan], inf, -inf),
        ([], inf, -inf),
    ):
        parts = extremes("ratio", torch.tensor(values))
        assert parts["ratio/min"].tolist() == [lowest, lowest]
        assert parts["ratio/max"].tolist() == [highest, highest]


def test_a_sequence_without_tokens_is_no_extreme_of_the_clip_ratios() -> None:
    settings_ = config(objective=build_objective("clip", ratio=Ratio.token))
    rows = [
        row(new=[0.5, 0.0], old=[0.0, 0.0], ref=[0.0, 0.0], advantage=1.0),  # one of two clipped
        row(new=[-0.5], old=[0.0], ref=[0.0], advantage=-1.0),
        row(new=[], old=[], ref=[], advantage=1.0),
    ]
    _, metrics = policy_loss(tensor_inputs(rows, settings_, rows), settings_)
    assert metrics["clip_ratio/high_max"].tolist() == [0.5, 0.5]
    rows = [{**rows[1]}, {**rows[2], "advantage": -1.0}]
    _, metrics = policy_loss(tensor_inputs(rows, settings_, rows), settings_)
    assert metrics["clip_ratio/low_min"].tolist() == [1.0, 1.0]  # 0 with the empty sequence


def test_the_bonus_is_a_gradient_of_the_entropy() -> None:
    settings_ = config(entropy={"bonus": 0.1})
    inputs = tensor_inputs([{**row, "at": row["new"]} for row in ROWS], settings_, ROWS)
    loss, _ = policy_loss(inputs, settings_)
    (gradient,) = torch.autograd.grad(loss, inputs.entropy_S)
    # -0.25 where the token is kept
    assert gradient.tolist() == [-0.25, -0.25, 0.0, 0.0, -0.25]


@pytest.mark.parametrize(
    ("settings_", "lacking"),
    [
        (config(correction={"level": "token"}, behaviour=Behaviour.recomputed), "engine_S"),
        (config(off_policy_threshold=0.1), "engine_S"),
        (config(kl={"beta": 0.1}), "ref_logprobs_S"),
        (config(entropy={"bonus": 0.1}), "entropy_S"),
    ],
)
def test_what_the_loss_lacks_is_named(settings_: AlgorithmConfig, lacking: str) -> None:
    inputs = replace(tensor_inputs(ROWS, settings_, ROWS), **{lacking: None})
    with pytest.raises(ValueError, match=lacking):
        policy_loss(inputs, settings_)


def test_clipping_removes_the_gradient_only_where_it_would_go_on() -> None:
    logprobs = torch.tensor([1.5, 1.5, 0.5, 0.5]).log().requires_grad_()
    inputs = ObjectiveInputs(
        logprobs_S=logprobs,
        behaviour_S=torch.zeros(4),
        advantages_S=torch.tensor([1.0, -1.0, 1.0, -1.0]),
        sequence_S=torch.arange(4),
        sequences=4,
    )
    loss = clip(inputs, ClipSettings(low=0.2, high=0.25)).loss_S
    # -1.25 (clipped), 1.5, -0.5, 0.8 (clipped)
    assert loss.tolist() == pytest.approx([-1.25, 1.5, -0.5, 0.8])
    loss.sum().backward()
    # with respect to log r: -A r where it is not clipped
    assert logprobs.grad.tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0])


def test_ratio_levels() -> None:
    new = torch.tensor([0.1, 0.3, 0.7])
    rows = torch.tensor([0, 0, 1])
    ratios = {level: importance_ratio(new, rows, 2, level).log().tolist() for level in Ratio}
    assert ratios[Ratio.token] == pytest.approx([0.1, 0.3, 0.7])
    assert ratios[Ratio.sequence_mean] == pytest.approx([0.2, 0.2, 0.7])
    assert ratios[Ratio.sequence_sum] == pytest.approx([0.4, 0.4, 0.7])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        # Sequence 0 has the log ratios .1 and .3, sequence 1 has .7; advantages 1, -2 and 3.
        (Ratio.token, [math.exp(0.1), -2 * math.exp(0.3), 3 * math.exp(0.7)]),
        (Ratio.sequence_mean, [math.exp(0.2), -2 * math.exp(0.2), 3 * math.exp(0.7)]),
        # The plain form of two tokens of advantage 1 is 2 exp(l_1 + l_2): 2 exp(.4) for each.
        (Ratio.sequence_sum, [2 * math.exp(0.4), -4 * math.exp(0.4), 3 * math.exp(0.7)]),
    ],
)
def test_an_advantage_reaches_the_logprob_of_its_own_token(level: Ratio, expected: list) -> None:
    log_ratio = torch.tensor([0.1, 0.3, 0.7], dtype=torch.float64, requires_grad=True)
    ratio = importance_ratio(log_ratio, torch.tensor([0, 0, 1]), 2, level, token_gradient=True)
    (ratio * torch.tensor([1.0, -2.0, 3.0])).sum().backward()
    assert log_ratio.grad.tolist() == pytest.approx(expected, rel=1e-12)


@given(
    logs=st.lists(st.lists(st.floats(-1, 1), max_size=4), min_size=1, max_size=4),
    level=st.sampled_from(Ratio),
)
def test_the_gradient_of_one_advantage_is_that_of_the_plain_form(logs: list, level: Ratio) -> None:
    values = torch.tensor([x for row in logs for x in row], dtype=torch.float64)
    rows = torch.tensor([b for b, row in enumerate(logs) for _ in row], dtype=torch.long)

    def gradient(ratio: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        leaf = values.clone().requires_grad_()
        (ratio(leaf) * (1.0 + rows)).sum().backward()
        return leaf.grad.tolist()

    def plain(leaf: torch.Tensor) -> torch.Tensor:
        parts = leaf.split([len(row) for row in logs])
        mean = level is Ratio.sequence_mean
        return torch.cat(
            [
                part if level is Ratio.token else (part.mean() if mean else part.sum()).expand(n)
                for part, n in zip(parts, map(len, logs), strict=True)
                if n
            ]
            or [leaf]
        ).exp()

    expected = gradient(plain)
    for token_gradient in (False, True):
        ratio = partial(
            importance_ratio,
            sequence_S=rows,
            sequences=len(logs),
            level=level,
            token_gradient=token_gradient,
        )
        assert gradient(ratio) == pytest.approx(expected, rel=1e-9)


CUT_OBJECTIVES = {
    "sequence_sum": build_objective("clip", ratio="sequence_sum"),
    "sequence_mean": build_objective("clip", ratio="sequence_mean"),
    "sapo": build_objective("sapo", ratio="sequence_sum"),
    "cispo": build_objective("cispo", ratio="sequence_sum"),
    "gmpo": build_objective("geometric_mean"),
    "vespo": build_objective("vespo"),
}
CUTS = ([5], [3, 2], [1, 3, 1])


def cut_inputs(lengths: list[int], settings_: AlgorithmConfig, log_ratios: list[float]):
    """An update of two rollouts: 5 tokens of advantage 2 cut so, and 3 tokens of advantage -1."""
    counts = torch.tensor([*lengths, 3])
    of_rollouts = torch.tensor([*([5] * len(lengths)), 3])
    new = torch.linspace(-3, -0.5, 8, dtype=torch.float64)
    return LossInputs(
        logprobs_S=(new + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_(),
        behaviour_S=new,
        engine_S=new,
        sequence_S=torch.repeat_interleave(torch.arange(len(counts)), counts),
        advantages_S=torch.tensor([2.0] * 5 + [-1.0] * 3, dtype=torch.float64),
        weights_B=token_weights(
            of_rollouts, settings_.aggregation, tokens=8, rollouts=2, fixed_length=FIXED_LENGTH
        ),
        rollout_tokens_B=of_rollouts if len(lengths) > 1 else None,
    )


@pytest.mark.parametrize("correction", ["none", "sequence", "token"])
@pytest.mark.parametrize("objective", CUT_OBJECTIVES)
def test_a_gradient_does_not_depend_on_how_a_rollout_is_cut(
    objective: str, correction: str
) -> None:
    settings_ = config(
        objective=CUT_OBJECTIVES[objective],
        aggregation=Aggregation.sequence_mean,
        correction=None if correction == "none" else {"level": correction},
        behaviour=Behaviour.engine if correction == "none" else Behaviour.recomputed,
        off_policy_threshold=0.1,
    )
    # A of one token over its 2 rollouts; where the ratio is a sum, each of its rollout's tokens
    # carries it: 5 tokens of 1 / (2 x 5) and 3 of 1 / (2 x 3).
    of_sum = objective in ("sequence_sum", "sapo")
    long, short = (-2 / 2, 1 / 2) if of_sum else (-2 / 10, 1 / 6)
    for lengths in CUTS:
        inputs = cut_inputs(lengths, settings_, [0.0] * 8)
        loss, _ = policy_loss(inputs, settings_)
        (gradient,) = torch.autograd.grad(loss, inputs.logprobs_S)
        assert gradient.tolist() == pytest.approx([long] * 5 + [short] * 3, rel=1e-13)
        if objective in ("sequence_sum", "sequence_mean", "gmpo"):  # -2 x 1/2 + 1 x 1/2
            assert loss.item() == pytest.approx(-0.5, rel=1e-13)


@pytest.mark.parametrize("token_advantages", [False, True])
def test_a_ratio_of_sequences_is_that_of_the_trajectory(token_advantages: bool) -> None:
    clipless = build_objective("clip", ratio="sequence_sum", low=0.9, high=9.0)
    credit = {"credit": {"name": "turn_reward"}} if token_advantages else {}
    settings_ = config(objective=clipless, aggregation=Aggregation.sequence_mean, **credit)
    inputs = cut_inputs([3, 2], settings_, [0.1, 0.2, 0.1, 0.3, 0.4, 0.0, 0.0, 0.0])
    loss, _ = policy_loss(inputs, settings_)
    # -2 (3 e^.4 + 2 e^.7) / 10 + 1 / 2
    assert loss.item() == pytest.approx(-2 * (3 * math.exp(0.4) + 2 * math.exp(0.7)) / 10 + 0.5)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs_S)
    # each of the rollout's 5 tokens: 5 x -2 r / 10
    expected = [-math.exp(0.4)] * 3 + [-math.exp(0.7)] * 2 + [0.5] * 3
    assert gradient.tolist() == pytest.approx(expected, rel=1e-13)


def test_kl_estimators() -> None:
    new, ref = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.5], dtype=torch.float64)
    values = {e: kl_estimate(new, ref, e).item() for e in KlEstimator}
    # d = 0.5: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d
    assert values[KlEstimator.k1] == 0.5
    assert values[KlEstimator.k2] == 0.125
    assert values[KlEstimator.k3] == pytest.approx(0.10653065971263342, abs=1e-15)


def test_the_top_entropy_of_equal_tokens_goes_by_place() -> None:
    entropy = torch.tensor([1.0, 1.0, 1.0, 2.0, 0.0])
    places = torch.tensor([4, 2, 0, 3, 1])
    for share, expected in (
        (0.2, [0, 0, 0, 1, 0]),  # 5 - ceil(.8 x 4) = 1
        (0.5, [0, 1, 1, 1, 0]),  # 5 - ceil(.5 x 4) = 3: of the ones those of places 0 and 2
        (0.75, [1, 1, 1, 1, 0]),
    ):
        for rounding in torch.randn(4, 5, generator=torch.Generator().manual_seed(0)) * 1e-6:
            assert top_entropy_mask(entropy + rounding, places, share).int().tolist() == expected


def row(**values: object) -> dict:
    length = len(values["new"])
    return {"engine": values["old"], "entropy": [1.0] * length, "kept": [1] * length, **values}


def test_kl_in_the_reward_is_not_in_the_loss_too() -> None:
    rows = [row(new=[-0.5], old=[-0.5], ref=[-2.0], advantage=1.0)]
    settings_ = config(kl={"beta": 0.5, "estimator": KlEstimator.k1, "place": KlPlace.reward})
    loss, metrics = policy_loss(tensor_inputs(rows, settings_, rows), settings_)
    assert loss.item() == -1.0
    assert "kl" not in metrics


@pytest.mark.parametrize(
    ("advantage", "settings_", "expected"),
    [
        (1.0, {}, -1.2),  # min(inf, 1.2)
        (-1.0, {"dual": 3.0}, 3.0),  # min(inf, 3)
        (1.0, {"name": "sapo"}, -4.0),  # a gate that is wholly open: 4 / tau
    ],
)
def test_a_ratio_beyond_all_numbers_is_clipped_like_any_other(
    advantage: float, settings_: dict, expected: float
) -> None:
    """e^200 is no float32: the clip leaves its bound, and no gradient."""
    logprobs = torch.zeros(400, requires_grad=True)
    objective = build_objective(**{"name": "clip", "ratio": "sequence_sum", **settings_})
    algorithm = config(objective=objective, aggregation=Aggregation.sequence_mean)
    inputs = LossInputs(
        logprobs_S=logprobs,
        behaviour_S=torch.full((400,), -0.5),
        sequence_S=torch.zeros(400, dtype=torch.long),
        advantages_S=torch.full((400,), advantage),
        weights_B=torch.tensor([1 / 400]),
    )
    loss, _ = policy_loss(inputs, algorithm)
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert logprobs.grad.abs().max() == 0


def test_what_is_no_number_is_no_ratio() -> None:
    new = torch.tensor([0.1, torch.nan])
    ratio = importance_ratio(new, torch.arange(2), 2, Ratio.token)
    assert ratio.isnan().tolist() == [False, True]


def test_clip_ratios_count_rollouts_where_ratios_are_of_rollouts() -> None:
    rows = [
        row(new=[0.2, 0.2], old=[0.0, 0.0], ref=[0.0, 0.0], advantage=1.0),  # clipped
        row(new=[0.0], old=[0.0], ref=[0.0], advantage=1.0),
    ]
    by_level = {}
    for level in (Ratio.token, Ratio.sequence_sum):
        settings_ = config(objective=build_objective("clip", ratio=level))
        _, metrics = policy_loss(tensor_inputs(rows, settings_, rows), settings_)
        by_level[level] = metrics["clip_ratio/high_mean"].tolist()
    assert by_level == {Ratio.token: [2.0, 3.0], Ratio.sequence_sum: [1.0, 2.0]}
