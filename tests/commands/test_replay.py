"""Recorded rollouts once more: the same ids, or where they first differ."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import parts
import pytest
import sandbox_kit
import tracking_rollouts
import vision_kit

from agenttrain.cli import main
from agenttrain.commands.recorded_calls import CallKey, RecordedCalls
from agenttrain.commands.replay import RecordedEngine, RecordedToolbox
from agenttrain.engines.base import EngineError
from agenttrain.engines.config import Sampling
from agenttrain.tools.config import ToolLimits
from agenttrain.tracking.pictures import shown_text
from agenttrain.tracking.rollouts import completions, read_rollout, rollout_record, tool_results
from agenttrain.types import (
    AssistantTurn,
    Completion,
    Delegated,
    Delegation,
    Done,
    Finish,
    Rollout,
    StopReason,
    ToolCall,
    ToolContext,
    ToolError,
    ToolResult,
    ToolUnavailable,
    Trajectory,
)
from agenttrain.utils.content import content_of
from agenttrain.utils.json_lines import dumps
from agenttrain.utils.seeds import derive_seed, seeds_of

pytestmark = pytest.mark.timeout(1200)  # whole runs

EVALUATION = ("eval.questions=10", "eval.greedy=false", "tracker=none")


def evaluation(folder: Path, experiment: str, *overrides: str) -> Path:
    """Ten rollouts of a bundled task, as its own experiment makes them."""
    arguments = [f"experiment={experiment}", *EVALUATION, f"hydra.run.dir={folder}", *overrides]
    assert main(["eval", *arguments]) == 0
    return folder


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Path:
    return evaluation(tmp_path_factory.mktemp("shop") / "run", "shop")


@pytest.fixture(scope="module")
def calculator(tmp_path_factory) -> Path:
    return evaluation(tmp_path_factory.mktemp("calculator") / "run", "calculator")


@pytest.fixture
def edit(shop, tmp_path) -> Callable[[Callable[[dict[str, Any]], None]], Path]:
    """A copy of a run whose first record was changed."""

    def edited(change: Callable[[dict[str, Any]], None]) -> Path:
        folder = Path(shutil.copytree(shop, tmp_path / "run"))
        file = folder / "rollouts" / "step-000000.jsonl"
        first, *rest = file.read_text().splitlines()[:3]
        record = json.loads(first)
        change(record)
        file.write_text("\n".join([json.dumps(record), *rest]) + "\n")
        return folder

    return edited


@pytest.mark.slow
@pytest.mark.parametrize("tools", ["recorded", "live"])
@pytest.mark.parametrize("task", ["shop", "calculator"])
def test_ten_rollouts_replay_to_identical_ids(request, capsys, task, tools):
    folder = request.getfixturevalue(task)
    assert main(["replay", str(folder), f"tools={tools}"]) == 0
    told = capsys.readouterr().out
    assert "10 of 10 rollouts of step 0 replay to identical ids" in told
    assert told.count(": identical: ") == 10


def test_one_rollout_is_chosen_by_its_name(shop, capsys):
    name = json.loads((shop / "rollouts" / "step-000000.jsonl").open().readline())["rollout_id"]
    assert main(["replay", str(shop), "step=0", f"rollout={name}"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"rollout {name}: identical: ")


def test_a_tools_other_answer_is_found_with_both_texts(edit, capsys):
    def change(record):
        (trajectory,) = record["trajectories"]
        reply = next(m for m in trajectory["messages"] if m["role"] == "tool")
        reply["content"] = "8,421"

    folder = edit(change)
    assert main(["replay", str(folder)]) == 1
    first, recorded, replayed, *_ = capsys.readouterr().out.splitlines()
    assert ": DIFFERS at position " in first and "(turn 0, tool)" in first
    assert recorded.startswith("  recorded  id ")
    assert "8,421" in replayed and "8,421" not in recorded


def test_live_tools_do_not_see_what_was_edited(edit, capsys):
    """The recorded ids still hold the true answer, which the real tool gives again."""

    def change(record):
        for call in record["tool_calls"]:
            call["content"] = "8,421"

    folder = edit(change)
    assert main(["replay", str(folder), "tools=live"]) == 0
    assert main(["replay", str(folder)]) == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda r: r.update(stop_reason="completed"), "stop reason completed was recorded, "),
        (
            lambda r: r["trajectories"][0]["messages"][1].update(content="no"),
            "DIFFERS in message 1\n",
        ),
        (lambda r: r["trajectories"][0]["token_ids"].append(5), "after its end"),
    ],
)
def test_every_part_of_a_record_is_compared(edit, capsys, change, told):
    assert main(["replay", str(edit(change))]) == 1
    assert told in capsys.readouterr().out


def test_an_end_by_the_clock_is_replayed_up_to_it(edit, capsys):
    def change(record):
        (trajectory,) = record["trajectories"]
        last = next(s for s in reversed(trajectory["spans"]) if s["origin"] == "sampled")
        trajectory["spans"] = [s for s in trajectory["spans"] if s["end"] <= last["end"]]
        trajectory["token_ids"] = trajectory["token_ids"][: last["end"]]
        trajectory["logprobs"] = trajectory["logprobs"][: last["end"]]
        answers = [i for i, m in enumerate(trajectory["messages"]) if m["role"] == "assistant"]
        trajectory["messages"] = trajectory["messages"][: answers[-1] + 1]
        unanswered = {call["id"] for call in trajectory["messages"][-1].get("tool_calls", ())}
        record["tool_calls"] = [c for c in record["tool_calls"] if c["id"] not in unanswered]
        record["stop_reason"] = "timeout"

    assert main(["replay", str(edit(change))]) == 0
    assert ": identical up to its end by timeout: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{run}", "--step", "7"], "--step 7: no rollouts of that step; there are 0 to 0"),
        (["{run}", "rollout=nobody"], "--rollout nobody: no such rollout; there are "),
        (["{run}/nowhere"], "is no run folder: there is no config.yaml in it"),
    ],
)
def test_what_cannot_be_replayed_is_told(shop, capsys, arguments, told):
    assert main(["replay", *(text.format(run=shop) for text in arguments)]) == 2
    assert told in capsys.readouterr().err


def test_a_task_that_left_the_data_is_named(edit, capsys):
    folder = edit(
        lambda record: record["trajectories"][0]["messages"][0].update(content="Who are you?")
    )
    assert main(["replay", str(folder)]) == 2
    assert "with its recorded prompt is not in the data now" in capsys.readouterr().err


def exit_door(door: str) -> Done:
    """Leave.

    Args:
        door: Which one.
    """
    return Done(f"You left by {door}.")


def long_text(words: int) -> str:
    """Many words.

    Args:
        words: How many.
    """
    return "what " * words


ROLLOUTS = {
    "parallel and malformed calls": lambda: parts.rollout(
        parts.call("add", '{"a": 1, "b": 2}').replace("<|im_end|>", "\n")
        + parts.call("add", '{"a": 1,'),
        "It is 3.<|im_end|>",
    ),
    "a clipped reply": lambda: parts.rollout(
        parts.call("long_text", '{"words": 300}'),
        "Long.<|im_end|>",
        tools=parts.toolbox(long_text, limits={"long_text": ToolLimits(max_result_tokens=20)}),
    ),
    "a tool that ends the episode": lambda: parts.rollout(
        parts.call("exit_door", '{"door": "A"}'), tools=parts.toolbox(exit_door)
    ),
    "a failed tool": lambda: parts.rollout(parts.call("nobody", "{}"), "Oh.<|im_end|>"),
    "a cut completion": lambda: parts.rollout("what is 3 + 4?", max_turn_tokens=3),
}


@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_record_gives_the_rollout_back(name):
    made: Rollout = ROLLOUTS[name]()
    record = json.loads(dumps(rollout_record(made)))
    again = read_rollout(record, made.task)
    assert again.trajectories[0].spans == made.trajectories[0].spans
    assert again.trajectories[0].token_ids == made.trajectories[0].token_ids
    assert again.trajectories[0].messages == json.loads(dumps(made.trajectories[0].messages))
    # The text of a call is in the file where it could not be parsed; the tokens hold the others.
    assert again.tool_results == [
        result if result.call.malformed else replace(result, call=replace(result.call, text=""))
        for result in made.tool_results
    ]
    assert again.stop_reason is made.stop_reason
    assert rollout_record(again) == rollout_record(made)


def test_only_replies_that_the_messages_do_not_hold_are_written_twice():
    clipped = rollout_record(ROLLOUTS["a clipped reply"]())
    assert clipped["tool_calls"][0]["content"] == "what " * 300
    whole = rollout_record(ROLLOUTS["parallel and malformed calls"]())
    assert len(whole["tool_calls"]) == 2
    assert all("content" not in call for call in whole["tool_calls"])


def test_a_completion_over_a_weight_update_keeps_its_versions():
    rollout = tracking_rollouts.new(0, 1.0)
    rollout.trajectories[0].append_sampled(
        Completion(
            token_ids=(10, 2, 10, 2),
            logprobs=(-0.1, float("nan"), -0.3, -0.4),
            finish=Finish.length,
            versions=((7, 1), (8, 3)),
        ),
        rollout.trajectories[0].token_ids,
    )
    (completion,) = completions(json.loads(dumps(rollout_record(rollout))))
    assert completion.versions == ((7, 1), (8, 3))
    assert completion.finish is Finish.length
    assert completion.logprobs[0] == -0.1 and completion.logprobs[1] != completion.logprobs[1]


async def _ask(engine: RecordedEngine, budget: int) -> Completion:
    return await engine.generate([1], Sampling(max_tokens=budget), session="a")


def test_a_recorded_engine_never_cuts_and_never_invents():
    said = Completion(
        token_ids=(4, 5, 2), logprobs=(-1.0,) * 3, finish=Finish.stop, versions=((3, 3),)
    )
    assert asyncio.run(_ask(RecordedEngine([said], max_context=9), 3)) is said
    with pytest.raises(EngineError, match="3 tokens were recorded where the budget is 2 now"):
        asyncio.run(_ask(RecordedEngine([said], max_context=9), 2))
    with pytest.raises(EngineError, match="no more were recorded"):
        asyncio.run(_ask(RecordedEngine([], max_context=9), 2))


def test_an_id_that_turns_repeat_keeps_each_turns_reply():
    """Some models write the ids of their calls, and may write one again."""
    rollout = tracking_rollouts.new(0, 1.0)
    for reply in (8, 9):
        tracking_rollouts.say(rollout, (5, 2))
        tracking_rollouts.call(rollout, reply)
    again = replace(rollout.tool_results[1].call, id="call_0_0")
    rollout.tool_results[1] = replace(rollout.tool_results[1], call=again)
    rollout.trajectories[0].messages[-2]["tool_calls"][0]["id"] = "call_0_0"
    rollout.trajectories[0].messages[-1]["tool_call_id"] = "call_0_0"
    record = json.loads(dumps(rollout_record(rollout)))
    assert all("content" not in call for call in record["tool_calls"])
    assert [r.content for r in tool_results(record)] == ["7", "no argument `x`"]


def said() -> Completion:
    return Completion(
        token_ids=(5, 2), logprobs=(-0.5,) * 2, finish=Finish.stop, versions=((0, 2),)
    )


def add_turn(trajectory: Trajectory, made: ToolCall, content: Any) -> None:
    """A turn that makes a call, and the reply to it."""
    trajectory.append_sampled(said(), trajectory.token_ids)
    trajectory.messages += [
        AssistantTurn(content="", reasoning=None, calls=(made,)).message(),
        {"role": "tool", "tool_call_id": made.id, "content": content},
    ]


def result(made: ToolCall, content: str, error: ToolError | None = None) -> ToolResult:
    return ToolResult(call=made, content=content, error=error, seconds=0.1)


def test_an_id_that_turns_repeat_keeps_each_turns_image():
    first, second = vision_kit.picture(16, 8, 1), vision_kit.picture(16, 8, 2)
    rollout = Rollout(task=parts.TASK, rollout_id="r-0")
    (trajectory,) = rollout.trajectories
    for number, shown in enumerate(([first], ["none"], [second])):
        made = ToolCall(id="f:0", name="look", arguments={"x": number})
        content = content_of(["it: ", *shown])
        rollout.tool_results.append(result(made, shown_text(content)))
        add_turn(trajectory, made, content)
    record = rollout_record(rollout)
    record["trajectories"][0]["messages"] = trajectory.messages  # with images that were read
    read = tool_results(record)
    assert [r.parts for r in read] == [("it: ", first), (), ("it: ", second)]


def test_conversations_may_repeat_an_id():
    """A sub-agent's call ends before the call that began it, and both wrote one id."""
    rollout = Rollout(task=parts.TASK, rollout_id="r-0")
    outer = ToolCall(id="f:0", name="ask", arguments={})
    inner = ToolCall(id="f:0", name="", arguments={}, malformed="no name", text="<call>")
    add_turn(rollout.trajectories[0], outer, "9")
    add_turn(rollout.begin(role="helper", delegation=None), inner, "Error: no name")
    rollout.tool_results = [
        result(inner, "Error: no name", ToolError.malformed),
        result(outer, "9"),
    ]
    record = json.loads(dumps(rollout_record(rollout)))
    assert all("content" not in call for call in record["tool_calls"])
    read = tool_results(record)
    assert [(r.call, r.content) for r in read] == [(inner, "Error: no name"), (outer, "9")]


