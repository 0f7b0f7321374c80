"""A folder of text files, or a file of rows -> passages to search."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agenttrain.config.corpus import text_files
from agenttrain.config.suggest import did_you_mean

BREAKS = ("\n\n", "\n", ". ", " ")
"""Where a long text is split, best first."""
ID_COLUMN = "id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Example: ``Document(id="rivers/oss.md", title="The Oss", text="A river in …")``"""

    id: str
    """Path within the folder; of a row its column `id`, or its number from 0."""
    title: str
    text: str


def documents(path: Path, text_column: str, title_column: str) -> list[Document]:
    """The documents at `path`, in the order of their paths or rows.

    Raises ValueError naming file and row for what cannot be read.
    """
    if path.is_dir():
        files = sorted(text_files(path), key=lambda file: file.relative_to(path).as_posix())
        return [_text_file(file, file.relative_to(path).as_posix()) for file in files]
    if path.suffix in (".jsonl", ".csv", ".parquet"):
        return list(_row_documents(path, text_column, title_column))
    return [_text_file(path, path.name)]


def passages(found: Iterable[Document], max_chars: int) -> Iterator[Document]:
    """The documents, long ones in parts of at most `max_chars`: ``oss.md#1``, ``oss.md#2``, …"""
    for document in found:
        parts = list(split(document.text, max_chars))
        for number, part in enumerate(parts, start=1):
            name = document.id if len(parts) == 1 else f"{document.id}#{number}"
            yield Document(id=name, title=document.title, text=part)


def split(text: str, max_chars: int) -> Iterator[str]:
    """Parts of at most `max_chars`, at the end of a paragraph, line, sentence or word if possible.

    Example: ``split("One two. Three four.", 12)`` gives ``One two.`` and ``Three four.``
    """
    text = text.strip()
    while len(text) > max_chars:
        cut = _cut(text, max_chars)
        yield text[:cut].strip()
        text = text[cut:].strip()
    yield text


def _cut(text: str, max_chars: int) -> int:
    for mark in BREAKS:
        # In the second half only, so that parts do not become tiny.
        at = text.rfind(mark, max_chars // 2, max_chars + 1)
        if at > 0:
            return at + (1 if mark == ". " else 0)
    return max_chars


def _text_file(file: Path, name: str) -> Document:
    """A file; a first line ``# Title`` is its title, else the file's name is."""
    try:
        text = file.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: is not UTF-8 text: {error}") from error
    first, _, rest = text.partition("\n")
    if first.startswith("# "):
        return Document(id=name, title=first.removeprefix("# ").strip(), text=rest)
    return Document(id=name, title=file.stem, text=text)


def _row_documents(file: Path, text_column: str, title_column: str) -> Iterator[Document]:
    read = {".jsonl": _json_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}[file.suffix]
    for number, row in enumerate(read(file)):
        text = row.get(text_column)
        if not isinstance(text, str):
            known = ", ".join(map(str, row))
            problem = "is no text" if text_column in row else "is no column"
            raise ValueError(
                f"text_column={text_column}: {problem} of row {number} of {file}"
                f"{did_you_mean(text_column, map(str, row))}; the row has: {known}"
            )
        title = row.get(title_column)
        yield Document(
            id=str(row.get(ID_COLUMN, number)), title="" if title is None else str(title), text=text
        )


def _json_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}, line {number}: is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f'{file}, line {number}: is no row such as {{"text": "…"}}')
            yield row


def _csv_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        yield from csv.DictReader(lines)


def _parquet_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow.parquet  # comes with datasets

    for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
        yield from batch.to_pylist()
