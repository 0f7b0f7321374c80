"""The seam of a runtime: one method that starts a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from socket import socket
from typing import Protocol, runtime_checkable

from agenttrain.types import RolloutMachine, ToolUnavailable


class MachineLost(ToolUnavailable):
    """A machine cannot be started, has ended, or does not answer: no fault of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """The machine that a rollout needs."""

    image: str
    """Name of an image, or of what the back end calls so."""
    cpus: float = 1.0
    memory_mb: int = 2048
    disk_mb: int = 4096
    processes: int = 256
    open_files: int = 1024
    is_open: bool = False
    """True: it has a network. False: it has its own loopback interface and nothing else."""
    hosts: tuple[str, ...] = ()
    """Hosts that a machine without a network reaches nevertheless, by a proxy in it."""
    user: str | None = None
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    capabilities: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    """Names of the run and the rollout, by which leftovers are found."""


class Runtime(Protocol):
    """Starts machines."""

    async def start(self, spec: MachineSpec) -> RolloutMachine:
        """Start a machine. Raises MachineLost if it does not start; then nothing of it is left."""

    async def aclose(self) -> None:
        """End what is left at the end of the run."""


@runtime_checkable
class EndsProcesses(Protocol):
    """A machine that can end whatever its commands have left running."""

    async def end_processes(self) -> None:
        """End all processes of the machine's user. Raises MachineLost."""


@runtime_checkable
class Listens(Protocol):
    """A machine in which a port of the run can be reached on 127.0.0.1."""

    def listener(self, port: int) -> socket:
        """Return a listening socket of the machine's network; port 0: a free one."""
