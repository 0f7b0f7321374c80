"""Servers that their launcher owns: they outlive the process that started them."""

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
from fleet_kit import STUB, alive, gone, inputs, record, sample, send, until
from transformers import Qwen3Config

from agenttrain.engines.spec import SERVERS_OWNER
from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.health import MemberState
from agenttrain.engines.vllm_server.local import end_servers
from agenttrain.engines.vllm_server.server_engine import VllmServerEngine
from agenttrain.engines.vllm_server.server_records import update_path
from agenttrain.engines.vllm_server.starting import build
from agenttrain.engines.weights_place import remove_weights_folder

FIRST = """
import asyncio, sys, time
from pathlib import Path
from fleet_kit import send, stubs

engine = stubs(Path(sys.argv[1]), restarts=int(sys.argv[2]))
asyncio.run(send(engine, 5.0, 7))
print("serving", flush=True)
time.sleep(600)
"""


@contextmanager
def started(folder: Path, owner: int, restarts: int = 1) -> Iterator[None]:
    """Servers of a process that is killed once they serve."""
    paths = os.pathsep.join(
        [str(Path(__file__).parents[1] / "kit"), os.environ.get("PYTHONPATH", "")]
    )
    first = subprocess.Popen(
        [sys.executable, "-c", FIRST, str(folder), str(restarts)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, SERVERS_OWNER: f"{owner} {folder / 'run'}", "PYTHONPATH": paths},
    )
    try:
        assert first.stdout is not None
        assert any(line.startswith("serving") for line in first.stdout)
        first.send_signal(signal.SIGKILL)
        first.wait()
        yield
    finally:
        first.kill()
        first.wait()
        end_servers((folder / "run").resolve())


def again(folder: Path) -> VllmServerEngine:
    """The engine of the run's next process."""
    parts = inputs(folder / "run", folder / "model", restarts=1)
    engine = build(VllmServerSettings(), parts, module=STUB)
    assert isinstance(engine, VllmServerEngine)
    return engine


@pytest.mark.slow
def test_the_next_process_takes_the_servers_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SERVERS_OWNER, f"{os.getpid()} {tmp_path / 'run'}")

    async def main() -> list[int]:
        before = [record(tmp_path, number) for number in (0, 1)]
        engine = again(tmp_path)
        await send(engine, 1.0, 3)  # an older version than they have: steps are trained again
        await asyncio.gather(*(sample(engine, number) for number in range(6)))
        after = [record(tmp_path, number) for number in (0, 1)]
        assert [(one.pid, one.boot) for one in after] == [(one.pid, 1) for one in before]
        assert [member.state for member in engine.fleet.members] == [MemberState.live] * 2
        await engine.aclose()
        return [pid for one in after for pid in (one.pid, one.wrapper)]

    with started(tmp_path, os.getpid()):
        first = Path((tmp_path / "run" / "weights.txt").read_text())
        remove_weights_folder(tmp_path / "run")  # as the start of a resumed run does
        pids = asyncio.run(main())
        assert "2 of 2 servers are running, and are reused" in capsys.readouterr().out
        assert all(map(alive, pids))  # its end is not theirs
        folders = [first, Path((tmp_path / "run" / "weights.txt").read_text())]
        assert [folder.stat().st_mode & 0o777 for folder in folders[1:]] == [0o700]
    assert gone(pids) and not any(folder.exists() for folder in folders)
    assert sorted(os.listdir(tmp_path / "run" / "servers")) == ["0.log", "1.log", "status.json"]


@pytest.mark.slow
@pytest.mark.parametrize("why", ["another plan", "an update was cut short"])
def test_others_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setenv(SERVERS_OWNER, f"{os.getpid()} {tmp_path / 'run'}")

    async def main() -> None:
        engine = again(tmp_path)
        await send(engine, 1.0, 0)
        await sample(engine, 1)
        await engine.aclose()

    cut_short = why != "another plan"
    with started(tmp_path, os.getpid(), restarts=1 if cut_short else 2):
        if cut_short:
            for number in (0, 1):
                update_path(tmp_path / "run", number).write_text("1")
        before = [record(tmp_path, number).pid for number in (0, 1)]
        asyncio.run(main())
        assert gone(before)
        after = [record(tmp_path, number).pid for number in (0, 1)]
    assert gone(after)


@pytest.mark.slow
def test_they_end_with_their_owner(tmp_path: Path) -> None:
    Qwen3Config(max_position_embeddings=256).save_pretrained(tmp_path / "model")
    owner = subprocess.Popen(["sleep", "600"])
    with started(tmp_path, owner.pid):
        servers = [record(tmp_path, number) for number in (0, 1)]
        weights = Path((tmp_path / "run" / "weights.txt").read_text())
        assert all(alive(one.pid) for one in servers)
        owner.kill()
        owner.wait()
        assert gone([pid for one in servers for pid in (one.pid, one.wrapper)])
        asyncio.run(until(lambda: not (tmp_path / "run" / "servers" / "0.json").exists()))
        asyncio.run(until(lambda: not weights.exists()))
