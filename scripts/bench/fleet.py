"""A fleet of two vLLM servers: exactness, failover, prefix caches, overhead, weight sync.

    .venv-vllm/bin/python scripts/bench/fleet.py [--quick] [--json FILE]

Two servers of vLLM's build for CPUs with the bundled model in float32, driven as a run drives them.
On a machine with few cores they share these with each other and with this process.

http_vs_inprocess_ids_equal  share of greedy rollouts of three turns whose ids are those of vLLM in
                             this process, up to the first token whose two best are within 1e-4
                             (200 of them; --quick: 20)
max_dlogp                    largest difference of their log-probabilities, in nats
weights_checksums_equal      share of syncs after which /weight_checker gives both servers the same
                             checksums and both score a text as the policy does, to 1e-4 (on a CPU
                             the checksums see embeddings and norms only; the scores see all), with
                             requests in flight; 20 syncs (--quick: 3)
restarted_checksums_equal    1 if a server that was killed afterwards, and loaded the last version
                             alone, has the checksums of the other, which loaded all of them
tp2_checksums_equal,         the same of two servers of two workers each (not with --quick)
tp2_restarted_equal
prefix_hit_share             cached tokens of the later turns of rollouts of eight turns, over those
                             in whole blocks of earlier turns, which one server would have
overhead_vs_raw              tokens/s through the fleet over those of a loop that posts the same
                             requests to the same servers by aiohttp, as `vllm bench serve`, and
                             reads nothing but the ids; median of the ratios of rounds side by side
client_us_per_token          CPU of this process for a token of the fleet's rounds
raw_us_per_token             … of the loop's
rollout_process_cores_64     CPU seconds of this process per second, 64 rollouts at once
long_ids_equal               share of greedy turns with prompts of 32,768 tokens, of a small random
                             model, whose ids are those of full forward passes of transformers
long_max_dlogp               … and the largest difference of their log-probabilities, in nats
long_overhead_vs_raw         as overhead_vs_raw, with prompts of 32,768 tokens in the prefix cache
long_client_us_per_token,    CPU of this process for a token of these prompts, of the fleet's rounds
long_raw_us_per_token        and of the loop's
long_process_cores_64        as rollout_process_cores_64, with these prompts
failover_detect_s            seconds from the kill of a server to the first request sent again
failover_step_ratio          time of a step in which a server is killed over an undisturbed one's
failover_expected_ratio      the same by arithmetic: a server of two is lost for the rest of the
                             step, and its unfinished turns are sampled again
tasks_lost, tasks_twice      rollouts of these steps that did not end, or not with the undisturbed
                             step's ids; that ended twice
sync_pause_share             seconds for which a server of a model of 0.5 GB (--quick: the bundled
                             one) is paused, over the seconds of the sync: files, load, comparison
sync_s                       seconds of that sync
memory_peak_share            peak of this process's memory during it, over the model's bytes
false_failovers              servers killed, though none is meant to fail, in ten minutes (--quick:
                             20 s) of 64 rollouts at once and a sync every 15 s, with the default
                             deadlines, while as many other processes as cores compute without end
false_suspects               servers examined after a failed call, and requests sent again, in it
full_load_s, _rollouts,      its seconds, rollouts of two turns and syncs
_syncs
start_s                      seconds from the start of two servers to their first token
run_start_s                  seconds from the command line of a run of two servers, rollout process
                             and two training processes to its first step, after the probe's tokens
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import harness
import torch
from fleet_load import fleet_round, full_load, long_prompts, overhead, round_prompts
from fleet_parts import CONTEXT, Fleet, Turn, big_model, exactness, step
from transformers import AutoModelForCausalLM

from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.engines.vllm.engine import VllmEngine
from agenttrain.engines.vllm_server.health import MemberState
from agenttrain.tracking.timeline_page import LOAD, read_processes
from agenttrain.utils.model_path import model_folder

BLOCK = 32
FULL_LOAD_S = 600.0


async def in_process(source: Path, count: int) -> list[list[Turn]]:
    """Return the same rollouts by vLLM in this process."""
    engine = VllmEngine(source, VllmSettings(max_context=CONTEXT, kv_cache_mb=256, max_rows=128))
    try:
        return await step(engine, count, turns=3, tokens=32, temperature=0.0)
    finally:
        await engine.aclose()


async def checksums(fleet: Fleet) -> list[Any]:
    """Return what /weight_checker says of each server."""
    clients = [member.client for member in fleet.engine.fleet.members]
    question = {"action": "checksum"}
    return [await one._call("POST", "/weight_checker", question) for one in clients if one]


async def weights(fleet: Fleet, count: int) -> tuple[float, float]:
    """Return the share of syncs after which both servers hold the policy's weights, and whether
    one that was started again does."""
    equal = 0
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in fleet.model.parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(noise * 0.02 * weight.std())
        flight = asyncio.create_task(step(fleet.engine, 8, turns=1, tokens=60))
        await asyncio.sleep(0.05)
        await fleet.sync()
        await flight
        one, other = await checksums(fleet)
        live = all(one.state is MemberState.live for one in fleet.engine.fleet.members)
        equal += live and one == other
    member = fleet.engine.fleet.members[0]
    os.kill(member.pid, signal.SIGKILL)
    await member.lost.wait()
    await fleet.all_live()
    one, other = await checksums(fleet)
    return equal / count, float(one == other)


async def prefix_hits(fleet: Fleet) -> float:
    """Return the share of the cacheable tokens of later turns that were cached."""
    fleet.engine.metrics()
    done = await step(fleet.engine, 16, 300, turns=8, tokens=24)  # prompts that nobody had
    prompts = [len(ids) for turns in done for ids, _ in turns]
    share = fleet.engine.metrics()["fleet/cached"]
    earlier = [
        (len(before) + len(completion.token_ids)) // BLOCK * BLOCK
        for turns in done
        for before, completion in turns[:-1]
    ]
    return share * sum(prompts) / sum(earlier)


def engine_core(group: int) -> int:
    """Return the process of a server's group that computes; the server itself if it does."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                inside = os.getpgid(int(entry.name)) == group
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if inside and b"EngineCore" in command:
                return int(entry.name)
    return group


