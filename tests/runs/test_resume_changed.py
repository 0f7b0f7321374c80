"""What a run learns with, before and after it was stopped: changes are named, nothing else is."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import yaml

from agenttrain.cli import main
from agenttrain.data.tasks import TaskSource
from agenttrain.runs.fingerprints import (
    _file_digests,
    _json,
    _rows_digest,
    check_unchanged,
    code_of,
    read,
    write,
)

pytestmark = pytest.mark.timeout(1200)  # whole runs

MINE = '''
RATE = 3


def unused():
    return 1


def scaled(number):
    return number * RATE


def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return scaled(number)


def length(rollout, **columns) -> float:
    return float(len(rollout.trajectories[0].token_ids) % 3)
'''
ROWS = [{"prompt": f"what is {n} + 1?", "answer": str(n + 1)} for n in range(6)]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module of the user's that can be written again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "my_changing_tools.py"

    def rewrite(text: str):
        file.write_text(text)
        sys.modules.pop("my_changing_tools", None)
        importlib.invalidate_caches()
        import linecache

        linecache.clearcache()
        return importlib.import_module("my_changing_tools")

    yield rewrite
    sys.modules.pop("my_changing_tools", None)


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("RATE = 3", "RATE = 3  # as agreed", True),
        ("    return 1", "    return 2", True),
        ("def scaled(number):\n", "def scaled(number):\n\n    # threefold\n", True),
        ("RATE = 3", "RATE = 4", False),
        ("number * RATE", "number + RATE", False),
        ("return scaled(number)", "return scaled(number + 0)", False),
    ],
)
def test_the_code_of_a_function_is_what_it_uses_of_its_module(mine, old, new, same):
    before = code_of(mine(MINE).double)
    assert before is not None and "RATE = 3" in before and "unused" not in before
    assert MINE.count(old) == 1
    assert (code_of(mine(MINE.replace(old, new)).double) == before) is same


def test_what_has_no_source_has_no_code():
    assert code_of(len) is None
    assert code_of(3) is None


def test_rows_are_their_number_order_and_content():
    found = {
        _rows_digest(TaskSource(rows))
        for rows in (ROWS, ROWS[:-1], ROWS[::-1], [*ROWS[:-1], {**ROWS[-1], "answer": "8"}])
    }
    assert len(found) == 4
    assert _rows_digest(TaskSource(list(ROWS))) == _rows_digest(TaskSource(ROWS))


def test_the_files_of_bundled_tools_are_their_content(tmp_path):
    (tmp_path / "a.md").write_text("The Oss is a river.")

    def found(path: object) -> dict[str, str]:
        return _file_digests(
            {"search": {"_target_": "agenttrain.tools.builtin.search.Search", "path": path}}
        )

    before = found(str(tmp_path))
    assert list(before) == ["tools.search.path"]
    (tmp_path / "a.md").write_text("The Oss is a lake.")
    assert found(str(tmp_path)) != before
    assert found("bundled:encyclopedia") == found(None) == {}


def test_values_that_json_does_not_know_have_no_address_in_them():
    assert _json({"a": object()}) == _json({"a": object()})


def test_what_changed_is_named_and_what_may_is_not_refused(tmp_path, capsys):
    before = {"data": {"rows of data.train": "1"}, "tools": {"schema of find": "2"}}
    after = {"data": {"rows of data.train": "3"}, "tools": {"schema of find": "2", "more": "4"}}
    write(tmp_path, before)
    check_unchanged(tmp_path, before, [])
    with pytest.raises(Exception, match=r"rows of data.train, more changed.*\[data,tools\]"):
        check_unchanged(tmp_path, after, [])
    with pytest.raises(Exception, match=r": more changed.*resume_changed=\[tools,data\]"):
        check_unchanged(tmp_path, after, ["data"])
    check_unchanged(tmp_path, after, ["data", "tools"])
    assert "resume_changed=data: rows of data.train changed" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", '{"data": 3}', "{"])
def test_fingerprints_that_cannot_be_read_are_told(tmp_path, capsys, text):
    (tmp_path / "fingerprints.json").write_text(text)
    assert read(tmp_path) is None
    assert "fingerprints.json: not readable" in capsys.readouterr().err


def test_fingerprints_that_are_gone_or_incomplete_are_told(tmp_path, capsys):
    now = {"data": {"rows of data.train": "1"}, "tools": {"schema of find": "2"}}
    check_unchanged(tmp_path, now, [])
    assert "fingerprints.json: missing, it is not known whether data" in capsys.readouterr().err
    write(tmp_path, {"tools": now["tools"]})
    check_unchanged(tmp_path, now, [])
    assert "fingerprints.json: holds nothing of data; it is" in capsys.readouterr().err


@pytest.mark.slow
def test_resume_auto_begins_goes_on_and_refuses(mine, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mine(MINE)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    run = [
        *("debug=tiny", "experiment=none", "model=shop", "tracker=none", "eval.questions=0"),
        *("data=file", "data.train.path=rows.jsonl", "data.test.path=rows.jsonl"),
        *("tools=[final_answer]", "+tools.double._target_=my_changing_tools.double"),
        *("reward=[]", "+reward.length._target_=my_changing_tools.length"),
    ]
    auto = [*run, "resume=auto", "hydra.run.dir=run"]

    def refused(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        return capsys.readouterr().err

    assert "resume_changed: there is no run yet" in refused(*auto, "resume_changed=[data]")
    assert main([*auto, "steps=1"]) == 0
    assert main([*auto, "steps=1"]) == 0
    assert "run: finished after 1 steps" in capsys.readouterr().out
    told = refused(*auto, "steps=2", "seed=3", "rollout.max_turns=2")
    assert "seed=3: the run in run was started with seed=0; leave it so" in told
    assert "rollout.max_turns=2: the run in run was started with rollout.max_turns=3" in told
    assert "add hydra.run.dir=<folder>" in refused(*run, "resume=auto")

    mine(MINE.replace("RATE = 3", "RATE = 4"))
    rows.write_text(rows.read_text().replace("what is 3", "what was 3"))
    told = refused(*auto, "steps=2")
    assert "rows of data.train, rows of data.test, code of tools.double changed" in told
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
    assert main(["resume=run", "steps=2", "resume_changed=[data,tools]"]) == 0
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["resume_changed"] == []
    assert main([*auto, "steps=3"]) == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
