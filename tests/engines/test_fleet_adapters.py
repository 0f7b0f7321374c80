"""Adapters by version on stub servers: which version a turn samples with, and which ones go."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_kit import STUB, TEXT, call, fault, inputs, record, until
from server_stub import TOKEN_S
from transformers import Qwen3Config

from agenttrain.engines.config import Sampling
from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.health import MemberState
from agenttrain.engines.vllm_server.starting import build
from agenttrain.engines.vllm_server.versions import Versions
from agenttrain.engines.weight_files import WeightFiles
from agenttrain.training.config import LoraSettings

NAME = "base_model.model.layers.0.q_proj.lora_A.weight"


def adapters(version: int) -> WeightFiles:
    return WeightFiles(folder=Path(str(version)), version=version, digest="", adapters=True)


def numbers(files: list[WeightFiles]) -> list[int]:
    return [one.version for one in files]


def test_a_rollout_keeps_the_version_that_it_began_with() -> None:
    versions = Versions()
    assert numbers(versions.add(adapters(0))) == []
    assert versions.of("a").version == 0
    assert numbers(versions.add(adapters(1))) == []  # a uses 0
    assert (versions.of("a").version, versions.of("b").version) == (0, 1)
    versions.release("a")
    assert numbers(versions.add(adapters(2))) == [0]
    assert (versions.of("b").version, versions.of("a").version) == (1, 2)
    # Two at once: the rollout of the oldest goes on with the newest.
    assert numbers(versions.add(adapters(3))) == [1]
    assert (versions.of("b").version, versions.of("a").version) == (3, 2)
    assert numbers(versions.held()) == [2, 3]


def test_as_many_versions_as_rollouts_may_be_old() -> None:
    versions = Versions(adapters=4)
    for version in range(4):
        assert versions.add(adapters(version)) == []
        assert versions.of(f"s{version}").version == version
    # Of five, the rollout of the oldest goes on with the newest.
    assert numbers(versions.add(adapters(4))) == [0]
    assert [versions.of(f"s{n}").version for n in range(4)] == [4, 1, 2, 3]


def test_a_session_names_the_version_that_it_began_with() -> None:
    """Whatever weights sample it: a new session has no keys of old ones in common with it."""
    versions = Versions()
    versions.add(WeightFiles(folder=Path("x"), version=0, digest=""))
    assert versions.start("a") == 0
    versions.add(WeightFiles(folder=Path("x"), version=1, digest=""))
    assert (versions.start("a"), versions.start("b")) == (0, 1)
    versions.release("a")
    assert versions.start("a") == 1


def test_weights_of_the_model_are_one_version() -> None:
    versions = Versions()
    for version in (0, 1):
        files = WeightFiles(folder=Path("x"), version=version, digest="")
        assert versions.add(files) == []
        assert versions.of("a") is files and versions.held() == [files]


async def sync(engine: Any, w: float, version: int) -> None:
    await engine.update(iter([(NAME, torch.tensor([[w]]))]), version)
    scores = await engine.verify(TEXT, lambda found: None if found == [-w] * 3 else f"not {w}")
    assert scores == [-w] * 3


@pytest.mark.slow
def test_adapters_come_under_requests_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_S, "0.01")
    model = tmp_path / "model"
    Qwen3Config(max_position_embeddings=256).save_pretrained(model)
    (tmp_path / "run").mkdir()
    parts = replace(inputs(tmp_path / "run", model), adapters=LoraSettings(rank=1, alpha=2))

    async def main() -> None:
        engine = build(VllmServerSettings(), parts, module=STUB)
        try:
            async with asyncio.timeout(100):
                await exercise(engine)
        finally:
            await engine.aclose()

    async def exercise(engine: Any) -> None:
        assert engine.takes_adapters
        await sync(engine, 1.0, 0)

        async def turn(session: str, tokens: int = 4) -> Any:
            sampling = Sampling(max_tokens=tokens, seed=1)
            return await engine.generate(TEXT, sampling, session=session)

        work = [asyncio.create_task(turn(f"r{n}", 60)) for n in range(8)]
        await until(lambda: sum(member.requests for member in engine.fleet.members) == 8)
        await sync(engine, 2.0, 1)
        for completion in await asyncio.gather(*work):
            assert (completion.versions, set(completion.logprobs)) == (((0, 60),), {-1.0})
        old, new = await turn("r0"), await turn("new")
        assert (old.versions, old.logprobs) == (((0, 4),), (-1.0,) * 4)
        assert (new.versions, new.logprobs) == (((1, 4),), (-2.0,) * 4)

        # A server that was started again has both versions before it samples.
        os.kill(record(tmp_path, 0).pid, signal.SIGKILL)
        members = engine.fleet.members
        await until(lambda: members[0].boot == 2 and members[0].state is MemberState.live)
        models = (await call(tmp_path, 0, "GET", "/v1/models"))["data"]
        assert [one["id"] for one in models] == ["policy", "policy-v0", "policy-v1"]

        # One that says that it has loaded them and has not.
        for n in range(8):
            await engine.release(f"r{n}")
        await engine.release("new")
        await fault(tmp_path, 1, "deaf")
        await sync(engine, 3.0, 2)
        assert members[1].deaths == 1
        await until(lambda: all(one.state is MemberState.live for one in members))
        for number in (0, 1):
            models = (await call(tmp_path, number, "GET", "/v1/models"))["data"]
            assert [one["id"] for one in models] == ["policy", "policy-v2"]
        assert [path.name for path in engine.writer.folder.iterdir() if path.is_dir()] == ["2"]

    asyncio.run(main())