async def failover(fleet: Fleet, count: int) -> dict[str, float]:
    """Kill a server, then the engine's process of another, in the middle of a step each."""
    walls, detected, ratios, arithmetic, lost, twice = [], [], [], [], 0, 0
    expected = await step(fleet.engine, count)
    for _ in range(3):
        begun = time.monotonic()
        await step(fleet.engine, count)
        walls.append(time.monotonic() - begun)
    usual = statistics.median(walls)
    victims: list[tuple[int, Callable[[int], int]]] = [(0, lambda group: group), (1, engine_core)]
    for number, victim in victims:
        await fleet.all_live()
        member = fleet.engine.fleet.members[number]
        begun = time.monotonic()
        work = asyncio.create_task(step(fleet.engine, count))
        await asyncio.sleep(usual / 3)
        before, killed = fleet.engine.fleet.resent, time.monotonic()
        requests = member.requests
        os.kill(victim(member.pid), signal.SIGKILL)
        while fleet.engine.fleet.resent == before:
            await asyncio.sleep(0.005)
        detected.append(time.monotonic() - killed)
        done = await work
        ratios.append((time.monotonic() - begun) / usual)
        arithmetic.append(expected_ratio((killed - begun) / usual, requests / count))
        ids = [[completion.token_ids for _, completion in turns] for turns in done]
        wanted = [[completion.token_ids for _, completion in turns] for turns in expected]
        lost += sum(a != b for a, b in zip(ids, wanted, strict=True))
        twice += len(done) - count
    return {
        "failover_detect_s": max(detected),
        "failover_step_ratio": max(ratios),
        "failover_expected_ratio": max(arithmetic),
        "tasks_lost": float(lost),
        "tasks_twice": float(twice),
    }


def expected_ratio(killed: float, share: float) -> float:
    """Return the time of a step, as a multiple of an undisturbed one's, in which one of two servers
    is killed at `killed`, while it has a `share` of the step's rollouts in flight.

    All of them are in a turn that takes half of the step, and sample it again. Example: killed at
    1/3, with half of the rollouts: 1/3 of the work is lost for half of them, so 2/3 + 1/6 are left
    for a server that needs twice the time: 1/3 + 2 x 5/6 = 2.0.
    """
    return killed + 2 * (1 - killed + share * (killed % 0.5))


