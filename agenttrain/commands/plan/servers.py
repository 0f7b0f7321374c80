"""Servers of a run with dedicated GPUs: the GPUs of one, and how many feed the trainers.

Everything here is computed; no server with several GPUs has been run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

from agenttrain.commands.plan.estimate import GIB, RESERVE, MemoryEstimate, Sizes, copied
from agenttrain.engines.memory import EngineLoad, EngineMemory, When
from agenttrain.engines.registry import spec_of
from agenttrain.launch.config import DistributedName
from agenttrain.settings.role_checks import fleets
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.config import Transport
from agenttrain.types import ConfigError

TENSOR_PARALLEL = (1, 2, 4, 8)
"""Numbers of GPUs that are tried for one server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """One number of GPUs of a server."""

    gpus: int
    bytes: int
    """Of each GPU."""
    holds: int
    """Rollouts whose keys and values fit at once."""
    fits: bool | None
    """None: the GPUs' memory is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The servers of a run."""

    chosen: ServerMemory
    """With servers.tensor_parallel_size."""
    tried: tuple[ServerMemory, ...]
    count: int
    trainers: int
    feeding: int | None
    """Servers that sample as fast as the trainers learn; None: speeds were not given."""

    @property
    def gpus(self) -> int:
        """GPUs of all servers."""
        return self.count * self.chosen.gpus

    @property
    def remedy(self) -> str | None:
        """Setting with which a server fits its GPUs; None: it fits, or there is none."""
        if self.chosen.fits is not False:
            return None
        able = [one.gpus for one in self.tried if one.fits and one.gpus > self.chosen.gpus]
        return f"servers.tensor_parallel_size={able[0]}" if able else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Measured speeds, in sampled tokens per second."""

    server: float | None
    """Of one server: `tokens_per_s` of a rollout phase."""
    trainer: float | None
    """Of one training GPU: sampled tokens of a step over its `time/train_s`."""

    def __post_init__(self) -> None:
        if (self.server is None) != (self.trainer is None):
            raise ConfigError(
                "--server-tokens-per-s, --trainer-tokens-per-s: how many servers feed the trainers "
                "needs both; measure both, or leave both out"
            )


def trainers_of(config: RunConfig, devices: int | None, *, on_gpu: bool = True) -> int | None:
    """Return the GPUs of `devices` that servers and a copy leave to the trainers; None: all.

    Without GPUs, a copy of the policy takes none. Raises ConfigError if none is left.
    """
    started, copy = fleets(config, "train"), on_gpu and copied(config)
    if devices is None or not (started or copy):
        return devices
    single = config.distributed.name is DistributedName.single
    if copy and single and devices == 1 and not started:
        return 1  # which they share
    taken = sum(servers.gpu_count for servers in started.values()) + copy
    if taken >= devices:
        parts = " + ".join(
            [
                f"{key}.count={servers.count} x "
                f"{key}.tensor_parallel_size={servers.tensor_parallel_size}"
                for key, servers in started.items()
            ]
            + ["the copy of the policy in the rollout process"] * copy
        )
        raise ConfigError(
            f"--devices {devices}: {parts} take {taken} GPUs and leave none to the trainer; lower "
            "one of them"
        )
    return 1 if single else devices - taken


def most(memory: EngineMemory) -> int:
    """Return the bytes of a GPU of its own at the moment that takes most."""
    own = [one for one in memory.items if not one.on_host]
    return max(sum(one.bytes for one in own if when in one.when) for when in When) + RESERVE


def fits(estimate: EngineMemory, limit: int | None) -> bool | None:
    """Return True if an engine fits a GPU of so many bytes; None: they are not known."""
    if limit is None:
        return None
    short = estimate.room is not None and estimate.room.missing > 0
    return most(estimate) <= limit and not short


def load_apart(config: RunConfig, memory: MemoryEstimate, sizes: Sizes, rows: int) -> EngineLoad:
    """Return the load of an engine with the policy's weights, and a GPU without the trainer."""
    load = memory.load
    return EngineLoad(
        rows=rows,
        prompt=load.prompt,
        sampled=load.sampled,
        limit=load.limit,
        on_gpu=True,
        memory=memory.machine.memory,
        taken=0,
        sharded=False,
        adapters=sizes.sends_adapters,
        broadcast=config.weight_sync.transport is Transport.nccl,
    )


