"""YAML files: their folder, parsing, the options of each group. Digests of files, their way to
disk, and atomic writing."""

from __future__ import annotations

import ctypes
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

PACKAGE = Path(__file__).resolve().parent.parent
SYNC_FILE_RANGE_WRITE = 2
"""Flag of Linux: start to write the pages that have changed."""


def conf_folder() -> Path:
    """Return the folder of train.yaml: packaged, or the repository's in an editable install."""
    return _data_folder("conf")


def skills_folder() -> Path:
    """Return the folder of skills for coding agents, packaged or the repository's likewise."""
    return _data_folder("skills")


def _data_folder(name: str) -> Path:
    """Return a folder that a wheel has inside the package, and the repository beside it."""
    packaged = PACKAGE / name
    return packaged if packaged.is_dir() else PACKAGE.parent / name


def cache_folder() -> Path:
    """Return the user's folder of files that are downloaded or converted once per machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "agenttrain"


def parse_yaml(text: str) -> Any:
    """Return `yaml.safe_load`, ten times as fast where PyYAML has libyaml."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def list_groups(*folders: Path) -> dict[str, list[str]]:
    """Return group -> its options, sorted, e.g. ``{"algorithm": ["grpo", "rloo"], …}``.

    `algorithm/objective` is a group too; `recipes/wordle` is an option of `experiment`.

    The first folder is ours, others are the user's. A user may keep any files in the subfolders of
    a group, so there a group within a group counts only if ours has it too.
    """
    options: dict[str, set[str]] = {}
    for folder in folders:
        for file in (*folder.glob("*/*.yaml"), *folder.glob("*/*/*.yaml")):
            group = file.parent.relative_to(folder).as_posix()
            name = file.stem
            if group.startswith("experiment/"):
                group, _, within = group.partition("/")
                name = f"{within}/{name}"
            is_ours, is_nested = folder == folders[0], "/" in group
            # `options` has all groups of ours by now, since our folder is read first.
            if is_ours or not is_nested or group in options:
                options.setdefault(group, set()).add(name)
    return {group: sorted(names) for group, names in sorted(options.items())}


def start_writeback(descriptor: int, start: int, size: int) -> None:
    """Have the system write these bytes of a file to disk, without waiting until they are there.

    Left alone, Linux begins seconds later or in `sync`. Does nothing on other systems.
    """
    library: Any = ctypes.CDLL(None)
    if hasattr(library, "sync_file_range"):
        library.sync_file_range(
            descriptor, ctypes.c_int64(start), ctypes.c_int64(size), SYNC_FILE_RANGE_WRITE
        )


def sync(path: Path) -> None:
    """Force a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of_blocks(file: Path, block_bytes: int) -> str:
    """Return the SHA-256 digest of a file's size and of 64 blocks that are spread over it.

    For files of many gigabytes, which are too long to read whole. Raises OSError.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        for number in range(64):
            opened.seek(number * max(size - block_bytes, 0) // 64)
            digest.update(opened.read(block_bytes))
    return digest.hexdigest()


def write_atomically(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Replace a file; a reader sees the old content or the new, never a part.

    The new file has the permissions `mode` from the start, less those that the umask takes away.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