async def pauses(fleet: Fleet, rounds: int) -> dict[str, float]:
    """Return the share of a sync for which a server is paused."""
    await fleet.sync()
    size = sum(tensor.nbytes for tensor in fleet.model.parameters())
    shares, seconds, before = [], [], resident()
    peak = before
    for _ in range(rounds):
        watching = asyncio.create_task(highest())
        seconds.append(await fleet.sync())
        watching.cancel()
        peak = max(peak, await watching)
        shares.append(fleet.engine.metrics()["fleet/pause_s"] / seconds[-1])
    return {
        "sync_pause_share": statistics.median(shares),
        "sync_s": statistics.median(seconds),
        "memory_peak_share": (peak - before) / size,
    }


def resident() -> int:
    """Return the bytes of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def highest() -> int:
    """Return the most memory of this process until it is cancelled."""
    peak = resident()
    try:
        while True:
            await asyncio.sleep(0.01)
            peak = max(peak, resident())
    except asyncio.CancelledError:
        return peak


def run_start(folder: Path) -> float:
    """Return the seconds that a run takes to its first step."""
    command = [sys.executable, "-m", "agenttrain.cli", "engine=vllm_server", "servers.count=2"]
    command += ["distributed=ddp", "distributed.processes=2", "debug=tiny", "steps=1"]
    command += ["engine.kv_cache_mb=64", f"engine.max_context={CONTEXT}", "servers.dead_s=120"]
    command += ["eval.questions=0", "tracker=none", f"hydra.run.dir={folder}"]
    begun = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    loading = next(one for one in read_processes(folder)[0].phases if one.name == LOAD)
    return loading.end - begun


async def figures(quick: bool, folder: Path) -> AsyncIterator[dict[str, float]]:
    """Yield all figures as they are measured."""
    source = model_folder("bundled:shop")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    begun = time.monotonic()
    fleet = Fleet(folder / "run", model, source, 2)
    try:
        await fleet.sync()
        await fleet_round(fleet, round_prompts(61)[:1], 1)
        yield {"start_s": time.monotonic() - begun}
        count = 20 if quick else 200
        served = await step(fleet.engine, count, turns=3, tokens=32, temperature=0.0)
        yield exactness(model, served, await in_process(source, count))
        yield {"prefix_hit_share": await prefix_hits(fleet)}
        yield await overhead(fleet, 3 if quick else 9)
        yield await failover(fleet, 24 if quick else 64)
        await fleet.all_live()
        synced, restarted = await weights(fleet, 3 if quick else 20)
        yield {"weights_checksums_equal": synced, "restarted_checksums_equal": restarted}
        if quick:
            yield await pauses(fleet, 3)
    finally:
        await fleet.engine.aclose()
    yield await long_prompts(folder, 2 if quick else 5, 2 if quick else 8)
    yield await full_load(folder, model, source, 20.0 if quick else FULL_LOAD_S)
    if not quick:
        fleet = Fleet(folder / "tp2-run", model, source, 2, by=2)
        try:
            synced, restarted = await weights(fleet, 20)
            yield {"tp2_checksums_equal": synced, "tp2_restarted_equal": restarted}
        finally:
            await fleet.engine.aclose()
        big = big_model(folder / "big")
        fleet = Fleet(folder / "big-run", big, folder / "big", 1)
        try:
            yield await pauses(fleet, 5)
        finally:
            await fleet.engine.aclose()
    yield {"run_start_s": run_start(folder / "whole-run")}


def measure(quick: bool) -> dict[str, float]:
    """Return all figures, from files in a temporary folder; print them as they come."""
    results: dict[str, float] = {}

    async def collect(folder: Path) -> None:
        async for new in figures(quick, folder):
            results.update(new)
            print(json.dumps(new), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(collect(Path(folder)))
    return results


if __name__ == "__main__":
    harness.run(__doc__ or "", measure)
