"""The pages for users of TRL and verl: names, defaults, and the ported scripts as whole runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from inspect import signature
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from code_blocks import ROOT, blocks
from command_kit import parse

from agenttrain import cli
from agenttrain.commands.settings import all_settings
from agenttrain.settings.compose import compose_run, hydra_session
from agenttrain.utils.model_path import model_folder

TRL, VERL = "guides/coming-from-trl.md", "guides/coming-from-verl.md"
PAGES = (TRL, VERL)
OTHER = ("hydra.run.dir", "data.train.path", "tools")
"""Names of ours that are no settings: Hydra's, an argument of `data.train`, a column."""


def rows(page: str, *, columns: int) -> Iterator[list[str]]:
    """Yield the cells of the rows of all tables with so many columns, without their headers."""
    table: list[list[str]] = []
    for line in [*(ROOT / "docs" / page).read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            table.append([cell.strip() for cell in line[1:-1].split("|")])
        elif table:
            yield from (row for row in table[2:] if len(row) == columns)
            table = []


def code(cell: str) -> list[str]:
    """Return the texts in backticks: ``code("`a`, `b` or c")`` is ``["a", "b"]``."""
    return re.findall(r"`([^`]+)`", cell)


def value(text: str) -> object:
    """Read a default as the pages write it: ``null``, ``1e-6``, ``[0.9, 0.99]``, ``none``."""
    if text.startswith("["):
        return [value(part.strip()) for part in text[1:-1].split(",")]
    words: dict[str, object] = {"null": None, "true": True, "false": False, "{}": {}}
    if text in words:
        return words[text]
    try:
        return float(text)
    except ValueError:
        return text


def plain(default: Any) -> object:
    """Return a setting in the form of `value`: sequences as lists, enums as texts."""
    if isinstance(default, list | tuple):
        return [plain(item) for item in default]
    return str(default) if isinstance(default, str) else default


@pytest.mark.parametrize("page", PAGES)
def test_our_names_exist_and_have_the_defaults_of_the_page(page: str) -> None:
    keys = {setting.key for setting in all_settings()}
    sections = {key[:at] for key in keys for at in range(len(key)) if key[at] == "."}
    command = parse(["experiment=none"])
    with hydra_session(command.source):
        config: Any = compose_run(command.overrides, command.source).config
    seen = 0
    for theirs, _, ours, default, _ in rows(page, columns=5):
        names = code(ours)
        assert names or ours == "none" or ours.startswith("a column"), theirs
        for name in names:
            # Components have their `_target_` and weight beside the settings that are listed.
            component = re.fullmatch(r"(tools|environment|reward)\.<name>\.\w+", name)
            known = component or name.startswith("data.map.") or name in {*keys, *sections, *OTHER}
            assert known, f"{theirs}: {name}"
        if default:
            (name,) = names
            expected = value(code(default)[0])
            if name.startswith("algorithm.objective.") and not name.endswith(".name"):
                # The keys of an objective are read by its own class: the defaults of any choice.
                found = [value(s.default) for s in all_settings() if s.key == name]
                assert expected in found, f"{theirs}: {name}"
            else:
                assert plain(attrgetter(name)(config)) == expected, f"{theirs}: {name}"
            seen += 1
    assert seen > 20


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="pip install 'agenttrain[test]' brings TRL")
def test_names_and_defaults_of_trl_are_those_of_the_installed_one() -> None:
    from trl import GRPOConfig, GRPOTrainer

    defaults = {field.name: field.default for field in fields(GRPOConfig)}
    for theirs, default, *_ in rows(TRL, columns=5):
        for name in code(theirs):
            assert name in defaults, name
            if default:
                assert plain(defaults[name]) == value(code(default)[0]), name
    arguments = signature(GRPOTrainer.__init__).parameters
    first = [row for row in rows(TRL, columns=3) if row[0].startswith("`")]
    names = [name for row in first for name in code(row[0]) if not name.startswith('"')]
    assert len(names) > 8
    assert set(names) <= set(arguments)


def forget() -> None:
    """Forget the modules of a page: the other one has a my_capitals.py too."""
    for module in ("my_capitals", "my_score"):
        sys.modules.pop(module, None)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_ported_script_trains(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in blocks(ROOT / "docs" / page):
        if block.title is not None:
            file = tmp_path / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
    (tmp_path / "my_model").symlink_to(model_folder("bundled:shop"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    command = ["--config-dir", "my_conf", "experiment=capitals", "debug=tiny", "tracker=none"]
    assert cli.main([*command, "hydra.run.dir=run"]) == 0
    assert (tmp_path / "run/metrics.jsonl").read_text().count("\n") >= 2
    forget()
