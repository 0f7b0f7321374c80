"""Servers that are stopped or asked to end in the middle of requests, or are slow to answer."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from fleet_kit import fault, gone, record, running, sample, until
from server_stub import TOKEN_S

from agenttrain.engines.vllm_server.health import MemberState


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "end"),
    [
        # Meanwhile it takes no connections: it ends by itself, or is killed at the third refusal.
        (signal.SIGTERM, "server 0 "),
        pytest.param(
            *(signal.SIGSTOP, "its engine did not answer for servers.dead_s=2 s"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["term", "stop"],
)
def test_a_server_that_is_sent_a_signal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    end: str,
) -> None:
    monkeypatch.setenv(TOKEN_S, "0.01")

    async def main() -> None:
        async with running(tmp_path, dead_s=2.0) as engine:
            work = [asyncio.create_task(sample(engine, n, 60)) for n in range(12)]
            member = engine.fleet.members[0]
            await until(lambda: member.requests > 1)
            pid = record(tmp_path, 0).pid
            os.kill(pid, number)
            await asyncio.gather(*work)
            await until(lambda: member.boot == 2 and member.state is MemberState.live)
            assert await asyncio.to_thread(gone, [pid])
            await asyncio.gather(*(sample(engine, n) for n in range(12)))

    asyncio.run(main())
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("server 0 ")]
    assert end in line and line.endswith("it is started again")


@pytest.mark.slow
def test_a_request_that_is_never_answered_is_sent_again(tmp_path: Path) -> None:
    """Its server answers otherwise: it goes on."""

    async def main() -> None:
        # More than a server takes for its first weights on a busy machine.
        async with running(tmp_path, request_s=20.0) as engine:
            for number in (0, 1):
                await fault(tmp_path, number, "stall")
            await asyncio.gather(*(sample(engine, n) for n in range(20)))
            assert engine.fleet.resent >= 1
            await until(lambda: all(m.state is MemberState.live for m in engine.fleet.members))
            assert [record(tmp_path, n).boot for n in (0, 1)] == [1, 1]

    asyncio.run(main())


@pytest.mark.slow
def test_slow_first_tokens_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that take three times servers.dead_s, of engines that answer examinations."""
    monkeypatch.setenv(TOKEN_S, "0.15")

    async def main() -> None:
        async with running(tmp_path, dead_s=2.0) as engine:
            await asyncio.gather(*(sample(engine, n, 40) for n in range(24)))
            metrics = engine.metrics()
            assert (metrics["fleet/deaths"], metrics["fleet/resent"]) == (0, 0)
            assert [record(tmp_path, n).boot for n in (0, 1)] == [1, 1]

    asyncio.run(main())
