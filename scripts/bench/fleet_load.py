"""Figures of scripts/bench/fleet.py: beside a raw loop, with long prompts, minutes of full load."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch
from fleet_parts import CONTEXT, EQUAL, LONG, Fleet, Turn, long_model, rollout, step

from agenttrain.engines.config import Sampling, ServersConfig
from agenttrain.engines.vllm_server.health import MemberState
from agenttrain.engines.vllm_server.routing import choose

AT_ONCE = 64
"""Rollouts, or requests, at a time."""
TAIL = 60
"""Last ids of a prompt, which no other request has; those before are in the prefix cache."""
SYNC_S = 15.0
"""Seconds between two syncs under full load."""
LOOK_S = 0.02
"""Seconds between two looks at the servers' states: a suspect stays one for servers.health_s."""
BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


def round_prompts(length: int) -> list[list[int]]:
    """Return the prompts of a round."""
    shared = [7 + n % 90 for n in range(length - TAIL)]
    return [[*shared, *(7 + (number + n) % 90 for n in range(TAIL))] for number in range(AT_ONCE)]


async def raw_round(fleet: Fleet, prompts: Sequence[list[int]], tokens: int) -> float:
    """Return tokens/s of a loop that posts the requests of `fleet_round` and reads only ids."""
    members = fleet.engine.fleet.members
    loads = dict.fromkeys(range(len(members)), 0)
    places = []  # those that the fleet chooses
    for number in range(len(prompts)):
        places.append(choose(f"round-{number}", loads))
        loads[places[-1]] += 1
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def one(number: int) -> int:
            client = members[places[number]].client
            assert client is not None
            body = {
                "request_id": f"raw-{time.monotonic()}-{number}",
                "token_ids": prompts[number],
                "sampling_params": {
                    **{"max_tokens": tokens, "temperature": 1.0, "seed": number, "logprobs": 0},
                    **{"ignore_eos": True, "detokenize": False},
                },
            }
            url = f"{client.url}/inference/v1/generate"
            async with http.post(url, json=body, headers=client.headers) as answer:
                return len((await answer.json())["choices"][0]["token_ids"])

        begun = time.monotonic()
        sampled = sum(await asyncio.gather(*map(one, range(len(prompts)))))
        return sampled / (time.monotonic() - begun)


async def fleet_round(fleet: Fleet, prompts: Sequence[list[int]], tokens: int) -> float:
    """Return tokens/s through the fleet."""

    async def one(number: int) -> int:
        sampling = Sampling(max_tokens=tokens, seed=number)
        session = f"round-{number}"
        completion = await fleet.engine.generate(prompts[number], sampling, session=session)
        return len(completion.token_ids)

    begun = time.monotonic()
    sampled = sum(await asyncio.gather(*map(one, range(len(prompts)))))
    return sampled / (time.monotonic() - begun)


async def rounds_beside(
    fleet: Fleet, rounds: int, *, length: int = TAIL, tokens: int = 64
) -> tuple[float, float, float, float]:
    """Return the share of a raw loop's speed, CPU seconds of a round of the fleet and of the loop,
    and cores of this process in a round of the fleet."""
    prompts = round_prompts(length)
    ratios: list[float] = []
    cores: list[float] = []
    seconds: dict[Any, list[float]] = {raw_round: [], fleet_round: []}
    for _ in range(rounds):
        speeds: dict[Any, float] = dict.fromkeys(seconds, 0.0)
        for loop in (raw_round, fleet_round, fleet_round, raw_round):
            wall, used = time.monotonic(), time.process_time()
            speeds[loop] += await loop(fleet, prompts, tokens)
            used = time.process_time() - used
            seconds[loop].append(used)
            if loop is fleet_round:
                cores.append(used / (time.monotonic() - wall))
        ratios.append(speeds[fleet_round] / speeds[raw_round])
    fleet_s, raw_s = (statistics.median(seconds[loop]) for loop in (fleet_round, raw_round))
    return statistics.median(ratios), fleet_s, raw_s, statistics.median(cores)


async def overhead(fleet: Fleet, rounds: int) -> dict[str, float]:
    """Return the figures of short prompts."""
    ratio, fleet_s, raw_s, cores = await rounds_beside(fleet, rounds)
    return {
        "overhead_vs_raw": ratio,
        "client_us_per_token": 1e6 * fleet_s / AT_ONCE**2,
        "raw_us_per_token": 1e6 * raw_s / AT_ONCE**2,
        "rollout_process_cores_64": cores,
    }


