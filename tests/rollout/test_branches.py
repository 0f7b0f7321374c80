"""Rollouts of several trajectories, some of which begin with tokens of another."""

from __future__ import annotations

import io
import json

import pytest
import tiny
from rich.console import Console

from agenttrain.algorithms.credit import set_advantages
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.loading import load_chat
from agenttrain.rewards.function import copy_rollout
from agenttrain.rollout.ledger import verify
from agenttrain.tracking.backends.base import rollout_table
from agenttrain.tracking.report import rollout_text
from agenttrain.tracking.rollouts import read_rollout, read_step, write_step
from agenttrain.tracking.viewer import render
from agenttrain.types import (
    Completion,
    Finish,
    LedgerError,
    Origin,
    Rollout,
    StopReason,
    Task,
    Trajectory,
)


def say(trajectory: Trajectory, *token_ids: int) -> None:
    completion = Completion(
        token_ids=token_ids,
        logprobs=(-0.5,) * len(token_ids),
        finish=Finish.stop,
        versions=((3, len(token_ids)),),
    )
    trajectory.append_sampled(completion, trajectory.token_ids)


def branched() -> Rollout:
    """Three trajectories, the second amid a span of the first, the third at the second's end.

    main      7 8 9 | 20 21 2 | 30 31          prompt, sampled, tool
    summary   7 8 9   20      | 40 2           4 of main, sampled
    main      7 8 9   20        40 2 | 5 | 22  all of summary, tool, sampled
    """
    rollout = Rollout(
        task=Task(task_id="t", messages=()),
        rollout_id="train-1-0-0",
        group_id="train-1-0",
        reward=1.0,
        stop_reason=StopReason.completed,
    )
    (main,) = rollout.trajectories
    main.append_context([7, 8, 9], Origin.prompt)
    say(main, 20, 21, 2)
    main.append_context([30, 31], Origin.tool)
    summary = rollout.branch(0, 4, role="summary")
    say(summary, 40, 2)
    later = rollout.branch(1, 6)
    later.append_context([5], Origin.tool)
    say(later, 22)
    set_advantages(rollout, 0.5)
    return rollout


def test_a_branch_has_spans_of_its_own_tokens_only() -> None:
    _, summary, later = branched().trajectories
    assert (summary.index, summary.role, summary.parent) == (1, "summary", (0, 4))
    assert list(summary.token_ids) == [7, 8, 9, 20, 40, 2]
    assert list(later.token_ids) == [7, 8, 9, 20, 40, 2, 5, 22]
    assert (later.context_length, list(later.own_ids)) == (6, [5, 22])
    assert (later.loss_mask, later.rollout_logprobs) == ([0, 1], [0.0, -0.5])
    assert (later.length, later.prompt_length, later.sampled_length) == (8, 0, 1)


def test_a_rollout_counts_every_token_once() -> None:
    rollout = branched()
    # 8 of main, 2 of the summary, 2 of what follows it; 3 + 2 + 1 of them sampled
    assert (rollout.length, rollout.sampled_length, rollout.turns) == (12, 6, 3)


def test_the_engine_is_sent_the_context_too() -> None:
    rollout = branched()
    completion = Completion(
        token_ids=(2,), logprobs=(-1.0,), finish=Finish.stop, versions=((3, 1),)
    )
    with pytest.raises(LedgerError, match=r"trajectory 2 turn 1: .* at position 0"):
        rollout.trajectories[2].append_sampled(completion, [5, 22])


@pytest.mark.parametrize("parent", [(0, 9), (0, 0), (3, 1), (-1, 1)])
def test_a_branch_needs_tokens_that_are_there(parent: tuple[int, int]) -> None:
    with pytest.raises(LedgerError, match=r"trajectory 3: parent=.* have \[8, 6, 8\] tokens"):
        branched().branch(*parent)


def test_files_hold_own_tokens_and_are_read_back(tmp_path) -> None:
    rollout = branched()
    write_step(tmp_path, 1, [rollout])
    (record,) = read_step(tmp_path, 1)
    written = [
        (part["role"], part["parent"], part["token_ids"], part["logprobs"])
        for part in record["trajectories"]
    ]
    assert written == [
        ("main", None, [7, 8, 9, 20, 21, 2, 30, 31], [0, 0, 0, -0.5, -0.5, -0.5, 0, 0]),
        ("summary", [0, 4], [40, 2], [-0.5, -0.5]),
        ("main", [1, 6], [5, 22], [0.0, -0.5]),
    ]
    spans = [(s["origin"], s["start"], s["end"]) for s in record["trajectories"][2]["spans"]]
    assert spans == [("tool", 0, 1), ("sampled", 1, 2)]
    again = read_rollout(record, rollout.task)
    assert again.trajectories == rollout.trajectories


def test_a_copy_for_a_reward_function_branches_alike() -> None:
    rollout = branched()
    assert copy_rollout(rollout).trajectories == rollout.trajectories


def test_what_shows_rollouts_names_the_context(tmp_path) -> None:
    write_step(tmp_path, 1, [branched()])
    (record,) = read_step(tmp_path, 1)
    console = Console(file=io.StringIO(), width=200)
    console.print(rollout_text(record, lambda ids: " ".join(map(str, ids)) + " "))
    shown = console.file.getvalue().splitlines()
    assert "summary, after 4 tokens of trajectory 0" in shown
    assert "main, after 6 tokens of trajectory 1" in shown
    page = render([record], lambda ids: " ".join(map(str, ids)))
    assert json.dumps([1, 6]).replace(" ", "") in page
    columns, (row,) = rollout_table([record])
    assert row[columns.index("turns")] == 3


def test_the_ledger_of_branches_is_verified() -> None:
    chat = load_chat(tiny.tokenizer(), ChatTemplateConfig(), ResponseSchemaConfig())
    question = [{"role": "user", "content": "what is 3 + 4?"}]
    rollout = Rollout(task=Task(task_id="t", messages=()), rollout_id="r")
    (main,) = rollout.trajectories
    main.append_context(chat.prompt_ids(question, ()), Origin.prompt)
    main.messages, main.prompt_messages = list(question), 1
    branches = [main, rollout.branch(0, main.length)]
    for trajectory, text in zip(branches, ("The answer is 7.", "7"), strict=True):
        trajectory.messages, trajectory.prompt_messages = list(question), 1
        say(trajectory, *tiny.tokenizer().encode(f"{text}<|im_end|>"))
        trajectory.messages.append({"role": "assistant", "content": text})
    verify(rollout, chat, ())

    branches[1].messages[-1] = {"role": "assistant", "content": "8"}
    position = main.prompt_length
    with pytest.raises(LedgerError, match=f"trajectory 1 turn 0 position {position}: .* '7<"):
        verify(rollout, chat, ())
    branches[1].parent = (0, position - 1)
    with pytest.raises(LedgerError, match="trajectory 1: its ids are not those of its spans"):
        verify(rollout, chat, ())
