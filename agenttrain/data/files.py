"""Read rows from local files or folders, or from the Hugging Face hub, as plain JSON values.

`FileRows` reads JSON lines, JSON, CSV, TSV, parquet, or folders that `save_to_disk` wrote.
`HubRows` reads a dataset of the hub, or a local folder of data files. `as_rows` reads a table that
a function of the user's returns. A row has what the file says: no keys that Arrow adds, and the
text of each cell of a CSV file, where an empty one is missing.
"""

from __future__ import annotations

import csv
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from agenttrain.data.config import check_hub, check_row_file, check_row_files
from agenttrain.data.images import with_absolute_paths
from agenttrain.types import ConfigError
from agenttrain.utils.data_fields import Data
from agenttrain.utils.hub import DATA, data_commit, explained

BLOCK = 128
"""Rows that are decoded together, which makes reading in order many times faster."""
NOT_TEXT = ("Audio", "Video", "Pdf")
"""Features that hold neither texts nor images."""


class BadRow(ValueError):
    """A row that cannot become a task. The message is the reason, without the row's place."""


class ArrowRows:
    """The rows of a table of `datasets`, with dates as ISO text and decimals as numbers.

    Arrow gives every struct the keys of all rows, and None to those that a row lacks. Here such
    keys are missing again, as is a key that was written as null.
    """

    def __init__(self, table: Any, *, name: str, limit: int | None = None) -> None:
        """`name` is for error messages. Raises ValueError for columns of audio or video."""
        for column, feature in table.features.items():
            table = _without_decoding(table, column, feature)
            if type(feature).__name__ in NOT_TEXT:
                raise ValueError(
                    f"path={name}: the column {column!r} holds {type(feature).__name__.lower()}s, "
                    "and only texts and images can be trained on; take a dataset without it"
                )
        # With a transform (`set_transform`) the user's code makes the values. Without one they are
        # to be plain Python.
        has_transform = table.format["type"] == "custom"
        if not has_transform:
            table = table.with_format(None)
        self._table = table if limit is None else table.select(range(min(limit, len(table))))
        self._name = name
        self._block_number = -1
        """Number of the block of rows that was decoded last: 1 for the rows from BLOCK on."""
        self._block_columns: dict[str, list[Any]] = {}
        """The columns of this block."""

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a fresh copy of a row.

        Rows are decoded in blocks, and the last block is kept, because rows are read in order.
        """
        number, position = divmod(index, BLOCK)
        if self._block_number != number:
            # A slice of a table is a mapping: column -> values.
            self._block_columns = self._table[number * BLOCK : (number + 1) * BLOCK]
            self._block_number = number
        features = self._table.features
        # Arrow gives each struct of a column the keys of all rows' structs, with the value None.
        return {
            name: _drop_added_keys(to_json_types(values[position]), features.get(name))
            for name, values in self._block_columns.items()
        }

    def where(self, index: int) -> str:
        """Return the row's place for error messages: the first is row 1."""
        return f"{self._name}, row {index + 1}"


def _drop_added_keys(value: Any, feature: Any) -> Any:
    """Return a value of an Arrow column without the keys that have no value.

    `feature` is the column's type in `datasets`. Only where it is a mapping Arrow has added keys.
    Example: ``{"a": 1, "b": None}`` of a column with the keys a and b -> ``{"a": 1}``. The content
    of a chat message stays, because templates read it.
    """
    if isinstance(value, dict) and isinstance(feature, Mapping):
        return {
            key: _drop_added_keys(inner, feature.get(key))
            for key, inner in value.items()
            if inner is not None or (key == "content" and "role" in value)
        }
    # `datasets` writes a list's feature as [feature], or as an object with an attribute of it.
    item_feature = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if isinstance(value, list) and item_feature is not None:
        return [_drop_added_keys(inner, item_feature) for inner in value]
    return value


