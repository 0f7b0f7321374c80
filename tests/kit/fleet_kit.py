"""A fleet of stub servers in processes of their own, as a run has them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from server_stub import CONFIG, next_token
from transformers import Qwen3Config

from agenttrain.engines.config import Sampling, ServersConfig
from agenttrain.engines.spec import EngineInputs
from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.fleet import FleetLost
from agenttrain.engines.vllm_server.guard import TOKEN
from agenttrain.engines.vllm_server.server_engine import VllmServerEngine
from agenttrain.engines.vllm_server.server_records import ServerRecord, read_record
from agenttrain.engines.vllm_server.starting import build
from agenttrain.training.config import Transport, WeightSyncMode

STUB = "server_stub"
# The servers' processes find the stub beside this file.
_paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _paths))

TEXT = [7, 8, 9, 10]
"""The probe."""
PATIENCE_S = 300
"""Only a hang takes so long."""


def inputs(
    run: Path, model: Path, transport: Transport = Transport.auto, **servers: Any
) -> EngineInputs:
    """The parts of a run that a fleet is built from."""
    return EngineInputs(
        policy=None,
        model=model,
        dtype="float32",
        adapters=None,
        tokenizer=None,
        sync_mode=WeightSyncMode.drain,
        sync_folder=None,
        transport=transport,
        servers=ServersConfig(**{"count": 2, "health_s": 0.1, **servers}),
        seed=0,
        on_gpu=False,
        rank=0,
        run_folder=run,
    )


def stubs(folder: Path, *, module: str = STUB, **servers: Any) -> VllmServerEngine:
    """Start stub servers of a run in `folder`."""
    model = folder / "model"
    Qwen3Config(max_position_embeddings=256).save_pretrained(model)
    run = folder / "run"
    run.mkdir()
    engine = build(VllmServerSettings(), inputs(run, model, **servers), module=module)
    assert isinstance(engine, VllmServerEngine)
    return engine


@asynccontextmanager
async def running(folder: Path, **servers: Any) -> AsyncIterator[VllmServerEngine]:
    """Stub servers with the weight 1.0 of version 0, which serve."""
    engine = stubs(folder, **servers)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await send(engine, 1.0, 0)
            yield engine
    finally:
        await engine.aclose()


async def send(engine: VllmServerEngine, w: float, version: int) -> list[float]:
    """Update all servers to the weight `w`, and let those serve that have it."""
    await engine.update(iter([("w", torch.tensor([w]))]), version)
    return await engine.verify(TEXT, lambda scores: None if scores == [-w] * 3 else f"not {w}")


async def failed_start(engine: VllmServerEngine) -> str:
    """The error with which the servers do not start; the engine is ended."""
    try:
        with pytest.raises(FleetLost) as caught:
            await send(engine, 1.0, 0)
    finally:
        await engine.aclose()
    return str(caught.value)


def expected(prompt: Sequence[int], count: int, seed: int = 0) -> tuple[int, ...]:
    """The tokens that any stub samples."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        ids.append(next_token(ids, seed))
    return tuple(ids[len(prompt) :])


async def sample(engine: VllmServerEngine, number: int, count: int = 8) -> tuple[int, ...]:
    """The completion of the request `number`, which is checked for its ids."""
    prompt = [*TEXT, number]
    completion = await engine.generate(
        prompt, Sampling(max_tokens=count, seed=number), session=f"rollout-{number}"
    )
    assert completion.token_ids == expected(prompt, count, number)
    return completion.token_ids


def record(folder: Path, number: int) -> ServerRecord:
    """The record of a server, which is there."""
    found = read_record(folder / "run", number)
    assert found is not None
    return found


async def call(folder: Path, number: int, method: str, path: str, body: Any = None) -> Any:
    """Speak with a stub itself."""
    server = record(folder, number)
    headers = {"Authorization": f"Bearer {server.token}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False) as http:
        return (await http.request(method, path, json=body)).json()


async def fault(folder: Path, number: int, kind: str, times: int = 1) -> None:
    """Order a fault of a stub."""
    await call(folder, number, "POST", "/stub/fault", {"kind": kind, "times": times})


async def until(true: Any) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    """True for a process that runs; one that ended and was not collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: Sequence[int]) -> bool:
    """Wait until none of the processes, nor of the groups that they lead, runs."""
    deadline = time.monotonic() + PATIENCE_S
    while any(map(alive, [*pids, *in_groups(pids)])):
        assert time.monotonic() < deadline, f"of {pids} some run"
        time.sleep(0.05)
    return True


def in_groups(groups: Sequence[int]) -> list[int]:
    """The processes of these groups."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                group = os.getpgid(int(entry.name))
            except ProcessLookupError:
                continue
            members += [int(entry.name)] if group in groups else []
    return members


TOKEN_OF_OTHERS = "a-secret-of-others"


class OutsideStub:
    """A stub server that nobody but the test starts and ends."""

    def __init__(self, port: int | None = None, **config: Any) -> None:
        self.port = port or free_port()
        self.config = config
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", STUB, "-", "0", str(self.port)],
            env={**os.environ, TOKEN: TOKEN_OF_OTHERS, CONFIG: json.dumps(self.config)},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    async def ready(self) -> None:
        """Wait until it answers."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(httpx.HTTPError):
                    await self.call("GET", "/version")
                    return
                await asyncio.sleep(0.05)

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Speak with it."""
        headers = {"Authorization": f"Bearer {TOKEN_OF_OTHERS}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, trust_env=False) as http:
            return (await http.request(method, path, json=body)).json()


@contextmanager
def outside_stubs(*ports: int | None, **config: Any) -> Iterator[list[OutsideStub]]:
    """Servers of others, up to the end of the test."""
    servers = [OutsideStub(port, **config) for port in ports]
    try:
        yield servers
    finally:
        for server in servers:
            server.end()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
