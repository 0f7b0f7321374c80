"""Guards on the figures of a step: when they speak, and what they say."""

from __future__ import annotations

import json
import math

import pytest

from agenttrain.algorithms.credit import set_advantages
from agenttrain.cli import main
from agenttrain.health.config import Guard, GuardsConfig, OnTrip, Streak, ToolFailures
from agenttrain.health.guards import Guards, GuardTripped
from agenttrain.settings.checks import validate
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.tracking.config import TrackerConfig
from agenttrain.tracking.run_folder import read_summary
from agenttrain.tracking.tracker import Tracker
from agenttrain.types import (
    Completion,
    ConfigError,
    Finish,
    Rollout,
    Task,
    ToolCall,
    ToolError,
    ToolResult,
)

pytestmark = pytest.mark.timeout(1200)  # whole runs

TASK = Task(task_id="t", messages=())
GAP = "sampling/logprob_gap_max"


def rollouts(*advantages: float | None) -> list[Rollout]:
    made = [Rollout(task=TASK, rollout_id="a") for _ in advantages]
    for rollout, advantage in zip(made, advantages, strict=True):
        (trajectory,) = rollout.trajectories
        completion = Completion(
            token_ids=(2,), logprobs=(-0.5,), finish=Finish.stop, versions=((0, 1),)
        )
        trajectory.append_sampled(completion, [])
        set_advantages(rollout, advantage)
    return made


def warnings(guards: Guards, *steps: dict[str, float]) -> list[str]:
    told: list[str] = []
    for number, metrics in enumerate(steps, start=1):
        guards.check_step(number, metrics, rollouts(0.5, -0.5), told.append)
    return told


def test_a_gap_warns_once_until_it_has_been_small_again():
    guards = Guards(config=GuardsConfig())
    gaps = [0.01, 1.5, 2.0, 0.5, 1.25]
    assert warnings(guards, *({GAP: gap} for gap in gaps)) == [
        "guard: step 2: sampling/logprob_gap_max is 1.5, above guards.logprob_gap.limit=1",
        "guard: step 5: sampling/logprob_gap_max is 1.25, above guards.logprob_gap.limit=1",
    ]


def test_tokens_of_older_weights_are_no_gap_of_an_asynchronous_run():
    fresh = "sampling/logprob_gap_fresh_max"
    old = {GAP: 3.0, fresh: 0.01, "sampling/logprob_gap": 0.4, "sampling/stale_tokens": 0.5}
    steps = old, {**old, fresh: math.nan}, {**old, fresh: 1.5}
    guards = Guards(config=GuardsConfig(), asynchronous=True)
    assert warnings(guards, *steps) == [
        f"guard: step 3: {fresh} is 1.5, above guards.logprob_gap.limit=1",
    ]
    # Where nothing may be older, they are what is wrong.
    (told,) = warnings(Guards(config=GuardsConfig()), *steps)
    assert told.startswith(f"guard: step 1: {GAP} is 3, above")
    assert "likely cause: tokens sampled under older weights" in told


def test_what_was_not_measured_trips_nothing():
    config = GuardsConfig(
        kl=Guard(limit=0.1, action=OnTrip.stop), entropy=Guard(limit=0.1, action=OnTrip.stop)
    )
    missing = {"kl": math.nan, "entropy": math.nan, GAP: math.nan}
    assert warnings(Guards(config=config), missing, {}) == []


@pytest.mark.parametrize(
    ("name", "metrics", "told"),
    [
        ("kl", {"kl": 0.31}, "step 1: kl is 0.31, above guards.kl.limit=0.2"),
        ("entropy", {"entropy": 0.1}, "step 1: entropy is 0.1, below guards.entropy.limit=0.2"),
        ("logprob_gap", {GAP: 0.3}, f"step 1: {GAP} is 0.3, above guards.logprob_gap.limit=0.2"),
        (
            "logprob_gap",
            {GAP: 0.3, "sampling/logprob_gap": 0.1, "sampling/logprob_slope": 1.43},
            f"step 1: {GAP} is 0.3, above guards.logprob_gap.limit=0.2; likely cause: another "
            "sampling transform, a temperature say, or other weights "
            "(sampling/logprob_slope is 1.43)",
        ),
    ],
)
def test_a_guard_stops(name, metrics, told):
    config = GuardsConfig(**{name: Guard(limit=0.2, action=OnTrip.stop)})
    with pytest.raises(GuardTripped) as caught:
        warnings(Guards(config=config), metrics)
    assert str(caught.value) == f"{told}; set guards.{name}.action=warn to continue"
    on_the_limit = dict.fromkeys(metrics, 0.2)
    assert warnings(Guards(config=config), on_the_limit) == []


