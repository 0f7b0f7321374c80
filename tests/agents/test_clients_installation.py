"""`scripts/test-clients` takes no half installation for a whole one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "test-clients"


def test_an_installation_that_failed_is_not_used(tmp_path: Path) -> None:
    for name, text in (("npm", 'mkdir -p "$3/node_modules"; exit 1'), ("bwrap", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    clients = tmp_path / "clients"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CLIENTS": str(clients)}
    for argument, text in (("--install", "could not be installed"), ("-q", "failed or was ended")):
        done = subprocess.run([SCRIPT, argument], env=env, capture_output=True, text=True)
        assert (done.returncode, text in done.stderr) == (77, True)
    assert (clients / "npm" / "node_modules").is_dir()
    assert not (clients / "npm" / "versions").exists()