def test_equal_calls_in_another_order_keep_their_results():
    rollout = Rollout(task=parts.TASK, rollout_id="r-0")
    made = ToolCall(id="f:0", name="look", arguments={})
    for text in "ABC":
        add_turn(rollout.trajectories[0], made, text)
    for order in ("CBA", "BAC", "ACB"):
        rollout.tool_results = [result(made, text) for text in order]
        record = json.loads(dumps(rollout_record(rollout)))
        assert "".join(r.content for r in tool_results(record)) == order


def test_an_environments_reward_is_read_again():
    rollout = tracking_rollouts.new(0, 1.0)
    tracking_rollouts.say(rollout, (10, 2))
    rollout.environment_reward = 0.25
    record = json.loads(dumps(rollout_record(rollout)))
    assert read_rollout(record, rollout.task).environment_reward == 0.25


QUIZ = '''
import random

class Quiz:
    """Answers with numbers that its seeds alone decide; over after two answers."""

    def reset(self, row, seed, group_seed):
        self.draw = random.Random(f"{seed} {group_seed}")
        self.done, self.answers = False, 0
        return f"Your lucky number is {random.Random(group_seed).randrange(100)}."

    def final_answer(self, answer: str) -> str:
        """Hand in an answer.

        Args:
            answer: The answer.
        """
        self.answers += 1
        self.done = self.answers == 2
        return f"{self.draw.randrange(10_000)}"

    def user(self, message):
        return None if self.answers else f"And {self.draw.randrange(10_000)}?"

    def reward(self, rollout):
        return self.answers / 2
'''


