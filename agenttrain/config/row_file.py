"""Sources of rows: checks of one before it is read."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agenttrain.config.suggest import did_you_mean

FORMATS = (".jsonl", ".json", ".csv", ".parquet")
FILE_ROWS = "agenttrain.data.files.FileRows"
HUB_ROWS = "agenttrain.data.hub.HubRows"
ENDLESS = tuple(
    f"agenttrain.data.{name}.row"
    for name in ("shop", "calculator", "code", "encyclopedia", "demonstrations")
)
"""The bundled generators: they have a row for every number."""
NO_PATH = "path=null: has no value; set data.path=…, or data.train.path=… and data.test.path=…"


def check_row_file(path: object, split: object = None, limit: object = None) -> Path:
    """Return the file or folder at `path`; raises ValueError that begins with the argument.

    A file has to be there, of a kind that can be read, and not empty; a folder must be one that
    `save_to_disk` of `datasets` wrote, and have the `split`.
    """
    if path is None:
        raise ValueError(NO_PATH)
    check_limit(limit)
    file = Path(str(path)).expanduser()
    if file.is_dir():
        listing = file / "dataset_dict.json"
        if listing.is_file():
            splits = json.loads(listing.read_text(encoding="utf-8"))["splits"]
            if split not in splits:
                hint = did_you_mean(str(split), splits)
                raise ValueError(f"split={split}: {path} has {', '.join(splits)}{hint}")
        elif not (file / "state.json").is_file():
            raise ValueError(
                f"path={path}: is a folder, and none that save_to_disk wrote; a folder of data "
                "files is read by data=hub"
            )
        elif split is not None:
            raise ValueError(
                f"split={split}: {path} is one dataset and has no splits; leave it out"
            )
        return file
    if not file.is_file():
        where = "" if file.is_absolute() else f" in {Path.cwd()}"
        raise ValueError(f"path={path}: there is no such file{where}")
    if file.suffix not in FORMATS:
        raise ValueError(f"path={path}: its ending must be one of {', '.join(FORMATS)}")
    if file.stat().st_size == 0:
        raise ValueError(f"path={path}: the file has no rows")
    if split is not None:
        raise ValueError(f"split={split}: {path} is one file and has no splits; leave it out")
    return file


def check_limit(limit: object) -> None:
    """Raise ValueError unless `limit` is a number of rows, or None for all."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit={limit}: must be a whole number of at least 1, or null for all")


def check_hub(
    path: object,
    subset: object = None,
    split: object = "train",
    revision: object = None,
    limit: object = None,
) -> None:
    """Raise ValueError for arguments of a hub dataset that cannot be right."""
    if path is None or not str(path):
        raise ValueError(NO_PATH)
    if not isinstance(split, str) or not split:
        raise ValueError(f"split={split}: give a split's name, e.g. train")
    check_limit(limit)


def known_rows(section: Mapping[str, Any]) -> int | None:
    """Count the rows of a `data.train` or `data.test` section; None where that is not cheap.

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
