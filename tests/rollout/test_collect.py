"""Groups in flight: mixed batches, order, failures that are data, and metrics over them."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import replace

import parts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import LIMITS, acollect, call, ids, toolbox

from agenttrain.chat.encoding import ChatError
from agenttrain.data.config import OnBadRow
from agenttrain.data.tasks import RowError
from agenttrain.engines.base import EngineError
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.collector import Collector, NoRollouts, SourceTools
from agenttrain.rollout.config import OnBreak
from agenttrain.rollout.ledger import verify
from agenttrain.tracking.metrics import rollout_metrics
from agenttrain.types import LedgerError, RowTool, StopReason, Task

ADD = call("add", '{"a": 3, "b": 4}')
WRONG = call("add", '{"a": 3, "c": 4}')
FINAL = call("final_answer", '{"answer": "7"}')
BYE = "The answer is 7.<|im_end|>"


def turns(rollout) -> float:
    """The number of turns, as a reward."""
    return float(rollout.turns)


def collector(engine, tools=None, **limits):
    return Collector(
        engine=engine,
        chat=parts.chat(),
        toolbox=tools or toolbox(),
        rubric=Rubric({"turns": turns}, {"turns": 1.0}),
        limits=replace(LIMITS, **limits),
    )


def tasks(count):
    message = {"role": "user", "content": "what is 3 + 4?"}
    return [Task(task_id=f"t{i}", messages=(message,)) for i in range(count)]


def by_session(answers):
    """Answers of each rollout by the position of its task: session train-1-<task>-<sample>."""
    return lambda token_ids, session, turn: ids(answers[int(session.split("-")[2])][turn])


def test_three_completions_two_with_calls_one_with_a_wrong_argument_name():
    engine = ScriptedEngine(by_session([[ADD, BYE], [WRONG, BYE], [BYE]]), max_context=4096)
    collected = asyncio.run(acollect(collector(engine), tasks(3)))
    metrics = rollout_metrics(collected.groups)
    assert metrics["tools/call_frequency"] == pytest.approx(2 / 3)
    assert metrics["tools/failure_frequency"] == pytest.approx(1 / 2)
    assert [r.turns for r in collected.rollouts] == [2, 2, 1]
    assert [r.reward for r in collected.rollouts] == [2.0, 2.0, 1.0]


def test_a_stop_tool_in_a_mixed_batch():
    engine = ScriptedEngine(by_session([[ADD, BYE], [FINAL], [ADD, FINAL]]), max_context=4096)
    tools = toolbox(stop_tools=["final_answer"])
    collected = asyncio.run(acollect(collector(engine, tools), tasks(3)))
    assert [r.stop_reason for r in collected.rollouts] == [
        StopReason.completed,
        StopReason.stop_tool,
        StopReason.stop_tool,
    ]


def test_groups_come_in_task_and_sample_order_whatever_finishes_first():
    noise = random.Random(0)

    async def wait(seconds: float) -> str:
        """Wait a little.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return "done"

    def answer(token_ids, session, turn):
        return ids(BYE if turn else call("wait", f'{{"seconds": {noise.random() / 50}}}'))

    engine = ScriptedEngine(answer, max_context=4096)
    collected = asyncio.run(acollect(collector(engine, toolbox(wait)), tasks(4), samples=3))
    assert [[r.rollout_id for r in group] for group in collected.groups] == [
        [f"test-1-{task}-{sample}" for sample in range(3)] for task in range(4)
    ]
    assert [r.task.task_id for r in collected.rollouts[::3]] == ["t0", "t1", "t2", "t3"]


class _Failing(ScriptedEngine):
    """Fails the requests of task 1."""

    async def generate(self, token_ids, sampling, *, session, **others):
        if session.split("-")[2] == "1":
            raise EngineError("out of memory")
        return await super().generate(token_ids, sampling, session=session, **others)


def test_progress_counts_every_rollout_as_it_ends():
    engine = ScriptedEngine(by_session([[ADD, BYE], [BYE]]), max_context=4096)
    told: list[tuple[int, int]] = []
    watched = replace(collector(engine), progress=lambda *counts: told.append(counts))
    asyncio.run(acollect(watched, tasks(2), samples=2))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_failed_rollout_is_counted_and_not_scored():
    engine = _Failing(parts.script(BYE), max_context=4096)
    collected = asyncio.run(acollect(collector(engine), tasks(3)))
    assert [r.reward for r in collected.rollouts] == [1.0, None, 1.0]
    assert collected.dropped == 1
    assert collected.rollouts[1].error == "out of memory"


def test_a_step_without_one_rollout_stops_the_run():
    engine = ScriptedEngine(lambda *_: (), max_context=4096)
    with pytest.raises(
        NoRollouts, match=r"all 2 rollouts failed \(2 error\); the first: .*no token"
    ):
        asyncio.run(acollect(collector(engine), tasks(2)))


