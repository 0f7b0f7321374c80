"""The run folder: its lock and its summary.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from filelock import Timeout

from agenttrain.types import AgenttrainError
from agenttrain.utils.file_locks import file_lock
from agenttrain.utils.files import write_atomically
from agenttrain.utils.json_lines import finite
from agenttrain.utils.redaction import hide_in_settings

PACKAGES = ("agenttrain", "torch", "transformers", "accelerate", "hydra-core", "trackio")


class FolderInUse(AgenttrainError):
    """Another process is using the run folder."""


class FolderGone(AgenttrainError):
    """The run folder was moved or deleted during the run."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the run folder for the block, making it if needed.

    Raises FolderInUse if another process holds it, OSError if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A stack, because only errors of taking the lock are translated, not those of the block.
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(folder / ".lock", blocking=False))
        except Timeout as error:  # an OSError too
            raise FolderInUse(
                f"{folder}: another process works in this run folder. Wait for it or stop it, or "
                "choose another folder with hydra.run.dir."
            ) from error
        except OSError as error:
            error.filename = str(folder)  # the file that the user can act on
            raise
        yield


def read_summary(folder: Path) -> dict[str, Any]:
    """Read summary.json; empty if there is none, or, with a warning, if it cannot be read."""
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
    """Merge `changes`, without secrets, into summary.json; None removes an entry."""
    merged = {**read_summary(folder), **hide_in_settings(changes)}
    summary = {name: value for name, value in merged.items() if value is not None}
    write_atomically(folder / "summary.json", json.dumps(finite(summary), indent=2) + "\n")
