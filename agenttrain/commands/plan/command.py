"""`agenttrain plan`: print a run's memory, and the settings that make a run fit if it does not."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from agenttrain.commands.plan import other_gpus, servers
from agenttrain.commands.plan.other_gpus import OtherGpus, plan_other_gpus
from agenttrain.commands.plan.remedies import Planner, Remedy
from agenttrain.commands.plan.servers import FleetPlan, Speeds, plan_servers, trainers_of
from agenttrain.commands.verb import STDOUT, write_report
from agenttrain.engines.memory import MemoryItem, When
from agenttrain.engines.registry import names_with, spec_of
from agenttrain.launch.config import DistributedName
from agenttrain.runs.memory_plan import (
    GIB,
    MemoryEstimate,
    PlannedHardware,
    sampler_shares_gpu,
    servers_share,
)
from agenttrain.settings.machine import float32_on_gpu
from agenttrain.settings.run_config import RunConfig
from agenttrain.types import ConfigError
from agenttrain.utils.host_memory import host_memory

SLOW_S = 3.0
"""Seconds after which a plan says that it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `agenttrain plan` beside the overrides.

    Without `--devices` on a machine with 8 GPUs, `devices` is None and `machine_gpus` and
    `machine.devices` are 8. With `--gpu-memory-gb 80` too the plan is for another machine:
    `machine_gpus` is None, and `machine.devices` still 8.
    """

    machine: PlannedHardware
    """GPU and host memory of the planned machine. Its `devices` is the number of processes that is
    assumed if nothing else gives one."""
    devices: int | None
    """`--devices`, which must agree with the settings; None: not given."""
    machine_gpus: int | None
    """GPUs of the planned machine, from `--devices` or from this machine. None: not known, so that
    the plan does not take trainer and server for sharing the only one."""
    prompt_tokens: int
    """Tokens that each prompt is assumed to have."""
    json: Path | None
    """Value of `--json`."""
    speeds: Speeds
    """Tokens per second of a server and of a trainer, where they are given."""


def plan_options(args: argparse.Namespace) -> PlanOptions:
    """Return the options for the verb's arguments and this machine; raises ConfigError."""
    if args.cpu and args.gpu_memory_gb is not None:
        raise ConfigError(
            "--gpu-memory-gb: has no effect with --cpu; give --host-memory-gb, or leave it out for "
            "this machine's"
        )
    gpu_bytes = []  # memory of each of this machine's GPUs
    if not args.cpu:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpu_bytes = [int(torch.cuda.get_device_properties(i).total_memory) for i in range(count)]
    gpu_memory = None if args.gpu_memory_gb is None else int(args.gpu_memory_gb * GIB)
    host = None if args.host_memory_gb is None else int(args.host_memory_gb * GIB)
    # With --gpu-memory-gb the run is for another machine: nothing of this one is its own.
    plans_this_machine = bool(gpu_bytes) and gpu_memory is None
    devices = args.devices or len(gpu_bytes) or 1
    if args.cpu:
        machine = PlannedHardware(devices=devices, memory=host or host_memory(), kind="cpu")
    else:
        if plans_this_machine:
            gpu_memory = min(gpu_bytes)
            host = host_memory() if host is None else host
        # None: a memory that is not known.
        machine = PlannedHardware(devices=devices, memory=gpu_memory, host=host)
    machine_gpus = args.devices
    if machine_gpus is None and plans_this_machine:
        machine_gpus = len(gpu_bytes)
    return PlanOptions(
        machine=machine,
        devices=args.devices,
        machine_gpus=machine_gpus,
        prompt_tokens=args.prompt_tokens,
        json=args.json,
        speeds=Speeds(server=args.server_tokens_per_s, trainer=args.trainer_tokens_per_s),
    )