class _Slow(ScriptedEngine):
    """Never answers."""

    async def generate(self, token_ids, sampling, *, session, **others):
        await asyncio.Event().wait()


def test_a_step_whose_rollouts_all_time_out_names_the_limit():
    slow = _Slow(parts.script(BYE), max_context=4096)
    with pytest.raises(NoRollouts, match=r"all 2 .*\(2 timeout\).*Raise rollout\.timeout_s"):
        asyncio.run(acollect(collector(slow, timeout_s=0.01), tasks(2)))


def test_a_step_of_broken_ledgers_only_says_so():
    engine = _Lying([ids(BYE)])
    with pytest.raises(NoRollouts, match=r"all 2 .*\(2 in a group with a broken ledger\)"):
        asyncio.run(acollect(collector(engine, on_break=OnBreak.drop), tasks(1), samples=2))


def test_overlong_prompts_are_dropped_before_sampling_and_counted():
    long = Task(task_id="long", messages=({"role": "user", "content": "word " * 400},))
    engine = ScriptedEngine(parts.script(BYE), max_context=200)
    collected = asyncio.run(acollect(collector(engine), [*tasks(1), long]))
    assert collected.overlong == 1
    assert [r.task.task_id for r in collected.rollouts] == ["t0"]


def test_a_step_of_overlong_prompts_only_stops_the_run():
    long = Task(task_id="long", messages=({"role": "user", "content": "word " * 400},))
    engine = ScriptedEngine(parts.script(BYE), max_context=200)
    with pytest.raises(NoRollouts, match=r"all 2 tasks .*200 tokens.*engine\.max_context.*data"):
        asyncio.run(acollect(collector(engine), [long, long]))


def test_a_row_that_the_template_refuses_is_a_bad_row():
    """A late message of a role without a form; the rows have no end, so no check saw it before."""
    late = ({"role": "user", "content": "hi"}, {"role": "narrator", "content": "it rains"})
    refused = Task(task_id="7", messages=late)
    skipping = collector(ScriptedEngine(parts.script(BYE)))
    skipping = replace(skipping, on_bad_row=OnBadRow.skip)
    collected = asyncio.run(acollect(skipping, [refused, *tasks(1)]))
    assert (collected.bad_rows, collected.overlong, collected.places) == (1, 0, [1])
    with pytest.raises(NoRollouts, match=r"all 1 tasks .*on_bad_row"):
        asyncio.run(acollect(skipping, [refused]))
    naming = replace(skipping, on_bad_row=OnBadRow.error, place_of="row {0.task_id}".format)
    with pytest.raises(ChatError, match=r"^row 7: .*narrator.*data\.on_bad_row=skip"):
        asyncio.run(acollect(naming, [*tasks(1), refused]))
    kit = SourceTools(
        toolbox=naming.toolbox, environments=naming.environments, rubric=naming.rubric
    )
    mixed, of_source = replace(naming, sources={"a": kit}), replace(refused, source="a")
    with pytest.raises(ChatError, match=r" data\.sources\.a\.on_bad_row=skip"):
        asyncio.run(acollect(mixed, [of_source]))


def of_sources(engine, on_bad_row: OnBadRow = OnBadRow.error):
    """A collector of a mixture of the sources a and b."""
    plain = collector(engine)
    kit = SourceTools(
        toolbox=plain.toolbox,
        environments=plain.environments,
        rubric=plain.rubric,
        on_bad_row=on_bad_row,
    )
    return replace(plain, sources={"a": kit, "b": kit}, place_of="data.train: row 7".format)


def test_a_step_without_rollouts_names_the_keys_of_the_sources():
    """Of both sources all tasks are left out: those of a as bad rows, those of b as overlong."""
    late = ({"role": "user", "content": "hi"}, {"role": "narrator", "content": "it rains"})
    bad = [Task(task_id=str(i), messages=late, source="a") for i in range(2)]
    long = ({"role": "user", "content": "word " * 400},)
    overlong = [Task(task_id=str(i), messages=long, source="b") for i in range(2)]
    mixed = of_sources(ScriptedEngine(parts.script(BYE), max_context=200), OnBadRow.skip)
    with pytest.raises(NoRollouts) as refused:
        asyncio.run(acollect(mixed, [*bad, *overlong]))
    keys = re.findall(r"data[.\w]*[.=][\w.=]*", str(refused.value))
    assert keys == ["data.sources.a.on_bad_row=skip", "data.sources.a.on_bad_row=error"]
    with pytest.raises(NoRollouts) as refused:
        asyncio.run(acollect(mixed, overlong))
    keys = re.findall(r"data\.[.\w]*\w", str(refused.value))
    assert keys == ["data.sources.b.train", "data.sources.b.test"]


def test_a_row_without_end_that_lists_no_tool_of_its_source_is_named():
    tools = (RowTool(name="find", description="", executor="find", parameters={}),)
    task = Task(task_id="7", messages=tasks(1)[0].messages, tools=tools, source="a")
    with pytest.raises(RowError) as refused:
        asyncio.run(acollect(of_sources(ScriptedEngine(parts.script(BYE))), [task]))
    assert str(refused.value).startswith("data.sources.a.train: row 7: tools: 'find'")
    assert "data.sources.a.executor=" in str(refused.value)


