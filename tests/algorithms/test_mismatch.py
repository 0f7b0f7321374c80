"""How far the engine is from the trainer: figures by hand, and what each cause looks like."""

from __future__ import annotations

import math

import pytest
import torch
from training_cases import rollout

from agenttrain.algorithms.mismatch import MISMATCH_NAMES, Origins, likely_cause, mismatch
from agenttrain.training.batch import make_sequences, stand_in
from agenttrain.training.policy import token_origins
from agenttrain.types import Completion, Finish, Origin

CPU = torch.device("cpu")


def figures(engine: list[float], trainer: list[float], **where: list) -> dict[str, float]:
    """The means and extremes that the parts make."""
    count = len(engine)
    found = Origins(
        turn_S=torch.tensor(where.get("turn", [0] * count)),
        third_S=torch.tensor(where.get("third", [0] * count)),
        stale_S=torch.tensor(where.get("stale", [False] * count), dtype=torch.bool),
    )
    means = (sum(engine) / count, sum(trainer) / count) if count else (0.0, 0.0)
    parts = mismatch(torch.tensor(engine), torch.tensor(trainer), found, means)
    assert tuple(parts) == MISMATCH_NAMES
    return {
        name: (part[0] if name.endswith("max") else part[0] / part[1]).item()
        for name, part in parts.items()
    }


def test_the_gap_by_turn_position_and_version() -> None:
    measured = figures(
        engine=[-1.0, -2.0, -1.0, -4.0],
        trainer=[-1.0, -1.5, -2.0, -4.0],
        turn=[0, 0, 1, 2],
        third=[0, 0, 1, 2],
        stale=[False, True, True, False],
    )
    # gaps 0, .5, 1, 0
    assert measured["sampling/logprob_gap"] == pytest.approx(1.5 / 4)
    assert measured["sampling/logprob_gap_max"] == 1.0
    assert measured["sampling/logprob_gap_first_turn"] == pytest.approx(0.25)
    assert measured["sampling/logprob_gap_later_turns"] == pytest.approx(0.5)
    assert measured["sampling/logprob_gap_early"] == pytest.approx(0.25)
    assert measured["sampling/logprob_gap_middle"] == 1.0
    assert measured["sampling/logprob_gap_late"] == 0.0
    assert measured["sampling/logprob_gap_fresh"] == 0.0
    assert measured["sampling/logprob_gap_stale"] == pytest.approx(0.75)
    assert measured["sampling/logprob_gap_fresh_max"] == 0.0
    assert measured["sampling/stale_tokens"] == 0.5
    # exp(t - e) - 1 - (t - e): 0, exp(.5) - 1.5 = 0.14872, exp(-1) - 1 + 1 = 0.36788, 0
    assert measured["sampling/kl"] == pytest.approx((0.14872 + 0.36788) / 4, abs=1e-5)
    # less the means: t 1.125 .625 .125 -1.875, e 1 0 1 -2; products 1.125 + .125 + 3.75 = 5,
    # squares of t 1.265625 + .390625 + .015625 + 3.515625 = 5.1875
    assert measured["sampling/logprob_slope"] == pytest.approx(5 / 5.1875)


def test_what_is_not_there_is_not_a_number() -> None:
    measured = figures([-1.0, -2.0], [-1.0, -2.0])
    assert {name for name, value in measured.items() if math.isnan(value)} == {
        "sampling/logprob_gap_later_turns",
        "sampling/logprob_gap_middle",
        "sampling/logprob_gap_late",
        "sampling/logprob_gap_stale",
    }
    assert measured["sampling/logprob_slope"] == 1.0
    assert math.isnan(figures([-1.0, -1.0], [-1.0, -1.0])["sampling/logprob_slope"])


def drawn(temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of 4000 tokens sampled at `temperature`: of the engine, and after none at all."""
    torch.manual_seed(0)
    logits_SV = 2 * torch.randn(4000, 50)
    at_SV = (logits_SV / temperature).log_softmax(-1)
    tokens_S = at_SV.exp().multinomial(1)
    return at_SV.gather(1, tokens_S)[:, 0], logits_SV.log_softmax(-1).gather(1, tokens_S)[:, 0]


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_another_temperature_shows_in_the_slope_and_noise_does_not(temperature: float) -> None:
    engine_S, trainer_S = drawn(temperature)
    scaled = figures(engine_S.tolist(), trainer_S.tolist())
    noise_S = 0.3 * torch.randn(4000)
    noisy = figures((trainer_S + noise_S).tolist(), trainer_S.tolist())
    # The normalisers vary with the context, which flattens or steepens 1 / T a little.
    assert scaled["sampling/logprob_slope"] == pytest.approx(1 / temperature, rel=0.1)
    assert noisy["sampling/logprob_slope"] == pytest.approx(1.0, abs=0.02)
    assert noisy["sampling/logprob_gap"] > 0.2


MEASURED = {
    "rollout/ledger_breaks": 0.0,
    "sampling/logprob_gap": 0.3,
    "sampling/logprob_gap_first_turn": 0.2,
    "sampling/logprob_gap_later_turns": 0.4,
    "sampling/logprob_gap_fresh": 0.3,
    "sampling/logprob_gap_stale": math.nan,
    "sampling/stale_tokens": 0.0,
    "sampling/logprob_slope": 1.04,
}
"""A gap that nothing but numerics explains."""


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({}, "numerics"),
        ({"rollout/ledger_breaks": 2.0}, "other tokens than were sampled"),
        (
            {"sampling/stale_tokens": 0.5, "sampling/logprob_gap_stale": 0.9},
            "tokens sampled under older weights (sampling/logprob_gap_stale is 0.9)",
        ),
        ({"sampling/stale_tokens": 0.5, "sampling/logprob_gap_stale": 0.35}, "numerics"),
        (  # all of them
            {
                "sampling/stale_tokens": 1.0,
                "sampling/logprob_gap_stale": 0.3,
                "sampling/logprob_gap_fresh": math.nan,
            },
            "tokens sampled under older weights",
        ),
        ({"sampling/logprob_gap_first_turn": 0.01}, "a wrong cache"),
        ({"sampling/logprob_slope": 1.43}, "another sampling transform"),
        ({"sampling/logprob_slope": math.nan}, "numerics"),
    ],
)
def test_the_likely_cause(changed: dict[str, float], cause: str) -> None:
    found = likely_cause({**MEASURED, **changed})
    assert found is not None
    assert found.startswith(cause)
    assert likely_cause({**MEASURED, **changed, "sampling/logprob_gap": math.nan}) is None


def test_origins_of_rows() -> None:
    """A rollout sampled across an update of the engine, and one of one token."""
    grown = rollout([(Origin.prompt, [7, 8]), (Origin.sampled, [20])])
    grown.trajectories[0].append_context([40], Origin.tool)
    later = Completion(
        token_ids=(21, 22, 2),
        logprobs=(-1.0, -1.0, -1.0),
        finish=Finish.stop,
        versions=((2, 1), (3, 2)),
    )
    grown.trajectories[0].append_sampled(later, grown.trajectories[0].token_ids)
    short = rollout([(Origin.prompt, [7]), (Origin.sampled, [2])], sample=1)
    found = token_origins([make_sequences(grown)[0], make_sequences(short)[0]], 3, CPU)
    # sampled          20     21 22 2   2
    assert found.turn_S.tolist() == [0, 1, 1, 1, 0]
    assert found.third_S.tolist() == [0, 0, 1, 2, 0]
    assert found.stale_S.tolist() == [True, True, False, False, True]
    assert token_origins([stand_in()], 0, CPU).turn_S.numel() == 0
