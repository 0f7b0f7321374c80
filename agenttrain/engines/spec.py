"""`EngineSpec`: an engine as its folder registers it.

Setup, `plan` and the checks use the spec of the chosen engine; none of them names an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from agenttrain.engines.base import Engine
from agenttrain.engines.broadcast import WeightSender
from agenttrain.engines.config import LEAST_TEMPERATURE, EngineSettings, ServersConfig
from agenttrain.engines.memory import EngineLoad, EngineMemory, ModelSizes
from agenttrain.training.config import LoraSettings, Transport, WeightSyncMode

if TYPE_CHECKING:
    from agenttrain.engines.vision import Vision

S = TypeVar("S", bound=EngineSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInputs:
    """The parts of a run that engines are built from; most engines need few of them."""

    policy: Any
    """The module to sample from; None for an engine with weights of its own."""
    model: Path
    """Folder of the model; of its base, where the policy has adapters."""
    dtype: str
    """Number format of the policy's weights, e.g. float32."""
    adapters: LoraSettings | None
    """The policy's adapters; None: it has none."""
    tokenizer: Path | None
    """Folder of the tokenizer, where requests come with a grammar."""
    sync_mode: WeightSyncMode
    """Treatment of requests in flight at an update."""
    sync_folder: str | None
    """weight_sync.folder."""
    transport: Transport
    """weight_sync.transport."""
    servers: ServersConfig
    seed: int
    on_gpu: bool
    rank: int
    """Number of this process; each one builds an engine."""
    run_folder: Path | None
    """Folder for the engine's log."""
    trainers: int = 1
    """Training processes of this machine, which have its first GPUs."""
    taken: tuple[int, ...] = ()
    """Further GPUs, by number, that the servers of roles have."""
    max_staleness: int = 0
    """async_training.max_staleness: updates by which a rollout may be older than the policy."""
    vision: Vision | None = None
    """Reads the images of requests, by the policy's own weights; None: there are none."""
    mixed_precision: str = "no"
    """Number format that training computes in, under autocast: no, bf16 or fp16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model with its chat and an address, for an engine's own server of OpenAI's API."""

    folder: str
    """The model, with its weights; the base model's folder, where there are adapters."""
    tokenizer: str
    """Folder of the tokenizer."""
    adapters: str | None
    """Folder of adapters; None: there are none."""
    dtype: str
    """Number format of the model's weights, e.g. float32."""
    name: str
    """Name of the model for clients."""
    host: str
    port: int
    template: str
    """File of the chat template."""
    generation: str
    """Folder with a generation_config.json that has the tokens which end a turn."""
    call_parser: str | None
    """The server's name for a parser of the model's calls; None: calls stay text."""
    sampling: dict[str, float]
    """Temperature, top_p, top_k and min_p of requests that name none."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Settings of other sections that an engine's check may see."""

    lora_rank: int
    """model.lora.rank; 0: no adapters."""
    transport: Transport
    """weight_sync.transport."""
    mode: WeightSyncMode
    """weight_sync.mode."""
    sync_folder: str | None
    """weight_sync.folder."""
    distributed: str
    """distributed.name."""
    several: bool
    """The run has more than one process."""
    servers: ServersConfig
    rollout_process: bool = False
    """The rollouts have a process of their own, which has the engine."""


def _no_problems(*_: Any) -> Iterable[str]:
    return ()


def _accept(settings: EngineSettings, model: Any) -> None:
    pass


SERVERS_OWNER = "AGENTTRAIN_SERVERS_OWNER"
"""Environment variable with a launcher's process number and, after a space, its run's folder: the
servers of that run are the launcher's."""


def _no_memory(settings: EngineSettings, load: EngineLoad, sizes: ModelSizes) -> EngineMemory:
    return EngineMemory()


