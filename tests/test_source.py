"""Rows to tasks: order, epochs, and rows that are refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenttrain.data.files import FileRows
from agenttrain.data.source import TaskSource, to_task

ROWS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(5)]


def answers(source, start, count):
    return [int(task.columns["answer"]) for task in source.tasks(start, count)]


def test_rows_in_order_and_round_again():
    assert answers(TaskSource(ROWS), 3, 4) == [3, 4, 0, 1]


@given(st.integers(0, 40), st.integers(1, 12), st.integers(0, 5))
def test_a_shuffle_visits_each_row_once_an_epoch_from_wherever_it_starts(start, count, seed):
    source = TaskSource(ROWS, shuffle=True, seed=seed)
    whole = answers(TaskSource(ROWS, shuffle=True, seed=seed), 0, 60)
    assert answers(source, start, count) == whole[start : start + count]
    assert [sorted(whole[i : i + 5]) for i in range(0, 60, 5)] == [[0, 1, 2, 3, 4]] * 12


def test_seeds_give_other_orders():
    orders = {tuple(answers(TaskSource(ROWS, shuffle=True, seed=s), 0, 5)) for s in range(20)}
    assert len(orders) > 10


def test_a_row_becomes_a_task():
    row = {"task_id": "x", "messages": [{"role": "user", "content": "q"}], "tools": ["sql"], "a": 1}
    task = to_task(row, 7)
    assert (task.task_id, task.tools, task.columns) == ("x", ("sql",), {"a": 1})
    assert to_task({"prompt": "q"}, 7).task_id == "7"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "q"}, r"row 3: needs `messages` .* found columns \['question'\]"),
        ({"messages": ["q"]}, r"row 3: 'q' is no chat message with a `role`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"row 3: the content of the user message is a list; only text",
        ),
    ],
)
def test_a_row_that_cannot_be_a_task_is_named(row, said):
    with pytest.raises(ValueError, match=said):
        to_task(row, 3)


def test_an_empty_dataset_is_refused():
    with pytest.raises(ValueError, match=r"no rows: check data\.train"):
        TaskSource([])


def test_rows_from_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert answers(TaskSource(FileRows(str(path))), 0, 5) == [0, 1, 2, 3, 4]
    assert len(FileRows(str(path), limit=2)) == 2
    with pytest.raises(ValueError, match="no such file"):
        FileRows(str(tmp_path / "none.jsonl"))
    (tmp_path / "rows.txt").write_text("x")
    with pytest.raises(ValueError, match=r"ending must be one of .*\.parquet"):
        FileRows(str(tmp_path / "rows.txt"))