def plan_servers(
    config: RunConfig, sizes: Sizes, memory: MemoryEstimate, speeds: Speeds
) -> FleetPlan | None:
    """Return the plan of the servers' GPUs; None: the run has no servers with GPUs."""
    spec, servers, load = spec_of(config.engine), config.servers, memory.load
    if not spec.fleet or memory.machine.kind == "cpu":
        return None
    rows = min(config.engine.max_rows, ceil(load.in_flight / servers.count))
    engine_load = load_apart(config, memory, sizes, rows)

    def tried(gpus: int) -> ServerMemory:
        assert spec.server_memory is not None
        estimate = spec.server_memory(config.engine, engine_load, sizes, gpus)
        cache = next((one.bytes for one in estimate.items if one.name == "keys and values"), 0)
        return ServerMemory(
            gpus=gpus,
            bytes=most(estimate),
            holds=cache * gpus // max(load.sampled * sizes.token_cache, 1),
            fits=fits(estimate, memory.machine.memory),
        )

    feeding = None
    if speeds.server is not None and speeds.trainer is not None:
        feeding = ceil(load.devices * speeds.trainer / speeds.server)
    return FleetPlan(
        chosen=tried(servers.tensor_parallel_size),
        tried=tuple(map(tried, TENSOR_PARALLEL)),
        count=len(servers.admin_urls) or servers.count,
        trainers=load.devices,
        feeding=feeding,
    )


def lines(fleet: FleetPlan, speeds: Speeds) -> Iterator[str]:
    """Yield the plan as text."""
    yield ""
    yield "servers (computed, never run on GPUs)"
    trainers = f"{fleet.trainers} GPU{'s' * (fleet.trainers > 1)} of the trainer"
    yield f"{fleet.count} x {fleet.chosen.gpus} GPUs beside {trainers}"
    yield f"{'GPUs of a server':<18}{'GiB':>8}  of each; rollouts that it holds"
    for one in fleet.tried:
        verdict = {True: "", False: "does not fit", None: ""}[one.fits]
        mark = "servers.tensor_parallel_size" if one.gpus == fleet.chosen.gpus else ""
        notes = ", ".join(note for note in (verdict, mark) if note)
        holds = f"{one.holds:,}{f' ({notes})' if notes else ''}"
        yield f"{one.gpus:<18}{one.bytes / GIB:8.2f}  {holds}"
    if fleet.chosen.fits is False:
        remedy = fleet.remedy or "no number of GPUs up to 8 is enough; set engine.quantization=fp8"
        yield f"A SERVER DOES NOT FIT: {remedy}"
    if fleet.feeding is None:
        yield (
            "how many servers feed the trainers depends on speeds; measure and give them: "
            "--server-tokens-per-s, --trainer-tokens-per-s"
        )
        return
    assert speeds.server is not None and speeds.trainer is not None
    yield (
        f"{fleet.feeding} servers of {speeds.server:g} tokens/s feed {fleet.trainers} trainers of "
        f"{speeds.trainer:g} tokens/s; servers.count={fleet.count}"
    )
    sampling, learning = fleet.count * speeds.server, fleet.trainers * speeds.trainer
    share = (1 / sampling) / (1 / sampling + 1 / learning)
    yield f"one after the other, sampling takes {share:.0%} of a step and updates the remainder"


def record(fleet: FleetPlan | None) -> dict[str, Any] | None:
    """Return the plan for --json."""
    if fleet is None:
        return None
    return {
        "computed_only": True,
        "count": fleet.count,
        "gpus": fleet.gpus,
        "trainers": fleet.trainers,
        "feeding": fleet.feeding,
        "fits": fleet.chosen.fits,
        "remedy": fleet.remedy,
        "by_gpus": [
            {"gpus": one.gpus, "gpu_bytes": one.bytes, "rollouts": one.holds, "fits": one.fits}
            for one in fleet.tried
        ],
    }
