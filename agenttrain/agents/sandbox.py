"""Agents' programs in a sandbox of bubblewrap, which reach the endpoint and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agenttrain.utils.files import PACKAGE

INSIDE = Path(__file__).with_name("inside.py")
SOCKET = "/tmp/.endpoint"
"""Path of the endpoint's socket in the sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Memory of a sandbox; of more, all of it is ended."""

    memory_mb: int
    disk_mb: int


def check_sandbox() -> None:
    """Raise ValueError unless bubblewrap is installed."""
    if sys.platform != "linux" or shutil.which("bwrap") is None:
        raise ValueError(
            "agent.sandbox=bwrap: bubblewrap is not installed; install it (apt install "
            "bubblewrap, on Linux), or leave agent.sandbox out"
        )


def confined(command: Sequence[str], socket: Path, port: int, limits: SandboxLimits) -> list[str]:
    """Return a command that runs another in a sandbox, with the endpoint at its usual address.

    The sandbox has namespaces of its own, network and processes among them; the disk is read-only,
    `/tmp` and `/run`, where sockets of other programs lie, its own and empty.
    """
    given = {"socket": SOCKET, "port": port, "root": str(PACKAGE.parent), **asdict(limits)}
    needed = {sys.prefix, sys.base_prefix, str(PACKAGE.parent), os.getcwd()}
    hidden = sorted(path for path in needed if path.startswith(("/tmp/", "/run/")))
    return [
        *("bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/"),
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/run"),
        *(word for path in hidden for word in ("--ro-bind", path, path)),
        *("--bind", str(socket), SOCKET, "--chdir", os.getcwd(), "--"),
        *(sys.executable, "-I", "-S", str(INSIDE), json.dumps(given), *command),
    ]
