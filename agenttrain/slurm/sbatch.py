"""SLURM's command: asked whether it would take a script, and given one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from agenttrain.config.errors import ConfigError

ABSENT = (
    "submit: there is no sbatch on PATH; log in to a machine of the cluster, or print the script "
    "with agenttrain submit --dry-run …"
)
TIMEOUT_S = 120
"""For a controller that does not answer."""
NO_CLUSTER = (
    "Unable to contact slurm controller",
    "Could not establish a configuration source",
    "Socket timed out on send/recv operation",
)
"""Messages of sbatch (SLURM 22 to 25) about the cluster and not about the job."""


class ClusterUnreachable(ConfigError):
    """There is an sbatch here, and no controller that answers it."""


def present() -> bool:
    """Return True if this machine can submit."""
    return shutil.which("sbatch") is not None


def lint(script: str) -> str:
    """Ask SLURM about the script, e.g. "Job 7 to start at … on nodes n1 in partition low".

    Raises ConfigError in SLURM's words for what it would refuse, ClusterUnreachable where it does
    not get to see the script.
    """
    done = _sbatch(["--test-only"], script)
    text = " ".join(line.removeprefix("sbatch: ") for line in done.stderr.split("\n")).strip()
    if any(message in text for message in NO_CLUSTER):
        raise ClusterUnreachable(
            f"submit: the cluster does not answer: {text}; `sinfo` shows whether it is up, and "
            "agenttrain submit --dry-run … prints the script without it"
        )
    if done.returncode != 0:
        raise ConfigError(
            f"submit: SLURM refuses the job: {text}; see slurm.partition, account, qos, time, "
            "nodes, gpus, cpus and memory, and what `sinfo` offers"
        )
    return text


def submit(path: Path) -> str:
    """Submit the script; return the job's number. Raises ConfigError in SLURM's words."""
    done = _sbatch(["--parsable", str(path)], None)
    if done.returncode != 0:
        raise ConfigError(f"submit: sbatch {path}: {done.stderr.strip()}")
    number, _, _ = done.stdout.strip().partition(";")  # then the cluster, where there are several
    return number


def _sbatch(arguments: list[str], script: str | None) -> subprocess.CompletedProcess[str]:
    if not present():
        raise ConfigError(ABSENT)
    command = ["sbatch", *arguments]
    try:
        return subprocess.run(
            command, input=script, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterUnreachable(
            f"submit: {' '.join(command)} has not answered for {TIMEOUT_S} seconds; `sinfo` shows "
            "whether the cluster is up"
        ) from error
