"""`stop_when`: the end of a run before its last step."""

from __future__ import annotations

import json
import math

import pytest

from agenttrain.cli import main
from agenttrain.health.config import StopWhenConfig
from agenttrain.health.stop_when import StopWhen

TINY = ("debug=tiny", "eval.questions=0", "tracker=none", "tracker.console=false")
TWO_STEPS = ("stop_when.metric=turns/mean", "stop_when.above=0", "stop_when.patience=2")


def steps_until_end(config, values):
    """Number of values after which the run ends; None if it does not."""
    end = StopWhen(config)
    for number, value in enumerate(values, start=1):
        end.add(value)
        if end.record is not None:
            return number
    return None


@pytest.mark.parametrize(
    ("settings", "values", "steps"),
    [
        ({"above": 0.5, "patience": 1}, [0.5, 0.6], 2),
        # Means of 3: 0.4, 0.6.
        ({"above": 0.5, "patience": 3}, [0.0, 0.6, 0.6, 0.6], 4),
        # One high value does not end it: the mean of 2 is 0.5.
        ({"above": 0.5, "patience": 2}, [0.0, 1.0, 0.0, 1.0, 0.25], 5),
        ({"below": 0.1, "patience": 2}, [0.3, 0.1, 0.05], 3),
        ({"below": 0.0, "patience": 1}, [0.0, -0.5], 2),
        # Nothing was measured in the second and third step.
        ({"above": 0.5, "patience": 2}, [1.0, math.nan, None, 1.0], 4),
        ({}, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0], None),
        ({"above": 2.0}, [1.0] * 10, None),
    ],
)
def test_a_run_ends_when_the_mean_of_the_latest_values_has_passed(settings, values, steps):
    assert steps_until_end(StopWhenConfig(**settings), values) == steps


def test_a_checkpoint_has_the_latest_values():
    config = StopWhenConfig(above=0.5, patience=3)
    before, after = StopWhen(config), StopWhen(config)
    for value in (0.0, 0.1, 0.9, 0.9):
        before.add(value)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert list(after.values) == [0.1, 0.9, 0.9]
    assert after.record == before.record is not None
    for metric, enabled in (("entropy", True), ("reward", False)):
        other = StopWhen(StopWhenConfig(metric=metric, above=0.5 if enabled else None, patience=3))
        other.load_state_dict(before.state_dict())
        assert other.record is None, "these are values of another metric, or of an end that is off"
    assert not StopWhen(StopWhenConfig(patience=3), before.values).state_dict()["stop_when"][
        "values"
    ]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "check stop_when.above=0.9 stop_when.below=0.1",
            "stop_when.below=0.1: stop_when.above=0.9 is set too; set one of them to null",
        ),
        (
            "check stop_when.metric=rewrd stop_when.above=1",
            "stop_when.metric=rewrd: is no metric (did you mean 'reward'?); "
            "docs/reference/metrics.md lists them",
        ),
        (
            "sft experiment=shop_warmstart stop_when.above=0.9",
            "stop_when.metric=reward: supervised learning has no such metric; set "
            "stop_when.metric=loss, say; docs/reference/metrics.md lists them",
        ),
        (
            "eval model=shop stop_when.above=0.9",
            "stop_when.above=0.9: has no effect in agenttrain eval; leave it out",
        ),
        ("check stop_when.patience=0", "stop_when.patience=0: must be at least 1"),
    ],
)
def test_a_wrong_end_is_refused(capsys, command, message):
    assert main(command.split()) == 2
    assert message in capsys.readouterr().err


def test_a_metric_of_the_objective_is_known(capsys):
    assert main(["check", "stop_when.metric=clip_ratio/high_mean", "stop_when.above=0.5"]) == 0
    assert "or until mean clip_ratio/high_mean of 5 steps above 0.5" in capsys.readouterr().out


def test_a_run_ends_early_and_goes_on_when_asked(tmp_path, capsys):
    run = tmp_path / "run"
    assert main([*TINY, *TWO_STEPS, "steps=4", f"hydra.run.dir={run}"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    end = {"metric": "turns/mean", "above": 0.0, "below": None, "patience": 2}
    mean = summary["stopped_when"].pop("mean")
    assert summary["stopped_when"] == end
    out = capsys.readouterr().out
    text = "mean turns/mean of 2 steps above 0"
    assert f"ended after 2 of 4 steps: {text} ({mean:.4g})" in out

    assert main([f"resume={run}"]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"{run}: finished after 2 steps ({text}); for more: agenttrain resume=")
    assert line.endswith("stop_when.above=null\n")

    assert main([f"resume={run}", "stop_when.above=null"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary.get("stopped_when")) == (4, None)


@pytest.mark.slow
def test_a_resumed_run_counts_the_steps_before(tmp_path):
    """The mean of three steps: two of the first start, one of the second."""
    run = tmp_path / "run"
    end = (*TWO_STEPS[:2], "stop_when.patience=3")
    assert main([*TINY, *end, "steps=2", f"hydra.run.dir={run}"]) == 0
    assert main([f"resume={run}", "steps=6"]) == 0
    assert json.loads((run / "summary.json").read_text())["steps"] == 3


@pytest.mark.slow
def test_a_metric_that_a_run_has_not_is_named(tmp_path):
    """A KL without a reference: in the table, and not in this run."""
    run = tmp_path / "run"
    assert main([*TINY, "stop_when.metric=kl", "stop_when.above=1", f"hydra.run.dir={run}"]) == 0
    warnings = json.loads((run / "summary.json").read_text())["warnings"]
    assert any("stop_when.metric=kl: step 1 has no such metric" in text for text in warnings)