@pytest.fixture(scope="module")
def quiz(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quiz")
    (folder / "quizzes_of_replay.py").write_text(QUIZ)
    sys.path.insert(0, str(folder))
    try:
        environment = ["tools=[sql]", "stop_tools=[]", "reward=[]"]
        environment += ["+environment.quiz._target_=quizzes_of_replay.Quiz"]
        return evaluation(folder / "run", "shop", *environment, "rollout.max_turns=4")
    finally:
        sys.path.remove(str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("tools", ["recorded", "live"])
def test_rollouts_of_an_environment_replay_too(quiz, monkeypatch, capsys, tools):
    monkeypatch.syspath_prepend(str(quiz.parent))
    file = quiz / "rollouts" / "step-000000.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert "environment_done" in {record["stop_reason"] for record in records}
    assert all(
        "lucky number" in record["trajectories"][0]["messages"][1]["content"] for record in records
    )
    assert main(["replay", str(quiz), f"tools={tools}"]) == 0
    assert "10 of 10 rollouts of step 0 replay to identical ids" in capsys.readouterr().out


@pytest.mark.slow
def test_a_supervised_step_is_made_anew_from_its_rows(tmp_path, capsys):
    folder = tmp_path / "run"
    run = ("sft", "debug=tiny", "data=shop_demonstrations", "tracker=none", "steps=1")
    assert main([*run, "eval.questions=0", f"hydra.run.dir={folder}"]) == 0
    assert main(["replay", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "2 of 2 rollouts of step 1 replay to identical ids" in told
    file = folder / "rollouts" / "step-000001.jsonl"
    first, *rest = file.read_text().splitlines()
    record = json.loads(first)
    record["trajectories"][0]["token_ids"][-1] += 1
    file.write_text("\n".join([json.dumps(record), *rest]) + "\n")
    assert main(["replay", str(folder)]) == 1
    assert ": DIFFERS at position " in capsys.readouterr().out


@pytest.mark.slow
def test_an_environment_that_answers_otherwise_is_found(quiz, tmp_path, monkeypatch, capsys):
    """Live it is another world now; its recorded replies are what they were."""
    folder = Path(shutil.copytree(quiz, tmp_path / "run"))
    config = (folder / "config.yaml").read_text()
    assert "quizzes_of_replay" in config
    (folder / "config.yaml").write_text(config.replace("quizzes_of_replay", "other_quizzes"))
    other = QUIZ.replace("randrange(10_000)", "randrange(10_000, 20_000)")
    (tmp_path / "other_quizzes.py").write_text(other)
    monkeypatch.syspath_prepend(str(tmp_path))
    # No run of this user wrote that config.yaml.
    assert main(["replay", str(folder), "tools=live"]) == 2
    assert "other_quizzes.Quiz\n" in capsys.readouterr().err
    assert main(["replay", str(folder), "tools=live", "trust=true"]) == 1
    assert ": DIFFERS at position " in capsys.readouterr().out
    assert main(["replay", str(folder)]) == 0


@pytest.mark.slow
def test_an_evaluation_with_limits_of_its_own_is_replayed(tmp_path, capsys):
    own = ("eval.tools=[sql]", "eval.max_turns=2")
    folder = evaluation(tmp_path / "run", "shop", *own, "eval.questions=3")
    assert main(["replay", str(folder)]) == 0
    assert "3 of 3 rollouts" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("tools", ["recorded", "live"])
@pytest.mark.parametrize("task", ["retrieval", "code"])
def test_ten_rollouts_of_other_tasks_replay_to_identical_ids(tmp_path, capsys, task, tools):
    if task == "code":
        sandbox_kit.usable("required")
    folder = evaluation(tmp_path / "run", task)
    assert main(["replay", str(folder), f"tools={tools}"]) == 0
    assert "10 of 10 rollouts of step 0 replay to identical ids" in capsys.readouterr().out


def test_ids_tell_the_seeds():
    assert seeds_of("train-3-r1-2-0", 7) == (
        derive_seed(7, "train", 3, "r1", 2, 0, 0),
        derive_seed(7, "train", 3, "r1", 2),
    )
    assert seeds_of("eval-greedy-11-0", 7)[1] == derive_seed(7, "eval", "greedy", 11)


def test_calls_that_repeat_an_id_get_their_own_turns_results():
    """Turn 0 calls an unknown tool; turn 1 begins a helper, beside a plain call. One id for all.

    The loop itself answers the unknown tool, so a replay never asks the toolbox about it. The
    helper's call is answered before the main agent's, and may be asked for after it.
    """
    rollout = Rollout(task=parts.TASK, rollout_id="r-0")
    main_agent = rollout.trajectories[0]
    wrong, ask, add, inner = (
        ToolCall(id=call_id, name=name, arguments={})
        for call_id, name in (("f:0", "nope"), ("f:0", "ask"), ("f:1", "add"), ("f:1", "add"))
    )
    add_turn(main_agent, wrong, "Error: unknown tool")
    main_agent.append_sampled(said(), main_agent.token_ids)
    main_agent.messages += [
        AssistantTurn(content="", reasoning=None, calls=(ask, add)).message(),
        {"role": "tool", "tool_call_id": "f:0", "content": "asked"},
        {"role": "tool", "tool_call_id": "f:1", "content": "outer"},
    ]
    delegation = Delegation(caller=(0, 1), call_id="f:0", schemas=(), max_turns=2, max_tokens=9)
    add_turn(rollout.begin(role="helper", delegation=delegation), inner, "inner")
    rollout.tool_results = [
        result(wrong, "Error: unknown tool", ToolError.unknown_tool),
        *(result(inner, "inner"), result(ask, "asked"), result(add, "outer")),
    ]
    toolbox = RecordedToolbox([], json.loads(dumps(rollout_record(rollout))))
    answers: list[str] = []

    async def answer(call: ToolCall, turn: int) -> None:
        """Answer one call of a turn of the agent that runs here."""
        context = replace(CONTEXT, turn=turn, call_id=call.id, run_policy=run_helper)
        (answered,) = await toolbox.execute([call], lambda _: context)
        answers.append(answered.content)

    async def run_helper(*args: Any, **options: Any) -> Delegated:
        await asyncio.sleep(0.01)  # the plain call of the turn comes first
        await answer(inner, 0)
        return Delegated(content="", stop_reason=StopReason.completed, messages=())

    async def turn_1() -> None:
        await asyncio.gather(answer(ask, 1), answer(add, 1))
        with pytest.raises(ToolUnavailable, match="no result was recorded for the call f:1 add"):
            await answer(add, 2)

    asyncio.run(turn_1())
    assert answers == ["outer", "inner", "asked"]


def test_a_call_that_was_never_answered_leaves_the_result_to_the_one_that_was():
    """The helper's only turn calls `f:0` too, and ends by its limit of turns."""
    rollout = Rollout(task=parts.TASK, rollout_id="r-0")
    main_agent = rollout.trajectories[0]
    ask = ToolCall(id="f:0", name="ask", arguments={})
    add_turn(main_agent, ask, "asked")
    delegation = Delegation(caller=(0, 0), call_id="f:0", schemas=(), max_turns=1, max_tokens=9)
    helper = rollout.begin(role="helper", delegation=delegation)
    helper.append_sampled(said(), helper.token_ids)
    helper.messages.append(AssistantTurn(content="", reasoning=None, calls=(ask,)).message())
    rollout.tool_results = [result(ask, "asked")]
    recorded = RecordedCalls(json.loads(dumps(rollout_record(rollout))))
    assert {key: answer.content for key, answer in recorded.results.items()} == {
        CallKey(agent=0, turn=0, call_id="f:0"): "asked"
    }


CONTEXT = ToolContext(rollout_id="r-0", task=parts.TASK, turn=0, call_id="", tool="ask")
