"""Agents' programs in a sandbox, which reach the endpoint and nothing else.

It is the sandbox of the tools `python` and `bash` (`tools/sandbox/confine.py`), with files of its
own (`visible.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
from glob import glob
from pathlib import Path

from agenttrain.agents.config import AgentConfig
from agenttrain.agents.visible import visible_files
from agenttrain.tools.sandbox.outside_process import base_python, bubblewrap, next_user
from agenttrain.tools.sandbox.root import Root
from agenttrain.utils.files import PACKAGE

START = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from agenttrain.agents.inside import main; sys.path.remove({root!r}); main()"
)
"""Code of the sandbox's first process. `root` is the folder that holds the package."""
SOCKET = "/.endpoint"
"""Path of the endpoint's socket in the sandbox."""
FILES = 200_000
"""Limit of files and folders that an agent can create."""
PROBE_S = 30.0
"""A sandbox in which no program has run by then is broken."""
ETC = (
    *("/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/pki/tls/certs", "/etc/ca-certificates"),
    *("/etc/pki/ca-trust/extracted", "/etc/localtime", "/etc/timezone", "/etc/mime.types"),
    *("/etc/services", "/etc/protocols", "/etc/fonts", "/etc/terminfo", "/etc/inputrc"),
    *("/etc/os-release", "/etc/debian_version", "/etc/java*", "/etc/python3*", "/etc/perl"),
)
"""Settings of programs that agents may use."""


def check_sandbox(settings: AgentConfig) -> None:
    """Raise ValueError unless a sandbox can be made here, and its user can read the agent's script.

    It runs a program in a sandbox, because namespaces fail for many reasons.
    """
    key = f"agent.sandbox={settings.sandbox}"
    try:
        user = next_user()  # None unless this process is root
        bubblewrap(user)  # raises FileNotFoundError if it is not installed
        problem = _probe_problem(settings)
    except FileNotFoundError as error:
        raise ValueError(
            f"{key}: bubblewrap is not installed; install it (apt install bubblewrap, on Linux), "
            "or leave agent.sandbox out"
        ) from error
    except PermissionError as error:
        raise ValueError(f"{key}: {error}; leave agent.sandbox out") from error
    if problem:
        raise ValueError(f"{key}: no sandbox can be made here: {problem}; leave agent.sandbox out")
    script = next(filter(os.path.isfile, settings.command), None)
    # Root's agents run as another user. 0o004: everybody may read the file.
    if script is not None and user is not None and not os.stat(script).st_mode & 0o004:
        raise ValueError(
            f"agent.command: {script}: only its owner can read it, and the agents of a run that "
            "root has started are another user; chmod o+r it"
        )


def sandbox_command(
    settings: AgentConfig, *, socket: Path | None = None, port: int = 0
) -> list[str]:
    """Return the words before a command that run it in a sandbox. Raises ValueError.

    bubblewrap starts `inside.main` in new namespaces. That builds the file system of `Root`, and
    starts the command. With `socket`, the endpoint's, the command reaches it on 127.0.0.1:`port`.
    """
    visible, user = visible_files(settings.command, settings.read), next_user()
    root = Root(
        # Not settings.disk_mb: at this limit writes only fail. The first process watches
        # settings.disk_mb, which is smaller, and ends the sandbox there with a reason. The file
        # system lies in memory, so it cannot exceed memory_mb.
        disk_mb=settings.memory_mb,
        files=FILES,
        home=visible.home,
        writable=(visible.home, "/tmp", "/var/tmp", "/run", "/dev/shm"),
        # Single files, folders that are shown, and paths in these that are not.
        programs=sorted(visible.programs),
        shown=sorted(visible.shown),
        hidden=sorted(visible.hidden),
        links=visible.links,
        sockets={} if socket is None else {SOCKET: str(socket)},
        settings=[path for pattern in ETC for path in glob(pattern)],
        terminals=True,
    )
    first_process = {  # settings of `inside.main`
        "root": root._asdict(),
        "user": user,
        "work": visible.work,
        "home": visible.home,
        "socket": None if socket is None else SOCKET,
        "port": port,
        "memory_mb": settings.memory_mb,
        "disk_mb": settings.disk_mb,
    }
    code = START.format(root=str(PACKAGE.parent))
    # -I -S: the interpreter takes no code from the environment, the folder or site-packages.
    python = [base_python(), "-I", "-S", "-c", code]
    return [*bubblewrap(user), "--die-with-parent", "--", *python, json.dumps(first_process)]


def _probe_problem(settings: AgentConfig) -> str:
    """Run `true` in a sandbox. Return why that fails, or "" if it works."""
    command = [*sandbox_command(settings), "true"]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_S
        )
    except subprocess.TimeoutExpired:
        return f"it did not start within {PROBE_S:g} s"
    code = result.returncode
    lines = result.stderr.strip().splitlines() or [f"it ended with exit code {code}"]
    return lines[-1] if code else ""
