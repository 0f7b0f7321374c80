"""The policy's servers: how many GPUs one needs, and how many servers keep the trainers busy.

Everything here is computed. No server with several GPUs has ever been run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from agenttrain.engines.memory import EngineLoad, EngineMemory, When
from agenttrain.engines.registry import spec_of
from agenttrain.launch.config import DistributedName
from agenttrain.runs.memory_plan import (
    GIB,
    MemoryEstimate,
    Sizes,
    has_policy_copy,
    sampler_shares_gpu,
)
from agenttrain.settings.engine_checks import sends_adapters
from agenttrain.settings.role_checks import fleets
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.config import Transport
from agenttrain.training.footprint import RESERVE
from agenttrain.types import ConfigError

TENSOR_PARALLEL = (1, 2, 4, 8)
"""Numbers of GPUs that are tried for one server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """Estimated memory of an engine server whose weights are divided among `gpus` GPUs."""

    gpus: int
    gpu_bytes: int
    """Bytes that the server uses on each of its GPUs, at its peak."""
    rollouts: int
    """Rollouts whose keys and values its GPUs hold at once."""
    fits: bool | None
    """True if `gpu_bytes` are no more than a GPU of the planned machine has, and the KV cache holds
    a rollout of full length. None: the size of the machine's GPUs is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Plan of the policy's servers: their memory, and how many keep the trainers busy."""

    chosen: ServerMemory
    """Memory with servers.tensor_parallel_size GPUs."""
    alternatives: tuple[ServerMemory, ...]
    """Memory with other numbers of GPUs, from few to many."""
    count: int
    """Number of servers."""
    trainers: int
    """GPUs of the trainer."""
    balanced: int | None
    """Number of servers that sample as fast as the trainers learn. None: no speeds were given."""

    @property
    def gpus(self) -> int:
        """GPUs of all servers."""
        return self.count * self.chosen.gpus

    @property
    def remedy(self) -> str | None:
        """Setting with which a server fits its GPUs. None: it fits, or no setting is known."""
        if self.chosen.fits is not False:
            return None
        for server in self.alternatives:
            if server.fits and server.gpus > self.chosen.gpus:
                return f"servers.tensor_parallel_size={server.gpus}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Measured speeds, in sampled tokens per second."""

    server: float | None
    """Speed of one server: `tokens_per_s` of a rollout phase."""
    trainer: float | None
    """Speed of one training GPU: sampled tokens of a step over its `time/train_s`."""

    def __post_init__(self) -> None:
        if (self.server is None) != (self.trainer is None):
            raise ConfigError(
                "--server-tokens-per-s, --trainer-tokens-per-s: how many servers feed the trainers "
                "needs both; measure both, or leave both out"
            )


def trainers_of(config: RunConfig, devices: int | None, *, on_gpu: bool = True) -> int | None:
    """Return how many of `devices` GPUs are left to the trainers, after servers and policy copy.

    Example: 8 GPUs, two servers of one GPU each -> 6. None if `devices` is None. `on_gpu`: the
    planned machine has GPUs; on CPUs there is no copy of the policy. Raises ConfigError if no GPU
    is left.
    """
    fleet_by_key, has_copy = fleets(config, "train"), on_gpu and has_policy_copy(config)
    if devices is None or not (fleet_by_key or has_copy):
        # All of them, also for distributed=single: the caller then refuses more than one, because
        # the others would be idle.
        return devices
    is_single = config.distributed.name is DistributedName.single
    if on_gpu and sampler_shares_gpu(config, devices) and not (has_copy and fleet_by_key):
        return 1  # the only GPU: trainer and sampler share it
    used = sum(servers.gpu_count for servers in fleet_by_key.values()) + (1 if has_copy else 0)
    if used >= devices:
        parts = [
            f"{key}.count={servers.count} x "
            f"{key}.tensor_parallel_size={servers.tensor_parallel_size}"
            for key, servers in fleet_by_key.items()
        ]
        if has_copy:
            parts.append("the copy of the policy in the rollout process")
        raise ConfigError(
            f"--devices {devices}: {' + '.join(parts)} take {used} GPUs and leave none to the "
            "trainer; lower one of them"
        )
    return 1 if is_single else devices - used


def peak_bytes(memory: EngineMemory) -> int:
    """Return the peak bytes of a GPU that only this engine uses."""
    items = [item for item in memory.items if not item.on_host]
    return max(sum(item.bytes for item in items if when in item.when) for when in When) + RESERVE


def fits(estimate: EngineMemory, limit: int | None) -> bool | None:
    """Return True if an engine fits a GPU of `limit` bytes. None: the limit is not known."""
    if limit is None:
        return None
    lacks_room = estimate.room is not None and estimate.room.missing > 0
    return peak_bytes(estimate) <= limit and not lacks_room


def server_load(config: RunConfig, memory: MemoryEstimate, sizes: Sizes, rows: int) -> EngineLoad:
    """Return the load of a server or copy with the policy's weights, on a GPU of its own.

    `rows` is the number of rollouts that it samples at once.
    """
    load = memory.load
    return EngineLoad(
        rows=rows,
        prompt=load.prompt,
        sampled=load.sampled,
        limit=load.limit,
        on_gpu=True,
        memory=memory.machine.memory,
        taken=0,  # no part of the GPU or of the weights is the trainer's
        sharded=False,
        adapters=sends_adapters(config, is_merged=sizes.merges_adapters),
        broadcast=config.weight_sync.transport is Transport.nccl,
    )


