"""Read rows from local files or folders, or from the Hugging Face hub, as plain JSON values.

`FileRows` reads JSON lines, JSON, CSV, parquet, or folders that `save_to_disk` wrote. `HubRows`
reads a dataset of the hub, or a local folder of data files.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from agenttrain.data.config import check_hub, check_row_file, check_row_files
from agenttrain.data.images import absolute_paths
from agenttrain.types import ConfigError
from agenttrain.utils.data_fields import Data
from agenttrain.utils.hub import DATA, data_commit, explained

BLOCK = 128
"""Rows that are decoded together; reading in order is then many times faster."""
NOT_TEXT = ("Audio", "Video", "Pdf")
"""Features that hold neither texts nor images."""


class BadRow(ValueError):
    """A row that cannot become a task; the message is the reason, without the row's place."""


class ArrowRows:
    """The rows of a table of `datasets`, with dates as ISO text and decimals as numbers."""

    fills_missing = True
    """Arrow gives every struct the keys of all rows; those that a row lacks are None."""

    def __init__(self, table: Any, *, name: str, limit: int | None = None) -> None:
        """`name` is for error messages. Raises ValueError for columns of audio or video."""
        for column, feature in table.features.items():
            table = _with_files(table, column, feature)
            if type(feature).__name__ in NOT_TEXT:
                raise ValueError(
                    f"path={name}: the column {column!r} holds {type(feature).__name__.lower()}s, "
                    "and only texts and images can be trained on; take a dataset without it"
                )
        self._table = table if limit is None else table.select(range(min(limit, len(table))))
        self._name = name
        self._block: tuple[int, dict[str, list[Any]]] = (-1, {})

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, position = divmod(index, BLOCK)
        if self._block[0] != number:
            self._block = (number, self._table[number * BLOCK : (number + 1) * BLOCK])
        return {name: plain(values[position]) for name, values in self._block[1].items()}

    def where(self, index: int) -> str:
        """Return the row's place for error messages: the first is row 1."""
        return f"{self._name}, row {index + 1}"


def _with_files(table: Any, column: str, feature: Any) -> Any:
    """Return the table with the images of a column, or of its lists, as files, not decoded."""
    inner = getattr(feature, "feature", None)
    if "Image" not in (type(feature).__name__, type(inner).__name__):
        return table
    import datasets

    files = datasets.Image(decode=False)
    return table.cast_column(column, files if inner is None else type(feature)(files))


class FileRows:
    """The rows of local files or folders of one kind, one file after the other.

    Example: ``FileRows(["first.jsonl", "more/*.jsonl"], limit=100)``; a pattern's files are sorted.
    """

    def __init__(
        self,
        path: Data[str | Sequence[str]],
        split: Data[str | None] = None,
        limit: Data[int | None] = None,
    ) -> None:
        """Read the first `limit` rows of all files, or all; `split` selects one of a folder that
        has several.

        Raises ValueError, beginning with the argument, for a pattern without a file and for a file
        that is missing, empty, of an unknown kind or unreadable. A line that is no row raises
        BadRow on access.
        """
        self._files: list[_File] = []
        self._starts: list[int] = []
        self._rows = 0
        for file in check_row_files(path, split, limit):
            left = None if limit is None else limit - self._rows
            if left == 0:
                break
            self._files.append(_File(file, split, left))
            self._starts.append(self._rows)
            self._rows += len(self._files[-1])
        self.fills_missing = self._files[0].fills_missing
        """Missing keys are None; see `ArrowRows`."""

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a fresh copy of a row."""
        file, position = self._place(index)
        return file[position]

    def where(self, index: int) -> str:
        """Return the row's place for error messages."""
        file, position = self._place(index)
        return file.where(position)

    def folder(self, index: int) -> Path:
        """Return the folder of a row's file."""
        return self._place(index)[0].folder

    def _place(self, index: int) -> tuple[_File, int]:
        number = bisect_right(self._starts, index) - 1
        return self._files[number], index - self._starts[number]


