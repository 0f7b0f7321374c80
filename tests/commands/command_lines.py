"""Command lines with their exit codes and the key that their error names: `command_lines.txt`.

A line of the table is ``<exit code>  <key>  <words>``. The key is the beginning of the error, up to
the value: ``steps``, ``--rows``, ``view``. It is ``-`` where nothing is wrong. The words follow
`agenttrain`; they are typed in a folder that `make_place` has filled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from agenttrain.settings.compose import Source, compose_run, hydra_session

TABLE = Path(__file__).with_name("command_lines.txt")
MESSAGES = Path(__file__).parents[1] / "golden" / "command_lines.txt"
"""The errors of all lines; the variable UPDATE_GOLDEN=1 lets the test write them anew."""
KEY = re.compile(r"agenttrain: ([^\s=:;]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A row of the table."""

    code: int
    key: str
    words: str


def command_lines() -> Iterator[CommandLine]:
    """Yield the rows of the table."""
    for row in TABLE.read_text(encoding="utf-8").splitlines():
        code, key, words = row.split(None, 2)
        yield CommandLine(code=int(code), key=key, words=words)


def key_in(errors: str) -> str:
    """Return the key that an error names; ``-`` for no error."""
    match = KEY.match(errors)
    return "-" if match is None else match[1] or "="


def make_place(folder: Path) -> None:
    """Write the runs and files that the command lines name into a new folder."""
    with hydra_session(Source()):
        plain = compose_run(["steps=9"], Source()).plain
    for name, summary in (
        ("run", {"status": "finished", "steps": 9, "verb": "train"}),
        ("evaluation", {"status": "finished", "steps": 0, "verb": "eval"}),
    ):
        (folder / name).mkdir(parents=True)
        settings = OmegaConf.to_yaml(OmegaConf.create(plain))
        (folder / name / "config.yaml").write_text(settings, encoding="utf-8")
        (folder / name / "summary.json").write_text(json.dumps(summary))
    (folder / "crash").mkdir()
    (folder / "crash" / "crash.json").write_text('{"stage": "lunch"}')
    (folder / "full").mkdir()
    (folder / "full" / "file.txt").write_text("something")
    (folder / "rows.jsonl").write_text('{"prompt": "How many?", "answer": "3"}\n' * 10)


def messages() -> dict[str, str]:
    """Return the recorded errors by their words."""
    parts = MESSAGES.read_text(encoding="utf-8").split("\n$ agenttrain ")[1:]
    pairs = (part.partition("\n") for part in parts)
    return {words: text.rstrip("\n") for words, _, text in pairs}


def write_messages(errors: dict[str, str]) -> None:
    """Write the errors of all lines."""
    head = "Errors of tests/commands/command_lines.txt; UPDATE_GOLDEN=1 writes them anew.\n"
    body = "".join(
        f"\n$ agenttrain {words}\n{text}".rstrip("\n") + "\n" for words, text in errors.items()
    )
    MESSAGES.write_text(head + body, encoding="utf-8")
