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
    """The parts of a run that engines are built from. Most engines need few of them."""

    policy: Any
    """The module to sample from; None for an engine with weights of its own."""
    model: Path
    """Folder of the model. If the policy has adapters: folder of the base model."""
    dtype: str
    """Number format of the policy's weights, e.g. float32."""
    adapters: LoraSettings | None
    """Settings of the policy's adapters, if the engine is sent only the adapters' weights. None: it
    is sent all weights of the model."""
    tokenizer: Path | None
    """Folder of the tokenizer, if requests come with a grammar; else None."""
    sync_mode: WeightSyncMode
    """Treatment of requests in flight at an update."""
    sync_folder: str | None
    """weight_sync.folder."""
    transport: Transport
    """weight_sync.transport."""
    servers: ServersConfig
    """Section `servers`, for engines that sample by servers."""
    seed: int
    on_gpu: bool
    rank: int
    """Number of this process; each one builds an engine."""
    run_folder: Path | None
    """Folder for the engine's log."""
    trainers: int = 1
    """Training processes of this machine, which have its first GPUs."""
    taken: tuple[int, ...] = ()
    """GPUs, by number, that role servers take beside the trainers'."""
    shares_gpu: bool = False
    """The only server has the GPU of the only trainer."""
    max_staleness: int = 0
    """async_training.max_staleness: updates by which a rollout may be older than the policy."""
    vision: Vision | None = None
    """Turns the images of requests into features, by the policy's weights. None: no images."""
    mixed_precision: str = "no"
    """Number format that training computes in, under autocast: no, bf16 or fp16."""
    record_routes: bool = False
    """Completions need `routes`: the trainer replays the experts of the rollouts."""


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
    """Rollouts run in a process of their own, which has the engine."""
    sends_adapters: bool = False
    """The engine gets the policy's adapters as they are. False: it gets all weights, or the model's
    architecture has to be read to tell. Then the check is made again."""


def _no_problems(*_: Any) -> Iterable[str]:
    return ()


SERVERS_OWNER = "AGENTTRAIN_SERVERS_OWNER"
"""Environment variable ``<process number of the launcher> <run folder>``. It says that the launcher
owns the servers of that run: they go on when the run's process ends."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec(Generic[S]):
    """An engine: its settings, the function that builds it, and facts needed before it is built.

    A bundled one is `SPEC` in `engines/<name>/spec.py`. One from outside the package is any object
    of this class, named by its dotted path::

        SPEC = EngineSpec(settings=MySettings, build=build)   # engine._target_=my_pkg.engine.SPEC

    Problems are complete lines ``key=value: problem; remedy``. A spec's module is imported when
    settings are checked, so torch and the engine itself are imported inside `build`.

    The fields follow in groups: settings and their checks, memory, places where the engine can run,
    servers, and abilities. A server is a program that samples for runs, in a process of its own.
    Only `server` is another one: it serves a trained model to clients of OpenAI's API.
    """

    settings: type[S]
    """Keys of the section `engine` and their bounds."""
    build: Callable[[S, EngineInputs], Engine]
    check: Callable[[S, RunFacts], Iterable[str]] = _no_problems
    """Yield problems of the settings together with those of other sections."""
    check_machine: Callable[[S, Callable[[], int]], Iterable[str]] = _no_problems
    """Yield problems of this machine. The second argument counts its GPUs, which imports torch."""
    check_model: Callable[[S, Any], None] = lambda settings, model: None
    """Raise EngineError for a model that the engine cannot serve. It is built without weights."""
    gpu_notes: Callable[[S], Iterable[str]] = _no_problems
    """Yield settings that are slow on a GPU, with a remedy."""
    memory: Callable[[S, EngineLoad, ModelSizes], EngineMemory] = lambda *_: EngineMemory()
    """Estimate the memory that the engine takes in each process."""
    server_memory: Callable[[S, EngineLoad, ModelSizes, int], EngineMemory] | None = None
    """Estimate the memory that each GPU of a server needs; the last argument counts its GPUs. For
    an engine in the rollout process: the memory of its copy of the policy. None: the engine has
    neither."""
    trainers_gpu_share: Callable[[S], float] | None = None
    """Return the share of the trainer's GPU, where it is the only one, that a server takes. None:
    servers of this engine never share a GPU with a trainer."""
    package: str | None = None
    """Package that the engine needs, e.g. vllm; `agenttrain doctor` imports it."""
    own_weights: bool = False
    """True: samples from its own weights, which are sent to it. False: from the policy's module, in
    the trainer's process."""
    standalone: bool = False
    """True: needs neither the policy nor a device of its process, so it can run in the rollout
    process (`rollout.process`)."""
    apart: EngineSpec[S] | None = None
    """Spec of the same engine for the rollout process, if it differs there: an engine that samples
    from the policy's module has its own weights there. None: this spec is used there too
    (`standalone`), or the engine cannot run there."""
    run_server: Callable[[Path, int, int | None, str], int] | None = None
    """Run one server of a run and return its exit code. Arguments: the run's folder, the server's
    number, a process with which the server ends too (None: it runs until it is stopped), and the
    address to listen on. Raises ConfigError if that server runs already. None: the engine has no
    servers."""
    read_servers: Callable[[Path, int], dict[str, Any] | None] | None = None
    """Return the state of a run's servers, or None if it has none. Arguments: the run's folder, and
    the number of lines of each log. ``{"time": …, "pid": …, "ended": …, "servers": [{"number": 0,
    "state": "live", …}, …]}``. None: the engine has no servers."""
    server_wrappers: Callable[[Path], Sequence[int]] | None = None
    """Return the process numbers of the wrappers on this machine that keep a run's servers up, role
    servers included. None: the engine has no servers."""
    end_servers: Callable[[Path], None] | None = None
    """End the servers of a launcher's run (`SERVERS_OWNER`), and remove their files except the
    logs. None: the engine has no servers."""
    serve_alone: Callable[[S, EngineInputs, str, int], int] | None = None
    """Run a server at a host and a port, for runs that did not start it, until it is stopped.
    Return the exit code. Raises ConfigError. None: the engine has no servers."""
    sender: Callable[[], WeightSender] | None = None
    """Return the trainer's end of weight_sync.transport=nccl. None: the engine does not support
    it."""
    server: Callable[[S, ServedModel], list[str]] | None = None
    """Return the command of the engine's own server of OpenAI's API. It answers `/health` once it
    is ready, and completes its answers after a SIGTERM. None: there is none."""
    deterministic: bool = False
    """True: can repeat a run bit for bit (`Lockstep`)."""
    reads_images: bool = False
    """True: takes requests with images."""
    grammars: bool = False
    """True: takes requests with a grammar."""
    records_routes: bool = False
    """True: can return the experts by which a model's layers sampled (`Completion.routes`)."""
    routes_need_gpu: bool = False
    """True: returns these experts on a GPU only."""
    too_cold: str = (
        f"must be at least {LEAST_TEMPERATURE:g}: divided by less, logits turn their rounding "
        "errors into whole nats, and overflow in the end"
    )
    """Reason against a temperature between 0 and LEAST_TEMPERATURE."""

    @property
    def may_stand_alone(self) -> bool:
        """True: can run in the rollout process, as it is or as `apart`."""
        return self.standalone or self.apart is not None

    @property
    def fleet(self) -> bool:
        """True: samples by the servers of the section `servers`, which have their own devices."""
        return self.run_server is not None
