"""Checkpoint folders on disk: complete or absent, and verified by hashes.

manifest.json holds the sha256 of every other file by name, and under its own name the sha256 of
these entries: a manifest that lost an entry does not verify either.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from agenttrain.engines.language_model import model_class
from agenttrain.types import AgenttrainError
from agenttrain.utils.files import sync

MANIFEST = "manifest.json"
PREFIX = "step-"
"""Start of a checkpoint's name, before its step."""
PRUNED = ".pruned-"
"""Put before the name of a checkpoint while it is being removed."""
READ_BY_LOADERS = (
    *("*.safetensors", "*.bin", "*.pt", "*.index.json", "adapter_config.json", "*token*"),
    "chat_template*",
)
"""Names that transformers, vLLM or we load: an added file of such a name would change the model."""


class CheckpointError(AgenttrainError):
    """A checkpoint is incomplete, corrupt or missing. The message names the file."""


class NotRead(CheckpointError, ValueError):
    """A pickle holds more than tensors and plain values. The message names the file."""


class NotWritten(CheckpointError):
    """A checkpoint cannot be written. The earlier ones are as they were."""


@contextmanager
def only_tensors(path: Path) -> Iterator[None]:
    """Turn torch's refusal to unpickle code in the block into NotRead, which names `path`."""
    try:
        yield
    except UnpicklingError as error:
        raise NotRead(
            f"{path}: holds a pickle with more than tensors and plain values, which could run code "
            "when it is read; it is refused"
        ) from error


def loading_options(folder: Path) -> dict[str, Any]:
    """Return keywords for `from_pretrained` of a folder: MXFP4 weights are dequantized to train."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") != "mxfp4":
        return {}
    from transformers import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def set_stop_tokens(model: Any, token_ids: Sequence[int]) -> None:
    """Make `token_ids` the end-of-sequence tokens of the model and of files that are saved of it.

    Whatever generates with these files then stops where training does. A config that has the same
    ids in another order stays as it is.
    """
    ids: int | list[int] = token_ids[0] if len(token_ids) == 1 else list(token_ids)
    for settings in (model.config, model.config.get_text_config(), model.generation_config):
        if not hasattr(settings, "eos_token_id"):  # no such key, or no generation_config.json
            continue
        current = settings.eos_token_id
        if set(current if isinstance(current, list) else [current]) != set(token_ids):
            settings.eos_token_id = ids


def auto_class(folder: Path) -> Any:
    """Return transformers' class that loads the model of a folder, with images or without."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return model_class(str(config.get("model_type")))


def latest(folder: Path) -> Path:
    """Return the newest checkpoint that verifies; warn of skipped ones. Raises CheckpointError."""
    for path in newest_first(folder):
        try:
            verify(path)
        except CheckpointError as error:
            print(f"warning: checkpoint skipped: {error}", file=sys.stderr)
        else:
            return path
    raise CheckpointError(f"{folder}: no intact checkpoint. Start a new run.")


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, intact or not, from the newest to the oldest."""
    by_step = {
        int(match[1]): path
        for path in folder.glob(f"{PREFIX}*")
        if (match := re.fullmatch(rf"{PREFIX}(\d+)", path.name))
    }
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def verify(path: Path, index: int = 0, count: int = 1) -> None:
    """Raise CheckpointError, naming the file, unless all files are as they were written.

    `count` processes may verify a checkpoint together: process `index` reads its part of the files.
    """
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST}: {error}") from error
    # The manifest's entry for itself is the digest of its other entries.
    digest_of_entries = files.pop(MANIFEST, None) if isinstance(files, dict) else None
    if digest_of_entries is None or digest_of_entries != _digest_of(files):
        raise CheckpointError(f"{path / MANIFEST}: its content is not what was written")
    sizes = {}
    for name in files:
        try:
            sizes[name] = (path / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path / name}: {error}") from error
    # From the largest to the smallest, in turns, so that all processes read about as much.
    for name in sorted(files, key=lambda name: (-sizes[name], name))[index::count]:
        try:
            current_digest = digest(path / name)
        except OSError as error:
            raise CheckpointError(f"{path / name}: {error}") from error
        if current_digest != files[name]:
            raise CheckpointError(f"{path / name}: its content is not what was written")
    for pattern in READ_BY_LOADERS:  # an added file of such a name would change the model
        for extra in path.glob(pattern):
            if extra.name not in files:
                raise CheckpointError(f"{extra}: was not written with the checkpoint; remove it")


def seal(part: Path, digests: Mapping[str, str] | None = None) -> None:
    """Write the manifest, give all files the mode that the umask says, force everything to disk.

    The manifest has the sha256 of each file, e.g. ``{"config.json": "3f…", …}``, and under its own
    name that of these entries. `digests` has the sha256 of files, by name, that were hashed while
    they were written. Such files are on disk already.
    """
    synced_digests = digests or {}
    files = sorted(path for path in part.rglob("*") if path.is_file())
    paths = {str(path.relative_to(part)): path for path in files}
    entries = {name: synced_digests.get(name) or digest(path) for name, path in paths.items()}
    text = json.dumps({**entries, MANIFEST: _digest_of(entries)}, indent=1)
    (part / MANIFEST).write_text(text, encoding="utf-8")
    # safetensors ignores the umask. The manifest, which was just created, has the mode it gives.
    copy_mode(part / MANIFEST, files)
    unsynced = [path for name, path in paths.items() if name not in synced_digests]
    for path in (*unsynced, part / MANIFEST, part):
        sync(path)


def copy_mode(example: Path, files: Iterable[Path]) -> None:
    """Give `files` the mode of `example`, a file that was written normally.

    safetensors writes weights with mode 0600 whatever the umask, so that a server of another user
    could not load them.
    """
    mode = stat.S_IMODE(example.stat().st_mode)
    for path in files:
        path.chmod(mode)


def replace(part: Path, path: Path) -> None:
    """Rename the finished folder `part` to `path`. A former folder of that name is removed last.

    The files of `part` are on disk already (`seal`). If the process dies meanwhile, the next run
    calls `recover`, which completes or undoes the renaming, before it writes a checkpoint.
    """
    former = path.with_name(f".{path.name}.former")
    # `recover` has restored a `former` that was the only copy. This one could not be removed.
    shutil.rmtree(former, ignore_errors=True)
    if path.exists():
        path.rename(former)
    part.rename(path)
    sync(path.parent)
    shutil.rmtree(former, ignore_errors=True)


def recover(folder: Path) -> None:
    """Undo a `replace` that died between its two renames, and remove other leftovers."""
    for former in folder.glob(f".{PREFIX}*.former"):  # .step-000010.former of step-000010
        path = folder / former.name[1:].removesuffix(".former")
        if path.exists():  # `replace` died after its second rename
            shutil.rmtree(former, ignore_errors=True)
        else:
            with suppress(FileNotFoundError):  # another process of the run has renamed it
                former.rename(path)
    for pattern in (f".{PREFIX}*.part", f"{PRUNED}*"):  # half written, half removed
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def put_aside(path: Path, name: str) -> None:
    """Rename a folder to `name` in the same folder, in place of one that has this name."""
    aside = path.with_name(name)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def digest(path: Path) -> str:
    """Return the sha256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(files: Mapping[str, str]) -> str:
    """Return the sha256 of a manifest's entries: file name -> sha256."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
