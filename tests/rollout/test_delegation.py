"""Tools that run the policy in a context of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import tiny
from parts import LIMITS, TASK, add, call, chat, final_answer, ids

from agenttrain.algorithms.credit import rewards_of_turns, set_advantages
from agenttrain.engines.base import EngineError
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine
from agenttrain.rollout.config import OnToolFailure, RolloutRequest
from agenttrain.rollout.ledger import verify
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.tools.config import ToolLimits
from agenttrain.tools.tool import FunctionTool
from agenttrain.tools.toolbox import Toolbox
from agenttrain.tracking.rollouts import read_rollout, rollout_record
from agenttrain.types import Completion, Finish, Rollout, StopReason, ToolContext, ToolError

END = "<|im_end|>"
ASK = call("ask", '{"question": "what is 3 + 4?"}')


async def ask(question: str, context: ToolContext) -> str:
    """Ask a helper.

    Args:
        question: The question.
    """
    message = {"role": "user", "content": question}
    found = await context.delegate([message], tools=["add", "ask"], role="helper", max_turns=3)
    return f"{found.stop_reason}: {found.content}"


def delegating(
    answers: Mapping[str, Sequence[str]],
    *functions,
    limits: Mapping[str, ToolLimits] | None = None,
    **settings,
) -> tuple[Rollout, ScriptedEngine]:
    """A rollout whose sessions answer like this; the first one is `rollout`."""
    engine = ScriptedEngine(
        lambda token_ids, session, turn: ids(answers[session][turn]),
        max_context=settings.pop("max_context", 4096),
    )
    tools = [FunctionTool(function) for function in (*functions, add, final_answer)]
    context = RolloutContext(
        engine=engine,
        chat=chat(),
        toolbox=Toolbox(
            {tool.name: tool for tool in tools}, limits=limits, stop_tools=["final_answer"]
        ),
        limits=replace(LIMITS, **settings),
    )
    done = asyncio.run(run_rollout(RolloutRequest(task=TASK), context))
    verify(done, context.chat, context.toolbox.schemas())
    return done, engine


def test_a_sub_agent_has_a_trajectory_of_its_own_which_is_trained() -> None:
    sub = [call("add", '{"a": 3, "b": 4}'), f"It is 7.{END}"]
    done, engine = delegating({"rollout": [ASK, f"7.{END}"], "rollout/1": sub}, ask)
    main, helper = done.trajectories
    assert (done.stop_reason, done.turns) == (StopReason.completed, 4)
    assert (main.role, helper.role, helper.parent) == ("main", "helper", None)
    assert (main.turns, helper.turns) == (2, 2)
    decode = tiny.tokenizer().decode
    texts = [decode(span.token_ids) for one in (main, helper) for span in one.sampled_spans()]
    assert texts == [ASK, f"7.{END}", *sub]
    assert [m["content"] for m in main.messages if m["role"] == "tool"] == ["completed: It is 7."]
    sent = decode(engine.sent[1].ids)
    assert "Tools:\nadd(a, b)\nask(question)<|im_end|>" in sent
    assert sent.endswith("<|im_start|>user\nwhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n")
    assert [one.call.id for one in done.tool_results] == ["call_1.0_0", "call_0_0"]
    assert engine.released == ["rollout/1", "rollout"]
    delegation = helper.delegation
    assert (delegation.caller, delegation.call_id) == ((0, 0), "call_0_0")
    assert (delegation.max_turns, delegation.max_tokens) == (3, 1000)
    again = read_rollout(rollout_record(done), TASK)
    assert [one.delegation.caller for one in again.trajectories[1:]] == [(0, 0)]
    assert again.trajectories[1].token_ids == helper.token_ids


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_delegating_deeper_than_allowed_ends_the_rollout(depth: int) -> None:
    sessions = ["rollout", *(f"rollout/{place}" for place in range(1, depth + 1))]
    done, _ = delegating({name: [ASK] for name in sessions}, ask, max_delegation_depth=depth)
    assert done.stop_reason is StopReason.max_delegation_depth
    assert len(done.trajectories) == depth + 1
    deepest = done.tool_results[0]
    assert deepest.content == (
        f"Error: the sub-agent was not run to its end: rollout.max_delegation_depth={depth} "
        "is used up; raise it, or delegate less"
    )


def test_sub_agents_have_a_number_of_tokens_in_all() -> None:
    answers = {
        "rollout": [ASK, ASK, f"no{END}"],
        "rollout/1": [f"7{END}"],
        "rollout/2": [f"7{END}"],
    }
    free, _ = delegating(answers, ask)
    assert free.stop_reason is StopReason.completed
    used = free.trajectories[1].length
    done, _ = delegating(answers, ask, max_delegated_tokens=2 * used)
    assert done.stop_reason is StopReason.completed
    # Not even the second prompt fits.
    done, _ = delegating(answers, ask, max_delegated_tokens=2 * used - 3)
    assert (done.stop_reason, done.truncated) == (StopReason.max_delegated_tokens, True)
    assert len(done.trajectories) == 2
    assert done.tool_results[-1].error is ToolError.exception
    assert f"rollout.max_delegated_tokens={2 * used - 3}" in done.tool_results[-1].content


def test_what_a_sub_agent_may_not_ask_for_stops_the_run() -> None:
    async def many(context: ToolContext) -> str:
        """Ask."""
        return (await context.delegate([], max_turns=9)).content

    async def unknown(context: ToolContext) -> str:
        """Ask."""
        return (await context.delegate([], tools=["serch"])).content

    with pytest.raises(
        ValueError, match=r"tool many: delegate\(max_turns=9\): .*rollout.max_turns=4"
    ):
        delegating({"rollout": [call("many", "{}")]}, many)
    with pytest.raises(
        ValueError, match=r"tool unknown: delegate\(tools: there is no tool 'serch'"
    ):
        delegating({"rollout": [call("unknown", "{}")]}, unknown)


def test_a_failed_sub_agent_fails_the_rollout_whatever_the_tool_makes_of_it() -> None:
    async def forgiving(context: ToolContext) -> str:
        """Ask."""
        try:
            return (await context.delegate([{"role": "user", "content": "hi"}])).content
        except Exception:
            return "nothing"

    answers = {"rollout": [call("forgiving", "{}"), f"7{END}"], "rollout/1": []}
    with pytest.raises(IndexError):
        delegating(answers, forgiving)

    class Broken(ScriptedEngine):
        async def generate(self, token_ids, sampling, *, session, parent=None, images=()):
            if parent is not None:
                raise EngineError("the engine is gone")
            return await super().generate(token_ids, sampling, session=session)

    engine = Broken(lambda token_ids, session, turn: ids(answers["rollout"][turn]))
    context = RolloutContext(
        engine=engine, chat=chat(), toolbox=Toolbox({"forgiving": FunctionTool(forgiving)})
    )
    done = asyncio.run(run_rollout(RolloutRequest(task=TASK), context))
    assert (done.stop_reason, done.error) == (StopReason.error, "the engine is gone")


def test_calls_of_a_turn_delegate_in_their_order() -> None:
    began: list[str] = []

    async def slow(name: str, wait: float, context: ToolContext) -> str:
        """Ask.

        Args:
            name: A name.
            wait: Seconds.
        """
        await asyncio.sleep(wait)
        began.append(name)
        return (await context.delegate([{"role": "user", "content": name}])).content

    two = [call("slow", f'{{"name": "{n}", "wait": {w}}}') for n, w in (("a", 0.2), ("b", 0.0))]
    answers = {
        "rollout": ["\n".join(two).replace(END, "", 1), f"7{END}"],
        "rollout/1": [f"one{END}"],
        "rollout/2": [f"two{END}"],
    }
    done, _ = delegating(answers, slow)
    assert began == ["b", "a"]
    assert [one.messages[0]["content"] for one in done.trajectories[1:]] == ["a", "b"]
    assert [one.content for one in done.tool_results] == ["one", "two"]


def test_a_sub_agent_uses_neither_the_slot_nor_the_time_of_the_call() -> None:
    calls = {"rollout": [ASK, f"7{END}"], "rollout/1": [ASK, f"8{END}"], "rollout/2": [f"9{END}"]}
    limits = {"ask": ToolLimits(concurrency=1, timeout_s=0.3)}

    done, _ = delegating(calls, ask, limits=limits, max_delegation_depth=2)
    assert done.stop_reason is StopReason.completed
    assert [one.content for one in done.tool_results] == ["completed: 9", "completed: 8"]


def test_a_tool_that_returns_without_its_sub_agent_fails() -> None:
    tasks = []

    async def careless(context: ToolContext) -> str:
        """Ask."""
        tasks.append(asyncio.create_task(context.delegate([{"role": "user", "content": "x"}])))
        await asyncio.sleep(0.01)
        return "done"

    engine = ScriptedEngine(
        lambda token_ids, session, turn: ids(call("careless", "{}")), delay=0.05
    )
    context = RolloutContext(
        engine=engine, chat=chat(), toolbox=Toolbox({"careless": FunctionTool(careless)})
    )
    done = asyncio.run(run_rollout(RolloutRequest(task=TASK), context))
    assert done.stop_reason is StopReason.error
    assert "the tool returned while its sub-agent was running" in done.error


def test_a_blocking_tool_cannot_run_an_event_loop_of_its_own() -> None:
    def blocking(context: ToolContext) -> str:
        """Ask."""
        return asyncio.run(context.delegate([{"role": "user", "content": "x"}])).content

    answers = {"rollout": [call("blocking", "{}")]}
    done, _ = delegating(answers, blocking, on_tool_failure=OnToolFailure.drop)
    assert done.stop_reason is StopReason.error
    assert "make the tool `async def`" in done.error


class Acting(TransformersEngine):
    """The real engine's seats and batches, and a script in place of what it samples."""

    answers: Mapping[str, Sequence[str]]

    async def generate(self, token_ids, sampling, *, session, parent=None, images=()):
        await super().generate(
            token_ids, replace(sampling, max_tokens=3), session=session, parent=parent
        )
        name = session.partition("/")[2]
        answer = ids(self.answers[name][self.turns.setdefault(session, 0)])
        self.turns[session] += 1
        return Completion(
            token_ids=answer,
            logprobs=(-1.0,) * len(answer),
            finish=Finish.stop,
            versions=((0, len(answer)),),
        )


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_tool_that_waits_for_the_policy_never_waits_for_itself(depth: int) -> None:
    async def play() -> list[Rollout]:
        engine = Acting(tiny.model(), TransformersSettings(max_rows=1))
        engine.turns = {}
        engine.answers = {
            "": [ASK, f"7{END}"],
            **{str(level): [ASK, f"{level}{END}"] for level in range(1, depth)},
            str(depth): [call("add", '{"a": 3, "b": 4}'), f"{depth}{END}"],
        }
        tools = {tool.name: tool for tool in (FunctionTool(ask), FunctionTool(add))}
        context = RolloutContext(
            engine=engine,
            chat=chat(),
            toolbox=Toolbox(tools, limits={"ask": ToolLimits(concurrency=1)}),
            limits=replace(LIMITS, max_delegation_depth=depth),
        )
        names = [f"r{number}" for number in range(3)]
        engine.expect(names)
        requests = [RolloutRequest(task=TASK, rollout_id=name) for name in names]
        try:
            async with asyncio.timeout(60):
                return await asyncio.gather(*(run_rollout(one, context) for one in requests))
        finally:
            await engine.aclose()

    for done in asyncio.run(play()):
        assert (done.stop_reason, done.error) == (StopReason.completed, None)
        assert [one.turns for one in done.trajectories] == [2] * (depth + 1)
        verify(
            done, chat(), Toolbox({"ask": FunctionTool(ask), "add": FunctionTool(add)}).schemas()
        )


def test_turns_of_a_sub_agent_are_credited_after_the_call_and_before_the_next_turn() -> None:
    sub = [call("add", '{"a": 3, "b": 4}'), f"It is 7.{END}"]
    done, _ = delegating({"rollout": [ASK, f"7.{END}"], "rollout/1": sub}, ask)
    done.rewards = {"steps": 10.0, "exact": 1.0}
    # By trajectory: main's two turns, then the sub-agent's two.
    done.turn_scores, done.reward = {"steps": (1.0, 2.0, 3.0, 4.0)}, 11.0
    assert rewards_of_turns(done, {}).rewards == (1.0, 3.0, 4.0, 3.0)
    set_advantages(done, [0.1, 0.2, 0.3, 0.4])
    first = [sorted(set(one.advantages)) for one in done.trajectories]
    assert first == [[0.1, 0.4], [0.2, 0.3]]
