"""The processes of a run: their number, the program that started them, and their crash files.

`launcher.py` starts them, or torchrun or a similar program, which describes them in the environment
(RANK, WORLD_SIZE, MASTER_ADDR, …). A launcher and its workers share a folder, the exchange. A rank
that fails writes the reason into a crash file there.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agenttrain.launch.config import DistributedConfig, DistributedName
from agenttrain.settings.checks import distributed_problems
from agenttrain.settings.command_line import CHECK, Command
from agenttrain.settings.compose import Composed
from agenttrain.settings.engine_checks import engine_problems
from agenttrain.settings.machine import process_count_problem
from agenttrain.types import AgenttrainError, ConfigError
from agenttrain.utils.exit_codes import FAILED, INTERRUPTED, PREEMPTED, REFUSED, TERMINATED
from agenttrain.utils.sections import raise_config_error
from agenttrain.utils.signals import StopRequest

EXCHANGE = "AGENTTRAIN_EXCHANGE"
"""Environment variable: the folder in which a launcher and its workers exchange files."""
CRASH = "crash-{rank}.json"
"""File of the exchange: the error that stopped a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """The launcher's own command line, which each worker gets as JSON and runs as a rank.

    So the launcher composes the settings, and each worker does so again. The ranks compare theirs.
    """

    arguments: list[str]
    """The words after `agenttrain`."""
    program: str
    """Module whose `run` takes the arguments."""
    verb: str
    folder: str
    """The run folder that the launcher of this node proposes. Only that of the first rank counts,
    which sends its name to the others: folders of other nodes may have other times in them."""
    sys_path: list[str]
    """Where the launcher finds modules."""


worker_command: WorkerCommand | None = None
"""Set in a worker of the launcher. Processes that a worker starts are not workers."""


def write_crash(exchange: Path, rank: str, error: BaseException) -> None:
    """Write the error that stopped a rank, for the launcher to report."""
    from agenttrain.training.world import PeerFailed  # imports torch

    line, trace = described(error)
    of_peer = isinstance(error, PeerFailed)
    record = {"time": time.time(), "error": line, "trace": trace, "of_peer": of_peer}
    (exchange / CRASH.format(rank=rank)).write_text(json.dumps(record), encoding="utf-8")


def read_crash(exchange: Path, rank: int) -> dict[str, Any]:
    """Return the crash that a rank recorded; empty if it recorded none.

    Its keys: `time`, `error` (one line), `trace`, and `of_peer`, True if another rank caused it.
    """
    try:
        crash: dict[str, Any] = json.loads((exchange / CRASH.format(rank=rank)).read_text())
    except (OSError, ValueError):
        return {}
    return crash


def described(error: BaseException) -> tuple[str, str]:
    """Return an error as one line, and its traceback.

    The line is ``ValueError: message``, or only the message of a ConfigError. The traceback is
    empty for errors of the user's settings, files or data: it would only show this package's code.
    """
    line = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, ConfigError):
        line = str(error)
    if isinstance(error, AgenttrainError | ValueError | OSError):
        return line, ""
    return line, "".join(traceback.format_exception(error))


def code_of(error: BaseException) -> int:
    """Return the exit code of a process that the error stopped."""
    return REFUSED if isinstance(error, ConfigError) else FAILED


def stop_code(stop: StopRequest, verb: str) -> int:
    """Return the exit code of a process that was interrupted before it had anything to save."""
    if not stop.at_once:
        return INTERRUPTED
    return TERMINATED if stop.insisted or verb == "eval" else PREEMPTED


RUNS = ("train", "sft", "eval")
"""Verbs that start processes."""
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment variables: without them every long wait for another process prints two warnings."""
FOREIGN = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
"""Variables of accelerate's launcher that would override our settings; distributed=fsdp2 replaces
them."""


def started_by_others(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if torchrun or a similar program started this process as one of several."""
    several = int(environment.get("WORLD_SIZE", "1")) > 1 and "RANK" in environment
    return several and EXCHANGE not in environment


def is_rank() -> bool:
    """Return True in one of the processes that share a run, whichever program started them."""
    return worker_command is not None or started_by_others()


def assigned_folder() -> Path | None:
    """Return the run folder of a rank; None if this process has to make the folder itself.

    Such a process is a run of its own, or the first rank of torchrun. The first rank of our
    launcher gets the launcher's folder. Later ranks make none: they get the current folder as a
    placeholder until the first rank sends them the name.
    """
    if not is_rank():
        return None
    is_first = os.environ["RANK"] == "0"
    if not is_first:
        return Path()
    if worker_command is None:  # not our launcher has started this process, but torchrun
        return None
    return Path(worker_command.folder)


def adopt_and_check_processes(command: Command, runs: Sequence[Composed]) -> None:
    """Raise ConfigError for a run of the command whose processes cannot be started.

    If torchrun or a similar program has started this process, the `distributed` of each run is set
    to the processes that there are (`adopt`). Else our launcher starts the processes later.
    """
    by_torchrun = started_by_others()
    if by_torchrun and command.sweep:
        raise ConfigError(
            "-m: torchrun starts its processes once, and a sweep needs new ones for each run; "
            "start agenttrain itself with distributed.processes=…"
        )
    for run in runs:
        problems = list[str]()
        if by_torchrun and command.verb in RUNS:
            adopt(run, command.overrides)
            # Checked before for the settings as typed, and here for those that `adopt` has set.
            problems += distributed_problems(run.config)
            problems += engine_problems(run.config, several=True)
            if run.config.distributed.restarts:
                problems.append(
                    f"distributed.restarts={run.config.distributed.restarts}: torchrun starts the "
                    "processes; leave it out, and use its --max-restarts with resume=auto"
                )
        section = run.config.distributed
        if command.verb in (*RUNS, CHECK):
            problems += accelerate_problems(run.config.training.mixed_precision)
            is_only_process = section.name is DistributedName.single and not is_rank()
            if is_only_process and (problem := missing_peers_problem()):
                problems.append(problem)
        raise_config_error(problems)
        if section.nodes > 1 and command.sweep:
            raise ConfigError(
                f"distributed.nodes={section.nodes}: the runs of a sweep (-m) have one node each; "
                "leave one of the two out"
            )
        has_launcher = section.name is not DistributedName.single and not by_torchrun
        if has_launcher and command.verb in RUNS:
            node_rank(section)  # raises ConfigError for a node without a number