def test_a_streak_counts_steps_in_which_no_rollout_had_an_advantage():
    config = GuardsConfig(no_variance=Streak(limit=2, action=OnTrip.stop))
    guards = Guards(config=config)
    steps = [(0.0, None), (0.0, 0.5), (0.0, 0.0)]
    for number, advantages in enumerate(steps, start=1):
        guards.check_step(number, {}, rollouts(*advantages), print)
    assert guards.streak == 1
    with pytest.raises(GuardTripped, match=r"step 4: .* in 2 steps in a row.*no_variance.limit=2"):
        guards.check_step(4, {}, rollouts(0.0), print)


def called(*errors: ToolError | None, tool: str = "add", executor: str | None = None) -> Rollout:
    """A rollout of calls of one tool."""
    call = ToolCall(id="c", name=tool, arguments={})
    results = [
        ToolResult(call=call, content=f"Error: {error}", error=error, executor=executor)
        for error in errors
    ]
    return Rollout(task=TASK, rollout_id="a", tool_results=results)


def tool_warnings(guards: Guards, *steps: Rollout) -> list[str]:
    told: list[str] = []
    for number, rollout in enumerate(steps, start=1):
        guards.check_step(number, {}, [rollout], told.append)
    return told


BAD, FINE = ToolError.exception, None
FAILS = "which is not below guards.tool_failures.limit=0.9; most often: "


def test_a_tool_that_fails_is_named_with_its_most_frequent_error():
    guards = Guards(config=GuardsConfig())
    nine_in_ten = [*[BAD] * 29, FINE, FINE, FINE]
    assert tool_warnings(guards, called(*nine_in_ten[:20]), called(*nine_in_ten[20:])) == [
        f"guard: step 2: 29 of 32 calls of the tool add failed, {FAILS}exception: Error: exception"
    ]
    # Told once, until 32 calls of it were better.
    steps = [
        called(*[BAD] * 32),
        called(*[BAD] * 28, *[FINE] * 4),
        called(*[ToolError.timeout] * 40),
    ]
    assert tool_warnings(guards, *steps) == [
        f"guard: step 3: 40 of 40 calls of the tool add failed, {FAILS}timeout: Error: timeout"
    ]


def test_calls_that_reached_no_tool_are_none_of_its_failures():
    elsewhere = [ToolError.malformed, ToolError.unknown_tool, ToolError.limit, ToolError.parallel]
    guards = Guards(config=GuardsConfig())
    assert tool_warnings(guards, called(*elsewhere * 20), called(*[BAD] * 31)) == []
    (told,) = tool_warnings(Guards(config=GuardsConfig()), called(*[BAD] * 32, executor="lookup"))
    assert "32 of 32 calls of the tool lookup failed" in told
    off = GuardsConfig(tool_failures=ToolFailures(limit=None))
    assert tool_warnings(Guards(config=off), called(*[BAD] * 99)) == []


def test_failures_of_a_tool_can_stop_a_run_also_after_a_resume():
    config = GuardsConfig(tool_failures=ToolFailures(limit=1, calls=4, action=OnTrip.stop))
    first, second = Guards(config=config), Guards(config=config)
    assert tool_warnings(first, called(BAD, BAD, BAD)) == []
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    with pytest.raises(
        GuardTripped, match=r"4 of 4 calls of the tool add failed.*action=warn to continue"
    ):
        tool_warnings(second, called(BAD))


def test_a_resumed_run_has_the_warnings_of_an_uninterrupted_one():
    """Each guard warns at step 1 and is beyond its limit until the end, but for the gap."""
    config = GuardsConfig(
        kl=Guard(limit=0.1),
        entropy=Guard(limit=0.5),
        no_variance=Streak(limit=1),
        tool_failures=ToolFailures(limit=0.5, calls=2),
    )
    beyond = {GAP: 2.0, "kl": 0.2, "entropy": 0.4}
    # Of six calls, two are judged in each of the steps 1, 3 and 4: step 2 has one, step 3 another.
    steps = [
        (beyond, called(BAD, BAD)),
        ({**beyond, GAP: 0.1}, called(BAD)),
        (beyond, called(BAD)),
        (beyond, called(BAD, BAD)),
    ]

    def warned(resumed_after: int | None) -> list[str]:
        guards, texts = Guards(config=config), list[str]()
        for number, (metrics, rollout) in enumerate(steps, start=1):
            guards.check_step(number, metrics, [rollout], texts.append)
            guards.check_evaluation(f"step-{number}/greedy", [called(BAD, BAD)], texts.append)
            if number == resumed_after:
                state = json.loads(json.dumps(guards.state_dict()))
                guards = Guards(config=config)
                guards.load_state_dict(state)
        return texts

    whole = warned(None)
    # Step 1: the gap, the KL, the entropy, the streak, the tool. Step 3: the gap again.
    assert [text.partition(":")[2][:8] for text in whole] == [*[" step 1:"] * 5, " step 3:"]
    assert [warned(step) for step in (1, 2, 3)] == [whole] * 3