def plan_servers(
    config: RunConfig, sizes: Sizes, memory: MemoryEstimate, speeds: Speeds
) -> FleetPlan | None:
    """Return the plan of the policy's servers. None: the run has none with GPUs of their own.

    A server on the trainer's GPU is counted there.
    """
    spec, servers, load = spec_of(config.engine), config.servers, memory.load
    if not spec.fleet or memory.machine.kind == "cpu" or memory.machine.shared:
        return None
    # Rollouts that one server samples at once.
    rows = min(config.engine.max_rows, ceil(load.in_flight / servers.count))
    engine_load = server_load(config, memory, sizes, rows)

    def estimate_server(gpus: int) -> ServerMemory:
        """Return the memory of a server whose weights are divided among `gpus` GPUs."""
        assert spec.server_memory is not None
        estimate = spec.server_memory(config.engine, engine_load, sizes, gpus)
        # The estimate calls the KV cache by this name. Its bytes are those of one GPU.
        cache = next((item.bytes for item in estimate.items if item.name == "keys and values"), 0)
        # Bytes of one token times the tokens of the longest rollout, prompt included. 0 for a
        # recurrent model, whose rollouts need no cache: the 1 below avoids a division by zero, and
        # the number is huge.
        rollout_bytes = load.sampled * sizes.token_cache
        return ServerMemory(
            gpus=gpus,
            gpu_bytes=peak_bytes(estimate),
            # Whole rollouts for which the caches of all its GPUs have room.
            rollouts=cache * gpus // max(rollout_bytes, 1),
            fits=fits(estimate, memory.machine.memory),
        )

    # The number of servers that sample as many tokens per second as the trainers learn from. Both
    # speeds are in sampled tokens per second: of one server, and of one training GPU.
    balanced = None
    if speeds.server is not None and speeds.trainer is not None:
        balanced = ceil(load.devices * speeds.trainer / speeds.server)
    return FleetPlan(
        chosen=estimate_server(servers.tensor_parallel_size),
        alternatives=tuple(map(estimate_server, TENSOR_PARALLEL)),
        count=len(servers.admin_urls) or servers.count,  # addresses of servers that run already
        trainers=load.devices,
        balanced=balanced,
    )


def lines(fleet: FleetPlan, speeds: Speeds) -> Iterator[str]:
    """Yield the plan as text."""
    yield ""
    yield "servers (computed, never run on GPUs)"
    trainers = f"{fleet.trainers} GPU{'s' * (fleet.trainers > 1)} of the trainer"
    yield f"{fleet.count} x {fleet.chosen.gpus} GPUs beside {trainers}"
    yield f"{'GPUs of a server':<18}{'GiB':>8}  of each; rollouts that it holds"
    for server in fleet.alternatives:
        notes = []
        if server.fits is False:
            notes.append("does not fit")
        if server.gpus == fleet.chosen.gpus:
            notes.append("servers.tensor_parallel_size")
        note = f" ({', '.join(notes)})" if notes else ""
        yield f"{server.gpus:<18}{server.gpu_bytes / GIB:8.2f}  {server.rollouts:,}{note}"
    if fleet.chosen.fits is False:
        remedy = fleet.remedy or "no number of GPUs up to 8 is enough; set engine.quantization=fp8"
        yield f"A SERVER DOES NOT FIT: {remedy}"
    if fleet.balanced is None:
        yield (
            "how many servers feed the trainers depends on speeds; measure and give them: "
            "--server-tokens-per-s, --trainer-tokens-per-s"
        )
        return
    assert speeds.server is not None and speeds.trainer is not None
    yield (
        f"{fleet.balanced} servers of {speeds.server:g} tokens/s feed {fleet.trainers} trainers of "
        f"{speeds.trainer:g} tokens/s; servers.count={fleet.count}"
    )
    # Seconds per sampled token of all servers, and of all trainers.
    sampling_s = 1 / (fleet.count * speeds.server)
    training_s = 1 / (fleet.trainers * speeds.trainer)
    share = sampling_s / (sampling_s + training_s)
    yield f"one after the other, sampling takes {share:.0%} of a step and updates the remainder"


def record(fleet: FleetPlan | None) -> dict[str, Any] | None:
    """Return the plan as --json prints it.

    ``computed_only``: no figure was measured. ``count`` servers of the settings have ``gpus`` GPUs
    in all; ``feeding`` servers would sample as fast as the GPUs of ``trainers`` learn. ``fits`` and
    ``remedy`` are those of a server of the settings, and ``by_gpus`` has the memory of a server
    with 1, 2, 4 and 8 GPUs.
    """
    if fleet is None:
        return None
    return {
        "computed_only": True,
        "count": fleet.count,
        "gpus": fleet.gpus,
        "trainers": fleet.trainers,
        "feeding": fleet.balanced,
        "fits": fleet.chosen.fits,
        "remedy": fleet.remedy,
        "by_gpus": [asdict(server) for server in fleet.alternatives],
    }
