"""Which of a job's files other machines may not see."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from agenttrain.config.model_path import BUNDLED
from agenttrain.config.schema import RunConfig
from agenttrain.slurm.script import JobScript

OWN = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that a machine has for itself."""


def unshared(script: JobScript, configs: Sequence[RunConfig]) -> Iterator[str]:
    """A line for each path that is probably this machine's own: nodes need what all can see."""
    named = {
        "the run's folder": script.folder,
        "the working folder": script.workdir,
        "Python": script.python,
    }
    for config in configs:
        if not config.model.path.startswith(BUNDLED):
            named[f"model.path={config.model.path}"] = Path(config.model.path)
        for split in ("train", "test"):
            path = getattr(config.data, split).get("path")
            if path is not None and Path(str(path)).expanduser().exists():
                named[f"data.{split}.path={path}"] = Path(str(path))
    own = {Path(folder).resolve() for folder in (*OWN, tempfile.gettempdir())}
    for name, path in named.items():
        parents = own & {*path.expanduser().resolve().parents}
        if parents:
            yield (
                f"{name}: {path} is in {max(parents)}, which every machine has for itself; the "
                "nodes must see it"
            )
