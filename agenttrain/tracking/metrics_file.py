"""metrics.jsonl: one object per step, the run's record whatever else is tracked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from agenttrain.tracking.json_lines import dumps, read_rows
from agenttrain.tracking.run_folder import write_atomically


class MetricsFile:
    """Appends one line per step; each line is on its way to disk when `write` returns.

    Non-finite values are written as null, because JSON has no NaN: null means that a step had
    nothing to measure (the latency of a tool that nobody called) or that a figure diverged.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            content = path.read_bytes()
            if content and not content.endswith(b"\n"):  # a last line torn by a crash
                with path.open("rb+") as file:
                    file.truncate(content.rfind(b"\n") + 1)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append ``{"step": step, **metrics}``."""
        self._file.write(dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a metrics.jsonl; a last line torn by a crash is left out."""
    return list(read_rows(path))


def cut(path: Path, step: int) -> None:
    """Keep the rows of steps up to and including `step`, atomically; for resuming from there.

    Kept lines keep their bytes; what follows them may be anything. A file that does not exist is
    left so. Raises ValueError, with file and line, for a line before them that is no row.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    length = last = 0
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        if last >= step or not line.endswith(b"\n"):
            break
        try:
            last = int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}:{number}: not the row of a step ({error}), and the run goes on from step "
                f"{step}. Mend or remove that line."
            ) from error
        length += len(line) if last <= step else 0
    write_atomically(path, content[:length].decode())
