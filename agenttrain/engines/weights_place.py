"""The folder of a run's weight files: a new one at each start, which goes with the run.

`<run>/weights.txt` has its place, outside of the run's folder as a rule: where all processes of a
run were killed at once, the next start removes what they have left. The folder names its run in
turn, so that the copy of a run that goes on does not remove that run's files.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from agenttrain.engines.base import EngineError

PREFIX = "agenttrain-weights-"
NOTE = "weights.txt"
OWNER = "run.txt"
"""File in the folder of weights with the path of its run."""


def new_weights_folder(run: Path, parent: Path) -> Path:
    """Return a new folder in `parent` for the weight files of a run; raises EngineError."""
    remove_weights_folder(run)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent.absolute()))
        (folder / OWNER).write_text(str(run.resolve()), encoding="utf-8")
    except OSError as error:
        raise EngineError(
            f"weight_sync.folder: {parent}: {error.strerror}; name a folder that can be written"
        ) from error
    run.mkdir(parents=True, exist_ok=True)
    (run / NOTE).write_text(str(folder), encoding="utf-8")
    return folder


def remove_weights_folder(run: Path) -> None:
    """Remove the folder of a run's last start, if it is still there, and the note of it."""
    with suppress(OSError):
        folder = Path((run / NOTE).read_text(encoding="utf-8"))
        owner, own = folder / OWNER, str(run.resolve())
        others = owner.is_file() and owner.read_text(encoding="utf-8") != own
        if folder.name.startswith(PREFIX) and not others:  # whatever a copied run says
            shutil.rmtree(folder, ignore_errors=True)
        (run / NOTE).unlink()
