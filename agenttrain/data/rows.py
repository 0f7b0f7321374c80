"""Rows as `datasets` has them, made plain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

BLOCK = 128
"""Rows decoded together: reading in order is then many times faster than row by row."""
NOT_TEXT = ("Image", "Audio", "Video", "Pdf")
"""Features that hold no text."""


class BadRow(ValueError):
    """A row that cannot become a task; the message is the reason, without the row's place."""


class ArrowRows:
    """A table of `datasets` by number, with dates as ISO text and decimals as numbers."""

    fills_missing = True
    """Arrow gives every struct all keys that some row's has; those it made up are None."""

    def __init__(self, table: Any, *, name: str, limit: int | None = None) -> None:
        """`name` is what error messages call it. Raises ValueError for images, audio and video."""
        for column, feature in table.features.items():
            if type(feature).__name__ in NOT_TEXT:
                raise ValueError(
                    f"path={name}: the column {column!r} holds {type(feature).__name__.lower()}s, "
                    "and only text can be trained on; take a dataset without it"
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


def plain(value: Any) -> Any:
    """Return a value as JSON has it, as far as that goes; containers are copied.

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
def quiet() -> Iterator[None]:
    """Switch off progress bars of `datasets` inside, which would tear up our own output."""
    import datasets

    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not bars:
            datasets.enable_progress_bars()


def load(function: Callable[[], Any], message: Callable[[Exception], str]) -> Any:
    """Return what `function` loads; its errors become a ValueError with the text of `message`."""
    from datasets.exceptions import DatasetsError

    try:
        with quiet():
            return function()
    except (DatasetsError, ValueError, OSError, RuntimeError) as error:
        raise ValueError(message(error)) from error


def reason(error: Exception) -> str:
    """Return what went wrong underneath, in a line."""
    return str(error.__cause__ or error).partition("\n")[0]