def adopt(composed: Composed, typed: Sequence[str]) -> None:
    """Set `distributed` to the processes that torchrun has started, as many as on this node.

    Raises ConfigError if one of the `typed` overrides contradicts them. Settings that come from a
    saved run may differ. Example: of WORLD_SIZE=4, two on each node, `distributed` gets
    ``processes=2 nodes=1``.
    """
    section = composed.config.distributed
    world_size = int(os.environ["WORLD_SIZE"])
    typed_settings = [
        text for text in typed if text.lstrip("+").partition("=")[0] in PROCESS_SETTINGS
    ]
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))  # of this node
    nodes = max(world_size // local_size, 1)
    contradicts = section.processes not in (None, local_size) or section.nodes not in (1, nodes)
    if typed_settings and (section.name is DistributedName.single or contradicts):
        raise ConfigError(
            f"{' '.join(typed_settings)}: {world_size} processes were started (WORLD_SIZE), "
            f"{local_size} on each of {nodes} node{'s' if nodes > 1 else ''}; leave it out, or "
            "start as many as it says"
        )
    if section.name is DistributedName.single:
        section.name = DistributedName.ddp
    # config.yaml gets the processes of one node, also if there are several: the addresses of nodes
    # are torchrun's. `agenttrain resume=` can then start the run itself, with fewer processes.
    section.processes, section.nodes = local_size, 1
    section.rendezvous = section.node_rank = None
    composed.plain["distributed"].update(
        name=str(section.name), processes=local_size, nodes=1, rendezvous=None, node_rank=None
    )


MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables in which MPI's launchers say how many processes they have started."""


def missing_peers_problem(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the problem of a process that a launcher should have started with others, or None."""
    remedy = "start agenttrain itself with distributed=ddp distributed.processes=N, or by torchrun"
    if "WORLD_SIZE" in environment:  # torchrun and the like say how many there are
        return None
    # `accelerate launch --cpu --num_processes 2` starts one process, or leaves the start to MPI. It
    # sets MASTER_ADDR, where several processes would meet, but no WORLD_SIZE.
    if "MASTER_ADDR" in environment and "ACCELERATE_USE_CPU" in environment:
        return (
            f"accelerate launch: was to start several processes (MASTER_ADDR="
            f"{environment['MASTER_ADDR']}) and has started one, or leaves them to MPI; {remedy}"
        )
    # SLURM sets MPI's variables in each shell of a job, whether or not processes are started there.
    if "SLURM_JOB_ID" in environment:
        return None
    for name in MPI_SIZES:
        size = environment.get(name, "1")
        if size not in ("", "0", "1"):  # mpirun has started several
            return f"{name}={size}: each of them would train alone; {remedy}"
    return None


def accelerate_problems(mixed_precision: str) -> Iterator[str]:
    """Yield problems of accelerate's environment variables that contradict the run's settings."""
    for variable in FOREIGN:
        if os.environ.get(variable, "false").lower() in ("1", "true"):
            yield f"{variable}={os.environ[variable]}: set distributed=fsdp2 instead"
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", "", mixed_precision):
        yield (
            f"ACCELERATE_MIXED_PRECISION={precision}: the run has "
            f"training.mixed_precision={mixed_precision}; set training.mixed_precision=bf16 or "
            "fp16 instead"
        )
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() not in ("no", ""):
        yield f"ACCELERATE_DYNAMO_BACKEND={backend}: nothing is compiled here; leave it out"


PROCESS_SETTINGS = ("distributed", "distributed.name", "distributed.processes", "distributed.nodes")
"""Settings that are decided once torchrun or a similar program has started the processes."""


def resolve(section: DistributedConfig) -> int:
    """Return the number of processes that this node runs; raises ConfigError."""
    devices = count_gpus()
    if problem := process_count_problem(section, devices):
        raise ConfigError(problem)
    return section.processes or devices


def count_gpus() -> int:
    """Return the number of this machine's GPUs.

    Imports torch, which takes seconds, only if there is a driver of CUDA's or AMD's.
    """
    if "torch" not in sys.modules:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            if not Path("/dev/kfd").exists():
                return 0
    import torch

    return torch.cuda.device_count()


def node_rank(section: DistributedConfig) -> int:
    """Return this machine's number; raises ConfigError if it is neither set nor in SLURM_NODEID."""
    if section.nodes == 1:
        return 0
    if section.node_rank is not None:
        return section.node_rank
    number = os.environ.get("SLURM_NODEID", "")
    if not number.isdecimal():
        raise ConfigError(
            "distributed.node_rank=null: which of the nodes is this one? add "
            "distributed.node_rank=0 on the first, 1 on the second, …"
        )
    if int(number) >= section.nodes:
        raise ConfigError(
            f"distributed.nodes={section.nodes}: this is node {number} (SLURM_NODEID); raise it"
        )
    return int(number)


def is_later_node(section: DistributedConfig) -> bool:
    """Return True if this launcher is not on the first node, which makes the run folder."""
    if started_by_others():  # the first rank makes it, whichever machine it is on
        return False
    return section.name is not DistributedName.single and node_rank(section) > 0
