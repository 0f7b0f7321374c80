"""Contexts that are replaced by shorter ones within a rollout."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import LIMITS, TASK, call, chat, ids, rollout, toolbox
from test_rollout_property import BYE, FINAL, LONG, PLANS, Plan, engine_of, task_of, the_chat
from test_rollout_property import toolbox as tools_of

from agenttrain.commands.replay import RecordedToolbox
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.compaction import DropToolResults, Summary, check_compaction
from agenttrain.rollout.config import RolloutConfig, RolloutRequest
from agenttrain.rollout.ledger import verify
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.tracking.rollouts import (
    added_messages,
    read_rollout,
    read_step,
    rollout_record,
    write_step,
)
from agenttrain.types import Origin, Rollout, StopReason, Task
from agenttrain.utils.json_lines import dumps

PROMPT = len(chat().prompt_ids(TASK.messages, toolbox().schemas()))
ADD = {n: call("add", f'{{"a": {n}, "b": 4}}') for n in (3, 5, 6)}
AT = PROMPT + 60
"""Passed by two turns of 39 tokens; the prompt, a summary with "go" (19) and one turn are 98."""
ANSWER = "The answer is 7.<|im_end|>"


class Short(Summary):
    """Texts of few tokens."""

    request = "sum?"
    resume = "go"


class AllTurns(DropToolResults):
    """Keeps everything, which makes no room."""

    def __init__(self, limits: RolloutConfig) -> None:
        super().__init__(limits)
        self.keep_turns = 99


def compacted(*answers: str, compaction: str = f"{__name__}.Short", **limits) -> tuple:
    """A rollout whose context is replaced after its second call; also what the engine was sent."""
    engine = ScriptedEngine(lambda token_ids, session, turn: ids(answers[turn]))
    done = rollout(
        engine=engine,
        **{"compaction": compaction, "compact_at": AT, "summary_tokens": 40, **limits},
    )
    return done, [tiny.tokenizer().decode(sent.token_ids) for sent in engine.sent]


def sampled(done: Rollout) -> list[str]:
    decode = tiny.tokenizer().decode
    return [decode(span.token_ids) for t in done.trajectories for span in t.sampled_spans()]


def test_a_summary_and_the_last_turn_take_the_place_of_the_context(tmp_path) -> None:
    answers = [ADD[3], ADD[5], "so far 7<|im_end|>", ANSWER]
    done, sent = compacted(*answers)
    assert (done.stop_reason, done.turns) == (StopReason.completed, 4)
    roles = [(t.role, t.turns, t.parent and t.parent[0]) for t in done.trajectories]
    assert roles == [("main", 2, None), ("summary", 1, 0), ("main", 1, 0)]
    main, summary, later = done.trajectories
    start, user, end = "<|im_start|>", "<|im_start|>user\n", "<|im_end|>\n"
    task = tiny.tokenizer().decode(main.token_ids[:PROMPT])
    assert task.endswith(f"what is 3 + 4?{end}{start}assistant\n")

    def reply(text: str) -> str:
        return f"\n{start}user\n<tool_response>\n{text}\n</tool_response>{end}"

    # The tools are shown as before, and the request follows the replies.
    begun = task + ADD[3] + reply("7") + start + "assistant\n" + ADD[5]
    assert sent[2] == begun + reply("9") + f"{user}sum?{end}{start}assistant\n"
    kept = ADD[5] + reply("9") + start + "assistant\n"
    assert sent[3] == f"{task}so far 7<|im_end|>\n{user}go{end}{start}assistant\n{kept}"
    # Every sampled token is trained once, in the trajectory that sampled it.
    assert sampled(done) == answers
    assert [span.origin for span in later.spans] == [Origin.prompt, Origin.sampled]
    assert summary.messages[-2:] == [
        {"role": "user", "content": "sum?"},
        {"role": "assistant", "content": "so far 7"},
    ]
    assert [m["role"] for m in later.messages] == [
        *("user", "assistant", "user", "assistant", "tool", "assistant")
    ]
    assert later.messages[4]["content"] == "9"
    write_step(tmp_path, 1, [done])
    (record,) = read_step(tmp_path, 1)
    again = read_rollout(record, TASK)
    assert [list(t.token_ids) for t in again.trajectories] == [
        list(t.token_ids) for t in done.trajectories
    ]
    assert [r.content for r in again.tool_results] == ["7", "9"]


def test_calls_after_a_summary_get_their_recorded_results_in_a_replay() -> None:
    summary = "so far 7<|im_end|>"
    answers = [ADD[3], ADD[5], summary, ADD[6], summary, ANSWER]
    done, _ = compacted(*answers, max_turns=6)
    assert [t.turns for t in done.trajectories] == [2, 1, 1, 1, 1]
    replayed, _ = compacted(
        *answers,
        tools=RecordedToolbox([toolbox()], json.loads(dumps(rollout_record(done)))),
        max_turns=6,
    )
    assert [r.content for r in replayed.tool_results] == ["7", "9", "10"]
    assert [t.token_ids for t in replayed.trajectories] == [t.token_ids for t in done.trajectories]


def test_the_kept_turn_has_its_sampled_ids_and_not_those_of_its_text() -> None:
    odd = (*ids("<tool_call>"), *(i for c in ADD[5][11:-10] for i in ids(c)), *ids("<|im_end|>"))
    assert len(odd) > len(ids(ADD[5]))  # one id for each character
    answers = [ids(ADD[3]), odd, ids("so far 7<|im_end|>"), ids(ANSWER)]
    engine = ScriptedEngine(lambda _ids, _session, turn: answers[turn])
    done = rollout(
        engine=engine, compaction=f"{__name__}.Short", compact_at=PROMPT + 110, summary_tokens=40
    )
    assert [t.role for t in done.trajectories] == ["main", "summary", "main"]
    kept = list(done.trajectories[2].token_ids)
    assert any(tuple(kept[i : i + len(odd)]) == odd for i in range(len(kept)))


def test_older_replies_are_dropped_and_every_turn_stays() -> None:
    def read(page: int) -> str:
        """Read a page.

        Args:
            page: Its number.
        """
        return f"page {page}" if page == 3 else "7 3 4 " * 16

    answers = [*(call("read", f'{{"page": {page}}}') for page in (3, 5, 6)), ANSWER]
    engine = ScriptedEngine(lambda _ids, _session, turn: ids(answers[turn]))
    done = rollout(
        engine=engine, tools=toolbox(read), compaction="drop_tool_results", compact_at=260
    )
    assert (done.stop_reason, done.turns) == (StopReason.completed, 4)
    first, later = done.trajectories
    # All before the first text that is dropped is the parent's.
    decode = tiny.tokenizer().decode
    dropped = "7 3 4 " * 16
    before = decode(first.token_ids)
    assert decode(later.token_ids[: later.context_length]) == before[: before.index(dropped)]
    assert decode(engine.sent[3].token_ids) == before.replace(dropped, "[dropped]", 1)
    shown = [m["content"] for m in later.messages if m["role"] == "tool"]
    assert shown == ["page 3", "[dropped]", dropped]  # the marker would be longer than the first
    assert sampled(done) == answers


@pytest.mark.parametrize(
    ("summary", "limits", "reason"),
    [
        (ADD[6], {}, StopReason.invalid_summary),
        (" <|im_end|>", {}, StopReason.invalid_summary),
        ("so far it is 7<|im_end|>", {"summary_tokens": 4}, StopReason.max_tokens),
        # The kept turn does not fit behind so long a summary, and without it the context does.
        ("so far " + "7 " * 12 + "<|im_end|>", {}, StopReason.completed),
        # Not even the summary alone fits.
        ("so far " + "7 " * 40 + "<|im_end|>", {"summary_tokens": 200}, StopReason.context_full),
    ],
)
def test_how_a_summary_may_end(summary: str, limits: dict, reason: StopReason) -> None:
    done, _ = compacted(ADD[3], ADD[5], summary, ANSWER, **limits)
    assert done.stop_reason is reason


def test_a_compaction_that_makes_no_room_ends_the_rollout() -> None:
    done, _ = compacted(ADD[3], ADD[5], ANSWER, compaction=f"{__name__}.AllTurns")
    assert (done.stop_reason, done.turns) == (StopReason.context_full, 2)


def test_only_new_tokens_count_towards_the_completion() -> None:
    # 2 turns of 39, the summary "so far 7" and the answer of 7; what is shown again does not count.
    needed = 2 * 39 + len(ids("so far 7<|im_end|>")) + 7
    answers = (ADD[3], ADD[5], "so far 7<|im_end|>", ANSWER)
    done, _ = compacted(*answers, max_completion_tokens=needed, max_turn_tokens=needed)
    assert done.stop_reason is StopReason.completed
    done, _ = compacted(*answers, max_completion_tokens=needed - 1, max_turn_tokens=needed - 1)
    assert done.stop_reason is StopReason.max_tokens


def test_room_for_a_summary_is_kept_free() -> None:
    def read(page: int) -> str:
        """Read a page.

        Args:
            page: Its number.
        """
        return "7 3 4 " * 40

    answers = [call("read", '{"page": 3}'), "so far 7<|im_end|>", ANSWER]
    engine = ScriptedEngine(
        lambda _ids, _session, turn: ids(answers[turn]), max_context=PROMPT + 150
    )
    done = rollout(
        engine=engine,
        tools=toolbox(read),
        compaction=f"{__name__}.Short",
        compact_at=PROMPT + 20,
        summary_tokens=40,
        max_result_tokens=500,
        keep_turns=0,
    )
    # The reply of 240 tokens is clipped, so that the request and 40 tokens fit behind it.
    assert done.stop_reason is StopReason.completed
    assert "clipped" in done.trajectories[0].messages[-1]["content"]
    assert engine.sent[1].sampling.max_tokens == 40
    assert done.trajectories[0].length < PROMPT + 150 - 40


def test_the_last_turn_is_not_spent_on_a_summary() -> None:
    done, _ = compacted(ADD[3], ADD[5], ANSWER, max_turns=3)
    assert (done.stop_reason, len(done.trajectories)) == (StopReason.completed, 1)


def test_an_unanswered_question_follows_the_summary() -> None:
    answers = ["7 " * 40 + "<|im_end|>", "so far 7<|im_end|>", "7<|im_end|>"]
    engine = ScriptedEngine(lambda _ids, _session, turn: ids(answers[turn]))
    done = rollout(
        engine=engine,
        task=Task(task_id="t", messages=TASK.messages, user_turns=("what is 7?",)),
        compaction=f"{__name__}.Short",
        compact_at=PROMPT + 40,
    )
    assert done.stop_reason is StopReason.completed
    _, summary, last = done.trajectories
    assert [m["content"] for m in summary.messages[1:]] == [
        *(answers[0].removesuffix("<|im_end|>").strip(), "sum?", "so far 7")
    ]
    assert [m["content"] for m in last.messages[1:]] == ["so far 7", "what is 7?", "7"]


def test_a_prompt_past_the_limit_asks_for_no_summary() -> None:
    done, _ = compacted(ADD[3], compact_at=PROMPT - 1)
    assert (done.stop_reason, done.turns) == (StopReason.context_full, 1)


def test_a_second_compaction_and_the_users_next_message(tmp_path) -> None:
    task = Task(
        task_id="t",
        messages=TASK.messages,
        user_turns=("what is 3 + 4?", "what is 7?"),
    )
    answers = [
        ADD[3],
        ADD[5],
        "so far 7<|im_end|>",
        ANSWER,
        "and 7<|im_end|>",
        "7<|im_end|>",
        "7 7<|im_end|>",
    ]
    engine = ScriptedEngine(lambda _ids, _session, turn: ids(answers[turn]))
    done = rollout(
        engine=engine, task=task, compaction=f"{__name__}.Short", compact_at=AT, max_turns=9
    )
    assert done.stop_reason is StopReason.completed
    write_step(tmp_path, 1, [done])
    (record,) = read_step(tmp_path, 1)
    asked = [message["content"] for message in added_messages(record) if message["role"] == "user"]
    assert asked == ["what is 3 + 4?", "what is 7?"]  # and neither request nor "go"
    assert [t.role for t in done.trajectories].count("summary") == 2
    assert sampled(done) == answers
    made = [result.call.id for result in done.tool_results]
    assert made == ["call_0_0", "call_1_0"]


def test_calls_of_a_later_trajectory_have_ids_of_their_own() -> None:
    done, _ = compacted(
        ADD[3], ADD[5], "so far 7<|im_end|>", ADD[6], ANSWER, max_turns=9, keep_turns=0
    )
    assert [r.call.id for r in done.tool_results] == ["call_0_0", "call_1_0", "call_2.0_0"]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"compaction": "summary"}, r"rollout.compaction=summary: set rollout.compact_at="),
        (
            {"compact_at": 9},
            "rollout.compact_at=9: has no effect with rollout.compaction=none; set",
        ),
        ({"compaction": "sumary", "compact_at": 9}, r"sumary: is unknown \(did you mean 'summary'"),
        ({"compaction": "summary", "compact_at": 9, "summary_tokens": 0}, "summary_tokens"),
    ],
)
def test_settings_that_contradict_each_other(limits: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutConfig(**limits)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"compaction": "my_missing.Mine"},
            "compaction=my_missing.Mine: .* no module 'my_missing'",
        ),
        (
            {"compact_at": 900},
            r"compact_at=900: with a turn of rollout.max_turn_tokens=512, the request and .* 1000",
        ),
    ],
)
def test_what_cannot_fit_or_be_made_is_refused_before_sampling(limits: dict, message: str) -> None:
    config = RolloutConfig(**{"compaction": "summary", "compact_at": 100, **limits})
    with pytest.raises(ValueError, match=message):
        check_compaction(config, chat(), 1000)
    fitting = RolloutConfig(compaction="summary", compact_at=100, max_turn_tokens=200)
    check_compaction(fitting, chat(), 1000)


def play(plan: Plan, runner: asyncio.Runner, room: int, **settings) -> Rollout:
    """Run the plan's rollout with a compaction `room` tokens after its prompt; check it."""
    tools, task = tools_of(plan.adds, plan.stop_tools), task_of(plan)
    schemas = tools.schemas(task.tools)
    prompt = the_chat().prompt_ids(task.messages, schemas)
    engine = engine_of(plan, len(prompt))
    limits = replace(
        LIMITS,
        max_turns=plan.turns,
        max_turn_tokens=plan.turn_tokens,
        max_completion_tokens=plan.budget,
        max_tool_calls=plan.calls,
        on_malformed_call=plan.malformed,
        compact_at=len(prompt) + room,
        **settings,
    )
    context = RolloutContext(engine=engine, chat=the_chat(), toolbox=tools, limits=limits)
    done = runner.run(run_rollout(RolloutRequest(task=task), context))
    if done.turns:
        verify(done, the_chat(), schemas)
    requests = iter(engine.sent)
    for trajectory in done.trajectories:
        before = trajectory.context(done.trajectories[: trajectory.index])
        for span in trajectory.spans:
            if span.origin is Origin.sampled:
                assert next(requests).ids == before
            before.extend(span.token_ids)
        assert trajectory.length <= engine.max_context
        assert list(trajectory.token_ids[: len(prompt)]) == prompt
    assert next(requests, None) is None
    assert done.turns <= plan.turns
    assert done.sampled_length <= plan.budget
    return done


def test_random_rollouts_hold_every_invariant() -> None:
    seen: set[tuple[StopReason | None, bool]] = set()
    with asyncio.Runner() as runner:

        @settings(max_examples=300, derandomize=True, database=None)
        @given(
            plan=PLANS.map(lambda plan: replace(plan, hangs=False, turns=5, turn_tokens=200)),
            likely=st.sampled_from(
                [[], [ADD[3], BYE, BYE], [ADD[3], BYE, FINAL], [ADD[3], ADD[3], BYE, LONG]]
            ),
            compaction=st.sampled_from(["drop_tool_results", f"{__name__}.Short"]),
            room=st.integers(20, 80),
            keep_turns=st.integers(0, 2),
        )
        def every(plan: Plan, likely: list[str], **settings) -> None:
            plan = replace(plan, answers=[*likely, *plan.answers][:5])
            done = play(plan, runner, summary_tokens=40, **settings)
            seen.add((done.stop_reason, len(done.trajectories) > 1))

        every()
    several = {reason for reason, compacted in seen if compacted}
    assert several >= {StopReason.completed, StopReason.invalid_summary}
