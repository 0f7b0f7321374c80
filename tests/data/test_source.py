"""Rows to tasks: order, epochs, and rows that are refused."""

from __future__ import annotations

import json

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenttrain.data.build import build_rows, build_tasks
from agenttrain.data.config import DataConfig
from agenttrain.data.files import FileRows
from agenttrain.data.tasks import RowError, TaskSource, check_columns, to_task

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
    assert to_task({"prompt": "q", "user_turns": ["and?"]}, 7).user_turns == ("and?",)


def test_a_column_without_a_value_is_none_of_the_row():
    row = {"task_id": None, "messages": None, "prompt": "q", "tools": None, "answer": None, "n": 0}
    task = to_task(row, 7)
    assert (task.task_id, task.tools, task.columns) == ("7", None, {"prompt": "q", "n": 0})


def test_columns_that_settings_name():
    source = TaskSource([{"prompt": "q"}, {"prompt": "q", "hops": 2}])
    check_columns(source, {"eval.group_by": "hops"})
    check_columns(source, {"eval.group_by": None})
    with pytest.raises(ValueError, match=r"eval\.group_by=hop: .* mean 'hops'\?\); they have: pro"):
        check_columns(source, {"eval.group_by": "hop"})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "q"}, r"row 3: needs `messages` .* found columns \['question'\]"),
        ({"prompt": "q", "user_turns": "and?"}, r"row 3: user_turns='and\?': give a list of texts"),
        ({"messages": ["q"]}, r"row 3: 'q' is no chat message with a `role`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"row 3: part 0 of the user message names an image that the column 'images' does not",
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


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", "\n\n", r"the file has no rows"),
        ("a.json", '[{"prompt": "q"},\n x]', r"line 2: is not JSON"),
        ("a.json", "[]", r"the file has no rows"),
        ("a.jsonl", "", r"the file has no rows"),
        ("a.csv", "\n\n", r"the file has no rows"),
        ("a.csv", "prompt,answer\n", r"the file has no rows"),
        ("a.csv", "prompt,answer\n1,2\n2,+,2\n", r"line 3: has 3 cells, and the header names 2"),
        ("a.csv", 'prompt\n"1"+1\n', r"line 2: is not CSV"),
        ("a.tsv", "a\tb\ta\n1\t2\t3\n", r"line 1: names the column 'a' twice"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_with_its_key(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    section = {"_target_": "agenttrain.data.files.FileRows", "path": str(path)}
    with pytest.raises(ValueError, match=rf"^data\.train\.path={path}(,|:) {said}"):
        build_rows(section, "data.train")


def test_a_dataset_of_the_users_without_rows_is_told_with_its_key():
    with pytest.raises(
        ValueError, match=r"data\.test\._target_='collections\.UserList': has no rows"
    ):
        build_rows({"_target_": "collections.UserList"}, "data.test")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '[{"prompt": "q\\u2028", "n": 1}, {"messages": []}]'),
        ("a.jsonl", '\ufeff{"prompt": "q\u2028", "n": 1}\n{"messages": []}'),
    ],
)
def test_json_rows_have_the_columns_that_they_are_written_with(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    rows = FileRows(str(tmp_path / name))
    assert [rows[0], rows[1]] == [{"prompt": "q\u2028", "n": 1}, {"messages": []}]


def test_a_table_shows_no_progress_bars_and_leaves_them_to_others(tmp_path, capfd):
    table = {"prompt": ["q", "r"], "answer": [None, 7]}
    datasets.Dataset.from_dict(table).save_to_disk(tmp_path / "a")
    capfd.readouterr()
    rows = FileRows(str(tmp_path / "a"))
    assert [task.columns for task in TaskSource(rows).tasks(0, 2)] == [
        {"prompt": "q"},
        {"prompt": "r", "answer": 7},
    ]
    assert "split" not in capfd.readouterr().err
    assert not datasets.are_progress_bars_disabled()


def counted(n):
    """Yield rows one by one, as the guide to datasets does."""
    for i in range(n):
        yield {"prompt": f"What is {i} + {i}?", "answer": str(2 * i)}


def endless():
    while True:
        yield {"prompt": "?"}


def unordered():
    return {("prompt", "?")}


def failing():
    yield {"prompt": "?"}
    raise ValueError("n=3: is odd")


def test_rows_that_a_function_yields(monkeypatch):
    rows = build_rows({"_target_": f"{__name__}.counted", "n": 3}, "data.train")
    assert [row["answer"] for row in rows] == ["0", "2", "4"]
    assert [row["answer"] for row in rows] == ["0", "2", "4"]
    monkeypatch.setattr("agenttrain.data.build.MAX_ITERATED", 10)
    assert len(build_rows({"_target_": f"{__name__}.counted", "n": 10}, "data.train")) == 10
    with pytest.raises(ValueError, match=r"data\.train\._target_=.*endless.* over 10 rows"):
        build_rows({"_target_": f"{__name__}.endless"}, "data.train")
    with pytest.raises(ValueError, match="gives a set, which has no rows by number"):
        build_rows({"_target_": f"{__name__}.unordered"}, "data.train")
    with pytest.raises(ValueError, match="is odd"):
        build_rows({"_target_": f"{__name__}.failing"}, "data.train")
    with pytest.raises(ValueError, match="has no rows"):
        build_rows({"_target_": f"{__name__}.counted", "n": 0}, "data.train")


def test_a_tool_as_transformers_and_openai_write_it():
    function = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
    returns = {"type": "integer", "description": "The sum."}
    for tool in (
        {"type": "function", "function": {**function, "return": returns}},
        {**function, "return": returns},
        {"type": "function", **function, "strict": True},
    ):
        (read,) = to_task({"prompt": "q", "tools": [tool]}, 0).tools
        assert (read.name, read.description) == ("add", "Add.")
        assert read.parameters == {"type": "object"}


def made(index: int) -> object:
    """Rows without end of a user's function: four of its first five make no task."""
    rows = ({"prompt": "hi"}, {"answer": "1"}, ["hi"], {"prompt": 3}, None)
    return {}["missing"] if index == 5 else rows[index]


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (1, "needs `messages`"),
        (2, "is a list, not a mapping of columns to values: ['hi']"),
        (4, "is a NoneType, not a mapping"),
        (5, f"KeyError: 'missing' ({__file__}:"),
    ],
)
def test_a_row_without_end_that_is_no_task_is_named_with_its_key(index, reason):
    config = DataConfig(train={"_target_": f"{__name__}.made"})
    for source, key in (("", "data.train"), ("mine", "data.sources.mine.train")):
        tasks = build_tasks(config, seed=0, source=source).train
        assert tasks.tasks(0, 1)[0].source == source
        with pytest.raises(RowError) as refused:
            tasks.tasks(index, 1)
        assert str(refused.value).startswith(f"{key}: row {index + 1}: {reason}")


def test_the_settings_of_a_row_without_end_are_those_of_its_source():
    config = DataConfig(train={"_target_": f"{__name__}.made"}, map={"size": "length(prompt)"})
    tasks = build_tasks(config, seed=0, source="mine").train
    with pytest.raises(RowError, match=r"mine\.train: row 4: data\.sources\.mine\.map\.size="):
        tasks.tasks(3, 1)


def listed() -> list[object]:
    return [{"prompt": "hi"}, ["hi"]]


def test_a_row_of_a_list_has_columns():
    with pytest.raises(ValueError, match=r"1 of 2 rows .*\n  row 2: is a list, not a mapping"):
        build_tasks(DataConfig(train={"_target_": f"{__name__}.listed"}), seed=0)
