"""Rows from a file (JSON lines, JSON, CSV, parquet) or from a folder that `save_to_disk` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agenttrain.config.row_file import check_row_file
from agenttrain.data.rows import ArrowRows, BadRow, load, reason


class FileRows:
    """The rows of one local file or folder, by number.

    JSON is read here, so that a mistake has a line number and a row has the columns that its own
    line has; the rest is read by `datasets`, with None in a cell without a value.
    """

    def __init__(self, path: str, split: str | None = None, limit: int | None = None) -> None:
        """Keep the first `limit` rows, None: all; `split` of a folder that has several.

        Raises ValueError, beginning with the argument, for what is missing, has no rows, is of an
        unknown kind or cannot be read. A line that is no row raises BadRow when it is asked for.
        """
        file = check_row_file(path, split, limit)
        self._path = path
        self._table: ArrowRows | None = None
        self._lines: list[tuple[str, str]] = []
        if file.suffix in (".jsonl", ".json") and file.is_file():
            self._lines = list(_json_texts(file, path))[:limit]
        else:
            self._table = ArrowRows(_table(file, path, split), name=path, limit=limit)
        if len(self) == 0:
            raise ValueError(f"path={path}: the file has no rows")

    @property
    def fills_missing(self) -> bool:
        """Return whether keys that are None may be made up; see `ArrowRows`."""
        return self._table is not None

    def __len__(self) -> int:
        return len(self._lines if self._table is None else self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row of the caller's own: changing it changes no other."""
        if self._table is not None:
            return self._table[index]
        try:
            row = json.loads(self._lines[index][1])
        except json.JSONDecodeError as error:
            raise BadRow(f"column {error.colno}: is not JSON: {error.msg}") from error
        if not isinstance(row, dict):
            raise BadRow('is no row such as {"prompt": "2+2?", "answer": "4"}')
        return row

    def where(self, index: int) -> str:
        """Return the row's place for error messages."""
        if self._table is not None:
            return self._table.where(index)
        return f"{self._path}, {self._lines[index][0]}"


def _json_texts(file: Path, path: str) -> Iterator[tuple[str, str]]:
    """Yield place and text of each row of a file of lines, or of one list of rows (`.json`)."""
    try:
        content = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"path={path}: is not UTF-8 text: {error}") from error
    if file.suffix == ".json" and content.lstrip().startswith("["):
        try:
            rows = json.loads(content)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"path={path}, line {error.lineno}: is not JSON: {error.msg}"
            ) from error
        yield from ((f"row {index + 1}", json.dumps(row)) for index, row in enumerate(rows))
        return
    # Not splitlines, which also splits at characters that may stand inside a JSON text.
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield f"line {number}", line


def _table(file: Path, path: str, split: str | None) -> Any:
    import datasets

    def read() -> Any:
        if file.is_dir():
            saved = datasets.load_from_disk(str(file))
            return saved if split is None else saved[split]
        return datasets.load_dataset(file.suffix[1:], data_files=str(file), split="train")

    return load(read, lambda error: f"path={path}: cannot be read: {reason(error)}")