@contextmanager
def announced_if_slow(path: str, after_s: float = SLOW_S) -> Iterator[None]:
    """Print on stderr that the plan is still at work, if the block takes longer than `after_s`.

    Two layers of each kind are traced, which takes seconds for recurrent ones.
    """
    text = f"plan: tracing the layers of {path}"
    timer = threading.Timer(after_s, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def show(config: RunConfig, options: PlanOptions) -> int:
    """Print the plan. Return exit code 1 if the run does not fit. Raises ConfigError."""
    machine = _planned_machine(config, options)
    planner = Planner(config, machine, options.prompt_tokens)
    memory = planner.estimate()
    fleet = plan_servers(config, planner.sizes(config.model), memory, options.speeds)
    if fleet is None and options.speeds.server is not None:
        remedy = "leave it out"
        if not machine.shared:  # then the run has no servers
            remedy = f"set {names_with(fleet=True)}, or {remedy}"
        raise ConfigError(
            f"--server-tokens-per-s: has no effect without servers on GPUs of their own; {remedy}"
        )
    # GPUs of parts that are neither trainer nor policy server, such as a judge's servers.
    other_parts = plan_other_gpus(config, planner, memory)
    remedies = planner.remedies() if memory.excess else []
    fits: bool | None = True
    if (
        memory.excess
        or any(part.fits is False for part in other_parts)
        or (fleet is not None and fleet.chosen.fits is False)
    ):
        fits = False
    elif machine.memory is None:
        fits = None  # the GPUs' memory is not known
    write_report(_record(memory, fleet, other_parts, fits, remedies), options.json)
    if options.json != STDOUT:  # there the JSON takes the place of the text
        print("\n".join(_lines(config, planner, memory, remedies)))
        if fleet is not None:
            print("\n".join(servers.lines(fleet, options.speeds)))
        for line in other_gpus.lines(other_parts):
            print(line)
    return 1 if fits is False else 0


def _planned_machine(config: RunConfig, options: PlanOptions) -> PlannedHardware:
    """Return the planned machine with the trainer's GPUs as its `devices`.

    With `--devices 8` and two servers of one GPU these are 6. Raises ConfigError if that number
    contradicts the settings of `distributed`.
    """
    distributed, machine = config.distributed, options.machine
    on_gpu = machine.kind != "cpu"
    # GPUs of --devices that servers and other parts leave to the trainer; None: not given.
    trainer_gpus = trainers_of(config, options.devices, on_gpu=on_gpu)
    is_single = distributed.name is DistributedName.single
    if is_single and trainer_gpus is not None and trainer_gpus > 1:
        raise ConfigError(
            f"--devices {trainer_gpus}: distributed=single is one process; add distributed=ddp or "
            "distributed=fsdp2"
        )
    processes = distributed.processes
    if trainer_gpus is not None and processes is not None:
        process_count = processes * distributed.nodes
        if process_count != trainer_gpus:
            raise ConfigError(
                f"--devices {trainer_gpus}: distributed.processes={processes} and "
                f"distributed.nodes={distributed.nodes} are {process_count} of them; leave one out"
            )
    # The trainer, and a server or the rollout process's copy of the policy, have only one GPU.
    shared = on_gpu and sampler_shares_gpu(config, options.machine_gpus)
    return replace(machine, devices=trainer_gpus or machine.devices, shared=shared)


def _record(
    memory: MemoryEstimate,
    fleet: FleetPlan | None,
    other_parts: Sequence[OtherGpus],
    fits: bool | None,
    remedies: Sequence[Remedy],
) -> dict[str, Any]:
    """Return the plan as --json prints it."""
    load, room = memory.load, memory.engine.room
    return {
        "devices": load.devices,
        "gpu_bytes": memory.machine.memory,
        "host_bytes": memory.machine.host,
        "parts": [asdict(part) for part in memory.parts],
        "rollouts_bytes": memory.at(When.rollouts),
        "update_bytes": memory.at(When.update),
        "activation_checkpointing": str(memory.level),
        "peak_bytes": memory.peak,
        "moments": {
            when: {"gpu": memory.at(when), "host_node": memory.host(when)} for when in When
        },
        "engine": None if room is None else {**asdict(room), "missing": room.missing},
        "servers": servers.record(fleet),
        "beside": other_gpus.record(other_parts),
        "fits": fits,
        "remedies": [
            {"overrides": r.overrides, "peak_bytes": r.peak, "fits": r.fits} for r in remedies
        ],
        "tokens": {
            "prompt": load.prompt,
            "rollout": load.context,
            "microbatch": load.packed,
            "rollouts_in_flight": load.rows,
        },
        "arithmetic": asdict(load.arithmetic),
    }


def _lines(
    config: RunConfig, planner: Planner, memory: MemoryEstimate, remedies: Sequence[Remedy]
) -> Iterator[str]:
    """Yield the plan as text: the run in a few lines, its parts, and the memory at each moment.

    Example, shortened (on a CPU there is a process in place of a GPU, and no part is apart in host
    memory)::

        machine     2 x GPU, 80.0 GiB each, 512 GiB of memory beside, distributed=fsdp2
        per GPU                GiB
        weights               7.10  bfloat16
        in host memory         GiB  of a process
        optimizer            28.40  float32 (update only)
        moment                 GPU  host of a node
        while sampling       41.20            9.10
        while updating       63.80           65.90
    """
    machine, load = memory.machine, memory.load
    sizes = planner.sizes(config.model)
    kind = type(sizes.model).__name__
    on_cpu, host = machine.kind == "cpu", machine.host
    device = "process on a CPU" if on_cpu else "GPU"
    size = ""
    if machine.memory is not None:
        gib = f"{machine.memory / GIB:.1f} GiB"
        size = f", the machine has {gib}" if on_cpu else f", {gib} each"
    host_memory = f", {host / GIB:.0f} GiB of memory beside" if host is not None else ""
    yield f"model       {config.model.path}: {kind}, {sizes.parameters:,} weights"
    yield (
        f"machine     {load.devices} x {device}{size}{host_memory}, "
        f"distributed={config.distributed.name}"
    )
    if machine.shared and spec_of(config.engine).fleet:
        share = servers_share(config)
        size = "" if machine.memory is None else f", {machine.memory * share / GIB:.1f} GiB"
        yield (
            f"server      has engine.memory_share={share:g} of the trainer's GPU{size} (computed, "
            "never run on a GPU)"
        )
    yield (
        f"a rollout   {load.prompt:,} tokens of prompt (--prompt-tokens), at most {load.context:,} "
        "in all"
    )
    yield from load.arithmetic.lines()
    yield f"recomputed  training.activation_checkpointing={_level(config, memory)}"
    yield ""
    yield f"{'per process' if on_cpu else 'per GPU':<18}{'GiB':>8}"
    for part in memory.parts:
        if not part.on_host:
            yield _row(part)
    if not on_cpu:
        yield f"{'in host memory':<18}{'GiB':>8}  of a process"
        for part in memory.parts:
            if part.on_host:
                yield _row(part)
    device_head, host_head = "GPU", "host of a node"
    if on_cpu:  # all processes of the node are in its memory
        device_head, host_head = "process", f"{load.local} of them"
    yield f"{'moment':<18}{device_head:>8}  {host_head:>14}"
    for when, name in MOMENTS.items():
        yield f"{name:<18}{memory.at(when) / GIB:8.2f}  {memory.host(when) / GIB:14.2f}"
    yield from _verdict(memory, remedies)
    if not on_cpu and (note := float32_on_gpu(config)):
        yield note


def _level(config: RunConfig, memory: MemoryEstimate) -> str:
    """Return the level of activation checkpointing, and with `auto` the one that is chosen."""
    setting = config.training.activation_checkpointing
    return str(setting) if setting is memory.level else f"{setting}: {memory.level}"


MOMENTS = {
    When.start: "at the start",
    When.rollouts: "while sampling",
    When.update: "while updating",
    When.sync: "while syncing",
    When.checkpoint: "at a checkpoint",
}


def _row(part: MemoryItem) -> str:
    """Return the table's line for a part, with its moments unless it is held all the time.

    `part.when` has the moments of a step (`When`) at which the part is in memory.
    """
    absent, notes = [when for when in When if when not in part.when], []
    if len(part.when) <= len(absent):  # name the moments of whichever list is shorter
        notes = [f"{', '.join(part.when)} only"]
    elif absent:
        notes = [f"not: {', '.join(absent)}"]
    if part.once:
        notes.append("one process of a node")
    note = f" ({'; '.join(notes)})" if notes else ""
    return f"{part.name:<18}{part.bytes / GIB:8.2f}  {part.why}{note}"


def _verdict(memory: MemoryEstimate, remedies: Sequence[Remedy]) -> Iterator[str]:
    """Yield the lines that say whether the run fits, and the settings that make it fit."""
    yield ""
    # `room` is the engine's memory for keys and values.
    machine, room = memory.machine, memory.engine.room
    on_cpu, limit = machine.kind == "cpu", machine.memory
    if memory.excess:
        if room is not None and room.missing:
            yield (
                f"DOES NOT START: the engine needs room for one sequence of {room.tokens:,} tokens "
                f"(engine.max_context), {room.needs / GIB:.2f} GiB of keys and values, and has "
                f"{room.has / GIB:.2f} GiB"
            )
        if memory.over:
            assert limit is not None  # `over` is 0 without one
            moment = memory.largest_on_host if on_cpu else memory.largest
            peak = memory.host(moment) if on_cpu else memory.peak
            yield (
                f"DOES NOT FIT: {peak / GIB:.2f} GiB of {limit / GIB:.2f}, the most "
                f"{MOMENTS[moment]}"
            )
        if memory.over_on_host:
            assert machine.host is not None  # `over_on_host` is 0 without it
            moment = memory.largest_on_host
            yield (
                f"DOES NOT FIT: {memory.host(moment) / GIB:.2f} GiB of a node's own "
                f"{machine.host / GIB:.2f}, the most {MOMENTS[moment]}"
            )
        if not remedies[0].fits:
            yield "no known setting makes it fit; the smallest plan is"
        elif len(remedies) > 1:
            yield "each of these makes it fit:"
        else:
            yield "this makes it fit:"
        width = max(len(remedy.overrides) for remedy in remedies)
        for remedy in remedies:
            yield f"  {remedy.overrides:<{width}}  {remedy.peak / GIB:.2f} GiB"
    elif limit is None:
        yield "whether it fits depends on the GPUs; give their size: --gpu-memory-gb 80"
    else:
        spare = limit - (memory.host(memory.largest_on_host) if on_cpu else memory.peak)
        yield f"fits: {spare / GIB:.2f} GiB to spare"
        if not on_cpu and machine.host is None:
            yield "the host's memory is not known; give its size: --host-memory-gb 512"
