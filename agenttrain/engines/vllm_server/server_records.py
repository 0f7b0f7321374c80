"""Files by which a run and its servers find each other, in `<run>/servers`.

`plan.json` says how a server is started. `<number>.json`, a server's record, has its address and
token, so only its owner can read it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from agenttrain.engines.vllm_server.files_transport import BACKEND
from agenttrain.utils.files import write_atomically
from agenttrain.utils.process_ids import process_exists, started_at
from agenttrain.utils.signing import sign

FOLDER = "servers"
PLAN = "plan.json"
LOG_LINES = 12
"""Last lines of a server's log in an error message."""
LOG_BYTES = 8000
"""Most bytes of a log that are read for them."""
SIGNATURE = "signature"
"""Key of a plan."""


class Condition(StrEnum):
    """Condition of a server, as its wrapper sees it."""

    starting = "starting"
    ready = "ready"
    """It has answered."""
    ended = "ended"
    """It has died, and is being started again."""
    gone = "gone"
    """It has died, and is not started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """How the servers of a run are started."""

    module: str
    """Module that is run as a server, with the run's folder, the number and the port."""
    model: str
    """Folder of the model."""
    tokenizer: str | None
    """Folder of the tokenizer, if requests come with a grammar."""
    dtype: str
    """Number format of the servers' weights."""
    max_context: int
    seed: int
    engine: Mapping[str, Any]
    """The section `engine`."""
    servers: Mapping[str, Any]
    """The section `servers`, or the keys of `roles.<role>` that start servers."""
    rank: int
    """Rank of the adapters that are sent to the servers. 0: all weights are sent."""
    adapters: int
    """Versions of adapters on a server at once."""
    weights: str | None
    """Folder of the weight files, which is removed with the run. None: there are no files."""
    backend: str = BACKEND
    """Weight transfer backend of the policy's servers, by vLLM's name."""
    gpus: tuple[tuple[int | str, ...], ...] | None = None
    """GPUs of each server, as CUDA_VISIBLE_DEVICES names them. None: the servers use CPUs."""
    record_routes: bool = False
    """Completions need the experts by which they were sampled."""
    role: str | None = None
    """Role of the frozen model, also the model's name for clients. None: they serve the policy."""

    @property
    def nodes(self) -> int:
        """Nodes that serve and do not train. 0: the servers are on the run's machine."""
        return int(self.servers.get("nodes", 0))

    def write(self, folder: Path) -> None:
        """Write the plan of the run in `folder`, signed by the user, as it names code to run.

        `agenttrain engine-server` checks the signature.
        """
        plan = asdict(self)
        write_private(folder / FOLDER / PLAN, {**plan, SIGNATURE: sign(plan)})

    @classmethod
    def read(cls, folder: Path) -> ServerPlan:
        """Read the plan of the run in `folder`. Raises OSError."""
        plan = json.loads((folder / FOLDER / PLAN).read_text(encoding="utf-8"))
        plan.pop(SIGNATURE, None)
        return cls(**plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    """State of one server, written by its wrapper."""

    number: int
    condition: Condition
    wrapper: int
    """Process number of the wrapper."""
    wrapper_started: int = 0
    """Start time of that process (`started_at`): its number may be reused by another process."""
    host: str = ""
    """Machine of the wrapper."""
    beat: int = 0
    """Heartbeat for a run on another machine: counted up every few seconds."""
    boot: int = 0
    """Times that the server has been started, this one included."""
    pid: int = 0
    """Process number of the server, and of its process group."""
    url: str = ""
    token: str = field(default="", repr=False)
    version: str = ""
    """Version of vLLM."""
    world_size: int = 1
    """Number of its workers."""
    end: str = ""
    """How it ended: ``ended with exit code 1``."""
    scratch: tuple[str, ...] = ()
    """Files outside the run's folder that its processes leave if they are killed."""

    @classmethod
    def of(cls, number: int, wrapper_pid: int) -> ServerRecord:
        """Return the first record of a server whose wrapper has just started on this machine."""
        return cls(
            number=number,
            condition=Condition.starting,
            wrapper=wrapper_pid,
            # 0: unknown, if the wrapper has ended already. Its id alone then identifies it.
            wrapper_started=started_at(wrapper_pid) or 0,
            host=socket.gethostname(),
        )

    @property
    def wrapper_exists(self) -> bool:
        """True if the wrapper still runs. Only valid on the wrapper's machine."""
        return process_exists(self.wrapper, self.wrapper_started)

    def write(self, folder: Path) -> None:
        write_private(record_path(folder, self.number), asdict(self))

    def write_first(self, folder: Path) -> None:
        """Write the record unless the server has one."""
        write_private(record_path(folder, self.number), asdict(self), replace=False)


def read_record(folder: Path, number: int) -> ServerRecord | None:
    """Read the record of a server, or return None if it has none."""
    try:
        record = json.loads(record_path(folder, number).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    scratch = tuple(record.pop("scratch", ()))
    return ServerRecord(**{**record, "condition": Condition(record["condition"])}, scratch=scratch)


def is_running(folder: Path, number: int) -> bool:
    """Return True if a server's wrapper runs on this machine, and has not given the server up."""
    record = read_record(folder, number)
    if record is None or record.condition is Condition.gone or record.host != socket.gethostname():
        return False
    return record.wrapper_exists


def record_path(folder: Path, number: int) -> Path:
    return folder / FOLDER / f"{number}.json"


def order_path(folder: Path, number: int) -> Path:
    """Return the path of the order to a remote wrapper. It holds the boot to kill."""
    return folder / FOLDER / f"{number}.kill"


def update_path(folder: Path, number: int) -> Path:
    """Return the path of the file that holds a server's boot while its weights are replaced."""
    return folder / FOLDER / f"{number}.update"


def log_path(folder: Path, number: int) -> Path:
    return folder / FOLDER / f"{number}.log"


def last_lines(folder: Path, number: int, count: int = LOG_LINES) -> str:
    """Return the last lines of a server's log that are not blank; empty if it has no log."""
    lines = text_since(log_path(folder, number), 0).splitlines()
    return "\n".join([line for line in lines if line.strip()][-count:])


def text_since(log: Path, size: int) -> str:
    """Return what was written to a log since it had `size` bytes, at most its last `LOG_BYTES`."""
    try:
        with log.open("rb") as file:
            file.seek(max(size, file.seek(0, os.SEEK_END) - LOG_BYTES))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def write_private(path: Path, value: Any, *, replace: bool = True) -> None:
    """Write JSON of mode 0600 atomically.

    Without `replace` an existing file is kept, and a file system without hard links gets no file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if replace:
        write_atomically(path, json.dumps(value), mode=0o600)
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.new")
    write_atomically(unfinished, json.dumps(value), mode=0o600)
    # A hard link is made atomically too, and fails if the file exists.
    with suppress(OSError):  # the file exists, or its file system has no links
        path.hardlink_to(unfinished)
    unfinished.unlink()
