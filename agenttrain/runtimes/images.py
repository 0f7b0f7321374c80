"""Images made of folders with a Dockerfile: built once for each content."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import sys
from pathlib import Path

from agenttrain.runtimes.base import MachineLost
from agenttrain.runtimes.client import call_client
from agenttrain.runtimes.output import Clipped
from agenttrain.utils.file_locks import lock_descriptor
from agenttrain.utils.files import cache_folder
from agenttrain.utils.temporary import TemporaryFolder

DOCKERFILE = "Dockerfile"
TAG = "localhost/agenttrain/"
ASK_S = 30.0
"""Seconds that a question to the client may take."""
LOG_BYTES = 4000


def folder_of(image: str) -> Path:
    """Return the folder that an image's setting names."""
    return Path(image).expanduser()


def is_folder(image: str) -> bool:
    """Return True for the path of a folder with a Dockerfile; an image's name is no such path."""
    return (folder_of(image) / DOCKERFILE).is_file()


def content_tag(folder: Path) -> str:
    """Return the name of the image of a folder's content: names, modes and bytes of its files.

    Example: ``localhost/agenttrain/fix-tests:3f2a9c01b4de``. Raises ValueError for a link that
    leads out of the folder.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            if not path.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{path}: is a link out of its folder; copy the file instead")
            digest.update(f"link {name} {os.readlink(path)}\n".encode())
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{name} {path.stat().st_mode & 0o111:o} {content}\n".encode())
    # A Harbor task has its Dockerfile in the folder `environment`: the task names the image.
    owner = folder.parent.name if folder.name == "environment" else folder.name
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in owner.lower()).strip("-")
    return f"{TAG}{name or 'image'}:{digest.hexdigest()[:12]}"


async def exists(client: str, image: str) -> bool:
    """Return True if this machine has an image. Raises MachineLost if the client fails."""
    result = await call_client([client, "image", "inspect", image], timeout_s=ASK_S)
    return result.code == 0


async def build(client: str, folder: Path, *, timeout_s: float, is_open: bool) -> str:
    """Build the image of a folder unless this machine has it; return its name.

    Processes that want the same image wait for the one that builds it. Without `is_open` the build
    has no network. Raises MachineLost with the end of the build's output.
    """
    tag = content_tag(folder)
    if await exists(client, tag):
        return tag
    lock = await asyncio.to_thread(_lock, tag)
    try:
        if await exists(client, tag):  # another process has built it meanwhile
            return tag
        print(f"image          building {tag} from {folder}", file=sys.stderr, flush=True)
        log = Clipped(LOG_BYTES)
        options = [] if is_open else ["--network", "none"]
        if os.path.basename(client) == "podman":
            options += ["--pull=missing" if is_open else "--pull=never"]
        command = [client, "build", *options, "-t", tag, str(folder)]
        result = await call_client(command, timeout_s=timeout_s, on_output=log.add)
        if result.code:
            words = log.bytes().decode("utf-8", "replace").strip()
            raise MachineLost(f"{folder}/{DOCKERFILE}: cannot be built: {words}")
    finally:
        os.close(lock)
    return tag


async def install(client: str, image: str, script: Path, *, timeout_s: float, is_open: bool) -> str:
    """Run a script in an image, unless this machine has the result; return the new image's name.

    The script runs with ``sh``, as the image's own user. `is_open` allows it to use the network.
    Raises MachineLost.
    """
    result = await call_client(
        [client, "image", "inspect", "--format", "{{.Id}}", image], timeout_s=ASK_S
    )
    if result.code:
        raise MachineLost(f"image {image}: {result.problem}")
    with TemporaryFolder() as parent:
        folder = parent / f"{image.rpartition('/')[2].partition(':')[0]}-agent"
        folder.mkdir()
        shutil.copyfile(script, folder / "install.sh")
        # `build` names the new image by a digest of this folder, and makes none if there is one of
        # that name. So the folder holds the script, and the id of the image in a comment.
        lines = [
            f"# {result.out.decode().strip()}",
            f"FROM {image}",
            "COPY install.sh /tmp/agenttrain-install.sh",
            "RUN sh /tmp/agenttrain-install.sh",
        ]
        (folder / DOCKERFILE).write_text("\n".join(lines) + "\n")
        return await build(client, folder, timeout_s=timeout_s, is_open=is_open)


def _lock(tag: str) -> int:
    """Wait for the lock of an image's name; return the file that holds it."""
    folder = cache_folder() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / f"{tag.rpartition(':')[2]}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    lock_descriptor(lock)
    return lock
