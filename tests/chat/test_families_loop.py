"""The loop where the chat template renders one call per turn."""

from __future__ import annotations

import copy

import pytest
import tiny
from parts import call, rollout

from agenttrain.rollout.config import OnParallelCalls
from agenttrain.types import Rollout, StopReason, ToolError

ONE = (
    "{%- for m in messages %}{%- if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{- raise_exception('one call!') }}{%- endif %}{%- endfor %}"
)
ADD = call("add", '{"a": 3, "b": 4}')
TWO = ADD.removesuffix("<|im_end|>") + "\n" + call("add", '{"a": 5, "b": 6}')
ANSWER = "The answer is 7.<|im_end|>"


def run(
    mode: OnParallelCalls, monkeypatch: pytest.MonkeyPatch, calls: str = TWO, **limits: object
) -> Rollout:
    one = copy.copy(tiny.tokenizer())
    one.chat_template = ONE + tiny.TEMPLATE
    monkeypatch.setattr(tiny, "tokenizer", lambda: one)
    return rollout(calls, ANSWER, on_parallel_calls=mode, **limits)


def test_the_first_call_is_run_and_its_reply_says_so_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = run(OnParallelCalls.error_reply, monkeypatch)
    assert done.stop_reason is StopReason.completed
    assert [result.error for result in done.tool_results] == [None, ToolError.parallel]
    told = "Error: only one call per turn; add was not run"
    assert [m["content"] for m in done.trajectories[0].messages if m["role"] == "tool"] == [
        "7",
        told,
    ]
    text = tiny.tokenizer().decode(done.trajectories[0].token_ids)
    assert f"<tool_response>\n7\n{told}\n</tool_response>" in text
    assert text.count("<tool_response>") == 1


def test_or_the_rollout_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(OnParallelCalls.stop, monkeypatch)
    assert done.stop_reason is StopReason.max_tool_calls
    assert done.tool_results == []


def test_a_single_call_is_run_where_several_would_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(OnParallelCalls.stop, monkeypatch, calls=ADD)
    assert done.stop_reason is StopReason.completed
    assert [result.content for result in done.tool_results] == ["7"]


def test_all_calls_are_run_where_the_template_renders_them() -> None:
    done = rollout(TWO, ANSWER, on_parallel_calls=OnParallelCalls.stop)
    assert [result.content for result in done.tool_results] == ["7", "11"]


def test_merged_replies_fit_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    length = len(tiny.tokenizer().encode(TWO, add_special_tokens=False))
    for room in range(20, 60):
        done = run(OnParallelCalls.error_reply, monkeypatch, max_completion_tokens=length + room)
        used = len(done.trajectories[0].token_ids) - done.trajectories[0].prompt_length
        assert used <= length + room
