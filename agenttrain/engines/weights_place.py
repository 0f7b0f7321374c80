"""The folder of a run's weight files: a new one at each start, removed when the run ends.

It is usually outside the run's folder, so `<run>/weights.txt` names it: if all processes of a run
were killed at once, the next start removes the folder that they left. The folder also names its
run. So a copy of a run's folder never removes the files of a run that still goes on.
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
    """Create a folder in `parent` for the weight files of a run; raises EngineError."""
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
    """Remove the weights folder of a run's last start, if it is still there, and the note."""
    with suppress(OSError):
        folder = Path((run / NOTE).read_text(encoding="utf-8"))
        owner = folder / OWNER
        is_ours = not owner.is_file() or owner.read_text(encoding="utf-8") == str(run.resolve())
        # The note of a copied run names another run's folder, and an edited one any folder.
        if folder.name.startswith(PREFIX) and is_ours:
            shutil.rmtree(folder, ignore_errors=True)
        (run / NOTE).unlink()
