"""Ports of servers that another process has, or takes before the server listens."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fleet_kit import TOKEN_OF_OTHERS, failed_start, record, running, sample, stubs
from port_taker import TIMES

from agenttrain.engines.vllm_server.guard import TOKEN


@pytest.mark.slow
def test_a_lost_port_is_replaced_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TIMES, "1")

    async def main() -> None:
        async with running(tmp_path, module="port_taker", count=1, restarts=0) as engine:
            await sample(engine, 1)
            assert record(tmp_path, 0).boot == 2  # the second start, and no restart

    asyncio.run(main())
    ports = [
        line.split()[-1]
        for line in (tmp_path / "run/servers/0.log").read_text().splitlines()
        if line.startswith("stub on port")
    ]
    assert len({*ports}) == 2


@pytest.mark.slow
def test_ports_that_are_all_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMES, "100")

    async def main() -> None:
        engine = stubs(tmp_path, module="port_taker", count=1, restarts=5)
        text = await failed_start(engine)
        assert "server 0 did not start: other processes took 3 ports" in text
        assert "address already in use" in text

    asyncio.run(main())
    assert (tmp_path / "run/starts").read_text() == "xxx"


BY_HAND = """
import sys
from pathlib import Path
from fleet_kit import STUB, inputs
from transformers import Qwen3Config
from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.starting import serve_alone

model = Path(sys.argv[1], "model")
Qwen3Config(max_position_embeddings=256).save_pretrained(model)
parts = inputs(Path(sys.argv[1]), model, count=1, restarts=5)
sys.exit(serve_alone(VllmServerSettings(), parts, "127.0.0.1", int(sys.argv[2]), module=STUB))
"""


@pytest.mark.slow
def test_a_named_port_is_not_replaced(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = subprocess.run(
            [sys.executable, "-c", BY_HAND, str(tmp_path), str(port)],
            env=os.environ | {TOKEN: TOKEN_OF_OTHERS},
            capture_output=True,
            text=True,
        )
    assert ended.returncode == 1
    end = f"server 0 did not start: another process listens on 127.0.0.1 port={port}; end that one"
    assert end in ended.stderr
    assert (tmp_path / "servers/0.log").read_text().count("stub on port") == 1
