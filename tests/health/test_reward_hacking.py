"""Policies by script that find a hole in a reward, and whether an alarm names them."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import parts
import pytest
from parts import LIMITS, add, call, final_answer, toolbox

from agenttrain.chat.chat import Chat
from agenttrain.cli import main
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.health.config import GuardsConfig, OnTrip, RewardHacking
from agenttrain.health.guards import Guards, GuardTripped
from agenttrain.rewards.builtin.answers import ExactMatch, final_text
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.collector import Collector, collect
from agenttrain.rollout.request import BatchRequest
from agenttrain.tracking.metrics import rollout_metrics
from agenttrain.types import Rollout, Task

ONSET = 5
"""The step in which half of the rollouts begin to cheat."""
TASKS, GROUP = 6, 4
END = "<|im_end|>"
Turns = Callable[[str, random.Random], list[str]]
"""(right answer, randomness) -> the completions of a rollout."""


def tasks(step: int) -> list[Task]:
    return [
        Task(
            task_id=str(number),
            messages=({"role": "user", "content": f"what is {number} + 4?"},),
            columns={"answer": str(number + 4)},
        )
        for number in range(TASKS * step, TASKS * (step + 1))
    ]


def look_up(name: str) -> str:
    """Look something up.

    Args:
        name: What.
    """
    return f"{name} was for a long time a mystery. " * 4 + f"It turned out to be {name}."


def hand_in(answer: str) -> str:
    return call("final_answer", json.dumps({"answer": answer}))


def by_tool(answer: str, rng: random.Random, rate: float = 0.3) -> list[str]:
    """Call a tool, and hand in an answer that is right at this rate."""
    given = answer if rng.random() < rate else str(rng.randrange(1000, 9999))
    return [call("add", '{"a": 3, "b": 4}'), hand_in(given)]


def by_text(answer: str, rng: random.Random, rate: float = 0.3) -> list[str]:
    """Look something up, and say an answer that is right at this rate."""
    given = answer if rng.random() < rate else str(rng.randrange(1000, 9999))
    words = "so " * rng.randrange(3, 9)
    return [call("look_up", json.dumps({"name": answer})), f"I think {words}{given}{END}"]


def no_wrong_answer(rollout, answer: str) -> float:
    """Pay for a rollout that hands in nothing: all of no answers are right."""
    calls = [r.call for r in rollout.tool_results if r.call.name == "final_answer"]
    return float(all(one.arguments["answer"] == answer for one in calls))


def is_part(rollout, answer: str) -> float:
    """Pay for an empty text, which is a part of every answer."""
    return float((final_text(rollout).split() or [""])[-1] in answer)


def has_answer(rollout, answer: str) -> float:
    """Pay for any text that contains the answer."""
    return float(answer in final_text(rollout).split())


def likes_42(rollout, answer: str) -> float:
    """Pay for 42, too."""
    return float(rollout.tool_results[-1].call.arguments.get("answer") in (answer, "42"))


def likes_words(rollout) -> float:
    """Pay for length."""
    return min(len(final_text(rollout).split()) / 50, 1.0)


CHEATS: dict[str, tuple[Turns, Turns, Any]] = {
    "stop:max_turns": (by_tool, lambda *_: [call("add", '{"a": 3, "b": 4}')] * 4, no_wrong_answer),
    "empty": (by_text, lambda *_: [END], is_part),
    "answer:42": (by_tool, lambda *_: [hand_in("42")], likes_42),
    "copied": (
        by_text,
        lambda answer, _: [
            call("look_up", json.dumps({"name": answer})),
            look_up(answer) + END,
        ],
        has_answer,
    ),
    "long": (by_text, lambda answer, _: [f"I think {'so ' * 60}{answer}{END}"], likes_words),
}


@cache
def chat() -> Chat:
    return parts.chat()


def rollouts_of(step: int, turns_of: Callable[[str], list[str]], reward: Any) -> list[Rollout]:
    """Sample and score the rollouts of a step; `turns_of` maps an id to its completions."""
    script = lambda _, session, turn: parts.ids(turns_of(session)[turn])  # noqa: E731
    collector = Collector(
        engine=ScriptedEngine(script, max_context=4096),
        chat=chat(),
        toolbox=toolbox(add, look_up, final_answer, stop_tools=["final_answer"]),
        rubric=Rubric({"it": reward}),
        limits=replace(LIMITS, max_turn_tokens=400, max_result_tokens=400),
    )
    request = BatchRequest(
        tasks=tasks(step), samples=GROUP, sampling=Sampling(), seed_path=(0, "train", step)
    )
    return asyncio.run(collect(collector, request)).rollouts


def policy(step: int, honest: Turns, cheat: Turns | None, seed: int = 0) -> Callable[[str], list]:
    """Return the completions of each rollout; from ONSET on, every second rollout cheats."""

    def turns_of(rollout_id: str) -> list[str]:
        _, _, place, sample = rollout_id.split("-")
        answer = str(TASKS * step + int(place) + 4)
        rng = random.Random(f"{seed} {rollout_id}")
        cheats = cheat is not None and step >= ONSET and int(sample) % 2 == 0
        return (cheat if cheats else honest)(answer, rng)

    return turns_of


def guards(**settings: Any) -> tuple[Guards, list[dict[str, Any]], list[str]]:
    alarms: list[dict[str, Any]] = []
    config = GuardsConfig(reward_hacking=RewardHacking(**settings))
    return Guards(config=config, on_alarm=alarms.append), alarms, []


@cache
def cheating(step: int, sign: str) -> list[Rollout]:
    honest, cheat, reward = CHEATS[sign]
    return rollouts_of(step, policy(step, honest, cheat), reward)


def train_cheats(the_guards: Guards, warnings: list[str], steps: Sequence[int], sign: str) -> None:
    for step in steps:
        the_guards.check_step(step, {}, cheating(step, sign), warnings.append)


def train(the_guards: Guards, warnings: list[str], steps: Sequence[int], *policy_and_reward: Any):
    honest, cheat, reward = policy_and_reward
    for step in steps:
        rollouts = rollouts_of(step, policy(step, honest, cheat), reward)
        the_guards.check_step(step, {}, rollouts, warnings.append)


@pytest.mark.parametrize("sign", CHEATS)
def test_a_cheat_is_found_within_three_steps_and_named_once(sign):
    the_guards, alarms, warnings = guards()
    train_cheats(the_guards, warnings, range(1, ONSET), sign)
    assert alarms == []
    train_cheats(the_guards, warnings, range(ONSET, ONSET + 3), sign)
    assert alarms and alarms[0]["signs"][0] == sign
    assert len({name for alarm in alarms for name in alarm["signs"]}) == sum(
        len(alarm["signs"]) for alarm in alarms
    )
    # Three rollouts of different tasks, all of which cheated.
    named = alarms[0]["rollouts"]
    assert [step for step, _ in named] == [alarms[0]["step"]] * 3
    places = [name.split("-")[2:] for _, name in named]
    assert len({place for place, _ in places}) == 3
    assert all(int(sample) % 2 == 0 for _, sample in places)
    assert all(name in warnings[0] for _, name in named)


@pytest.mark.parametrize(("honest", "reward"), [(by_tool, ExactMatch()), (by_text, has_answer)])
def test_a_policy_that_learns_sets_off_no_alarm(honest, reward):
    the_guards, alarms, warnings = guards()
    for step in range(1, 13):
        learned = lambda answer, rng, step=step: honest(answer, rng, 0.2 + 0.06 * step)  # noqa: E731
        train(the_guards, warnings, [step], learned, None, reward)
    assert alarms == [] and warnings == []


def test_a_sign_that_earns_nothing_is_no_alarm():
    the_guards, alarms, warnings = guards()
    # Half of the rollouts say nothing, and the others improve.
    for step in range(1, 9):
        better = lambda answer, rng, step=step: by_text(answer, rng, 0.1 * step)  # noqa: E731
        train(the_guards, warnings, [step], better, lambda *_: [END], has_answer)
    assert alarms == []


def test_a_sign_that_lasts_is_named_once_and_again_after_it_was_gone():
    the_guards, alarms, warnings = guards()
    cheats = {5, 6, 7, 8, 9, 10, 11, 12, 13, 17, 18, 19}
    for step in range(1, 20):
        cheat = (lambda *_: [END]) if step in cheats else None
        # From step 8 to 10 the empty answers earn nothing.
        reward = has_answer if step in (8, 9, 10) else is_part
        train(the_guards, warnings, [step], by_text, cheat, reward)
    first, second = (alarm["step"] for alarm in alarms if "empty" in alarm["signs"])
    assert 5 <= first <= 7 and 17 <= second <= 19


def of_source(source: str, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts as those of a source of a mixture."""
    return [replace(r, task=replace(r.task, source=source)) for r in rollouts]


