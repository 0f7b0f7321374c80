#!/usr/bin/env python
"""Measure containers: how fast they start, what a command costs, how many run side by side.

    scripts/bench/containers.py [--quick] [--json FILE] [--image NAME]

Figures of the JSON, one flat object:

exec_ms             median wall milliseconds of `true` in a running container, by the channel
podman_exec_ms      the same by `podman exec`, interleaved
exec_ratio          podman_exec_ms / exec_ms
start_s             median wall seconds of one start, 8 at a time
stop_s              median wall seconds of one end
memory_mb           resident memory of the processes that a container adds on the host
rollouts, commands  containers at once, and commands of 1 s in each
cpu_ms              user and system milliseconds of this process per command, containers warm
wall_ratio          wall of all rollouts side by side / the slowest rollout measured alone
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import time
from pathlib import Path
from statistics import median

import psutil

from agenttrain.runtimes.config import RuntimeConfig
from agenttrain.runtimes.containers import Container
from agenttrain.runtimes.machines import Machines
from agenttrain.types import Task


async def measure(image: str, rollouts: int, commands: int, pairs: int) -> dict[str, float]:
    """Return the figures."""
    settings = RuntimeConfig(name="podman", image=image, memory_mb=64, max_running=rollouts)
    machines, task = Machines(settings), Task(task_id="bench", messages=())
    starts: list[float] = []
    stops: list[float] = []

    async def start(number: int) -> Container:
        begun = time.perf_counter()
        machine = await machines.start(f"bench-{number}", task)
        starts.append(time.perf_counter() - begun)
        assert isinstance(machine, Container)
        return machine

    figures: dict[str, float] = {}
    try:
        started = [await start(0)]
        for begin in range(1, rollouts, 8):
            group = range(begin, min(begin + 8, rollouts))
            started += await asyncio.gather(*map(start, group))
        box = started[0]
        ours, theirs = [], []
        for _ in range(pairs):
            begun = time.perf_counter()
            await box.exec(["true"], timeout_s=30)
            ours.append(1000 * (time.perf_counter() - begun))
            begun = time.perf_counter()
            subprocess.run(["podman", "exec", box.name, "true"], check=True, capture_output=True)
            theirs.append(1000 * (time.perf_counter() - begun))
        figures["exec_ms"], figures["podman_exec_ms"] = median(ours), median(theirs)
        figures["exec_ratio"] = figures["podman_exec_ms"] / figures["exec_ms"]
        figures["memory_mb"] = _memory_mb(box.pid)

        async def rollout(machine: Container) -> float:
            begun = time.perf_counter()
            for _ in range(commands):
                await machine.exec(["sleep", "1"], timeout_s=60)
            return time.perf_counter() - begun

        alone = await rollout(box)
        before, begun = _cpu_s(), time.perf_counter()
        await asyncio.gather(*map(rollout, started))
        wall = time.perf_counter() - begun
        figures["cpu_ms"] = 1000 * (_cpu_s() - before) / (rollouts * commands)
        figures["wall_ratio"] = wall / alone
        for number in range(rollouts):
            begun = time.perf_counter()
            await machines.release(f"bench-{number}")
            stops.append(time.perf_counter() - begun)
    finally:
        await machines.aclose()
    figures["start_s"], figures["stop_s"] = median(starts), median(stops)
    figures["rollouts"], figures["commands"] = rollouts, commands
    return figures


def _cpu_s() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


def _memory_mb(pid: int) -> float:
    """Return the resident memory of a container's first process and of its monitor."""
    process = psutil.Process(pid)
    family = [process, *([process.parent()] if process.parent() else [])]
    return float(sum(member.memory_info().rss for member in family if member)) / (1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 rollouts instead of 64")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--image", default="localhost/agenttrain-test/busybox:1")
    args = parser.parse_args()
    rollouts, commands, pairs = (8, 2, 5) if args.quick else (64, 8, 40)
    figures = asyncio.run(measure(args.image, rollouts, commands, pairs))
    for name, value in figures.items():
        print(f"{name:<16}{value:10.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
