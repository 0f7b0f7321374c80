"""Settings of the runtime: where the commands of a rollout run, and what they may use."""

from __future__ import annotations

import re
from dataclasses import field
from enum import StrEnum
from typing import Any

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from agenttrain.utils.data_fields import Data
from agenttrain.utils.sections import SETTINGS, Number, Whole, raise_problems


class RuntimeName(StrEnum):
    """The place where a rollout's commands run."""

    bwrap = "bwrap"
    """The tools' own sandboxes, and no container."""
    podman = "podman"
    """A container for each rollout, by the program `runtime.client`."""


class Client(StrEnum):
    """The program that makes containers."""

    podman = "podman"
    docker = "docker"


class Network(StrEnum):
    """Reach of a container."""

    none = "none"
    """Nothing."""
    endpoint = "endpoint"
    """The endpoint of an outside agent, on 127.0.0.1, and nothing else."""
    allowlist = "allowlist"
    """The endpoint, and `runtime.hosts` through a proxy on 127.0.0.1."""
    open = "open"
    """What the client's default network reaches."""


class Grade(StrEnum):
    """The container in which a Harbor task's tests run."""

    task = "task"
    """The one that the task names; `shared` if it names none."""
    shared = "shared"
    """The rollout's own."""
    fresh = "fresh"
    """A new one, with the artifacts that the task declares."""


HOST = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
CAPABILITY = re.compile(r"[A-Z]+(_[A-Z]+)*")
UNSAFE = ("SYS_ADMIN", "SYS_MODULE", "SYS_RAWIO", "SYS_PTRACE", "SYS_BOOT", "SYS_TIME", "ALL")
"""Capabilities that no container gets: they reach the host or other containers."""


@dataclass(config=SETTINGS)
class RuntimeConfig:
    """Where tools, environments and agents run commands."""

    name: Data[RuntimeName] = RuntimeName.bwrap
    """bwrap: sandboxes of the tools. podman: a container for each rollout."""
    _target_: str | None = None
    """Class of a runtime of your own, made with `options`; see guides/containers."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class `_target_`."""
    client: Data[Client] = Client.podman
    """The program that makes containers: podman or docker."""
    image: str | None = None
    """Image of rows without one of their own: a name, or a folder with a Dockerfile."""
    pull: bool = False
    """Images that this machine lacks are pulled; otherwise they are refused before sampling."""
    network: Network = Network.endpoint
    """none, endpoint (an outside agent's, and nothing else), allowlist or open."""
    hosts: list[str] = field(default_factory=list)
    """Hosts of network=allowlist, e.g. [example.org, "*.example.net"]."""
    cpus: Number = Field(default=1.0, gt=0)
    """Processors of a container; a Harbor task may ask for fewer."""
    memory_mb: Whole = Field(default=2048, ge=16)
    """Memory of a container, swap included; a Harbor task may ask for less."""
    disk_mb: Whole = Field(default=4096, ge=8)
    """Size of what a container writes; of more it is ended, and the rollout is not scored."""
    processes: Whole = Field(default=256, ge=8)
    """Processes and threads of a container."""
    open_files: Whole = Field(default=1024, ge=64)
    """Open files of each process."""
    user: Data[str | None] = None
    """User of commands, by name or id; None: the image's, or the Harbor task's."""
    workdir: Data[str | None] = None
    """Folder in which commands begin; None: the image's, or the Harbor task's."""
    env: list[str] = field(default_factory=list)
    """Environment variables of the run that containers get, and that ${NAME} in a Harbor task may
    read, e.g. [PIP_INDEX_URL]."""
    capabilities: list[str] = field(default_factory=list)
    """Linux capabilities that a container keeps, e.g. [CHOWN, SETUID]; all others are dropped."""
    trust: bool = False
    """Dockerfiles, tests, solutions and commands of task folders may run: they are code of whoever
    made the folder."""
    grade: Data[Grade] = Grade.task
    """Container in which a Harbor task is graded: its own choice, shared or fresh."""
    keep_processes: bool = False
    """What an agent left running goes on while a Harbor task's tests run in its container: for
    tasks that ask for a service. Such a process can also write the reward itself."""
    max_running: Whole = Field(default=128, ge=1)
    """Containers at once; more rollouts wait."""
    max_starting: Whole = Field(default=8, ge=1)
    """Containers that start at once."""
    start_timeout_s: Number = Field(default=60.0, gt=0)
    """Seconds that a container has to start."""
    build_timeout_s: Number = Field(default=1800.0, gt=0)
    """Seconds that the build of an image has."""
    retries: Whole = Field(default=2, ge=0)
    """Times a start that failed is tried again; then the rollout ends as `error`, without a
    reward."""

    @property
    def label(self) -> str:
        """The setting that chose the machines, for errors."""
        if self._target_ is not None:
            return f"runtime._target_={self._target_}"
        return f"runtime={self.name}"

    @property
    def has_machines(self) -> bool:
        """True if each rollout has a machine of its own."""
        return self.name is not RuntimeName.bwrap or self._target_ is not None

    @property
    def is_client(self) -> bool:
        """True if `client` makes the machines."""
        return self.name is not RuntimeName.bwrap and self._target_ is None

    @model_validator(mode="after")
    def _check(self) -> RuntimeConfig:
        """Check capabilities and hosts, and that no setting is without effect."""
        problems = []
        for capability in self.capabilities:
            name = capability.removeprefix("CAP_")
            if name in UNSAFE or not CAPABILITY.fullmatch(name):
                problems.append(
                    f"runtime.capabilities={capability}: is no capability that a container can "
                    f"have; refused are {', '.join(UNSAFE)}; leave it out"
                )
        is_list = self.network is Network.allowlist
        if is_list != bool(self.hosts):
            problems.append(
                "runtime.hosts: are the hosts of runtime.network=allowlist; "
                + ("name some" if is_list else "add it, or leave hosts out")
            )
        for host in self.hosts:
            if not HOST.fullmatch(host):
                problems.append(
                    f"runtime.hosts={host}: expected a name like example.org or *.example.org, in "
                    "lower case, without scheme, port and path"
                )
        if self.options and self._target_ is None:
            problems.append(
                "runtime.options: are arguments of runtime._target_; add it, or leave options out"
            )
        if not self.has_machines and self.image is not None:
            problems.append(
                f"runtime.image={self.image}: has no effect with runtime=bwrap; add runtime=podman"
            )
        raise_problems(problems)
        return self
