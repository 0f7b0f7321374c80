"""Files of rows: what can be said of one before it is read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMATS = (".jsonl", ".json", ".csv", ".parquet")
FILE_ROWS = "agenttrain.data.files.FileRows"
ENDLESS = tuple(
    f"agenttrain.data.{name}.row" for name in ("shop", "calculator", "code", "encyclopedia")
)
"""The bundled generators: they have a row for every number."""


def check_row_file(path: object, limit: object = None) -> Path:
    """The file at `path`; raises ValueError beginning with ``path=`` or ``limit=`` otherwise.

    A file has to be there, of a kind that can be read, and not empty.
    """
    file = Path(str(path)).expanduser()
    if not file.is_file():
        raise ValueError(f"path={path}: there is no such file")
    if file.suffix not in FORMATS:
        raise ValueError(f"path={path}: its ending must be one of {', '.join(FORMATS)}")
    if file.stat().st_size == 0:
        raise ValueError(f"path={path}: the file has no rows")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit={limit}: must be a whole number of at least 1, or null for all")
    return file


def known_rows(section: Mapping[str, Any]) -> int | None:
    """Rows of a `data.train` or `data.test` section where that is cheap to know, else None.

    Example: 2 for a JSONL file of two lines, `sys.maxsize` for ``agenttrain.data.shop.row``.
    """
    target = section.get("_target_")
    if target in ENDLESS:
        return sys.maxsize
    file, limit = Path(str(section.get("path"))).expanduser(), section.get("limit")
    if target != FILE_ROWS or file.suffix != ".jsonl" or not file.is_file():
        return None
    with file.open("rb") as lines:
        rows = sum(1 for line in lines if line.strip())
    return rows if limit is None else min(rows, limit)