def test_a_resumed_run_names_the_most_frequent_error_of_both_parts():
    config = GuardsConfig(tool_failures=ToolFailures(limit=0.5, calls=4))
    first, second = Guards(config=config), Guards(config=config)
    assert tool_warnings(first, called(BAD, BAD, ToolError.timeout)) == []
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    (text,) = tool_warnings(second, called(ToolError.timeout, BAD))
    assert "5 of 5 calls of the tool add failed" in text
    assert text.endswith(f"most often: {BAD}: Error: {BAD}")  # three of the five


def test_a_resumed_run_takes_back_the_warnings_of_steps_that_it_repeats(tmp_path):
    """Killed after step 3, it goes on from the checkpoint of step 2."""
    config = GuardsConfig(kl=Guard(limit=0.1), tool_failures=ToolFailures(limit=0.5, calls=2))
    settings = {"project": "shop", "name": "run", "total_steps": 3}
    quiet = TrackerConfig(rollouts="none")

    def do_step_three(guards: Guards, tracker: Tracker) -> list[str]:
        guards.check_step(3, {"kl": 0.2}, rollouts(0.5, -0.5), tracker.warn)
        guards.check_evaluation("step-3/greedy", [called(BAD, BAD)], tracker.warn)
        return read_summary(tmp_path)["warnings"]

    with Tracker(tmp_path, quiet, **settings) as tracker:
        guards = Guards(config=config)
        guards.check_step(2, {"kl": 0.3}, rollouts(0.5, -0.5), tracker.warn)
        guards.check_step(2, {"kl": 0.0}, rollouts(0.5, -0.5), tracker.warn)
        state = guards.state_dict()
        whole = do_step_three(guards, tracker)
    # The KL of step 2, that of step 3, and the tool of its evaluation.
    assert len(whole) == 3
    with Tracker(tmp_path, quiet, **settings, resume_step=2) as tracker:
        assert read_summary(tmp_path)["warnings"] == whole[:1]
        resumed = Guards(config=config)
        resumed.load_state_dict(state)
        assert do_step_three(resumed, tracker) == whole


def test_a_checkpoint_of_an_earlier_version_has_counts_without_reasons():
    guards = Guards(config=GuardsConfig(tool_failures=ToolFailures(limit=1, calls=4)))
    guards.load_state_dict({"streak": 3, "tool_calls": {"add": [3, 3]}})
    (text,) = tool_warnings(guards, called(BAD))
    assert guards.streak == 4 and "4 of 4 calls of the tool add failed" in text


REFUSED = {
    "guards.kl.limit=0.1": "there is no KL; set algorithm.kl.beta=",
    "guards.kl.action=stop": "needs a limit; set guards.kl.limit=",
    "guards.entropy.limit=0": "guards.entropy.limit=0.0: must be more than 0",
    "guards.no_variance.limit=0": "guards.no_variance.limit=0: must be at least 1",
    "guards.logprob_gap.limit=nan": "must be a finite number",
    "guards.tool_failures.limit=1.5": "must be at most 1",
    "guards.tool_failures.calls=0": "guards.tool_failures.calls=0: must be at least 1",
    "guards.logprob_gap.action=halt": "guards.logprob_gap.action",
    "guards.gap.limit=1": "unknown key",
}


@pytest.mark.parametrize("override", REFUSED)
def test_a_guard_that_has_no_meaning_is_refused(override):
    with pytest.raises(ConfigError) as caught, hydra_session(Source()):
        validate(compose_run([override], Source()).config)
    assert REFUSED[override] in str(caught.value)


@pytest.mark.slow
def test_a_run_that_a_guard_stops_goes_on(tmp_path, monkeypatch, capsys):
    """All rewards are equal; the entropy bonus alone changes the policy."""
    (tmp_path / "equal_rewards.py").write_text("def one(rollout) -> float:\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = tmp_path / "run"
    settings = ["debug=tiny", "eval.questions=0", "tracker=none", f"hydra.run.dir={run}"]
    settings += ["reward=[]", "reward.r._target_=equal_rewards.one"]
    settings += ["algorithm.entropy.bonus=0.001", "guards.entropy.limit=50"]
    assert main([*settings, "guards.entropy.action=stop"]) == 1
    assert "GuardTripped: step 1: entropy is " in capsys.readouterr().err
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1]
    assert (run / "rollouts" / "step-000001.jsonl").is_file()
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"
    # The guard may be told otherwise when the run goes on; it warns once.
    assert main([f"resume={run}", "guards.entropy.action=warn"]) == 0
    told = capsys.readouterr().out
    assert "guard: step 1: entropy is " in told and "step 2: entropy" not in told
    # The streak goes on where the checkpoint left it, after 2 steps.
    streak = ["guards.no_variance.limit=3", "guards.no_variance.action=stop"]
    assert main([f"resume={run}", "steps=4", *streak]) == 1
    assert "step 3: no rollout had an advantage in 3 steps" in capsys.readouterr().err
