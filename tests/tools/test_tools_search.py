"""The search tool: BM25 over real files."""

from __future__ import annotations

import asyncio
import json
import random
from math import log
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenttrain.data.bundled.encyclopedia import ALL_PEOPLE, FAMILIES, articles, row
from agenttrain.tools.build import build_toolbox
from agenttrain.tools.builtin.search import Search, split, words
from agenttrain.types import Task, ToolCall, ToolContext, ToolFailure

CONTEXT = ToolContext(rollout_id="r", task=Task(task_id="t", messages=()), turn=0, call_id="c")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four documents and what is none."""
    docs = tmp_path / "docs"
    (docs / "towers").mkdir(parents=True)
    (docs / ".git").mkdir()
    (docs / "towers" / "north.md").write_text("# North Tower\n\nThe tower is 41 m high.\n")
    (docs / "a.txt").write_text("a tower and a tower and a gate", encoding="utf-8")
    (docs / "b.txt").write_text("\ufeffÓbidos: 北京是中国的首都。", encoding="utf-8")
    (docs / "empty.md").write_text("")
    (docs / "picture.png").write_bytes(b"\x89PNG tower")
    (docs / ".git" / "hidden.md").write_text("tower tower tower")
    return docs


def test_passages_stand_under_their_id_and_title(folder: Path) -> None:
    search = Search(path=str(folder))
    assert (
        search(query="How HIGH is it?") == "[towers/north.md] North Tower\nThe tower is 41 m high."
    )
    assert (
        search("obidos")
        == search("ÓBIDOS!")
        == search("京")
        == search("zzz 北")
        == ("[b.txt] b\nÓbidos: 北京是中国的首都。")
    )
    assert search("tower").split("\n\n")[1].startswith("[a.txt]")
    assert search("nowhere") == "no passage matches 'nowhere'"
    for query in ("", "  ", "?!…"):
        with pytest.raises(ToolFailure, match="the query has no words"):
            search(query)


def test_scores_are_those_of_bm25(tmp_path: Path) -> None:
    for name, text in (("a", "red red fox"), ("b", "red dog"), ("c", "a dog and a cat sleep")):
        (tmp_path / f"{name}.txt").write_text(text)
    search = Search(path=str(tmp_path))
    # Words with the file's name as title: a 4, b 3, c 7; mean 14/3; k1 = 1.5, b = 0.75.
    # red: in 2 of 3 documents, idf = log(1 + (3 - 2 + 0.5) / (2 + 0.5)) = log(1.6)
    norm = 1.5 * (0.25 + 0.75 * 4 / (14 / 3))
    expected = log(1.6) * 2 / (2 + norm)
    assert search._index.get_scores(["red"])[0] == pytest.approx(expected, rel=1e-5)
    assert [passage.id for passage in search.find(["red"])] == ["a.txt", "b.txt"]


def test_equals_come_in_the_order_of_the_corpus(tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "text": "the same words"} for i in range(50)]
    random.Random(0).shuffle(rows)
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    found = Search(path=str(file), k=7).find(["same", "words"])
    assert [passage.id for passage in found] == [row["id"] for row in rows[:7]]


def test_rows_of_jsonl_csv_and_parquet_are_the_same(tmp_path: Path) -> None:
    rows = [{"name": "Kirn", "body": "a town"}, {"name": "Issel", "body": "a river, 北"}]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "r.csv").write_text('name,body\nKirn,a town\nIssel,"a river, 北"\n')
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "r.parquet")
    for kind in ("jsonl", "csv", "parquet"):
        path = str(tmp_path / f"r.{kind}")
        search = Search(path=path, text_column="body", title_column="name")
        assert search("kirn") == "[0] Kirn\na town"
        assert search("北 kirn river") == "[1] Issel\na river, 北\n\n[0] Kirn\na town"


def test_long_documents_are_several_passages(tmp_path: Path) -> None:
    (tmp_path / "long.md").write_text(
        "# Oss\n\nThe first paragraph, a short one.\n\nThe second one is this. It has the fox."
    )
    search = Search(path=str(tmp_path), max_chars=35, k=5)
    assert search("fox") == "[long.md#3] Oss\nIt has the fox."
    assert {passage.id for passage in search.find(["oss"])} == {f"long.md#{i}" for i in (1, 2, 3)}


@given(st.text(alphabet="ab. \n北é", max_size=200), st.integers(1, 30))
def test_parts_fit_and_nothing_is_lost(text: str, max_chars: int) -> None:
    parts = list(split(text, max_chars))
    assert all(len(part) <= max_chars for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Óbidos, 北京!", ["obidos", "北", "京"]),
        ("STRASSE Straße ﬁsh", ["strasse", "strasse", "fish"]),
        ("x_y-z 3.5", ["x", "y", "z", "3", "5"]),
        ("한국어 ไทย", ["한", "국", "어", "ไ", "ท", "ย"]),
        ("\ud800 …", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (None, {"path": "/no/such/docs"}, "path=/no/such/docs: there is no such folder or file"),
        (None, {"path": "bundled:encyclopedai"}, r"did you mean 'encyclopedia'\?"),
        (None, {}, "has no path; set the folder or file"),
        (b"x", {"name": "a.pdf"}, r"its ending must be one of \.md"),
        (b"?!", {"name": "-.txt"}, "there are no words in it"),
        (b"\xff\xfe", {"name": "a.txt"}, r"a\.txt: is not UTF-8 text"),
        (b'{"body": "x"}', {"name": "a.jsonl"}, "text_column=text: is no column of row 0 of"),
        (b'{"text": 3}', {"name": "a.jsonl"}, "text_column=text: is no text of row 0 of"),
        (b'{"text": "x"}\n[1]', {"name": "a.jsonl"}, r"a\.jsonl, line 2: is no row"),
        (b'{"text": "x"}\n{', {"name": "a.jsonl"}, r"a\.jsonl, line 2: is not JSON"),
        (b"x", {"name": "a.txt", "k": 0}, "k=0: must be a whole number of at least 1"),
        (b"x", {"name": "a.txt", "max_chars": True}, "max_chars=True: must be a whole"),
    ],
)
def test_a_corpus_that_cannot_be_searched(tmp_path, content, settings, message) -> None:
    settings = dict(settings)
    if content is not None:
        file = tmp_path / settings.pop("name")
        file.write_bytes(content)
        settings["path"] = str(file)
    with pytest.raises(ValueError, match=message):
        build_toolbox(
            {"search": {"_target_": "agenttrain.tools.builtin.search.Search", **settings}}
        )


def test_a_folder_without_texts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the folder has no files ending in \.md, \.markdown"):
        Search(path=str(tmp_path))


def test_the_bundled_encyclopedia_answers_its_questions() -> None:
    section = {
        "_target_": "agenttrain.tools.builtin.search.Search",
        "path": "bundled:encyclopedia",
        "k": 2,
    }
    toolbox = build_toolbox({"search": section})

    def look_up(query: str) -> str:
        call = ToolCall(id="c", name="search", arguments={"query": query})
        (result,) = asyncio.run(toolbox.execute([call], lambda call: CONTEXT))
        assert result.error is None
        return result.content

    for person in ALL_PEOPLE:  # each article that a question leads to is found by its name
        assert f"born {person.born} in {person.town.name}" in look_up(person.name)
        town = person.town
        assert f"founded in {town.founded}" in look_up(f"town {town.name} founded")
        assert f"{town.river.length} kilometres" in look_up(f"river {town.river.name} kilometres")


def test_questions_and_articles_agree() -> None:
    folder = Path(__file__).parents[2] / "agenttrain/data/documents/encyclopedia"
    shipped = {
        file.relative_to(folder).as_posix(): file.read_text(encoding="utf-8")
        for file in folder.rglob("*.md")
    }
    assert len(shipped) == 40
    assert shipped == articles()
    rows = {split: [row(split, i, seed=0) for i in range(200)] for split in ("train", "test")}
    asked = {split: {r["messages"][1]["content"] for r in found} for split, found in rows.items()}
    assert not asked["train"] & asked["test"]
    assert {r["family"] for r in rows["train"]} == set(FAMILIES)
    everything = "\n".join(shipped.values())
    assert all(r["answer"] in everything for found in rows.values() for r in found)
    with pytest.raises(ValueError, match="split='tune': must be one of train, test"):
        row("tune", 0, seed=0)
