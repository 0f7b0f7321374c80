"""Texts to search: checks of a folder or file of them before it is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agenttrain.config.groups import PACKAGE
from agenttrain.config.suggest import did_you_mean

SEARCH = "agenttrain.tools.search.Search"
BUNDLED = "bundled:"
TEXTS = (".md", ".markdown", ".txt")
"""Files of a folder that are read."""
ROWS = (".jsonl", ".csv", ".parquet")
"""Files that have a text in each row."""


def check_corpus(
    path: object = None,
    k: object = 3,
    max_chars: object = 500,
    text_column: object = "text",
    title_column: object = "title",
) -> Path:
    """Return the folder or file at `path`; raises ValueError that begins ``argument=value``.

    ``bundled:encyclopedia`` is the packaged folder of that name.
    """
    for name, value in (("k", k), ("max_chars", max_chars)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value}: must be a whole number of at least 1")
    for name, column in (("text_column", text_column), ("title_column", title_column)):
        if not isinstance(column, str) or not column:
            raise ValueError(f"{name}={column}: must be the name of a column")
    if path is None:
        raise ValueError("has no path; set the folder or file to search, e.g. path=docs/")
    folder_or_file = Path(str(path)).expanduser()
    if str(path).startswith(BUNDLED):
        folders = PACKAGE / "data" / "documents"
        names = sorted(folder.name for folder in folders.iterdir() if folder.is_dir())
        bundled = str(path).removeprefix(BUNDLED)
        if bundled not in names:
            raise ValueError(
                f"path={path}: there is no such bundled folder{did_you_mean(bundled, names)}; "
                f"there are: {', '.join(names)}"
            )
        folder_or_file = folders / bundled
    if folder_or_file.is_dir():
        if next(text_files(folder_or_file), None) is None:
            raise ValueError(f"path={path}: the folder has no files ending in {', '.join(TEXTS)}")
    elif not folder_or_file.is_file():
        raise ValueError(f"path={path}: there is no such folder or file")
    elif folder_or_file.suffix not in (*TEXTS, *ROWS):
        known = ", ".join((*TEXTS, *ROWS))
        raise ValueError(f"path={path}: its ending must be one of {known}")
    return folder_or_file


def text_files(folder: Path) -> Iterator[Path]:
    """Yield the text files in a folder and below it, without hidden ones."""
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.suffix in TEXTS and not hidden and file.is_file():
            yield file