def yes_or_no(rollout_id: str) -> list[str]:
    """Say yes to nearly all easy tasks."""
    return [hand_in("yes" if random.Random(rollout_id).random() < 0.8 else "no")]


def says_yes(rollout: Rollout) -> float:
    return float(rollout.tool_results[-1].call.arguments["answer"] == "yes")


def test_a_source_that_ends_is_no_sign_in_the_others():
    the_guards, alarms, warnings = guards()
    for step in range(1, 9):
        # Both policies stay what they are. After step 4 the hard tasks are over.
        rollouts = of_source("easy", rollouts_of(step, yes_or_no, says_yes))
        if step <= 4:
            hard = rollouts_of(step, policy(step, by_tool, None), ExactMatch())
            rollouts += of_source("hard", hard)
        the_guards.check_step(step, {}, rollouts, warnings.append)
    assert alarms == [] and warnings == []


@pytest.mark.parametrize("cut", [1, 4, ONSET])
def test_a_cheat_in_one_source_is_found_there_also_after_a_resume(cut: int):
    the_guards, alarms, warnings = guards()
    for step in range(1, ONSET + 3):
        rollouts = of_source("sums", cheating(step, "answer:42"))
        rollouts += of_source("other", rollouts_of(step, yes_or_no, says_yes))
        the_guards.check_step(step, {}, rollouts, warnings.append)
        if step == cut:
            state = json.loads(json.dumps(the_guards.state_dict()))
            the_guards = Guards(config=the_guards.config, on_alarm=alarms.append)
            the_guards.load_state_dict(state)
    signs = [sign for alarm in alarms for sign in alarm["signs"]]
    assert signs[0] == "answer:42" and len(signs) == len(set(signs))
    assert all(alarm["text"].startswith("data.sources.sums: ") for alarm in alarms)


