"""Environments: an instance per rollout, and a life cycle that holds whatever happens."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import parts
import pytest
import worlds
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import LIMITS, call, ids, script, toolbox

from agenttrain.algorithms.credit import set_advantages
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.environments.config import EnvironmentSettings
from agenttrain.environments.environment import EnvironmentKind
from agenttrain.environments.environments import Environments
from agenttrain.rewards.builtin.tools import environment, turn_rewards
from agenttrain.rewards.function import RewardError
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.collector import Collector, NoRollouts
from agenttrain.rollout.config import OnToolFailure, RolloutRequest
from agenttrain.rollout.ledger import verify
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.rollout.row_tools import RowTools
from agenttrain.tools.config import ToolLimits
from agenttrain.tools.toolbox import StuckTools
from agenttrain.tracking.rollouts import read_rollout, rollout_record
from agenttrain.types import (
    Origin,
    Rollout,
    StopReason,
    Task,
    ToolError,
    ToolUnavailable,
    TurnReward,
)
from agenttrain.utils.json_lines import dumps
from agenttrain.utils.locate import class_method

BYE = "I give up.<|im_end|>"


def move(steps: int) -> str:
    return call("move", f'{{"steps": {steps}}}')


@pytest.fixture(autouse=True)
def fresh() -> None:
    worlds.Life.events = []


def environments(cls: type = worlds.Maze, **settings: Any) -> Environments:
    kind = EnvironmentKind("world", cls, settings=EnvironmentSettings(**settings))
    return Environments({"world": kind})


def task(number: int = 0, prompt: str | None = "Find the exit.", **columns: Any) -> Task:
    messages = () if prompt is None else ({"role": "user", "content": prompt},)
    return Task(task_id=f"t{number}", messages=messages, columns={"exit": 3, **columns})


async def arun(
    *answers: str,
    worlds_: Environments,
    the_task: Task | None = None,
    engine: ScriptedEngine | None = None,
    seed: int = 0,
    group_seed: int = 0,
    **limits: Any,
) -> Rollout:
    chat, tools = parts.chat(), toolbox()
    done = await run_rollout(
        RolloutRequest(
            task=the_task or task(), sampling=Sampling(seed=seed), group_seed=group_seed
        ),
        RolloutContext(
            engine=engine or ScriptedEngine(script(*answers)),
            chat=chat,
            toolbox=tools,
            limits=replace(LIMITS, **limits),
            environments=worlds_,
        ),
    )
    if done.trajectories[0].spans:
        verify(done, chat, RowTools(done.task, tools, worlds_).schemas)
    return done


def run(*answers: str, worlds_: Environments, **keywords: Any) -> Rollout:
    return asyncio.run(arun(*answers, worlds_=worlds_, **keywords))


def life() -> list[str]:
    """What happened, in order, where only one instance lived."""
    assert len({number for _, number in worlds.Life.events}) == 1
    return [what for what, _ in worlds.Life.events]


def test_a_rollout_through_an_environment():
    done = run(move(1), move(2), worlds_=environments())
    assert done.stop_reason is StopReason.environment_done
    assert [m["content"] for m in done.trajectories[0].messages if m["role"] == "user"] == [
        "Find the exit.",
        "The exit is 3 steps to the right.",
    ]
    assert [m["content"] for m in done.trajectories[0].messages if m["role"] == "tool"] == [
        "at 1",
        "out",
    ]
    assert done.environment_reward == 1.0
    assert life() == ["made", "reset", "closed"]
    # What reset said belongs to the prompt: it is not trained on and not counted.
    assert done.trajectories[0].spans[0].origin is Origin.prompt
    assert len(done.task.messages) == 2


def test_run_wide_tools_stand_beside_those_of_the_environment():
    both = call("add", '{"a": 3, "b": 4}').replace("<|im_end|>", "") + "\n" + move(1)
    done = run(both, BYE, worlds_=environments())
    assert [r.content for r in done.tool_results] == ["7", "at 1"]
    assert done.stop_reason is StopReason.completed
    assert done.environment_reward == pytest.approx(1 / 3)


def test_calls_of_an_environment_run_in_order_and_none_after_the_end():
    def several(*steps: int) -> str:
        return "\n".join(move(n).replace("<|im_end|>", "") for n in steps) + "<|im_end|>"

    done = run(several(1, 1, 1, 1), worlds_=environments())
    assert [r.content for r in done.tool_results[:3]] == ["at 1", "at 2", "out"]
    assert done.tool_results[3].error is ToolError.limit
    assert "the episode is over" in done.tool_results[3].content
    assert done.stop_reason is StopReason.environment_done
    assert len([m for m in done.trajectories[0].messages if m["role"] == "tool"]) == 4


def test_what_a_method_raises_is_a_reply_and_the_episode_goes_on():
    done = run(move(101), move(3), worlds_=environments())
    assert done.tool_results[0].content == "Error: ValueError: too far"
    assert done.stop_reason is StopReason.environment_done


def test_an_unknown_call_names_all_tools_there_are():
    done = run(call("mvoe", '{"steps": 1}'), BYE, worlds_=environments())
    assert done.tool_results[0].error is ToolError.unknown_tool
    assert "(did you mean 'move'?); tools: add, final_answer, move, look" in (
        done.tool_results[0].content
    )


def test_seeds_repeat_and_a_group_shares_one():
    made: list[tuple[int, int]] = []

    class Seeded(worlds.Maze):
        def close(self) -> None:
            made.append(self.seeds)

    for seed in (1, 2, 1):
        run(BYE, worlds_=environments(Seeded), seed=seed, group_seed=5)
    assert made[0] == made[2]
    assert made[0][0] != made[1][0]
    assert made[0][1] == made[1][1]


def test_a_row_without_a_prompt_is_asked_by_the_reset():
    done = run("7<|im_end|>", worlds_=environments(worlds.Guesser), the_task=task(prompt=None))
    assert done.trajectories[0].messages[0] == {"role": "user", "content": "guess a number"}


def test_nobody_asks_anything():
    done = run(BYE, worlds_=environments(worlds.Picky), the_task=task(prompt=None))
    assert done.stop_reason is StopReason.error
    assert "there is no prompt: the row has none, and reset gave no message" in str(done.error)
    assert life() == ["made", "closed"]


def test_the_environment_answers_as_a_user():
    done = run("5<|im_end|>", "6<|im_end|>", "7<|im_end|>", worlds_=environments(worlds.Guesser))
    said = [m["content"] for m in done.trajectories[0].messages]
    assert said[2:] == ["5", "wrong, again", "6", "wrong, again", "7", "right"]
    assert done.stop_reason is StopReason.environment_done
    assert done.environment_reward == 1.0
    # The last user message opens no turn of the assistant.
    assert parts.chat().decode(done.trajectories[0].token_ids[-12:]).endswith("right<|im_end|>\n")


def test_a_user_that_says_nothing_ends_the_conversation():
    done = run("quit<|im_end|>", worlds_=environments(worlds.Guesser))
    assert done.stop_reason is StopReason.completed
    assert done.environment_reward is None


def test_scripted_user_turns_come_before_the_environment():
    the_task = replace(task(), user_turns=("and now?",))
    done = run(
        "5<|im_end|>", "7<|im_end|>", worlds_=environments(worlds.Guesser), the_task=the_task
    )
    assert [m["content"] for m in done.trajectories[0].messages[2:]] == [
        "5",
        "and now?",
        "7",
        "right",
    ]


def test_a_user_reply_at_the_turn_limit():
    done = run("5<|im_end|>", worlds_=environments(worlds.Guesser), max_turns=1)
    assert done.stop_reason is StopReason.max_turns
    assert done.trajectories[0].messages[-1]["role"] == "assistant"


@pytest.mark.parametrize(
    ("cls", "row", "error", "events"),
    [
        (
            worlds.Picky,
            {"bad": True},
            "environment 'world': its reset failed with ConnectionError: the simulator is down",
            ["made", "closed"],
        ),
        (
            worlds.DoneAtOnce,
            {},
            "`done` is true before the first turn; reset must make it false",
            ["made", "closed"],
        ),
    ],
)
def test_what_cannot_start_ends_as_an_error_and_is_closed(cls, row, error, events):
    done = run(BYE, worlds_=environments(cls), the_task=task(**row))
    assert (done.stop_reason, done.turns) == (StopReason.error, 0)
    assert error in str(done.error)
    assert life() == events


def test_a_constructor_that_takes_too_long_is_closed_when_it_is_done():
    async def scenario() -> Rollout:
        done = await arun(BYE, worlds_=environments(worlds.SlowToMake, hook_timeout_s=0.05))
        while len(worlds.Life.events) < 2:
            await asyncio.sleep(0.01)
        return done

    done = asyncio.run(scenario())
    assert "its constructor took too long (it took longer than 0.05 s)" in str(done.error)
    assert "environment.world.hook_timeout_s=0.05 is the limit" in str(done.error)
    assert life() == ["made", "closed"]


class Slow(Exception):
    """An error whose text takes longer than any limit here."""

    def __str__(self) -> str:
        time.sleep(3)
        return "at last"


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (SystemExit(3), "its reset failed with RuntimeError: SystemExit: 3"),
        (KeyboardInterrupt(), "its reset failed with RuntimeError: KeyboardInterrupt"),
        (Slow(), "its reset took too long"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_reset_raises_stays_in_the_environment(raised, told, is_async):
    class World(worlds.Life):
        def reset(self) -> None:
            raise raised

    class AsyncWorld(worlds.Life):
        async def reset(self) -> None:
            await asyncio.sleep(0)
            raise raised

    world = environments(AsyncWorld if is_async else World, hook_timeout_s=0.3)
    rollout = run(BYE, worlds_=world)
    assert rollout.stop_reason is StopReason.error
    assert told in str(rollout.error)


def test_messages_of_a_reset_that_cannot_be_rendered():
    class World(worlds.Life):
        def reset(self) -> list[Any]:
            return [{"role": "assistant", "content": "I look.", "tool_calls": "look()"}]

    done = run(BYE, worlds_=environments(World))
    assert (done.stop_reason, done.turns) == (StopReason.error, 0)
    text = "environment 'world': its reset gave messages that cannot be shown: a message of the "
    assert str(done.error).startswith(f"{text}role assistant: tool_calls are no JSON")
    assert life()[-1] == "closed"


def test_a_reset_that_takes_too_long():
    done = run(BYE, worlds_=environments(worlds.SlowToReset, hook_timeout_s=0.3))
    assert "its reset took too long" in str(done.error)
    assert life() == ["made", "closed"]


def test_a_call_that_takes_too_long_is_told_and_the_instance_is_not_used_again():
    the_worlds = environments(worlds.Stuck, timeout_s=0.05)
    the_worlds.kinds["world"].pooled = True
    done = run(call("wait", "{}"), BYE, worlds_=the_worlds)
    assert done.tool_results[0].error is ToolError.timeout
    assert done.stop_reason is StopReason.completed
    assert life() == ["made", "waiting", "closed"]
    assert the_worlds.kinds["world"].live == 0


def test_calls_that_outlive_their_rollouts_stay_counted_and_stop_the_run():
    gate = threading.Event()

    class Hangs:
        def wait(self) -> str:
            """Wait."""
            gate.wait(30)
            return "over"

    settings = EnvironmentSettings(timeout_s=0.05, hook_timeout_s=0.05)
    kind = EnvironmentKind("world", Hangs, settings=settings)
    the_worlds = Environments({"world": kind}, max_stuck=1)
    for count in (1, 2):
        assert run(call("wait", "{}"), BYE, worlds_=the_worlds).stop_reason is StopReason.completed
        assert the_worlds.stuck == ("environment world",) * count
    with pytest.raises(StuckTools, match=r"max_stuck_calls=1: 2 calls of env.*world \(2\)"):
        run(BYE, worlds_=the_worlds)
    gate.set()
    while the_worlds.stuck:
        time.sleep(0.005)
    assert run(BYE, worlds_=the_worlds).stop_reason is StopReason.completed


@pytest.mark.parametrize("on_tool_failure", list(OnToolFailure))
def test_broken_infrastructure_of_a_method_is_tried_once_and_no_reply(on_tool_failure):
    class Down(worlds.Life):
        def go(self) -> str:
            """Go."""
            self._note("tried")
            raise ToolUnavailable("the simulator is down")

    def play() -> Rollout:
        return run(call("go", "{}"), worlds_=environments(Down), on_tool_failure=on_tool_failure)

    if on_tool_failure is OnToolFailure.error:
        with pytest.raises(ToolUnavailable, match="the simulator is down"):
            play()
    else:
        done = play()
        assert (done.stop_reason, done.environment_reward) == (StopReason.error, None)
        assert "the simulator is down" in str(done.error)
    assert life() == ["made", "tried", "closed"]


def test_the_limit_of_calls_of_a_method():
    done = run(move(1), move(1), BYE, worlds_=environments(max_calls=1))
    assert [r.error for r in done.tool_results] == [None, ToolError.limit]
    assert done.stop_reason is StopReason.completed


def test_the_rollout_times_out_inside_a_call():
    done = run(call("wait", "{}"), worlds_=environments(worlds.Stuck), timeout_s=0.1)
    assert done.stop_reason is StopReason.timeout
    assert life() == ["made", "waiting", "closed"]


def test_an_interrupt_closes_what_is_open():
    async def scenario() -> None:
        rollout = asyncio.create_task(
            arun(call("wait", "{}"), worlds_=environments(worlds.Stuck, timeout_s=60))
        )
        while not any(what == "waiting" for what, _ in worlds.Life.events):
            await asyncio.sleep(0.005)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

    asyncio.run(scenario())
    assert life() == ["made", "waiting", "closed"]


def test_an_interrupt_while_it_is_made():
    async def scenario() -> None:
        rollout = asyncio.create_task(arun(BYE, worlds_=environments(worlds.SlowToMake)))
        while not worlds.Life.events:
            await asyncio.sleep(0.005)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        while len(worlds.Life.events) < 2:
            await asyncio.sleep(0.005)

    asyncio.run(scenario())
    assert life() == ["made", "closed"]


def test_a_close_that_fails_is_told_once(capsys):
    class Clumsy(worlds.Life):
        def close(self) -> None:
            raise OSError("no such window")

    the_worlds = environments(Clumsy)
    assert [run(BYE, worlds_=the_worlds).stop_reason for _ in range(2)] == [
        StopReason.completed
    ] * 2
    told = capsys.readouterr().err
    assert told.count("its close failed with OSError: no such window (logged once)") == 1


def test_a_reward_that_fails_stops_the_run_as_other_rewards_do():
    with pytest.raises(RewardError, match=r"reward 'environment' .*'much'; a reward is a finite"):
        run(BYE, worlds_=environments(worlds.BadReward))
    assert life() == ["made", "closed"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_judged_as_that_of_a_function(value):
    class Odd(worlds.Life):
        def reward(self, rollout) -> float:
            return value

    done = run(BYE, worlds_=environments(Odd))
    rubric = Rubric({"environment": environment})
    with pytest.raises(RewardError, match=r"reward 'environment' .* a reward is a finite number"):
        asyncio.run(rubric.score([done]))
    (reason,) = asyncio.run(rubric.lenient().score([done]))  # in an evaluation
    assert f"it returned {value}" in reason and done.reward is None
    # So it is again where a crash is replayed.
    again = read_rollout(json.loads(dumps(rollout_record(done))), done.task)
    assert again.environment_reward is not None and math.isnan(again.environment_reward)


def test_everything_blocking_runs_in_one_thread_off_the_event_loop():
    who = call("whereabouts", "{}")
    done = run(who, who, BYE, worlds_=environments(worlds.Picky))
    threads = {result.content.split()[1] for result in done.tool_results}
    assert len(threads) == 1
    assert threads != {str(threading.get_ident())}


def collector(the_worlds: Environments, answer: Any, **limits: Any) -> Collector:
    return Collector(
        engine=ScriptedEngine(answer),
        chat=parts.chat(),
        toolbox=toolbox(),
        rubric=Rubric({"environment": environment}),
        limits=replace(LIMITS, **limits),
        environments=the_worlds,
    )


def test_two_hundred_rollouts_each_with_a_world_of_its_own():
    the_worlds = environments()

    # Rollout (task, sample) walks task + 1 steps at once, then sample more; the exit is far away.
    def answer(token_ids, session, turn):
        task_number, sample = (int(part) for part in session.split("-")[2:])
        return ids([move(task_number + 1), move(sample), BYE][turn])

    tasks = [task(number, exit=1000) for number in range(50)]
    collecting = collector(the_worlds, answer)
    collected = asyncio.run(parts.acollect(collecting, tasks, samples=4))
    assert [[r.environment_reward for r in group] for group in collected.groups] == [
        [(number + 1 + sample) / 1000 for sample in range(4)] for number in range(50)
    ]
    assert [r.reward for r in collected.groups[7]] == [0.008, 0.009, 0.01, 0.011]
    assert Counter(what for what, _ in worlds.Life.events) == {
        "made": 200,
        "reset": 200,
        "closed": 200,
    }
    assert collected.uneven_prompts == 0


def test_a_pool_makes_no_more_than_run_at_once_and_is_closed_with_the_run():
    the_worlds = environments(worlds.PooledMaze)

    async def scenario() -> None:
        tasks = [task(number) for number in range(10)]
        collecting = collector(the_worlds, script(move(3)), concurrency=3, deterministic=False)
        collected = await parts.acollect(collecting, tasks, samples=2)
        assert [r.environment_reward for r in collected.rollouts] == [1.0] * 20
        assert the_worlds.kinds["world"].live <= 3
        await the_worlds.aclose()
        await the_worlds.aclose()

    asyncio.run(scenario())
    counts = Counter(what for what, _ in worlds.Life.events)
    assert counts["made"] == counts["closed"] <= 3
    assert counts["reset"] == 20


def test_failing_resets_are_dropped_and_counted_never_scored():
    the_worlds = environments(worlds.Picky)
    tasks = [task(0), task(1, bad=True)]
    collected = asyncio.run(parts.acollect(collector(the_worlds, script(BYE)), tasks, samples=2))
    assert collected.dropped == 2
    assert [r.stop_reason for r in collected.groups[1]] == [StopReason.error] * 2
    assert [r.reward for r in collected.groups[1]] == [None, None]
    with pytest.raises(NoRollouts, match=r"all 1 rollouts failed .*the simulator is down"):
        asyncio.run(parts.acollect(collector(the_worlds, script(BYE)), [task(1, bad=True)]))


def test_prompts_that_differ_within_a_group_are_counted_and_told_once(capsys):
    class Dice(worlds.Life):
        def reset(self, seed: int) -> str:
            return f"You rolled {seed % 1000}."

    the_worlds = environments(Dice)
    for _ in range(2):
        collecting = collector(the_worlds, script(BYE))
        collected = asyncio.run(parts.acollect(collecting, [task(), task(1)], samples=2))
        assert collected.uneven_prompts == 2
    told = capsys.readouterr().err
    assert told.count("note: in 2 of 2 groups the environment's reset gave") == 1


def test_a_prompt_that_a_reset_makes_too_long_is_counted_as_overlong():
    class Wordy(worlds.Life):
        def reset(self, row: dict[str, Any]) -> str:
            return "word " * row["words"]

    tasks = [task(0, words=1), task(1, words=3000)]
    collecting = collector(environments(Wordy), script(BYE))
    collected = asyncio.run(parts.acollect(collecting, tasks, samples=2))
    assert (collected.overlong, collected.dropped, len(collected.groups)) == (1, 0, 1)
    with pytest.raises(NoRollouts, match="fill the engine's context of 4096"):
        asyncio.run(parts.acollect(collecting, tasks[1:], samples=2))
    counts = Counter(what for what, _ in worlds.Life.events)
    assert counts["made"] == counts["closed"] == 6


def test_each_row_has_the_environment_that_it_names():
    kinds = {
        name: EnvironmentKind(name, cls)
        for name, cls in (("maze", worlds.Maze), ("guess", worlds.Guesser))
    }
    tasks = [task(0, environment="maze"), task(1, environment="guess")]

    def answer(token_ids, session, turn):
        return ids(move(3) if session.split("-")[2] == "0" else "7<|im_end|>")

    collecting = collector(Environments(kinds), answer)
    collected = asyncio.run(parts.acollect(collecting, tasks))
    assert [m["content"] for m in collected.rollouts[0].trajectories[0].messages][-1] == "out"
    assert [m["content"] for m in collected.rollouts[1].trajectories[0].messages][-1] == "right"
    with pytest.raises(ValueError, match="several environments: maze, guess; add the column"):
        asyncio.run(parts.acollect(collecting, [task()]))
    with pytest.raises(ValueError, match=r"environment='maz': .*did you mean 'maze'"):
        asyncio.run(parts.acollect(collecting, [task(environment="maz")]))


def test_two_environments_may_use_one_name_for_different_tools():
    class Other(worlds.Life):
        def move(self, where: str) -> str:
            """Go somewhere.

            Args:
                where: To which place.
            """
            return f"in {where}"

    the_worlds = Environments(
        {"maze": EnvironmentKind("maze", worlds.Maze), "other": EnvironmentKind("other", Other)}
    )
    done = run(
        call("move", '{"where": "Oslo"}'),
        BYE,
        worlds_=the_worlds,
        the_task=task(environment="other"),
    )
    assert done.tool_results[0].content == "in Oslo"
    assert the_worlds.tool_names == ("move", "look")


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (worlds.Guesser, {}, None),
        (
            type("NoReset", (), {}),
            {"pooled": True},
            r"pooled and has no reset.*set environment\.world\.pooled=false",
        ),
        (
            type("DoneMethod", (), {"done": lambda self: True}),
            {},
            r"`done` is a method; make it an attribute, or write @property above it",
        ),
        (
            type("AsksMore", (), {"reset": lambda self, row, level: None}),
            {},
            r"its reset takes 'level'; it can be given row, seed, group_seed",
        ),
        (
            type("AsksMore", (), {"reset": lambda self, level, **others: None}),
            {},
            r"its reset takes 'level'; it can be given row, seed, group_seed",
        ),
        (
            type("NoDoc", (), {"go": lambda self, where: None}),
            {},
            r"environment\.world: tool 'go' .*has no type; annotate it, e\.g\. `where: str`"
            r"\nor begin its name with _ if it is no tool",
        ),
    ],
)
def test_classes_that_cannot_work_are_refused_when_they_are_declared(cls, settings, message):
    if message is None:
        environments(cls, **settings)
        return
    with pytest.raises(ValueError, match=message):
        environments(cls, **settings)


def test_bound_arguments_and_rows_belong_to_one_rollout():
    board: list[str] = []
    seen: list[int] = []

    class Writer(worlds.Life):
        def reset(self, row: dict[str, Any]) -> None:
            self.board.append("x")
            row["marks"].append(1)
            seen.append(len(self.board) + len(row["marks"]))

    kind = EnvironmentKind("world", Writer, bound={"board": board})
    the_task = task(marks=[])
    for _ in range(2):
        run(BYE, worlds_=Environments({"world": kind}), the_task=the_task)
    assert (seen, board, the_task.columns["marks"]) == ([2, 2], [], [])


def test_limits_of_an_environment_are_those_of_its_tools():
    assert isinstance(EnvironmentSettings(timeout_s=2.0), ToolLimits)
    done = run(call("wait", "{}"), BYE, worlds_=environments(worlds.Stuck, timeout_s=0.05))
    assert done.tool_results[0].content == "Error: timed out after 0.05 s"


ANSWERS = (
    move(1),
    move(101),
    call("move", '{"stps": 1}'),
    call("look", "{}"),
    call("nope", "{}"),
    call("add", '{"a": 1, "b": 2}'),
    f"{move(1)[:-10]}\n{call('look', '{}')}",
    "<tool_call>\n{broken\n</tool_call><|im_end|>",
    BYE,
)


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.sampled_from(ANSWERS), min_size=4, max_size=4), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([None, 2]),
)
def test_whatever_models_do_every_world_is_closed_once_and_every_call_answered(
    scripts, pooled, max_tool_calls
):
    worlds.Life.events = []
    the_worlds = environments(worlds.Maze, pooled=pooled)

    def answer(token_ids, session, turn):
        return ids(scripts[int(session.split("-")[2])][turn])

    async def scenario():
        collecting = collector(the_worlds, answer, max_tool_calls=max_tool_calls)
        collected = await parts.acollect(collecting, [task(n) for n in range(len(scripts))])
        await the_worlds.aclose()
        return collected

    collected = asyncio.run(scenario())  # collect verifies every ledger
    counts = Counter(worlds.Life.events)
    assert set(counts.values()) <= {1} or pooled
    made = {number for what, number in counts if what == "made"}
    assert made == {number for what, number in counts if what == "closed"}
    for done in collected.rollouts:
        at = sum(
            int(result.call.arguments["steps"])
            for result in done.tool_results
            if result.call.name == "move" and result.error is None
        )
        assert done.environment_reward == at / 3
        assert (done.stop_reason is StopReason.environment_done) == (at >= 3)
        replied = [m["tool_call_id"] for m in done.trajectories[0].messages if m["role"] == "tool"]
        assert replied == [result.call.id for result in done.tool_results]


def test_turn_rewards_and_states_of_an_environment_are_recorded() -> None:
    done = run(move(1), move(1), move(9), worlds_=environments(worlds.Doors))
    (trajectory,) = done.trajectories
    assert trajectory.turn_rewards == {0: 0.25, 1: 0.25, 2: 2.25}
    assert [result.reward for result in done.tool_results] == [0.25, 0.25, 2.25]
    assert done.stop_reason is StopReason.environment_done
    assert len(trajectory.states) == len(set(trajectory.states)) == 3
    other = run(move(2), move(9), worlds_=environments(worlds.Doors)).trajectories[0]
    assert other.states == [trajectory.states[0], trajectory.states[2]]  # at 0, at 2
    assert turn_rewards(done) == [0.25, 0.25, 2.25]
    asyncio.run(Rubric({"steps": turn_rewards}, {"steps": 2.0}).score([done]))
    assert (done.turn_scores, done.reward) == ({"steps": (0.25, 0.25, 2.25)}, 5.5)
    set_advantages(done, [0.5, -0.5, 0.0])
    record = json.loads(dumps(rollout_record(done)))
    read = read_rollout(record, done.task)
    assert read.trajectories == done.trajectories
    assert (read.turn_scores, read.reward) == (done.turn_scores, done.reward)
    assert [result.reward for result in read.tool_results] == [0.25, 0.25, 2.25]


class Talker(worlds.Life):
    """Rewards an answer by what it says next."""

    def reset(self) -> str:
        return "Hello."

    def user(self, message: dict[str, Any]) -> TurnReward | None:
        return TurnReward(0.5, None) if "bye" in message["content"] else TurnReward(0.1, "And?")


def test_an_environments_user_rewards_the_turn_that_it_answers() -> None:
    done = run("Hi.<|im_end|>", "bye<|im_end|>", worlds_=environments(Talker))
    assert done.trajectories[0].turn_rewards == {0: 0.1, 1: 0.5}
    assert done.stop_reason is StopReason.completed


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e101])
def test_a_turn_reward_that_is_no_number_ends_the_run(value: float) -> None:
    class Broken(worlds.Maze):
        def move(self, steps: int) -> TurnReward:  # type: ignore[override]
            """Walk to the right.

            Args:
                steps: How far.
            """
            return TurnReward(value, "moved")

    with pytest.raises(RewardError, match=r"tool move on rollout 'rollout', turn 0: returned Turn"):
        run(move(1), worlds_=environments(Broken))


def test_a_state_that_cannot_be_compared_is_the_environments_failure() -> None:
    class Odd(worlds.Maze):
        def state(self) -> object:
            return {self}

    done = run(move(1), worlds_=environments(Odd))
    assert done.stop_reason is StopReason.error
    assert "environment 'world': its state failed with TypeError: it gave {" in str(done.error)
    assert "return a text, a number, or lists and dicts of them" in str(done.error)


@pytest.mark.parametrize(
    "value, problem",
    [
        ([1.0], "it returned 1 numbers for 2 turns; return one for each sampled turn"),
        ([1.0, None], "the reward of a turn is a number"),
        ([1.0, math.nan], "a reward is a finite number, or None"),
        ([1.0, "x"], "a reward is a finite number, or None"),
    ],
)
def test_rewards_by_turn_that_do_not_fit(value: Any, problem: str) -> None:
    done = run(move(1), move(2), worlds_=environments())
    with pytest.raises(RewardError, match=problem):
        asyncio.run(Rubric({"mine": lambda rollout: value}).score([done]))


class Dials:
    """As many dials as its argument says: tools that only the arguments know."""

    def __init__(self, count: int, limit: int = 99) -> None:
        self.left, self.limit, self.moves = count, limit, 0
        self.done = self.truncated = False

    @classmethod
    def tools(cls, count: int, limit: int = 99) -> list[dict[str, Any]]:
        if count > 3:
            raise ValueError(f"count={count}: at most 3")
        position = {"type": "object", "properties": {"to": {"type": "integer"}}, "required": ["to"]}
        names = [f"dial_{number}" for number in range(count)]
        return [
            {"type": "function", "function": {"name": name, "parameters": position}}
            for name in names
        ]

    def reset(self) -> str:
        return "Turn every dial to 1."

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        self.moves += 1
        self.left -= arguments["to"] == 1
        self.truncated = self.moves == self.limit
        self.done = self.left == 0 or self.truncated
        return f"{name} at {arguments['to']}"


def dials(**bound: Any) -> Environments:
    return Environments({"dials": EnvironmentKind("dials", Dials, bound=bound)})


def test_tools_that_depend_on_the_arguments():
    worlds_ = dials(count=2)
    assert worlds_.tool_names == ("dial_0", "dial_1")
    wrong = call("dial_1", '{"too": 1}')
    done = run(call("dial_0", '{"to": "1"}'), wrong, call("dial_1", '{"to": 1}'), worlds_=worlds_)
    assert [(r.content, r.error) for r in done.tool_results] == [
        ("dial_0 at 1", None),
        (
            "Error: unknown argument 'too' (did you mean 'to'?); missing argument 'to'",
            ToolError.invalid_arguments,
        ),
        ("dial_1 at 1", None),
    ]
    assert done.stop_reason is StopReason.environment_done
    with pytest.raises(ValueError, match=r"environment\.dials\.count=4: at most 3"):
        dials(count=4)


def test_a_described_tool_may_take_the_context():
    class Asks(Dials):
        def call_tool(self, name: str, arguments: dict[str, Any], context: Any) -> str:
            return f"{name} in turn {context.turn}"

    worlds_ = Environments({"dials": EnvironmentKind("dials", Asks, bound={"count": 1})})
    turn = call("dial_0", '{"to": 0}')
    done = run(turn, turn, BYE, worlds_=worlds_)
    assert [r.content for r in done.tool_results] == ["dial_0 in turn 0", "dial_0 in turn 1"]


def test_a_described_tool_with_the_name_of_a_method_is_refused():
    class Twice(Dials):
        def dial_0(self) -> str:
            """Turn it."""
            return "no"

    with pytest.raises(ValueError, match=r"environment\.dials: it has two tools .* 'dial_0'"):
        Environments({"dials": EnvironmentKind("dials", Twice, bound={"count": 1})})


def test_a_limit_of_the_environment_is_a_stop_reason_of_its_own():
    turn = call("dial_0", '{"to": 0}')
    done = run(turn, turn, worlds_=dials(count=1, limit=2))
    assert done.stop_reason is StopReason.environment_truncated
    # Without `done` it says nothing.
    Dials.truncated = True
    try:
        assert run(turn, BYE, worlds_=dials(count=1)).stop_reason is StopReason.completed
    finally:
        del Dials.truncated


def test_the_check_of_a_class_is_made_before_a_run_and_a_method_of_that_name_is_a_tool():
    class Strict(Dials):
        @classmethod
        def check(cls, count: int, limit: int = 99) -> None:
            if count < 1:
                raise ValueError(f"count={count}: at least 1")

    class Board:
        def check(self, square: str) -> str:
            """Check a square.

            Args:
                square: Its name.
            """
            return square

    assert class_method(Strict, "check") is not None
    assert class_method(Board, "check") is None
    assert environments(Board).tool_names == ("check",)
