"""Temporary folders outlive neither their context nor, for long, a killed process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from agenttrain.utils.temporary import (
    LOCK,
    PREFIX,
    UNFINISHED,
    UNFINISHED_S,
    TemporaryFolder,
    remove_abandoned,
)

HOLDER = """
import sys
from pathlib import Path
from agenttrain.utils.temporary import TemporaryFolder
print(TemporaryFolder(Path(sys.argv[1])).path, flush=True)
sys.stdin.read()
"""


def test_a_folder_ends_with_its_context(tmp_path: Path) -> None:
    with TemporaryFolder(tmp_path) as folder:
        (folder / "file").write_text("x")
        assert [path.name for path in tmp_path.iterdir()] == [folder.name]
        assert folder.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    held = Path(holder.stdout.readline().strip())
    foreign = tmp_path / f"{PREFIX}foreign"  # by its name only
    foreign.mkdir()
    with TemporaryFolder(tmp_path) as folder:
        assert held.is_dir() and folder.is_dir()
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert held.is_dir()
    (held / "socket").write_text("x")
    with TemporaryFolder(tmp_path) as folder:
        assert sorted(tmp_path.iterdir()) == sorted([folder, foreign])


def test_a_link_in_place_of_a_folder_or_its_lock_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / LOCK).write_text("")
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    (tmp_path / f"{PREFIX}lock").mkdir()
    (tmp_path / f"{PREFIX}lock" / LOCK).symlink_to(target / LOCK)
    before = sorted(os.walk(tmp_path))
    remove_abandoned(tmp_path)
    assert sorted(os.walk(tmp_path)) == before


def test_a_folder_that_never_got_its_lock_is_removed_once_it_is_old(tmp_path: Path) -> None:
    new, old, link = (tmp_path / f"{UNFINISHED}{name}" for name in ("new", "old", "link"))
    new.mkdir()
    old.mkdir()
    link.symlink_to(tmp_path)
    then = time.time() - UNFINISHED_S - 60
    os.utime(old, (then, then))
    os.utime(link, (then, then), follow_symlinks=False)
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([new, link])
