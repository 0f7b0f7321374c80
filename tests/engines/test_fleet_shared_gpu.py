"""One GPU for the trainer and the policy's server: its share of the memory, and when it starts.

There is no GPU here: `torch.cuda` is told of one with 24 GiB. The servers are stubs.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fleet_kit import PATIENCE_S, STUB, gone, inputs, record, sample, send
from transformers import Qwen3Config

from agenttrain import cli
from agenttrain.engines.spec import EngineInputs
from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.server_engine import VllmServerEngine
from agenttrain.engines.vllm_server.server_records import PLAN, record_path
from agenttrain.engines.vllm_server.starting import build, server_plan
from agenttrain.runs.loading import make_standalone_engine
from agenttrain.runs.memory_plan import GIB, keep_servers_share
from agenttrain.runs.roles import start_roles
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.settings.run_config import RunConfig
from agenttrain.types import ConfigError


@pytest.fixture
def one_card(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A GPU of 24 GiB. The list gets the shares of it that this process limits itself to."""
    limits: list[float] = []
    card = SimpleNamespace(total_memory=24 * GIB, name="card")
    monkeypatch.setattr("agenttrain.engines.vllm_server.spec.find_spec", lambda name: object())
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda: True,
        "get_device_properties": lambda device: card,
        "set_per_process_memory_fraction": limits.append,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return limits


def run_with(*overrides: str) -> RunConfig:
    with hydra_session(Source()):
        return compose_run(open_keys(("engine=vllm_server", *overrides)), Source()).config


def shared(folder: Path, **servers: Any) -> EngineInputs:
    """The parts of a run whose trainer and only server have one GPU."""
    model = folder / "model"
    Qwen3Config(max_position_embeddings=256).save_pretrained(model)
    (folder / "run").mkdir()
    return replace(inputs(folder / "run", model, count=1, **servers), shares_gpu=True)


def test_a_server_on_the_trainers_gpu_starts_with_the_first_weights(tmp_path: Path) -> None:
    async def main() -> list[int]:
        engine = build(VllmServerSettings(), shared(tmp_path), module=STUB)
        assert isinstance(engine, VllmServerEngine)
        written: list[bool] = []

        def weights():
            # Read while the files are written, by a trainer whose tensors are on the GPU.
            written.append(record_path(tmp_path / "run", 0).exists())
            yield "w", torch.tensor([1.0])

        try:
            async with asyncio.timeout(PATIENCE_S):
                await engine.update(weights(), 0)
                assert written == [False]
                await engine.verify([7, 8, 9, 10], lambda scores: None)
                started = record(tmp_path, 0)
                assert started.boot == 1
                await sample(engine, 3)
                await send(engine, 0.5, 1)
            assert record(tmp_path, 0).pid == started.pid
        finally:
            await engine.aclose()
        return [started.pid, started.wrapper]

    assert gone(asyncio.run(main()))


def test_an_engine_that_got_no_weights_has_nothing_to_end(tmp_path: Path) -> None:
    engine = build(VllmServerSettings(), shared(tmp_path), module=STUB)
    weights = Path((tmp_path / "run" / "weights.txt").read_text())
    assert weights.is_dir()
    asyncio.run(engine.aclose())
    assert not weights.exists()
    assert not (tmp_path / "run" / "servers" / PLAN).exists()


@pytest.mark.parametrize(
    ("typed", "shares_gpu", "gpus", "share"),
    [
        (None, True, (("3",),), 0.35),
        (0.6, True, (("3",),), 0.6),
        (None, False, (("5",),), 0.9),
        (0.6, False, (("5",),), 0.6),
    ],
)
def test_what_a_server_is_started_with(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_card: list[float],
    typed: float | None,
    shares_gpu: bool,
    gpus: tuple,
    share: float,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    parts = replace(shared(tmp_path), on_gpu=True, shares_gpu=shares_gpu)
    plan = server_plan(VllmServerSettings(memory_share=typed), parts, STUB)
    assert (plan.gpus, plan.engine["memory_share"]) == (gpus, share)


def test_the_rollout_process_starts_no_server_before_it_gets_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_card: list[float]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = run_with("async_training.max_staleness=1", "weight_sync.mode=in_flight")
    engine = make_standalone_engine(config, tmp_path, "train", on_gpu=True, trainers=1)
    assert not record_path(tmp_path, 0).exists()
    asyncio.run(engine.aclose())


def test_a_run_without_roles_looks_for_no_second_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_card: list[float]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    async def main() -> None:
        async with AsyncExitStack() as stack:
            await start_roles(run_with(), "train", tmp_path, stack).ready()

    asyncio.run(main())


def test_the_trainer_keeps_to_its_share(
    monkeypatch: pytest.MonkeyPatch, one_card: list[float]
) -> None:
    # 1 - 0.35 - 1.5 GiB of 24 for the contexts of both processes
    keep_servers_share(run_with())
    keep_servers_share(run_with("engine.memory_share=0.5"))
    assert one_card == [pytest.approx(0.5875), pytest.approx(0.4375)]
    with pytest.raises(ConfigError, match=r"engine.memory_share=0.95: leaves the trainer nothing"):
        keep_servers_share(run_with("engine.memory_share=0.95"))
    # Servers of others, a second GPU or process: the trainer has its GPU to itself.
    keep_servers_share(run_with("servers.admin_urls=[http://a:1]"))
    keep_servers_share(run_with("distributed=ddp"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    keep_servers_share(run_with())
    assert len(one_card) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), None),
        (("servers.gpus=[0]",), None),
        # 24 x 0.05 less passes, 1.5 of graphs and workspaces, and the weights
        (
            ("engine.memory_share=0.05",),
            "engine.memory_share=0.05: leaves the server on the trainer's GPU -0.31 GiB of keys",
        ),
        # 24 x 0.9 and 1.5, beside the trainer's own 1.5
        (
            ("engine.memory_share=0.9",),
            "engine.memory_share=0.9: the server takes 23.1",
        ),
        (
            ("engine.memory_share=0.95",),
            "engine.memory_share=0.95: leaves the trainer nothing of the GPU's 24.00 GiB, of which "
            "contexts take 1.50; lower it",
        ),
    ],
)
def test_check_adds_up_what_both_take(
    capsys: pytest.CaptureFixture[str],
    one_card: list[float],
    overrides: tuple[str, ...],
    message: str | None,
) -> None:
    code = cli.main(["check", "engine=vllm_server", *overrides])
    told = capsys.readouterr().err
    assert code == (0 if message is None else 2), told
    assert message is None or message in told
