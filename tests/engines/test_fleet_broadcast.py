"""Weights by a broadcast: servers and the group are doubles, which hang as NCCL would."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_kit import (
    PATIENCE_S,
    STUB,
    TEXT,
    TOKEN_OF_OTHERS,
    OutsideStub,
    call,
    fault,
    inputs,
    record,
    sample,
    until,
)
from stub_transfer import StubTransfer
from torch import Tensor
from transformers import Qwen3Config

from agenttrain.engines.broadcast import BroadcastResult, Receipt, Regathered, WeightForm
from agenttrain.engines.vllm_server import nccl_transport
from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.fleet import FleetLost
from agenttrain.engines.vllm_server.guard import TOKEN
from agenttrain.engines.vllm_server.health import MemberState
from agenttrain.engines.vllm_server.nccl_transport import NcclSender, address_towards
from agenttrain.engines.vllm_server.server_engine import BroadcastEngine
from agenttrain.engines.vllm_server.starting import build
from agenttrain.training.config import Transport

LIVE, WAITS, AWAY = MemberState.live, MemberState.syncing, MemberState.restarting


class Weights:
    """The stub's weight between two others, and how often all of them were gathered."""

    def __init__(self, w: float, broken: bool = False) -> None:
        self.w, self.broken = w, broken
        self.passes = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield "embed", torch.zeros(3, 2, dtype=torch.bfloat16)
        yield "w", torch.tensor([self.w])
        if self.broken:
            raise ValueError("a weight that cannot be gathered")
        yield "head", torch.zeros(3, 2)
        self.passes += 1

    def forms(self) -> list[WeightForm]:
        return [
            WeightForm("embed", torch.bfloat16, (3, 2)),
            WeightForm("w", torch.float32, (1,)),
            WeightForm("head", torch.float32, (3, 2)),
        ]


async def send(engine: BroadcastEngine, w: float, version: int) -> Weights:
    """Update the servers, and let those serve that have the weight."""
    weights = Weights(w)
    await engine.update(weights, version)
    scores = await engine.verify(TEXT, lambda scores: None if scores == [-w] * 3 else f"not {w}")
    assert scores == [-w] * 3
    return weights


@asynccontextmanager
async def fleet(folder: Path, **servers: Any) -> AsyncIterator[BroadcastEngine]:
    """Stub servers whose weights come by a broadcast."""
    model, run = folder / "model", folder / "run"
    Qwen3Config(max_position_embeddings=256).save_pretrained(model)
    run.mkdir()
    parts = inputs(run, model, Transport.nccl, **servers)
    engine = build(VllmServerSettings(), parts, module=STUB)
    assert isinstance(engine, BroadcastEngine)
    engine._sender = NcclSender(StubTransfer)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield engine
    finally:
        await engine.aclose()


def states(engine: BroadcastEngine) -> list[MemberState]:
    return [member.state for member in engine.fleet.members]


def boots(folder: Path, count: int) -> list[int]:
    return [record(folder, number).boot for number in range(count)]


async def versions(folder: Path, number: int) -> set[str]:
    """The versions that a server has sampled with."""
    return {one["version"] for one in await call(folder, number, "GET", "/stub/log")}


@pytest.mark.slow
def test_servers_of_two_one_and_four_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their ranks are 1 and 2, 3, and 4 to 7; the group lasts while the servers are the same."""
    monkeypatch.setenv(TOKEN, TOKEN_OF_OTHERS)

    async def main() -> None:
        servers = [OutsideStub(None, backend="nccl", workers=count) for count in (2, 1, 4)]
        urls = [server.url for server in servers]
        try:
            for server in servers:
                await server.ready()
            async with fleet(tmp_path, admin_urls=urls, count=3) as engine:
                assert (await send(engine, 1.0, 0)).passes == 1
                transfer: Any = engine._sender._transfer
                assert sorted(transfer._group._workers) == [1, 2, 3, 4, 5, 6, 7]
                assert states(engine) == [LIVE] * 3
                assert (await send(engine, 0.5, 1)).passes == 1
                assert engine._sender._transfer is transfer
                await asyncio.gather(*(sample(engine, number) for number in range(12)))
                for server in servers:
                    log = await server.call("GET", "/stub/log")
                    assert log and {one["version"] for one in log} == {"1"}
                assert engine.metrics()["fleet/pause_s"] > 0
            assert not list((tmp_path / "run").rglob("*.safetensors"))
        finally:
            for server in servers:
                server.end()

    asyncio.run(main())


@pytest.mark.slow
def test_a_dead_server_is_left_out_and_is_in_the_next_group(tmp_path: Path) -> None:
    """It serves nothing before; the weights are gathered once."""

    async def main() -> None:
        async with fleet(tmp_path, health_s=0.1) as engine:
            await send(engine, 1.0, 0)
            os.kill(record(tmp_path, 0).pid, signal.SIGKILL)
            assert (await send(engine, 2.0, 1)).passes == 1
            assert states(engine)[1] is LIVE
            await until(lambda: states(engine) == [WAITS, LIVE])
            await asyncio.gather(*(sample(engine, number) for number in range(12)))
            assert await versions(tmp_path, 0) == set()
            await send(engine, 3.0, 2)
            assert states(engine) == [LIVE] * 2 and boots(tmp_path, 2) == [2, 1]
            await asyncio.gather(*(sample(engine, number) for number in range(12)))
            assert await versions(tmp_path, 0) == {"2"}

    asyncio.run(main())


@pytest.mark.slow
def test_a_server_dies_in_the_broadcast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is given up; the others answer, and get all weights again in a new one."""

    async def main() -> None:
        async with fleet(tmp_path, count=3) as engine:
            await send(engine, 1.0, 0)
            await fault(tmp_path, 1, "crash")
            assert (await send(engine, 2.0, 1)).passes == 2
            assert [states(engine)[number] for number in (0, 2)] == [LIVE] * 2
            assert (record(tmp_path, 0).boot, record(tmp_path, 2).boot) == (1, 1)
            await until(lambda: states(engine) == [LIVE, WAITS, LIVE])
            assert (await send(engine, 3.0, 2)).passes == 1
            assert states(engine) == [LIVE] * 3 and boots(tmp_path, 3) == [1, 2, 1]

    asyncio.run(main())


