"""Servers of nodes of their own: `agenttrain engine-server` starts them, the run finds them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fleet_kit import STUB, fault, gone, inputs, record, sample, send, stubs, until

from agenttrain.engines.config import ServersConfig
from agenttrain.engines.placement import place
from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.fleet import FleetLost
from agenttrain.engines.vllm_server.health import MemberState
from agenttrain.engines.vllm_server.server_engine import VllmServerEngine
from agenttrain.engines.vllm_server.server_records import order_path
from agenttrain.engines.vllm_server.starting import build
from agenttrain.utils.exit_codes import DONE


@contextmanager
def serving(run: Path, *numbers: int) -> Iterator[list[subprocess.Popen]]:
    """Steps of a job that serve; they wait for the run."""
    command = [sys.executable, "-m", "agenttrain.cli", "engine-server", str(run)]
    steps = [
        subprocess.Popen([*command, f"number={number}", "host=127.0.0.1", "wait=100"])
        for number in numbers
    ]
    try:
        yield steps
    finally:
        for step in steps:
            step.kill()
            step.wait()


def states(engine: VllmServerEngine) -> list[MemberState]:
    return [member.state for member in engine.fleet.members]


@pytest.mark.slow
def test_a_run_finds_its_servers_and_they_end_with_it(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(tmp_path / "run", 0, 1) as steps:
            await asyncio.sleep(1)  # they come first
            engine = stubs(tmp_path, nodes=1, count=2)
            await send(engine, 1.0, 0)
            await asyncio.gather(*(sample(engine, number) for number in range(12)))
            assert states(engine) == [MemberState.live] * 2
            # The files of the weights are where other machines see them.
            assert engine.writer.folder.is_relative_to(tmp_path / "run")
            servers = [record(tmp_path, number).pid for number in (0, 1)]
            assert record(tmp_path, 0).wrapper == steps[0].pid
            await engine.aclose()
            for step in steps:
                assert await asyncio.to_thread(step.wait) == DONE
            assert gone(servers)
        left = sorted(path.name for path in (tmp_path / "run" / "servers").iterdir())
        assert left == ["0.log", "1.log", "status.json"]

    asyncio.run(main())


@pytest.mark.slow
def test_a_server_that_hangs_is_killed_by_its_own_wrapper(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(tmp_path / "run", 0, 1):
            engine = stubs(tmp_path, nodes=1, count=2, dead_s=3.0)
            await send(engine, 1.0, 0)
            await fault(tmp_path, 0, "hang")
            await until(lambda: states(engine)[0] is MemberState.restarting)
            assert await asyncio.gather(*(sample(engine, number) for number in range(6)))
            await until(lambda: states(engine) == [MemberState.live] * 2)
            assert record(tmp_path, 0).boot == 2
            await engine.aclose()

    asyncio.run(main())


@pytest.mark.slow
def test_a_silent_machine_and_one_that_never_comes(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(tmp_path / "run", 0, 1) as steps:
            engine = stubs(tmp_path, nodes=1, count=2, dead_s=3.0)
            await send(engine, 1.0, 0)
            os.kill(record(tmp_path, 1).pid, signal.SIGKILL)
            steps[1].kill()
            await until(lambda: states(engine)[1] is MemberState.gone)
            assert "is on a silent machine" in engine.fleet.members[1].reason
            assert await sample(engine, 0)
            await engine.aclose()

    asyncio.run(main())

    async def alone() -> None:
        folder = tmp_path / "alone"
        folder.mkdir()
        engine = stubs(folder, nodes=1, count=1, start_s=1.0)
        late = "server 0 was not started within 1 s on its node"
        with pytest.raises(FleetLost, match=late):
            await send(engine, 1.0, 0)
        await engine.aclose()

    asyncio.run(alone())


def test_an_order_of_an_earlier_start_of_the_run_kills_no_server(tmp_path: Path) -> None:
    run = tmp_path / "run"
    asyncio.run(stubs(tmp_path, nodes=1, count=1).aclose())
    order = order_path(run, 0)
    order.write_text("1")  # of a wrapper that was killed: the next one counts from 1 again
    engine = build(
        VllmServerSettings(), inputs(run, tmp_path / "model", nodes=1, count=1), module=STUB
    )
    assert not order.exists()
    asyncio.run(engine.aclose())


@pytest.mark.slow
def test_in_a_job_the_end_is_left_to_the_run(tmp_path: Path, monkeypatch) -> None:
    """SLURM sends SIGTERM to every process of every step; srun passes SIGUSR1 on."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    async def main() -> None:
        with serving(tmp_path / "run", 0) as (step,):
            engine = stubs(tmp_path, nodes=1, count=1)
            await send(engine, 1.0, 0)
            step.send_signal(signal.SIGTERM)
            await asyncio.sleep(1)
            assert step.poll() is None and await sample(engine, 0)
            pid = record(tmp_path, 0).pid
            step.send_signal(signal.SIGUSR1)
            assert await asyncio.to_thread(step.wait) == DONE
            assert gone([pid])
            await engine.aclose()

    asyncio.run(main())


def test_the_gpus_of_a_node_are_divided():
    servers = ServersConfig(nodes=2, count=4, tensor_parallel_size=2)
    # positions among the GPUs that the node's job sees
    assert place(servers, trainers=8) == ((0, 1), (2, 3), (0, 1), (2, 3))
    assert ServersConfig(nodes=3).count == 3