def long_exactness(model: Any, done: Sequence[list[Turn]]) -> dict[str, float]:
    """Compare greedy turns with full forward passes, up to the first token that rounding may
    decide."""
    equal, count, gap = 0, 0, 0.0
    for ids, completion in (turn for turns in done for turn in turns):
        sampled = list(completion.token_ids)
        with torch.no_grad():
            hidden = model.model(torch.tensor([[*ids, *sampled]])).last_hidden_state[0]
            logits = model.lm_head(hidden[len(ids) - 1 : -1])
        best = logits.topk(2)
        wrong = (best.indices[:, 0] != torch.tensor(sampled)).nonzero().flatten().tolist()
        same = wrong[0] if wrong else len(sampled)
        gaps = logits.log_softmax(-1)[range(len(sampled)), sampled]
        gaps = (gaps - torch.tensor(completion.logprobs)).abs()[:same]
        gap = max([gap, *gaps.tolist()])
        equal += not wrong or (best.values[same, 0] - best.values[same, 1]).item() < EQUAL
        count += 1
    return {"long_ids_equal": equal / count, "long_max_dlogp": gap}


async def long_prompts(folder: Path, rounds: int, count: int) -> dict[str, float]:
    """Return the figures of prompts of LONG tokens."""
    model = long_model(folder / "long")
    room = LONG + CONTEXT
    fleet = Fleet(folder / "long-run", model, folder / "long", 2, context=room)
    try:
        await fleet.sync()
        shape = {"turns": 2, "tokens": 16, "temperature": 0.0, "length": LONG}
        equal = long_exactness(model, await step(fleet.engine, count, **shape))
        for loop in (raw_round, fleet_round):  # into the prefix caches of both
            for _ in range(2):
                await loop(fleet, round_prompts(LONG), 1)
        ratio, fleet_s, raw_s, cores = await rounds_beside(fleet, rounds, length=LONG, tokens=16)
    finally:
        await fleet.engine.aclose()
    return {
        **equal,
        "long_overhead_vs_raw": ratio,
        "long_client_us_per_token": 1e6 * fleet_s / (AT_ONCE * LONG),
        "long_raw_us_per_token": 1e6 * raw_s / (AT_ONCE * LONG),
        "long_process_cores_64": cores,
    }


@contextmanager
def busy_machine() -> Iterator[None]:
    """Have as many other processes as there are cores, which compute without end."""
    command = [sys.executable, "-c", BURN]
    others = [subprocess.Popen(command) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for one in others:
            one.kill()
            one.wait()


async def full_load(folder: Path, model: Any, source: Path, seconds: float) -> dict[str, float]:
    """Count what a fleet of healthy servers takes for a failure, with the default deadlines."""
    fleet = Fleet(folder / "load-run", model, source, 2, dead_s=ServersConfig().dead_s)
    members = fleet.engine.fleet.members
    end, rollouts, suspects = 0.0, 0, 0

    async def sample(slot: int) -> None:
        nonlocal rollouts
        number = slot
        while time.monotonic() < end:
            await rollout(fleet.engine, number, turns=2, tokens=100, temperature=1.0)
            rollouts, number = rollouts + 1, number + AT_ONCE

    async def sync() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(min(SYNC_S, seconds / 4))
            await fleet.sync()

    async def look() -> None:
        nonlocal suspects
        before = [one.state for one in members]
        while True:
            await asyncio.sleep(LOOK_S)
            states = [one.state for one in members]
            pairs = zip(before, states, strict=True)
            suspects += sum(new is MemberState.suspect and new is not old for old, new in pairs)
            before = states

    try:
        await fleet.sync()
        fleet.engine.metrics()
        end = time.monotonic() + seconds
        looking = asyncio.create_task(look())
        with busy_machine():
            await asyncio.gather(sync(), *map(sample, range(AT_ONCE)))
        looking.cancel()
        metrics = fleet.engine.metrics()
    finally:
        await fleet.engine.aclose()
    return {
        "full_load_s": seconds,
        "full_load_rollouts": float(rollouts),
        "full_load_syncs": float(fleet.version),
        "false_failovers": metrics["fleet/deaths"],
        "false_suspects": suspects + metrics["fleet/resent"],
    }
