"""A run's own record: config.yaml and summary.json, each replaced atomically."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agenttrain.types import AgenttrainError
from agenttrain.utils.json_lines import finite

PACKAGES = ("agenttrain", "torch", "transformers", "accelerate", "hydra-core", "trackio")


NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system that cannot lock."""


class FolderInUse(AgenttrainError):
    """Another process works in the run folder."""


class FolderGone(AgenttrainError):
    """The run folder was moved or deleted while the run went on."""


class Presence:
    """Notices that the folder of a run is not the one that it began in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = _number(folder)

    def check(self) -> None:
        """Raise FolderGone, before a file is written where nobody looks for it."""
        try:
            same = _number(self._folder) == self._number
        except OSError:
            same = False
        if not same:
            raise FolderGone(
                f"{self._folder}: the run's folder was moved or deleted while the run was in it. "
                f"Put it back, and the run goes on from its newest checkpoint with resume="
            )


def _number(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the run folder, which is made if need be; the end of the process gives it back too.

    Raises FolderInUse when another process holds it, OSError when it cannot be written. A file
    system that has no locks lets everyone in.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        file = (folder / ".lock").open("w")
    except OSError as error:  # the folder is what the user can do something about
        error.filename = str(folder)
        raise
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderInUse(
                f"{folder}: another process works in this run folder. Wait for it or stop it, or "
                "choose another folder with hydra.run.dir."
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


def read_summary(folder: Path) -> dict[str, Any]:
    """Read the summary so far; empty before there is one, and with a warning for a broken one."""
    path = folder / "summary.json"
    if not path.exists():
        return {}
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(summary, dict):
            raise ValueError(f"a {type(summary).__name__}, not an object")
    except ValueError as error:
        print(f"warning: {path}: not readable, it will be replaced: {error}", file=sys.stderr)
        return {}
    return summary


def update_summary(folder: Path, **changes: Any) -> None:
    """Merge `changes` into summary.json; a change to None takes the entry out."""
    merged = {**read_summary(folder), **changes}
    summary = {name: value for name, value in merged.items() if value is not None}
    write_atomically(folder / "summary.json", json.dumps(finite(summary), indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader sees the old text or the new one, never a half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
