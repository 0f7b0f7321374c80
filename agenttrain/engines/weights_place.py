"""The folder of a run's weight files: a new one at each start, removed when the run ends.

It is a `TemporaryFolder` of the process that makes it. `<run>/weights.txt` has its place, outside
of the run's folder as a rule: where all processes of a run were killed at once, the next start of
the run looks there too.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from agenttrain.engines.base import EngineError
from agenttrain.utils.temporary import TemporaryFolder, remove_abandoned

NOTE = "weights.txt"
"""File in the run's folder: the folder of its weights, for the next start if this one is killed."""
VERSIONS = 3
"""Most versions of the weights on disk at once: two, and one that is being written."""

_held: dict[Path, TemporaryFolder] = {}
"""Folder of a run -> the folder of weights that this process has made for it."""


def new_weights_folder(run: Path, parent: Path) -> Path:
    """Create a folder in `parent` for the weight files of a run; raises EngineError."""
    remove_weights_folder(run)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = TemporaryFolder(parent.absolute())
    except OSError as error:
        raise EngineError(
            f"weight_sync.folder: {parent}: {error.strerror}; name a folder that can be written"
        ) from error
    run.mkdir(parents=True, exist_ok=True)
    _held[run.resolve()] = folder  # for `remove_weights_folder`
    (run / NOTE).write_text(str(folder.path), encoding="utf-8")
    return folder.path


def remove_weights_folder(run: Path) -> None:
    """Remove a run's folder of weights and its note, unless another process uses the folder."""
    if (folder := _held.pop(run.resolve(), None)) is not None:
        folder.remove()
    with suppress(OSError):  # there is no note
        # Folders of processes that were killed, and could not remove them.
        remove_abandoned(Path((run / NOTE).read_text(encoding="utf-8")).parent)
        (run / NOTE).unlink()