@dataclass(frozen=True, kw_only=True)
class EngineSpec(Generic[S]):
    """An engine: its settings, the function that builds it, and facts needed before it is built.

    A bundled one is `SPEC` in `engines/<name>/spec.py`. One from outside the package is any object
    of this class, named by its dotted path::

        SPEC = EngineSpec(settings=MySettings, build=build)   # engine._target_=my_pkg.engine.SPEC

    Problems are complete lines ``key=value: problem; remedy``. The module of a spec is imported
    to check settings, so it imports torch and the engine itself in `build`, not at its top.
    """

    settings: type[S]
    """Keys of the section `engine` and their bounds."""
    build: Callable[[S, EngineInputs], Engine]
    check: Callable[[S, RunFacts], Iterable[str]] = _no_problems
    """Yield problems of the settings together with those of other sections."""
    check_machine: Callable[[S, Callable[[], int]], Iterable[str]] = _no_problems
    """Yield problems of this machine. The second argument counts its GPUs and imports torch."""
    check_model: Callable[[S, Any], None] = _accept
    """Raise EngineError for a model, built without weights, that the engine cannot serve."""
    gpu_notes: Callable[[S], Iterable[str]] = _no_problems
    """Yield settings that are slow on a GPU, with a remedy."""
    memory: Callable[[S, EngineLoad, ModelSizes], EngineMemory] = _no_memory
    """Estimate the memory that the engine takes in each process."""
    server_memory: Callable[[S, EngineLoad, ModelSizes, int], EngineMemory] | None = None
    """Estimate the memory that a server of so many GPUs takes of each, or the copy of the policy in
    the rollout process, which has one; None: there are none."""
    package: str | None = None
    """Package of others that samples, beside agenttrain's own; `agenttrain doctor` imports it."""
    own_weights: bool = False
    """True: samples from weights of its own, which are sent to it; False: from the policy's."""
    standalone: bool = False
    """True: needs neither the policy nor a device of its process, so that it can be in a process
    apart from the trainer's (`rollout.process`)."""
    apart: EngineSpec[S] | None = None
    """The same engine with weights of its own, for a process apart from the trainer's; None: it is
    this one, or there is none."""
    run_server: Callable[[Path, int, int | None, str], int] | None = None
    """Run one server of the run in a folder, by its number, until it is stopped or the process of
    the third argument has ended, at an address of this machine; return the exit code. Raises
    ConfigError if that server runs already. None: the engine has no servers."""
    read_servers: Callable[[Path, int], dict[str, Any] | None] | None = None
    """Return the state of the servers of the run in a folder, with so many lines of each log:
    ``{"time": …, "pid": …, "ended": …, "servers": [{"number": 0, "state": "live", …}, …]}``; None:
    it has none. None in its place: the engine has no servers."""
    server_wrappers: Callable[[Path], Sequence[int]] | None = None
    """Return the processes on this machine, by number, that keep a run's servers up, those of its
    roles too; None: the engine has no servers."""
    end_servers: Callable[[Path], None] | None = None
    """End the servers of a launcher's run (`SERVERS_OWNER`), and remove their files but the logs;
    None: the engine has no servers."""
    serve_alone: Callable[[S, EngineInputs, str, int], int] | None = None
    """Run a server for runs of others at a host and a port, until it is stopped; return the exit
    code. Raises ConfigError. None: the engine has no servers."""
    sender: Callable[[], WeightSender] | None = None
    """Return the trainer's end of weight_sync.transport=nccl; None: the engine takes weights in no
    such way."""
    server: Callable[[S, ServedModel], list[str]] | None = None
    """Return the command of the engine's own server of OpenAI's API, which answers `/health` once
    it is ready and completes its answers after a SIGTERM; None: it has none."""
    deterministic: bool = False
    """True: can repeat a run bit for bit (`Lockstep`)."""
    reads_images: bool = False
    """True: takes requests with images."""
    grammars: bool = False
    """True: takes requests with a grammar."""
    too_cold: str = (
        f"must be at least {LEAST_TEMPERATURE:g}: divided by less, logits turn their rounding "
        "errors into whole nats, and overflow in the end"
    )
    """Reason against a temperature between 0 and LEAST_TEMPERATURE."""

    @property
    def may_stand_alone(self) -> bool:
        """True: can be in a process apart from the trainer's, if with weights of its own."""
        return self.standalone or self.apart is not None

    @property
    def fleet(self) -> bool:
        """True: samples by processes of the section `servers`, which have devices of their own."""
        return self.run_server is not None
