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
start_s                      seconds from the start of two servers to their first token
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import harness
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agenttrain.engines.config import Sampling, ServersConfig
from agenttrain.engines.spec import EngineInputs
from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.engines.vllm.engine import VllmEngine
from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.engine import VllmServerEngine
from agenttrain.engines.vllm_server.health import MemberState
from agenttrain.engines.vllm_server.routing import choose
from agenttrain.engines.vllm_server.spec import build
from agenttrain.training.config import Transport, WeightSyncMode
from agenttrain.training.weight_sync import named_weights, policy_logprobs
from agenttrain.utils.model_path import model_folder

CONTEXT, BLOCK, EQUAL = 1024, 32, 1e-4
TEXT = [7 + n % 90 for n in range(60)]
Turn = tuple[list[int], Any]


class Fleet:
    """Servers of a model, as a run has them."""

    def __init__(self, folder: Path, model: Any, source: Path, count: int, by: int = 1) -> None:
        folder.mkdir()
        inputs = EngineInputs(
            policy=None,
            model=source,
            dtype="float32",
            adapters=None,
            tokenizer=None,
            sync_mode=WeightSyncMode.drain,
            sync_folder=None,
            transport=Transport.auto,
            servers=ServersConfig(count=count, tensor_parallel_size=by, restarts=9, dead_s=120.0),
            seed=0,
            on_gpu=False,
            rank=0,
            run_folder=folder,
        )
        settings = VllmServerSettings(max_context=CONTEXT, kv_cache_mb=256, max_rows=128)
        engine = build(settings, inputs)
        assert isinstance(engine, VllmServerEngine)
        self.engine, self.model, self.version = engine, model, -1

    async def sync(self) -> float:
        """Send the policy's weights to all servers; return the seconds."""
        self.version += 1
        expected = policy_logprobs(self.model, TEXT)

        def problem(scores: Sequence[float]) -> str | None:
            gap = max(abs(a - b) for a, b in zip(scores, expected, strict=True))
            return None if gap <= EQUAL else f"a gap of {gap:.3g}"

        begun = time.monotonic()
        await self.engine.update(named_weights(self.model), self.version)
        await self.engine.verify(TEXT, problem)
        return time.monotonic() - begun

    async def all_live(self) -> None:
        """Wait until every server serves."""
        while any(one.state is not MemberState.live for one in self.engine.fleet.members):
            await asyncio.sleep(0.1)