def as_rows(table: Any, name: str) -> Any:
    """Return a table of `datasets`, pyarrow or pandas as rows by number.

    Anything else is returned as it is. Raises ValueError for a table with several splits.
    """
    # Compared by name, because importing the libraries takes a second. If the value is a table, its
    # library has been imported already.
    if type(table).__module__.partition(".")[0] not in ("datasets", "pyarrow", "pandas"):
        return table
    import datasets
    import pandas
    import pyarrow

    if isinstance(table, datasets.DatasetDict):
        raise ValueError(f"has the splits {', '.join(map(str, table))}; return one of them")
    if isinstance(table, pandas.DataFrame):
        return [_frame_row(record) for record in table.to_dict("records")]
    if isinstance(table, pyarrow.Table):
        table = datasets.Dataset(table)
    if isinstance(table, datasets.Dataset):
        return ArrowRows(table, name=name) if len(table) else ()
    return table


def _frame_row(record: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row of a data frame. Pandas' marks for no value (NaN, NaT, NA) become None."""
    row: dict[str, Any] = {}
    for key, value in record.items():
        # Checked before `to_json_types`, which would make a text of NaT, and after it, because it
        # may give NaN.
        plain = None if _is_missing(value) else to_json_types(value)
        # The row's own key stays, with None. Within its value, keys of None are dropped: Arrow
        # adds them to mappings that lack a key of others in the column.
        row[str(key)] = None if _is_missing(plain) else _without_none(plain)
    return row


def _is_missing(value: Any) -> bool:
    """Return True for pandas' marks of no value."""
    return type(value).__name__ in ("NaTType", "NAType") or (
        isinstance(value, float) and value != value
    )


def _without_none(value: Any) -> Any:
    """Drop keys without a value from all mappings in a value: Arrow has added them.

    The content of a chat message stays, because templates read it.
    """
    if isinstance(value, dict):
        return {
            key: _without_none(inner)
            for key, inner in value.items()
            if inner is not None or (key == "content" and "role" in value)
        }
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def _without_decoding(table: Any, column: str, feature: Any) -> Any:
    """Return the table with a column's images, single or in lists, as undecoded files.

    A column of anything else is left as it is.
    """
    inner = getattr(feature, "feature", None)
    if "Image" not in (type(feature).__name__, type(inner).__name__):
        return table
    import datasets

    files = datasets.Image(decode=False)
    return table.cast_column(column, files if inner is None else type(feature)(files))


class FileRows:
    """The rows of local files or folders of one kind, one file after the other.

    Example: ``FileRows(["first.jsonl", "more/*.jsonl"], limit=100)``. The files of a pattern are
    sorted.
    """

    def __init__(
        self,
        path: Data[str | Sequence[str]],
        split: Data[str | None] = None,
        limit: Data[int | None] = None,
    ) -> None:
        """Read the first `limit` rows of all files together, or all rows.

        `split` selects one split of a folder that has several. Raises ValueError, beginning with
        the argument, for a pattern without a file and for a file that is missing, empty, of an
        unknown kind or unreadable. A line that is no row raises BadRow on access.
        """
        self._files: list[_File] = []
        self._starts: list[int] = []
        """Number of the first row of each file."""
        self._rows = 0
        for file in check_row_files(path, split, limit):
            remaining = None if limit is None else limit - self._rows
            if remaining == 0:
                break
            self._files.append(_File(file, split, remaining))
            self._starts.append(self._rows)
            self._rows += len(self._files[-1])

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
        """Return the file of a row, and the row's index in it."""
        number = bisect_right(self._starts, index) - 1
        return self._files[number], index - self._starts[number]


class _File:
    """The rows of one local file or folder.

    JSON is parsed here, so that errors have a line number and a row has only the columns of its
    own line. CSV is parsed here because pandas guesses (NA becomes nothing, 007 a number). Other
    formats are read by `datasets`, with None in a column without a value.
    """

    def __init__(self, path: str, split: str | None, limit: int | None) -> None:
        """Read the first `limit` rows of a file, or of a split of a folder."""
        file = check_row_file(path, split, limit)
        self._path = path
        self._table: ArrowRows | None = None
        self._lines: list[tuple[str, str]] = []
        """Place and JSON text of each row, if the file is parsed here."""
        if file.suffix in (".jsonl", ".json") and file.is_file():
            self._lines = list(_json_texts(file, path))[:limit]
        elif file.suffix in CELLS and file.is_file():
            self._lines = list(_cell_texts(file, path))[:limit]
        else:
            import datasets

            with loading_dataset(lambda error: f"path={path}: cannot be read: {cause_line(error)}"):
                if file.is_dir():
                    dataset = datasets.load_from_disk(str(file))
                    table = dataset if split is None else dataset[split]
                else:
                    # "train" is the split that `datasets` makes of files without a split.
                    table = datasets.load_dataset(
                        file.suffix[1:], data_files=str(file), split="train"
                    )
            self._table = ArrowRows(table, name=path, limit=limit)
        if len(self) == 0:
            raise ValueError(f"path={path}: the file has no rows")

    def __len__(self) -> int:
        return len(self._lines if self._table is None else self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a fresh copy of a row, with absolute paths of images. Raises BadRow."""
        if self._table is not None:
            return with_absolute_paths(self._table[index], self.folder)
        try:
            row = json.loads(self._lines[index][1])
        except json.JSONDecodeError as error:
            raise BadRow(f"column {error.colno}: is not JSON: {error.msg}") from error
        if not isinstance(row, dict):
            raise BadRow('is no row such as {"prompt": "2+2?", "answer": "4"}')
        return with_absolute_paths(row, self.folder)

    @property
    def folder(self) -> Path:
        """The folder of the file, or the folder itself."""
        path = Path(self._path).expanduser().absolute()
        return path if path.is_dir() else path.parent

    def where(self, index: int) -> str:
        if self._table is not None:
            return self._table.where(index)
        return f"{self._path}, {self._lines[index][0]}"


CELLS = {".csv": ",", ".tsv": "\t"}
"""Ending of a file of cells -> their separator."""


def _cell_texts(file: Path, path: str) -> Iterator[tuple[str, str]]:
    """Yield the place and JSON of each row of a file of cells. An empty cell is null."""
    csv.field_size_limit(2**31 - 1)  # the default refuses a prompt of 131,072 characters
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, delimiter=CELLS[file.suffix], strict=True)
            names = next((cells for cells in reader if cells), None)
            if names is None:
                raise ValueError(f"path={path}: the file has no rows")
            names = [name or f"Unnamed: {number}" for number, name in enumerate(names)]
            if len(set(names)) < len(names):
                duplicate = next(name for name in names if names.count(name) > 1)
                raise ValueError(f"path={path}, line 1: names the column {duplicate!r} twice")
            line = reader.line_num + 1  # where the next row begins: a cell may have line breaks
            for cells in reader:
                if len(cells) > len(names):
                    raise ValueError(
                        f"path={path}, line {line}: has {len(cells)} cells, and the "
                        f"header names {len(names)} columns; quote a text with separators in it"
                    )
                if cells:  # not an empty line
                    row = {name: cell or None for name, cell in zip(names, cells, strict=False)}
                    yield f"line {line}", json.dumps(row)
                line = reader.line_num + 1
    except UnicodeDecodeError as error:
        raise ValueError(f"path={path}: is not UTF-8 text: {error}") from error
    except csv.Error as error:
        raise ValueError(f"path={path}, line {reader.line_num}: is not CSV: {error}") from error


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
    """The rows of one split of a dataset. A dataset in the cache needs no network.

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

        describe = partial(_hub_problem, path=path, subset=subset, split=split)
        # The inner block sees an error first: `explained` describes those of the hub, such as a
        # dataset that needs a token, and `describe` all others.
        hub_errors = nullcontext() if is_local else explained(path, revision, "path", DATA)
        with loading_dataset(describe), hub_errors:
            builder = datasets.load_dataset_builder(path, subset, revision=commit or revision)
            # Cells of CSV stay texts: pandas would guess types, and make the number 7 of 007.
            cell_arguments = _cells_as_texts(builder)
            table = datasets.load_dataset(
                path, subset, split=split, revision=commit or revision, **cell_arguments
            )
        if commit is not None:
            # Without an answer of the hub, `datasets` loads another commit from its cache.
            _check_cached_commit(table, commit, path)
        name = path if subset is None else f"{path} ({subset})"
        super().__init__(table, name=name, limit=limit)
        if len(self) == 0:
            raise ValueError(f"split={split}: has no rows")


def _hub_problem(error: Exception, *, path: str, subset: str | None, split: str) -> str:
    """Describe an error of `datasets` in terms of the argument of HubRows that caused it."""
    text = " ".join(str(error).split())
    if isinstance(error, ConfigError):
        return text
    if isinstance(error, ConnectionError):
        return (
            f"path={path}: is not in the cache of datasets (HF_HOME), and the hub cannot "
            "be reached; load it once where there is a network (HF_HUB_OFFLINE unset) and "
            "bring the cache, or save_to_disk it and use data=file "
            f"({cause_line(error)})"
        )
    # The message of `datasets` names the split or the configuration that it lacks.
    if "split" in text.lower() and f'"{split}"' in text:
        return f"split={split}: {text}"
    if "config" in text.lower() and not isinstance(error, OSError):
        return f"subset={subset}: {text}; set data.subset=…"
    return f"path={path}: {cause_line(error)}"


def _check_cached_commit(table: Any, commit: str, path: str) -> None:
    """Raise ValueError if the table is of another commit.

    If the hub does not answer, `datasets` takes the newest revision in its cache, whichever was
    asked for.
    """
    # The cache has a folder for each commit.
    cached_commits = {Path(file["filename"]).parent.name for file in table.cache_files}
    if cached_commits and commit not in cached_commits:
        raise ValueError(
            f"revision={commit}: the cache of datasets (HF_HOME) has another one of {path} "
            f"({', '.join(sorted(cached_commits))}); set data.revision to it, or load the rows "
            "where the hub can be reached (HF_HUB_OFFLINE unset)"
        )


def _cells_as_texts(builder: Any) -> dict[str, Any]:
    """Return the arguments with which `datasets` reads the cells of a CSV dataset as texts.

    Otherwise pandas guesses their types: 007 becomes a number. There are no arguments for a dataset
    of another format, and for one that declares its columns.
    """
    import datasets
    from datasets import StreamingDownloadManager
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.utils.file_utils import xopen

    if not isinstance(builder, Csv) or builder.config.features is not None:
        return {}
    files = [file for in_split in builder.config.data_files.values() for file in in_split]
    manager = StreamingDownloadManager()
    # The file may be compressed.
    first_file = next(iter(manager.iter_files(manager.extract(files[:1]))))
    with xopen(first_file, "r", encoding="utf-8-sig", newline="") as lines:
        names = next(csv.reader(lines, delimiter=builder.config.sep or ","), [])
    texts = {name or f"Unnamed: {i}": datasets.Value("string") for i, name in enumerate(names)}
    features = datasets.Features(texts)
    return {"features": features, "keep_default_na": False, "na_values": [""]}


def to_json_types(value: Any) -> Any:
    """Convert a value to JSON's types as far as possible. Containers are copied.

    Example: ``to_json_types({"day": date(2024, 5, 1)}) == {"day": "2024-05-01"}``
    """
    if isinstance(value, dict):
        return {key: to_json_types(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_types(inner) for inner in value]
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return float(value)
    return to_json_types(value.tolist()) if hasattr(value, "tolist") else value  # numpy's have it


@contextmanager
def loading_dataset(describe: Callable[[Exception], str]) -> Iterator[None]:
    """Hide progress bars in the block, and turn an error of `datasets` into a ValueError.

    `describe(error)` returns the message of the ValueError.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    shows_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # they would tear up our own output
    try:
        yield
    except (DatasetsError, ValueError, OSError, RuntimeError) as error:
        raise ValueError(describe(error)) from error
    finally:
        if shows_bars:
            datasets.enable_progress_bars()


def cause_line(error: Exception) -> str:
    """Return the first line of the error's cause."""
    return str(error.__cause__ or error).partition("\n")[0]