class _File:
    """The rows of one local file or folder.

    JSON is parsed here, so that errors have a line number and a row has only the columns of its
    own line. Other formats are read by `datasets`, with None in a cell without a value.
    """

    def __init__(self, path: str, split: str | None, limit: int | None) -> None:
        file = check_row_file(path, split, limit)
        self._path = path
        self._table: ArrowRows | None = None
        self._lines: list[tuple[str, str]] = []
        if file.suffix in (".jsonl", ".json") and file.is_file():
            self._lines = list(_json_texts(file, path))[:limit]
        else:
            import datasets

            with reading(lambda error: f"path={path}: cannot be read: {reason(error)}"):
                if file.is_dir():
                    saved = datasets.load_from_disk(str(file))
                    table = saved if split is None else saved[split]
                else:
                    table = datasets.load_dataset(
                        file.suffix[1:], data_files=str(file), split="train"
                    )
            self._table = ArrowRows(table, name=path, limit=limit)
        self.fills_missing = self._table is not None
        if len(self) == 0:
            raise ValueError(f"path={path}: the file has no rows")

    def __len__(self) -> int:
        return len(self._lines if self._table is None else self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._table is not None:
            return absolute_paths(self._table[index], self.folder)
        try:
            row = json.loads(self._lines[index][1])
        except json.JSONDecodeError as error:
            raise BadRow(f"column {error.colno}: is not JSON: {error.msg}") from error
        if not isinstance(row, dict):
            raise BadRow('is no row such as {"prompt": "2+2?", "answer": "4"}')
        return absolute_paths(row, self.folder)

    @property
    def folder(self) -> Path:
        """The folder of the file, or the folder itself."""
        path = Path(self._path).expanduser().absolute()
        return path if path.is_dir() else path.parent

    def where(self, index: int) -> str:
        if self._table is not None:
            return self._table.where(index)
        return f"{self._path}, {self._lines[index][0]}"


def _json_texts(file: Path, path: str) -> Iterator[tuple[str, str]]:
    """Yield the place and text of each row of a file of JSON lines, or of one JSON list."""
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
    # Not splitlines, which also splits at characters that JSON strings may contain.
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield f"line {number}", line


class HubRows(ArrowRows):
    """The rows of one split of a dataset; one that is in the cache needs no network.

    Example: ``HubRows("openai/gsm8k", subset="main", split="test", limit=100)``
    """

    def __init__(
        self,
        path: Data[str],
        subset: Data[str | None] = None,
        split: Data[str] = "train",
        revision: Data[str | None] = None,
        limit: Data[int | None] = None,
    ) -> None:
        """Raises ValueError, beginning with the argument, for anything the hub does not have."""
        check_hub(path, subset, split, revision, limit)
        is_local = Path(path).exists()
        try:
            commit = None if is_local else data_commit(path, revision, "path")
        except ConfigError as error:
            raise ValueError(str(error)) from error
        import datasets

        def message(error: Exception) -> str:
            """Describe the error in terms of the setting that caused it."""
            text = " ".join(str(error).split())
            if isinstance(error, ConfigError):
                return text
            if isinstance(error, ConnectionError):
                return (
                    f"path={path}: is not in the cache of datasets (HF_HOME), and the hub cannot "
                    "be reached; load it once where there is a network (HF_HUB_OFFLINE unset) and "
                    "bring the cache, or save_to_disk it and use data=file "
                    f"({reason(error)})"
                )
            if "split" in text.lower() and f'"{split}"' in text:
                return f"split={split}: {text}"
            if "config" in text.lower() and not isinstance(error, OSError):
                return f"subset={subset}: {text}; set data.subset=…"
            return f"path={path}: {reason(error)}"

        name = path if subset is None else f"{path} ({subset})"
        hub = nullcontext() if is_local else explained(path, revision, "path", DATA)
        with reading(message), hub:
            table = datasets.load_dataset(path, subset, split=split, revision=commit or revision)
        # Without an answer of the hub `datasets` takes the newest revision in its cache, whichever
        # was asked for.
        cached = {Path(file["filename"]).parent.name for file in table.cache_files}
        if commit is not None and cached and commit not in cached:
            raise ValueError(
                f"revision={commit}: the cache of datasets (HF_HOME) has another one of {path} "
                f"({', '.join(sorted(cached))}); set data.revision to it, or load the rows "
                "where the hub can be reached (HF_HUB_OFFLINE unset)"
            )
        super().__init__(table, name=name, limit=limit)
        if len(self) == 0:
            raise ValueError(f"split={split}: has no rows")


def plain(value: Any) -> Any:
    """Convert a value to JSON's types as far as possible; containers are copied.

    Example: ``plain({"day": date(2024, 5, 1)}) == {"day": "2024-05-01"}``
    """
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return float(value)
    return value.tolist() if hasattr(value, "tolist") else value


@contextmanager
def reading(message: Callable[[Exception], str]) -> Iterator[None]:
    """Hide progress bars in the block; errors of `datasets` become a ValueError with `message`."""
    import datasets
    from datasets.exceptions import DatasetsError

    shows_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # they would tear up our own output
    try:
        yield
    except (DatasetsError, ValueError, OSError, RuntimeError) as error:
        raise ValueError(message(error)) from error
    finally:
        if shows_bars:
            datasets.enable_progress_bars()


def reason(error: Exception) -> str:
    """Return the first line of the error's cause."""
    return str(error.__cause__ or error).partition("\n")[0]