async def rollout(
    engine: Any, number: int, *, turns: int, tokens: int, temperature: float
) -> list[Turn]:
    """Return prompt and completion of each turn; replies have 20 ids."""
    noise = random.Random(number)
    ids = [100 + number % 400] + [7 + (number // 4 + n) % 90 for n in range(60)]
    done = []
    for turn in range(turns):
        sampling = Sampling(max_tokens=tokens, temperature=temperature, seed=100 * number + turn)
        completion = await engine.generate(ids, sampling, session=f"rollout-{number}")
        done.append((list(ids), completion))
        ids += [*completion.token_ids, *(noise.randrange(7, 300) for _ in range(20))]
    await engine.release(f"rollout-{number}")
    return done


async def step(engine: Any, count: int, first: int = 0, **shape: Any) -> list[list[Turn]]:
    """Return the rollouts of a step, those with the numbers from `first` on."""
    shape = {"turns": 2, "tokens": 100, "temperature": 1.0, **shape}
    numbers = range(first, first + count)
    return await asyncio.gather(*(rollout(engine, number, **shape) for number in numbers))


def exactness(model: Any, one: list[list[Turn]], other: list[list[Turn]]) -> dict[str, float]:
    """Compare rollouts up to the first token that rounding may decide."""
    equal, gap = 0, 0.0
    for mine, theirs in zip(one, other, strict=True):
        good = True
        for (ids, a), (_, b) in zip(mine, theirs, strict=True):
            pairs = list(zip(a.token_ids, b.token_ids, strict=True))
            same = next((n for n, (x, y) in enumerate(pairs) if x != y), len(pairs))
            logprobs = list(zip(a.logprobs, b.logprobs, strict=True))[:same]
            gap = max([gap, *(abs(x - y) for x, y in logprobs)])
            if same < len(pairs):
                with torch.no_grad():
                    seen = torch.tensor([[*ids, *a.token_ids[:same]]])
                    best = model(seen).logits[0, -1].topk(2).values
                good = (best[0] - best[1]).item() < EQUAL
                break  # the next turns have other prompts
        equal += good
    return {"http_vs_inprocess_ids_equal": equal / len(one), "max_dlogp": gap}


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


async def raw_round(fleet: Fleet, count: int, tokens: int) -> float:
    """Return tokens/s of a loop that posts the requests of `fleet_round` and reads only ids."""
    members = fleet.engine.fleet.members
    loads = dict.fromkeys(range(len(members)), 0)
    places = []  # those that the fleet chooses
    for number in range(count):
        places.append(choose(f"round-{number}", loads))
        loads[places[-1]] += 1
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def one(number: int) -> int:
            client = members[places[number]].client
            assert client is not None
            body = {
                "request_id": f"raw-{time.monotonic()}-{number}",
                "token_ids": [7 + (number + n) % 90 for n in range(60)],
                "sampling_params": {
                    **{"max_tokens": tokens, "temperature": 1.0, "seed": number, "logprobs": 0},
                    **{"ignore_eos": True, "detokenize": False},
                },
            }
            url = f"{client.url}/inference/v1/generate"
            async with http.post(url, json=body, headers=client.headers) as answer:
                return len((await answer.json())["choices"][0]["token_ids"])

        begun = time.monotonic()
        sampled = sum(await asyncio.gather(*(one(number) for number in range(count))))
        return sampled / (time.monotonic() - begun)


async def fleet_round(fleet: Fleet, count: int, tokens: int) -> float:
    """Return tokens/s through the fleet."""

    async def one(number: int) -> int:
        ids = [7 + (number + n) % 90 for n in range(60)]
        sampling = Sampling(max_tokens=tokens, seed=number)
        completion = await fleet.engine.generate(ids, sampling, session=f"round-{number}")
        return len(completion.token_ids)

    begun = time.monotonic()
    sampled = sum(await asyncio.gather(*(one(number) for number in range(count))))
    return sampled / (time.monotonic() - begun)


async def overhead(fleet: Fleet, rounds: int) -> dict[str, float]:
    """Return the share of a raw loop's speed, the CPU of both, and the cores at 64 rollouts."""
    ratios: list[float] = []
    cores: list[float] = []
    seconds: dict[Any, list[float]] = {raw_round: [], fleet_round: []}
    for _ in range(rounds):
        speeds: dict[Any, float] = dict.fromkeys(seconds, 0.0)
        for loop in (raw_round, fleet_round, fleet_round, raw_round):
            wall, used = time.monotonic(), time.process_time()
            speeds[loop] += await loop(fleet, 64, 64)
            used = time.process_time() - used
            seconds[loop].append(used)
            if loop is fleet_round:
                cores.append(used / (time.monotonic() - wall))
        ratios.append(speeds[fleet_round] / speeds[raw_round])
    by_token = {loop: 1e6 * statistics.median(used) / 64**2 for loop, used in seconds.items()}
    return {
        "overhead_vs_raw": statistics.median(ratios),
        "client_us_per_token": by_token[fleet_round],
        "raw_us_per_token": by_token[raw_round],
        "rollout_process_cores_64": statistics.median(cores),
    }


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


def big_model(folder: Path) -> Any:
    """Save and return a random model of 0.5 GB in float32."""
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=14,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


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


async def figures(quick: bool, folder: Path) -> dict[str, float]:
    """Return all figures."""
    source = model_folder("bundled:shop")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    found: dict[str, float] = {}
    begun = time.monotonic()
    fleet = Fleet(folder / "run", model, source, 2)
    try:
        await fleet.sync()
        await fleet_round(fleet, 1, 1)
        found["start_s"] = time.monotonic() - begun
        count = 20 if quick else 200
        served = await step(fleet.engine, count, turns=3, tokens=32, temperature=0.0)
        found |= exactness(model, served, await in_process(source, count))
        found["prefix_hit_share"] = await prefix_hits(fleet)
        found |= await overhead(fleet, 3 if quick else 9)
        found |= await failover(fleet, 24 if quick else 64)
        await fleet.all_live()
        shares = await weights(fleet, 3 if quick else 20)
        found["weights_checksums_equal"], found["restarted_checksums_equal"] = shares
        if quick:
            found |= await pauses(fleet, 3)
    finally:
        await fleet.engine.aclose()
    if not quick:
        fleet = Fleet(folder / "tp2-run", model, source, 2, by=2)
        try:
            found["tp2_checksums_equal"], found["tp2_restarted_equal"] = await weights(fleet, 20)
        finally:
            await fleet.engine.aclose()
        big = big_model(folder / "big")
        fleet = Fleet(folder / "big-run", big, folder / "big", 1)
        try:
            found |= await pauses(fleet, 5)
        finally:
            await fleet.engine.aclose()
    return found


def measure(quick: bool) -> dict[str, float]:
    """Return all figures, from files in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(figures(quick, Path(folder)))


if __name__ == "__main__":
    harness.run(__doc__ or "", measure)
