"""Real containers for tests: an image made of this machine's busybox, and what is left of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from agenttrain.runtimes.config import RuntimeConfig
from agenttrain.runtimes.leftovers import PREFIX, machine_id
from agenttrain.runtimes.machines import Machines
from agenttrain.types import Task

IMAGE = "localhost/agenttrain-test/busybox:1"
BASE = "localhost/agenttrain-base:1"
"""Base of the tasks in examples/terminal_agent; `scripts/test-containers` makes it."""
needs_containers = pytest.mark.skipif(
    os.environ.get("AGENTTRAIN_CONTAINERS") != "1",
    reason="starts containers; run scripts/test-containers",
)


def podman(*arguments: str) -> str:
    """Return what podman prints; a failure is an error."""
    done = subprocess.run(
        ["podman", *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()


def ours(*processes: int) -> list[str]:
    """Return the names of containers of this process, or of these processes, running or not."""
    begins = tuple(f"{PREFIX}{machine_id()}-{pid}-" for pid in processes or (os.getpid(),))
    return [name for name in labelled() if name.startswith(begins)]


def labelled() -> list[str]:
    """Return the names of all containers with our label, also those of other processes."""
    return podman("ps", "-a", "--filter", "label=agenttrain.run", "--format", "{{.Names}}").split()


def make_image() -> None:
    """Make IMAGE once: busybox under all of its names."""
    found = subprocess.run(["podman", "image", "exists", IMAGE], check=False)
    if found.returncode == 0:
        return
    busybox = shutil.which("busybox")
    assert busybox is not None, "apt-get install busybox-static"
    names = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        for name in ("bin", "tmp", "etc", "root", "dev", "proc", "sys", "run"):
            (root / name).mkdir(parents=True)
        (root / "tmp").chmod(0o1777)
        for name in names.stdout.split():
            if name != "busybox":
                (root / "bin" / name).symlink_to("busybox")
        shutil.copy(os.path.realpath(busybox), root / "bin/busybox")
        archive = Path(folder, "root.tar")
        with tarfile.open(archive, "w") as tar:
            tar.add(root, ".")
        podman("import", str(archive), IMAGE)


def settings(**changes: Any) -> RuntimeConfig:
    """Return settings for small containers of IMAGE."""
    small = {"image": IMAGE, "memory_mb": 64, "disk_mb": 32, "processes": 32, "cpus": 1.0}
    return RuntimeConfig(name="podman", **{**small, **changes})


def task(**columns: Any) -> Task:
    return Task(task_id="t", messages=({"role": "user", "content": "go"},), columns=columns)


def machines(**changes: Any) -> Machines:
    return Machines(settings(**changes))


def make_task(folder: Path, toml: str = "", test: str = "", image: str = "x") -> Path:
    """Make a Harbor task's folder; `test` is its script."""
    (folder / "tests").mkdir(parents=True)
    image_line = f'[environment]\ndocker_image = "{image}"\n' if "[environment]" not in toml else ""
    (folder / "task.toml").write_text(f"{toml}\n{image_line}")
    (folder / "instruction.md").write_text("Do it.\n")
    script = folder / "tests" / "test.sh"
    script.write_text(f"#!/bin/sh\n{test}\n")
    script.chmod(0o755)
    return folder


# The client's own limits may be above this machine's.
STRANGER = (
    *("run", "-d", "--network", "none", "--ulimit", "nofile=1024:1024"),
    *("--ulimit", "nproc=512:512"),
)
"""Arguments that start a container that is not ours."""


def start_stranger(*options: str) -> str:
    """Start a container that is not ours; return its id."""
    return podman(*STRANGER, *options, IMAGE, "sleep", "100000")


def is_running(container: str) -> bool:
    return podman("inspect", "--format", "{{.State.Running}}", container) == "true"


def remove(container: str) -> None:
    podman("rm", "-f", "-t", "0", container)
