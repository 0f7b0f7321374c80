"""Rows from a file: JSON lines, CSV or parquet, read by `datasets`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


class FileRows:
    """The rows of one local file, by number."""

    def __init__(self, path: str, limit: int | None = None) -> None:
        """Raises ValueError for a file that is missing, or of a kind that is not known."""
        file = Path(path).expanduser()
        if not file.is_file():
            raise ValueError(f"data path={path!r}: there is no such file")
        if file.suffix not in FORMATS:
            raise ValueError(
                f"data path={path!r}: its ending must be one of {', '.join(sorted(FORMATS))}"
            )
        from datasets import load_dataset

        rows = load_dataset(FORMATS[file.suffix], data_files=str(file), split="train")
        self._rows = rows if limit is None else rows.select(range(min(limit, len(rows))))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self._rows[index])
