"""Memory of the host: limits of cgroups, and machines that do not say it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from agenttrain.utils.host_memory import host_memory

MIB = 2**20
UNLIMITED = 9_223_372_036_854_771_712  # version 1 of cgroups has a number for it


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        # a container, which sees its own group as the topmost one
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": str(7 * MIB)}, 7 * MIB),
        # a container that sees its path on the host
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/memory.max": str(7 * MIB)}, 7 * MIB),
        ({"sys/fs/cgroup/memory.max": str(7 * MIB)}, 7 * MIB),
        # a job whose steps are groups without a limit of their own
        (
            {
                "proc/self/cgroup": "0::/slurm/job_7/step_0",
                "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max",
                "sys/fs/cgroup/slurm/job_7/memory.max": str(5 * MIB),
                "sys/fs/cgroup/slurm/memory.max": str(8 * MIB),
            },
            5 * MIB,
        ),
        # version 1
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n2:memory:/slurm/job_7\n0::/",
                "sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes": str(6 * MIB),
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(UNLIMITED),
            },
            6 * MIB,
        ),
    ],
)
def test_the_smallest_limit_of_the_groups_holds(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    write(tmp_path, files)
    assert host_memory(tmp_path) == expected


def test_without_limits_it_is_the_memory_of_the_machine(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    assert host_memory(tmp_path) == total
    limits = {"sys/fs/cgroup/memory.max": "max"}
    write(tmp_path, {"proc/self/cgroup": "0::/../..", **limits})
    assert host_memory(tmp_path) == total


@pytest.mark.skipif(not psutil.LINUX, reason="psutil reads /proc on Linux alone")
def test_a_machine_that_does_not_say_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert host_memory() is None
