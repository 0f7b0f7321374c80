"""What a table says is what a reward reads: padding of Arrow, guesses of pandas, marks of CSV."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow
import pytest

from agenttrain.data.build import build_tasks
from agenttrain.data.config import DataConfig
from agenttrain.data.files import FileRows, HubRows, as_rows

ROWS: list[dict[str, Any]] = [
    {
        "prompt": "w",
        "answer": {"city": "Rome"},
        "steps": [{"call": {"a": 1}}, {"note": "x"}],
        "tools": [
            {
                "name": "weather",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            }
        ],
    },
    {
        "prompt": "a",
        "answer": {"sum": 3},
        "steps": [{"call": {"b": [{"c": 1}, {"d": 2}]}}],
        "tools": [
            {
                "name": "add",
                "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
            }
        ],
    },
    {"prompt": "n"},
]
"""No two rows have the same keys, at any depth."""
READ = [
    ({name: row[name] for name in ("prompt", "answer", "steps") if name in row}, row.get("tools"))
    for row in ROWS
]


def made_dataset() -> Any:
    return datasets.Dataset.from_list(ROWS)


def made_formatted() -> Any:
    return made_dataset().with_format("numpy")


def made_frame() -> Any:
    return pandas.DataFrame(ROWS)


def made_frame_of_arrow() -> Any:
    """As `pandas.read_parquet` makes it: arrays of dicts with all keys."""
    return made_dataset().data.table.to_pandas()


def made_table() -> Any:
    return pyarrow.Table.from_pylist(ROWS)


def made_splits() -> Any:
    return datasets.DatasetDict({"train": made_dataset()})


def read(**section: Any) -> list[tuple[dict[str, Any], Any]]:
    """Columns and tools of every row."""
    source = build_tasks(DataConfig(train=section, test={}), seed=0).train
    return [
        (
            {**task.columns},
            [{"name": tool.name, "parameters": tool.parameters} for tool in task.tools]
            if task.tools is not None
            else None,
        )
        for task in source.tasks(0, len(source))
    ]


@pytest.mark.parametrize(
    "function", [made_dataset, made_formatted, made_frame, made_frame_of_arrow, made_table]
)
def test_tables_of_functions_have_no_keys_but_those_of_their_rows(function: Any) -> None:
    assert read(_target_=f"{__name__}.{function.__name__}") == READ


def test_a_missing_date_of_a_frame_is_no_text() -> None:
    days = pandas.to_datetime(["2020-01-31", None])
    rows = as_rows(pandas.DataFrame({"day": days}), "f")
    assert [row["day"] for row in rows] == ["2020-01-31T00:00:00", None]


def test_a_function_that_returns_several_splits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.train\._target_=.*: has the splits train;"):
        read(_target_=f"{__name__}.made_splits")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "pandas", "disk"])
def test_files_have_no_keys_but_those_of_their_rows(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("rows.parquet" if kind == "pandas" else f"rows.{kind}")
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "parquet":
        made_dataset().to_parquet(path)
    elif kind == "pandas":
        made_frame().to_parquet(path)
    else:
        made_dataset().save_to_disk(path)
    assert read(_target_="agenttrain.data.files.FileRows", path=str(path)) == READ


def test_json_columns_of_several_types_keep_their_nulls(tmp_path: Path) -> None:
    """`datasets` marks a column without one Arrow type, and adds nothing to it."""
    rows = [{"prompt": "q", "x": {"a": None}}, {"prompt": "r", "x": 5}, {"prompt": "s", "x": "y"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = HubRows(str(tmp_path))
    assert [found[index] for index in range(3)] == rows


CELLS = ["NA", "007", "None", "null", "nan", "N/A", "True", "1.50", "12", "", " x ", "1e5", "∞"]


def cells_of(rows: Any) -> list[Any]:
    return [rows[index]["answer"] for index in range(len(rows))]


@pytest.mark.parametrize(("suffix", "separator"), [("csv", ","), ("tsv", "\t")])
def test_a_cell_is_the_text_that_is_written(suffix: str, separator: str, tmp_path: Path) -> None:
    file = tmp_path / f"rows.{suffix}"
    lines = [f"12345{separator}{cell}" for cell in CELLS]
    file.write_text("\n".join([f"prompt{separator}answer", *lines, ""]), encoding="utf-8-sig")
    rows = FileRows(str(file))
    assert cells_of(rows) == [cell or None for cell in CELLS]
    assert rows[0]["prompt"] == "12345"
    read_rows = read(_target_="agenttrain.data.files.FileRows", path=str(file))
    assert read_rows[CELLS.index("")] == ({"prompt": "12345"}, None)


def test_a_folder_of_csv_files_as_from_the_hub(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    lines = ["prompt,answer", *(f"1,{cell}" for cell in CELLS)]
    (data / "train.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert cells_of(HubRows(str(data))) == [cell or None for cell in CELLS]


def test_a_compressed_csv_file_as_from_the_hub(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.csv.gz").write_bytes(gzip.compress(b"prompt,answer\n1,007\n"))
    assert HubRows(str(data))[0] == {"prompt": "1", "answer": "007"}


def test_long_cells_lines_in_cells_and_short_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(f'prompt,answer\n"{"a" * 200_000}\nb",1\nshort\n\nc,2\n')
    rows = FileRows(str(file))
    assert [len(rows[0]["prompt"]), rows[1], rows[2]["answer"]] == [
        200_002,
        {"prompt": "short"},
        "2",
    ]
    assert [rows.where(index).rpartition(", ")[2] for index in range(3)] == [
        "line 2",
        "line 4",
        "line 6",
    ]