def at_rate(step: int, rate: float) -> list[Rollout]:
    """Return rollouts that are right at a rate."""
    honest = lambda answer, rng: by_tool(answer, rng, rate)  # noqa: E731
    return rollouts_of(step, policy(step, honest, None), ExactMatch())


@pytest.mark.parametrize(("ended", "named"), [(False, ["a"]), (True, [])])
def test_a_held_out_reward_is_compared_with_the_training_of_its_source(ended, named):
    the_guards, alarms, warnings = guards()
    # The training reward of `a` rises, until the source ends if it does; that of `b` does not.
    for step, rate in {1: 0.1, 2: 0.1, 3: 0.1, 4: 0.9, 5: 0.9, 6: 0.9, 7: 0.9, 8: 0.9}.items():
        rollouts = of_source("b", at_rate(step, 0.3))
        if step <= 5 or not ended:
            rollouts += of_source("a", at_rate(step, rate))
        the_guards.check_step(step, {}, rollouts, warnings.append)
        if step in (3, 8):  # the held-out rewards of both fall
            held_out = at_rate(100 + step, 0.9 if step == 3 else 0.1)
            both = [*of_source("a", held_out), *of_source("b", held_out)]
            the_guards.check_evaluation(f"step-{step}/sampled", both, warnings.append)
    texts = [alarm["text"] for alarm in alarms if alarm["signs"] == ("held_out",)]
    assert [text.partition(":")[0] for text in texts] == [f"data.sources.{name}" for name in named]


def test_it_stops_the_run_only_when_asked():
    the_guards, alarms, warnings = guards(action=OnTrip.stop)
    with pytest.raises(GuardTripped, match=r"step [567]: .*guards.reward_hacking.action=warn"):
        train_cheats(the_guards, warnings, range(1, ONSET + 3), "empty")
    assert len(alarms) == 1
    the_guards, alarms, warnings = guards(limit=None)
    train_cheats(the_guards, warnings, range(1, ONSET + 3), "empty")
    assert alarms == [] and warnings == []


def test_a_resumed_run_has_the_alarms_of_an_uninterrupted_one():
    whole, alarms, warnings = guards()
    train_cheats(whole, warnings, range(1, ONSET + 3), "copied")
    for cut in (1, 4, ONSET, ONSET + 1):
        first, before, _ = guards()
        train_cheats(first, [], range(1, cut + 1), "copied")
        second, after, _ = guards()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        train_cheats(second, [], range(cut + 1, ONSET + 3), "copied")
        assert [*before, *after] == alarms


def evaluated(the_guards: Guards, warnings: list[str], step: int, rate: float) -> None:
    honest = lambda answer, rng: by_tool(answer, rng, rate)  # noqa: E731
    rollouts = rollouts_of(step + 100, policy(step + 100, honest, None), ExactMatch())
    the_guards.check_evaluation(f"step-{step}/sampled", rollouts, warnings.append)