@pytest.mark.slow
def test_a_server_hangs_in_the_broadcast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_transport, "BROADCAST_S", 1.0)
    monkeypatch.setattr(nccl_transport, "GRACE_S", 0.5)

    async def main() -> None:
        async with fleet(tmp_path) as engine:
            await send(engine, 1.0, 0)
            await fault(tmp_path, 0, "stuck")
            assert (await send(engine, 2.0, 1)).passes == 2
            assert states(engine)[1] is LIVE and boots(tmp_path, 2)[1] == 1
            assert "weight update 1: it did not leave a broadcast" in engine.fleet.members[0].reason
            # All of them: nobody is left to send to before they have started again.
            for number in (0, 1):
                await until(lambda: states(engine)[0] is WAITS)
                await fault(tmp_path, number, "stuck")
            await send(engine, 3.0, 2)
            assert LIVE in states(engine) and boots(tmp_path, 2) == [3, 2]

    asyncio.run(main())


@pytest.mark.slow
def test_servers_that_answer_and_have_not_loaded(tmp_path: Path) -> None:
    """One such answer is forgiven, as others break a broadcast too; two are not."""

    async def main() -> None:
        async with fleet(tmp_path) as engine:
            await send(engine, 1.0, 0)
            # The other one has everything, so this one waits for the next update.
            await fault(tmp_path, 0, "refuse")
            assert (await send(engine, 2.0, 1)).passes == 1
            assert states(engine) == [WAITS, LIVE]
            await send(engine, 3.0, 2)
            assert states(engine) == [LIVE] * 2 and boots(tmp_path, 2) == [1, 1]
            # No group comes about.
            await fault(tmp_path, 0, "absent")
            os.kill(record(tmp_path, 1).pid, signal.SIGKILL)
            await until(lambda: states(engine)[1] is WAITS)
            assert (await send(engine, 4.0, 3)).passes == 2
            assert states(engine) == [LIVE] * 2 and boots(tmp_path, 2) == [1, 2]
            # Whoever says 200 and has loaded nothing is found by the comparison.
            await fault(tmp_path, 0, "deaf")
            await send(engine, 5.0, 4)
            assert engine.fleet.members[0].reason == "was killed: not 5.0"
            await until(lambda: states(engine)[0] is WAITS)
            for number in (0, 1):
                await fault(tmp_path, number, "refuse", times=2)
            assert (await send(engine, 6.0, 5)).passes == 3
            assert LIVE in states(engine) and boots(tmp_path, 2) == [3, 3]

    asyncio.run(main())


def test_no_server_has_the_weights(tmp_path: Path) -> None:
    """In a step no weight sync comes that would help."""

    async def main() -> None:
        async with fleet(tmp_path) as engine:
            await send(engine, 1.0, 0)
            for number in (0, 1):
                os.kill(record(tmp_path, number).pid, signal.SIGKILL)
            with pytest.raises(FleetLost) as caught:
                await sample(engine, 1)
            text = str(caught.value)
            assert text.startswith("weight_sync.transport=nccl: no server has the policy's weights")
            assert "weight_sync.transport=files" in text and "server 1: " in text
            # The next sync would have found them.
            await send(engine, 2.0, 1)
            await sample(engine, 1)

    asyncio.run(main())


@pytest.mark.slow
def test_a_group_that_never_comes_about(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, count=1, restarts=9) as engine:
            with pytest.raises(FleetLost) as caught:
                for _ in range(20):
                    (receiver,) = (await engine.assemble(0)).receivers
                    problem = "its workers cannot reach the group"
                    receipt = Receipt(number=0, boot=receiver.boot, problem=problem)
                    assert not await engine.settle(BroadcastResult(version=0, receipts=(receipt,)))
            text = str(caught.value)
            assert "8 broadcasts of weight update 0 have reached no server" in text
            assert "server 0: was killed: weight update 0: its workers cannot reach" in text

    asyncio.run(main())


@pytest.mark.slow
def test_weights_that_cannot_be_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_transport, "GRACE_S", 0.2)

    async def main() -> None:
        async with fleet(tmp_path) as engine:
            with pytest.raises(ValueError, match="a weight that cannot be gathered"):
                await engine.update(Weights(1.0, broken=True), 0)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("urls", "address"),
    [(["http://127.0.0.1:8000"], "127.0.0.1"), (["http://localhost:1", "http://127.0.0.1"], None)],
)
def test_the_address_of_the_group(urls: Sequence[str], address: str | None) -> None:
    assert address_towards(urls) == (address or "127.0.0.1")
    assert isinstance(Weights(1.0), Regathered)