class _Lying(ScriptedEngine):
    """Says `stop` for task 0 though its last token is no stop token."""

    async def generate(self, token_ids, sampling, *, session, **others):
        whole = await super().generate(token_ids, sampling, session=session, **others)
        if session.split("-")[2] != "0":
            return whole
        return replace(
            whole,
            token_ids=whole.token_ids[:-1],
            logprobs=whole.logprobs[:-1],
            versions=((0, len(whole.token_ids) - 1),),
        )


def test_a_broken_ledger_stops_the_run_or_drops_the_group():
    with pytest.raises(
        LedgerError, match=r"rollout test-1-0-0 trajectory 0 turn 0 .* no stop token"
    ):
        asyncio.run(acollect(collector(_Lying([ids(BYE)])), tasks(2)))
    engine = _Lying([ids(BYE)])
    kept = asyncio.run(acollect(collector(engine, on_break=OnBreak.drop), tasks(2), samples=2))
    assert kept.broken == 2
    assert [r.task.task_id for r in kept.rollouts] == ["t1", "t1"]
    assert kept.dropped == 2


def test_concurrency_is_bounded():
    running, most = set(), []

    async def wait() -> str:
        """Wait a moment."""
        running.add(me := object())
        most.append(len(running))
        await asyncio.sleep(0.001)
        running.remove(me)
        return "done"

    engine = ScriptedEngine(parts.script(call("wait", "{}"), BYE), max_context=4096)
    asyncio.run(acollect(collector(engine, toolbox(wait), concurrency=3), tasks(12)))
    assert max(most) == 3


def test_seeds_depend_on_run_step_task_sample_and_turn_only():
    seeds = {}

    class Recording(ScriptedEngine):
        async def generate(self, token_ids, sampling, *, session, **others):
            seeds.setdefault(session, []).append(sampling.seed)
            return await super().generate(token_ids, sampling, session=session, **others)

    def run(**limits):
        seeds.clear()
        engine = Recording(parts.script(ADD, BYE), max_context=4096)
        asyncio.run(acollect(collector(engine, **limits), tasks(3), samples=2))
        return dict(seeds)

    first = run()
    assert run(concurrency=1) == first
    assert len({seed for pair in first.values() for seed in pair}) == 3 * 2 * 2


PIECES = ["<tool_call>", "</tool_call>", "<|im_end|>", "<|im_start|>", '{"name": "add"', "a b", "}"]
COMPLETIONS = st.one_of(
    st.sampled_from([ADD, WRONG, FINAL, BYE, '<tool_call>{"name": 3}</tool_call><|im_end|>']),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map(
        lambda p: "".join(p) + "<|im_end|>"
    ),
)


@settings(max_examples=150)
@given(
    answers=st.lists(COMPLETIONS, min_size=4, max_size=4),
    budget=st.integers(1, 400),
    turn_tokens=st.integers(1, 120),
    max_calls=st.one_of(st.none(), st.integers(1, 3)),
)
def test_the_ledger_holds_whatever_the_model_writes(answers, budget, turn_tokens, max_calls):
    tools = toolbox(stop_tools=["final_answer"])
    done = parts.rollout(
        *answers,
        tools=tools,
        max_completion_tokens=budget,
        max_turn_tokens=turn_tokens,
        max_tool_calls=max_calls,
    )
    verify(done, parts.chat(), tools.schemas())
    assert done.stop_reason is not None and done.stop_reason is not StopReason.error
    assert done.length - done.trajectories[0].prompt_length <= budget
    assert (
        len(done.trajectories[0].loss_mask)
        == len(done.trajectories[0].rollout_logprobs)
        == len(done.trajectories[0].token_ids)
    )
    assert sum(done.trajectories[0].loss_mask) == done.sampled_length > 0
    replies = sum(message["role"] == "tool" for message in done.trajectories[0].messages)
    assert replies == len(done.tool_results)


def test_rewards_see_the_replies_of_stop_tools():
    def handed_in(rollout) -> float:
        """What the stop tool answered, as a reward."""
        last = rollout.trajectories[0].messages[-1]
        return float(
            (last["role"], last["name"], last["content"]) == ("tool", "final_answer", "ok")
        )

    tools = toolbox(stop_tools=["final_answer"])
    engine = ScriptedEngine(by_session([[FINAL], [BYE]]), max_context=4096)
    made = replace(collector(engine, tools), rubric=Rubric({"in": handed_in}, {"in": 1.0}))
    message = {"role": "user", "content": "?"}
    asked = [Task(task_id=str(i), messages=(message,)) for i in range(1)]
    collected = asyncio.run(acollect(made, asked))
    assert collected.rollouts[0].reward == 1.0