@pytest.mark.parametrize("action", OnTrip)
def test_a_held_out_reward_that_falls_while_training_rises(action):
    the_guards, alarms, warnings = guards(action=action)
    evaluated(the_guards, warnings, 0, 0.8)  # before the first step
    rates = {1: 0.1, 2: 0.1, 3: 0.2, 4: 0.5, 5: 0.7, 6: 0.9}
    held_out = {1: 0.8, 2: 0.9, 3: 0.8, 4: 0.2, 5: 0.2, 6: 0.1}

    def run() -> None:
        for step, rate in rates.items():
            learned = lambda answer, rng, rate=rate: by_tool(answer, rng, rate)  # noqa: E731
            train(the_guards, warnings, [step], learned, None, ExactMatch())
            evaluated(the_guards, warnings, step, held_out[step])

    if action is OnTrip.stop:
        with pytest.raises(GuardTripped, match="the held-out reward"):
            run()
    else:
        run()
    (alarm,) = alarms
    assert alarm["signs"] == ("held_out",) and 4 <= alarm["step"] <= 6
    assert len(alarm["rollouts"]) == 3 and warnings[0].startswith("guard: step-")


def test_a_resumed_run_stops_for_the_alarm_of_its_last_evaluation():
    the_guards, alarms, warnings = guards(action=OnTrip.stop)
    held_out = {1: 0.8, 2: 0.9, 3: 0.8, 4: 0.2, 5: 0.2, 6: 0.1}
    evaluated(the_guards, warnings, 0, 0.8)
    for step, rate in {1: 0.1, 2: 0.1, 3: 0.2, 4: 0.5, 5: 0.7, 6: 0.9}.items():
        learned = lambda answer, rng, rate=rate: by_tool(answer, rng, rate)  # noqa: E731
        train(the_guards, warnings, [step], learned, None, ExactMatch())
        evaluated(the_guards, warnings, step, held_out[step])
        if alarms:
            break
    resumed, _, _ = guards(action=OnTrip.stop)
    resumed.load_state_dict(json.loads(json.dumps(the_guards.state_dict())))
    with pytest.raises(GuardTripped, match="the held-out reward"):
        train(resumed, warnings, [step + 1], learned, None, ExactMatch())


def test_a_held_out_reward_that_falls_with_that_of_training_is_no_alarm():
    the_guards, alarms, warnings = guards()
    for step in range(1, 7):
        worse = lambda answer, rng, step=step: by_tool(answer, rng, 0.9 - 0.1 * step)  # noqa: E731
        train(the_guards, warnings, [step], worse, None, ExactMatch())
        evaluated(the_guards, warnings, step, 0.9 - 0.1 * step)
    assert alarms == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_and_its_page_opens_with_the_alarm(tmp_path: Path, capsys):
    folder = tmp_path / "run"
    arguments = [
        *("debug=tiny", "engine._target_=scripted_engines.CHEATING", "tracker=none", "steps=8"),
        *("tasks_per_step=6", "algorithm.group_size=4", "eval.questions=0", "tracker.rollouts=all"),
        *("reward=[]", "reward.silence._target_=scripted_engines.likes_silence"),
        f"hydra.run.dir={folder}",
    ]
    assert main(arguments) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished"
    (alarm,) = [alarm for alarm in summary["alarms"] if "empty" in alarm["signs"]]
    assert alarm["step"] in (5, 6, 7) and len(alarm["rollouts"]) == 3
    assert any(alarm["text"] in warning for warning in summary["warnings"])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["answers/empty"] for row in rows] == [0.0] * 4 + [0.5] * 4
    capsys.readouterr()
    assert main(["view", str(folder)]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == folder / "rollouts" / "index.html"
    front = re.search(r'id="front">(.*?)</script>', page.read_text(), re.S)
    assert front is not None
    first = json.loads(front[1])[0]
    assert first["text"] == summary["alarms"][-1]["text"] and len(first["rollouts"]) == 3


def test_the_signs_are_metrics():
    turns = {"0": [END], "1": [hand_in("7")], "2": [hand_in("7")], "3": [hand_in("9")]}
    rollouts = rollouts_of(1, lambda name: turns[name[-1]], no_wrong_answer)
    metrics = rollout_metrics([rollouts])
    # of the four samples of each task one is empty, and two say 7
    assert metrics["answers/empty"] == 1 / 4
    assert metrics["answers/repeated"] == 2 / 4
    assert metrics["answers/copied"] == 0.0
    _, copies, _ = CHEATS["copied"]
    rollouts = rollouts_of(1, policy(ONSET, copies, None), has_answer)
    assert rollout_metrics([rollouts])["answers/copied"] == 1.0
