"""Real files of each format, folders of `save_to_disk`, the hub: the same rows from all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path

import datasets
import pytest

from agenttrain.data.build import build_rows, build_tasks
from agenttrain.data.config import DataConfig, OnBadRow, check_row_file
from agenttrain.data.files import BLOCK, FileRows, HubRows
from agenttrain.types import Task

ROWS = [
    {"prompt": "What is 2+2?", "answer": "four", "hops": 1},
    {"prompt": "¿Qué es\n3+3?", "answer": 'six, "6"', "hops": 2},
]
FILE = "agenttrain.data.files.FileRows"


def written(folder: Path, kind: str, rows: list[dict] = ROWS) -> Path:
    """The rows as a file, or a folder, of that kind."""
    path, table = folder / f"rows.{kind}", datasets.Dataset.from_list(rows)
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif kind == "json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif kind == "csv":
        table.to_csv(path)
    elif kind == "parquet":
        table.to_parquet(path)
    else:
        table.save_to_disk(path)
    return path


def tasks(path: Path | str, **settings: object) -> list[Task]:
    """All tasks of a file, which is also the test file."""
    section = {"_target_": FILE, "path": str(path)}
    config = DataConfig(train=section, test=section, **settings)
    built = build_tasks(config, seed=0).train
    return built.tasks(0, len(built))


@pytest.mark.parametrize("test", [{}, {"_target_": FILE, "path": None}])
def test_rows_of_training_alone(test, tmp_path):
    rows = [{"prompt": f"What is {number}?"} for number in range(200)]
    train = {"_target_": FILE, "path": str(written(tmp_path, "jsonl", rows))}
    alone = build_tasks(DataConfig(train=train, test=test), seed=0)
    assert (len(alone.train), len(alone.test), list(alone.by_key)) == (200, 0, ["data.train"])
    assert alone.test.tasks(0, 0) == []
    assert alone.notes == (
        "data.test: names no rows, so evaluations are left out; data.test_fraction=0.1 holds some "
        "of data.train out",
    )

    def held_out(**settings: object) -> list[list[Task]]:
        splits = build_tasks(DataConfig(train=train, test=test, **settings), seed=0)
        assert len(splits.train) + len(splits.test) == 200
        return [source.tasks(0, len(source)) for source in (splits.train, splits.test)]

    first = held_out(test_fraction=0.1)
    assert 5 < len(first[1]) < 40
    assert held_out(test_fraction=0.1) == first != held_out(test_fraction=0.1, test_seed=1)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "disk"])
def test_the_same_rows_from_every_kind(kind, tmp_path):
    found = tasks(written(tmp_path, kind))
    assert [task.messages for task in found] == [
        ({"role": "user", "content": row["prompt"]},) for row in ROWS
    ]
    # A file of cells has no types: what is written is what is read.
    numbers = ("1", "2") if kind == "csv" else (1, 2)
    assert [(task.columns["answer"], task.columns["hops"]) for task in found] == [
        ("four", numbers[0]),
        ('six, "6"', numbers[1]),
    ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_limit(kind, tmp_path):
    assert len(FileRows(str(written(tmp_path, kind)), limit=1)) == 1


def test_splits_of_a_folder(tmp_path):
    halves = {name: datasets.Dataset.from_list([row]) for name, row in zip("ab", ROWS, strict=True)}
    datasets.DatasetDict(halves).save_to_disk(tmp_path / "both")
    assert FileRows(str(tmp_path / "both"), split="b")[0]["hops"] == 2
    with pytest.raises(ValueError, match=r"split=None: .*both has a, b"):
        check_row_file(tmp_path / "both")
    with pytest.raises(ValueError, match=r"split=aa: .*both has a, b \(did you mean 'a'\?\)"):
        FileRows(str(tmp_path / "both"), split="aa")


def test_splits_where_there_are_none(tmp_path):
    for kind, said in (
        ("disk", "is one dataset and has no splits"),
        ("csv", "is one file and has"),
    ):
        with pytest.raises(ValueError, match=rf"split=train: .*{said}"):
            check_row_file(written(tmp_path, kind), "train")
    with pytest.raises(ValueError, match=r"path=.*: is a folder, and none that save_to_disk wrote"):
        check_row_file(tmp_path)


def test_what_arrow_makes_up_is_taken_away_again(tmp_path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": "Add 1 and 2."},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
                        {"type": "function", "function": {"name": "neg", "arguments": {"b": 2}}},
                    ],
                },
                {"role": "tool", "content": "3", "tool_call_id": "c"},
            ]
        }
    ]
    made = datasets.Dataset.from_list(rows)[0]["messages"]
    assert "tool_calls" in made[0], "Arrow gives every message all keys"
    assert made[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None}
    (task,) = tasks(written(tmp_path, "parquet", rows))
    assert list(task.messages) == rows[0]["messages"]


def test_json_keeps_the_nulls_of_its_own(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": None}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
    (task,) = tasks(written(tmp_path, "jsonl", [{"messages": messages, "note": None}]))
    assert list(task.messages) == messages
    assert task.columns == {}


def test_dates_and_decimals_are_plain(tmp_path):
    row = {"prompt": "q", "day": date(2024, 5, 1), "price": Decimal("3.10"), "days": [date.min]}
    (task,) = tasks(written(tmp_path, "parquet", [row]))
    assert task.columns["day"] == "2024-05-01"
    assert (task.columns["price"], task.columns["days"]) == (3.1, ["0001-01-01"])


def test_rows_across_blocks(tmp_path):
    rows = [{"prompt": f"q{number}", "n": number} for number in range(BLOCK + 3)]
    found = FileRows(str(written(tmp_path, "parquet", rows)))
    wanted = [BLOCK + 2, 0, BLOCK, BLOCK - 1]
    assert [found[index]["n"] for index in wanted] == wanted


def test_bad_rows_are_told_at_once_with_their_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = ['{"prompt": "q"}', "", '{"prompt": q}', '["q"]', '{"question": "q"}']
    path.write_text("\n".join(lines + ['{"prompt": 3}'] * 9))
    with pytest.raises(ValueError, match="12 of 13 rows cannot be used") as caught:
        tasks(path)
    told = str(caught.value).splitlines()
    assert told[0].startswith("data.train: ")
    assert told[0].endswith("or leave them out with data.on_bad_row=skip")
    assert told[1] == f"  {path}, line 3: column 12: is not JSON: Expecting value"
    assert told[2].startswith(f"  {path}, line 4: is no row such as")
    assert "line 5: needs `messages`" in told[3] and "found columns ['question']" in told[3]
    assert told[-1] == "  … and 2 more"
    assert len(told) == 12


def test_bad_rows_can_be_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\nnonsense\n{"prompt": "c"}\n')
    section = {"_target_": FILE, "path": str(path)}
    config = DataConfig(train=section, test=section, on_bad_row=OnBadRow.skip)
    built = build_tasks(config, seed=0)
    assert [task.task_id for task in built.train.tasks(0, 3)] == ["0", "2", "0"]
    assert built.notes[0].splitlines() == [
        "data.train: 1 of 3 rows are left out (data.on_bad_row=skip)",
        f"  {path}, line 2: column 1: is not JSON: Expecting value",
    ]
    path.write_text("nonsense\n")
    with pytest.raises(ValueError, match=r"1 of 1 rows cannot be used; data.map.…=… and"):
        tasks(path, on_bad_row=OnBadRow.skip)


def test_bad_rows_of_a_table_are_told_by_number(tmp_path):
    rows = [{"prompt": "q", "n": 1}, {"prompt": None, "n": 2}]
    with pytest.raises(ValueError, match=r"rows.parquet, row 2: needs `messages`"):
        tasks(written(tmp_path, "parquet", rows))
    # The header is line 1.
    with pytest.raises(ValueError, match=r"rows.csv, line 3: needs `messages`"):
        tasks(written(tmp_path, "csv", rows))


def test_a_folder_of_data_files_as_from_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    written(tmp_path, "jsonl").rename(tmp_path / "train.jsonl")
    (tmp_path / "test.jsonl").write_text(json.dumps(ROWS[1]))
    rows = HubRows(str(tmp_path), split="train", limit=1)
    assert (len(rows), rows[0]["hops"]) == (1, 1)
    assert rows.where(0) == f"{tmp_path}, row 1"
    assert HubRows(str(tmp_path), split="test")[0]["hops"] == 2
    section = {"_target_": "agenttrain.data.files.HubRows", "path": str(tmp_path), "split": "dev"}
    with pytest.raises(ValueError, match=r'^data.test.split=dev: Unknown split "dev". Should be'):
        build_rows(section, "data.test")
    with pytest.raises(ValueError, match=r"^subset=maths: .*'maths' not found"):
        HubRows(str(tmp_path), subset="maths")


@pytest.mark.slow
def test_a_hub_dataset_that_cannot_be_had_offline(tmp_path):
    script = "from agenttrain.data.files import HubRows\nHubRows('someone/questions')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    told = done.stderr.splitlines()[-1]
    assert "path=someone/questions: is not in the cache of datasets (HF_HOME), and the hub" in told
    assert "save_to_disk it and use data=file" in told
