"""`data.where`, and several files and patterns in `data.path`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agenttrain.data.build import build_tasks
from agenttrain.data.config import DataConfig, OnBadRow, known_rows
from agenttrain.data.files import FileRows

FILE = "agenttrain.data.files.FileRows"
SHOP = {"_target_": "agenttrain.data.bundled.shop.row", "split": "train", "seed": 0}


def rows(folder: Path, name: str, *values: dict) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def asked(path: object, **settings: object) -> list[str]:
    """The questions of the tasks of `path`."""
    config = DataConfig(train={"_target_": FILE, "path": path}, **settings)
    train = build_tasks(config, seed=0).train
    return [task.messages[0]["content"] for task in train.tasks(0, len(train))]


@pytest.fixture
def file(tmp_path: Path) -> str:
    hops = [{"prompt": f"q{n}", "hops": n, "answer": "x" if n else None} for n in range(4)]
    return str(rows(tmp_path, "rows.jsonl", *hops))


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("hops > `1`", ["q2", "q3"]),
        ("hops > `1` && prompt != 'q3'", ["q2"]),
        ("hops > `9` || missing > `1`", []),  # a comparison of nothing is null
        ("answer > `1`", None),
        ("answer", None),
        ("sum(hops) > `1`", None),
    ],
)
def test_where(where: str, kept: list[str] | None, file: str) -> None:
    """What is neither true nor false, or cannot be computed, is a mistake of its row."""
    if kept:
        assert asked(file, where=where) == kept
        return
    with pytest.raises(ValueError) as caught:
        asked(file, where=where)
    message = str(caught.value)
    if kept == []:
        assert message == (
            f"data.where={where}: is true of none of the 4 rows of data.train; their columns are: "
            "answer, hops, prompt"
        )
    else:
        assert re.search(r"rows\.jsonl, line [12]: data\.where=", message)


def test_rows_are_chosen_before_they_are_changed(file: str) -> None:
    """So `where` can leave out the rows that `map` does not fit: the first has no answer."""
    split = {"first": "split(answer, ',')[0]"}
    with pytest.raises(ValueError, match=r"line 1: data\.map\.first="):
        asked(file, map=split)
    assert asked(file, map=split, where="answer != null") == ["q1", "q2", "q3"]


def test_where_counts_and_holds_out_of_what_is_left(file: str) -> None:
    config = DataConfig(
        train={"_target_": FILE, "path": file}, where="hops > `0`", on_bad_row=OnBadRow.skip
    )
    splits = build_tasks(config, seed=0)
    assert splits.notes[0] == "data.where=hops > `0`: is true of 3 of 4 rows of data.train"
    assert splits.train.where(0) == f"{file}, line 2"
    assert [task.task_id for task in splits.train.tasks(0, 4)] == ["1", "2", "3", "1"]


def test_rows_without_end_are_not_chosen() -> None:
    with pytest.raises(ValueError, match=r"data\.where=hops: has no effect on rows without end"):
        DataConfig(train=SHOP, where="hops")


def test_several_files_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the list; a pattern's files sorted; a file that comes twice counts once."""
    first = rows(tmp_path, "z.jsonl", {"prompt": "z"})
    for name in ("b", "a", "c"):
        rows(tmp_path, f"more/{name}.jsonl", {"prompt": f"{name}0"}, {"prompt": f"{name}1"})
    pattern = str(tmp_path / "more" / "*.jsonl")
    both = [str(first), pattern, str(tmp_path / "more" / "a.jsonl")]
    inside = ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert asked(pattern) == inside
    assert asked(both) == ["z", *inside]
    assert asked(str(tmp_path / "**" / "*.jsonl")) == [*inside, "z"]
    found = FileRows(both, limit=4)
    assert [found[index]["prompt"] for index in range(len(found))] == ["z", "a0", "a1", "b0"]
    assert found.where(3) == f"{tmp_path}/more/b.jsonl, line 1"
    assert known_rows({"_target_": FILE, "path": both}) == 7
    monkeypatch.chdir(tmp_path)
    assert asked("more/[ab].jsonl") == ["a0", "a1", "b0", "b1"]
    named = rows(tmp_path, "odd[1].jsonl", {"prompt": "odd"})
    assert asked(str(named)) == ["odd"]


def test_files_that_cannot_be_read_together(tmp_path: Path) -> None:
    first = rows(tmp_path, "a.jsonl", {"prompt": "a"})
    table = tmp_path / "b.csv"
    table.write_text("prompt\nb\n")
    refusals = {
        "path=%s/*.json: the pattern matches no file": f"{tmp_path}/*.json",
        "path=%s/no.jsonl: there is no such file": [str(first), f"{tmp_path}/no.jsonl"],
        "names files that end in .csv, .jsonl; give files of one kind": f"{tmp_path}/*",
        "path=[]: give a file, a pattern such as rows/*.jsonl, or a list": [],
        "path=3: give a file": 3,
    }
    for problem, path in refusals.items():
        with pytest.raises(ValueError) as caught:
            FileRows(path)
        assert problem.replace("%s", str(tmp_path)) in str(caught.value)
    with pytest.raises(ValueError, match="expected a text or a list of texts"):
        DataConfig(train=SHOP, path=[3])
