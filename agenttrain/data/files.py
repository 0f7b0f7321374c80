"""Rows from a file: JSON lines, JSON, CSV or parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agenttrain.config.row_file import check_row_file


class FileRows:
    """The rows of one local file, by number.

    JSON is read here, so that a mistake has a line number and a row has the columns that its own
    line has; CSV and parquet are read by `datasets`, with None in a cell without a value.
    """

    def __init__(self, path: str, limit: int | None = None) -> None:
        """Keep the first `limit` rows, None: all.

        Raises ValueError, naming the line where there is one, for a file that is missing, has no
        rows, is of an unknown kind or cannot be read.
        """
        file = check_row_file(path, limit)
        self._texts: list[str] | None = None
        self._rows: Sequence[Any] = ()
        if file.suffix in (".jsonl", ".json"):
            self._texts = self._rows = list(_json_rows(file, path))[:limit]
        else:
            self._rows = _table(file, path, limit)
        if len(self._rows) == 0:
            raise ValueError(f"path={path}: the file has no rows")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A row of the caller's own: changing it changes no other."""
        return dict(self._rows[index] if self._texts is None else json.loads(self._texts[index]))


def _json_rows(file: Path, path: str) -> Iterator[str]:
    """The text of each row, checked: a file of lines, or (`.json`) one list of rows."""
    try:
        content = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"path={path}: is not UTF-8 text: {error}") from error
    if file.suffix == ".json" and content.lstrip().startswith("["):
        for index, row in enumerate(_parse(content, f"path={path}", lines=True)):
            yield json.dumps(_row(row, f"path={path}, row {index}"))
        return
    # Not splitlines, which also splits at characters that may stand inside a JSON text.
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            _row(_parse(line, f"path={path}, line {number}"), f"path={path}, line {number}")
            yield line


def _parse(text: str, where: str, *, lines: bool = False) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}" if lines else f"column {error.colno}"
        raise ValueError(f"{where}, {place}: is not JSON: {error.msg}") from error


def _row(row: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f'{where}: is no row such as {{"prompt": "2+2?", "answer": "4"}}')
    return row


def _table(file: Path, path: str, limit: int | None) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError

    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(file.suffix[1:], data_files=str(file), split="train")
    except (DatasetsError, ValueError, OSError) as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise ValueError(f"path={path}: cannot be read: {reason}") from error
    finally:
        if not bars:
            datasets.enable_progress_bars()
    return rows if limit is None else rows.select(range(min(limit, len(rows))))
