"""What an engine asks of a GPU and of vLLM, by thread and device; no test here has a GPU."""

from __future__ import annotations

import asyncio
import os
import random
import re
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from fake_vllm import Machine, machine

from agenttrain.engines.base import EngineDead, EngineError
from agenttrain.engines.config import EngineDtype, Sampling
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine
from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.engines.vllm.engine import VllmEngine
from agenttrain.engines.vllm.setup import check_device
from agenttrain.engines.vllm.weights import SPREAD, Manifest, checksum
from agenttrain.training.config import WeightSyncMode
from agenttrain.types import Completion
from agenttrain.utils.model_path import model_folder
from agenttrain.utils.threads import DaemonThreads

__all__ = ["machine"]


def weights(value: float, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    """All ten values of the fake's model: the sum of its weights is ten times `value`."""
    shapes = {"q.weight": (2, 2), "k.weight": (2, 2), "norm.weight": (2,)}
    return [(name, torch.full(shape, value, dtype=dtype)) for name, shape in shapes.items()]


def run(
    use: Callable[[VllmEngine], Awaitable[None]],
    mode: WeightSyncMode = WeightSyncMode.drain,
    dtype: EngineDtype = EngineDtype.float32,
    log: Path | None = None,
    **settings: bool,
) -> None:
    async def main() -> None:
        config = VllmSettings(dtype=dtype, **settings)
        engine = VllmEngine(
            model_folder("bundled:shop"), config, mode=mode, seed=2**40 + 5, log=log
        )
        try:
            async with asyncio.timeout(20):
                await use(engine)
        finally:
            await engine.aclose()

    asyncio.run(main())


def test_one_thread_builds_steps_loads_rests_and_shuts_down_on_the_process_gpu(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")

    async def use(engine: VllmEngine) -> None:
        await engine.update(weights(1), 1)
        await engine.generate([1], Sampling(max_tokens=3), session="a")
        await engine.sleep()
        await engine.update(weights(2), 2)

    run(use, sleep=True)
    # Which vLLM reads; the process sees other GPUs than its launcher counts.
    assert (machine.llms[0].local_rank, os.environ["LOCAL_RANK"]) == ("3", "7")
    first, *rest = machine.calls
    assert first == ("vllm", 3, "set_device 3"), "before anything is built"
    assert {(thread, device) for thread, device, _ in rest} == {("vllm", 3)}
    kinds = {call.split()[0] for _, _, call in rest}
    assert {"build", "step", "load", "sleep", "wake_up", "shutdown"} <= kinds
    assert "set_stream" not in kinds, "the main thread's stream stays"
    # Before the second load: the cache's memory is taken when the weights are in.
    order = [call for _, _, call in machine.of("sleep", "wake_up", "load")]
    assert order == ["load", "sleep 2", "wake_up weights", "load", "wake_up kv_cache"]


def test_vllm_leaves_the_process_its_precision_and_threads(machine: Machine) -> None:
    before, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()

    async def use(engine: VllmEngine) -> None:
        assert machine.llms[0].arguments.seed == (2**40 + 5) % 2**32, "numpy takes no more"
        assert torch.get_float32_matmul_precision() == before
        assert torch.get_num_threads() == threads

    run(use)


@pytest.mark.parametrize("mode", [WeightSyncMode.in_flight, WeightSyncMode.abort_resume])
def test_a_token_on_its_way_carries_the_version_of_its_weights(
    machine: Machine, mode: WeightSyncMode
) -> None:
    """A batch is in flight when the weights change: each token here is ten times its version."""

    async def use(engine: VllmEngine) -> None:
        await engine.update(weights(0), 0)
        for version in range(1, 6):
            steps, machine.llms[0].until = engine.stats.steps, str(version)
            flying = asyncio.create_task(engine.generate([1], Sampling(max_tokens=9), session="a"))
            while engine.stats.steps < steps + 20:
                await asyncio.sleep(0.001)
            await engine.update(weights(version), version)
            completion: Completion = await flying
            labels = [v for v, count in completion.versions for _ in range(count)]
            assert labels == [token // 10 for token in completion.token_ids]
            assert set(labels) == {version - 1, version}

    run(use, mode)


@pytest.mark.parametrize(
    ("wanted", "policys", "chosen"),
    [
        ("auto", "float32", "bfloat16"),
        ("auto", "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "float32"),
    ],
)
def test_the_engine_has_a_number_format_of_its_own(
    machine: Machine, wanted: str, policys: str, chosen: str
) -> None:
    config = VllmSettings(dtype=EngineDtype(wanted))
    engine = VllmEngine(model_folder("bundled:shop"), config, dtype=policys)
    assert machine.llms[0].arguments.dtype == chosen
    assert engine.dtype is getattr(torch, chosen)
    asyncio.run(engine.aclose())


def test_auto_is_the_policys_format_where_the_gpu_has_no_bfloat16(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    engine = VllmEngine(model_folder("bundled:shop"), VllmSettings(), dtype="float32")
    assert machine.llms[0].arguments.dtype == "float32"
    asyncio.run(engine.aclose())


def test_a_weight_that_is_lost_on_its_way_is_found_by_its_bytes(machine: Machine) -> None:
    async def use(engine: VllmEngine) -> None:
        await engine.update(weights(1), 1)
        for lost, parameter in (("k.weight", "qkv.weight"), ("norm.weight", "norm.weight")):
            machine.llms[0].loses = lost
            with pytest.raises(EngineError, match=rf"version 2: .* {parameter}: hold other bytes"):
                await engine.update(weights(2), 2)
            machine.llms[0].loses = None
            await engine.update(weights(1), 1)

    run(use)


def test_a_parameter_in_another_form_is_left_to_the_probe(machine: Machine) -> None:
    """What the first load did not leave as it was sent cannot be compared later."""

    async def use(engine: VllmEngine) -> None:
        machine.llms[0].loses = "k.weight"
        await engine.update(weights(1), 1)
        assert set(engine._manifest.comparable) == {"norm.weight"}
        await engine.update(weights(2), 2)

    run(use)


def test_a_checksum_is_that_of_the_values_in_any_order() -> None:
    bits = torch.tensor([1, 0, 3], dtype=torch.int16)
    assert int(checksum(bits)) == 1 * (1 + SPREAD) + 3 * (3 + SPREAD)
    torch.manual_seed(0)
    values = torch.randn(64, 33, dtype=torch.bfloat16)
    parts = sum(int(checksum(part)) for part in values.split(20))
    padded = torch.nn.functional.pad(values.T, (0, 7))
    assert int(checksum(padded)) == int(checksum(values)) == parts
    changed = values.clone()
    changed[3, 4] *= 1.01
    assert int(checksum(changed)) != int(checksum(values))


def test_nothing_is_compared_where_the_workers_are_other_processes(machine: Machine) -> None:
    async def use(engine: VllmEngine) -> None:
        llm, manifest = machine.llms[0], Manifest()
        llm.vllm_config.parallel_config.world_size = 2
        llm.collective_rpc = lambda method, kwargs: None
        manifest.load(llm, weights(1))
        assert manifest.comparable == {}

    run(use)


def test_vllms_log_goes_to_a_file_of_the_run(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "logs" / "vllm-3.log"

    async def use(engine: VllmEngine) -> None:
        assert log.parent.is_dir()
        path = Path(machine.llms[-1].arguments.logging_config.pylogging_config_file)
        assert not path.exists(), "it is read while the engine is built"

    run(use, log=log)
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "my.json")

    async def leave(engine: VllmEngine) -> None:
        assert not hasattr(machine.llms[-1].arguments, "logging_config")

    run(leave, log=log)


def test_blocking_functions_run_on_the_gpu_of_their_caller(machine: Machine) -> None:
    """A reward model that loads in such a thread would else be on GPU 0 in every process."""

    async def main() -> int:
        outcome = await DaemonThreads().run(torch.cuda.current_device)
        return outcome.value

    assert asyncio.run(main()) == 3


def test_the_decode_thread_works_on_the_process_gpu(machine: Machine) -> None:
    async def main() -> None:
        engine = TransformersEngine(tiny.model(), TransformersSettings(max_context=64))
        await engine.generate([7, 8], Sampling(max_tokens=2), session="a")
        await engine.aclose()

    asyncio.run(main())
    assert machine.of("set_device") == [("agenttrain-decode", 3, "set_device 3")]


def test_a_run_draws_the_same_numbers_with_vllm_as_without(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """vLLM seeds random, numpy and torch when it starts, in all ranks with the same seed."""
    from agenttrain.runs import loading
    from agenttrain.settings.run_config import RunConfig

    monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
    config = RunConfig()
    config.model.path = "bundled:shop"
    config.engine = VllmSettings()
    world = SimpleNamespace(is_main=True, rank=0)
    policy = SimpleNamespace(
        world=world, accelerator=SimpleNamespace(device=torch.device("cuda", 3)), vision=None
    )

    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    loading.seed_random(11)
    expected = draws()
    loading.seed_random(11)
    engine = loading.make_engine(config, policy, tmp_path, verb="train")
    assert draws() == expected
    started = f"engine: compiling, and capturing CUDA graphs: a minute .*log: {tmp_path}/vllm.log"
    assert re.search(started, capsys.readouterr().out)
    assert threading.current_thread().name == "MainThread"
    asyncio.run(engine.aclose())


def test_a_thread_on_another_gpu_than_the_models_is_refused(machine: Machine) -> None:
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=where)]))
    worker = SimpleNamespace(get_model=lambda: model)
    llm = SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(world_size=1)),
        model_executor=SimpleNamespace(driver_worker=SimpleNamespace(worker=worker)),
    )
    where = torch.device("cuda", 3)
    check_device(llm)
    where = torch.device("cuda", 0)
    with pytest.raises(EngineError, match=r"the model is on cuda:0, and the thread .* on GPU 3"):
        check_device(llm)


def test_an_engine_that_dies_before_new_weights_come_is_dead(machine: Machine) -> None:
    """Its batch on the way fails: the weights have nothing to do with it."""

    async def use(engine: VllmEngine) -> None:
        await engine.update(weights(0), 0)
        llm = machine.llms[0]
        llm.until = "never"
        flying = asyncio.create_task(engine.generate([1], Sampling(max_tokens=9), session="a"))
        while engine.stats.steps < 5:
            await asyncio.sleep(0.001)
        step = llm.step

        def fail() -> list[object]:
            if llm.paused:
                raise RuntimeError("CUDA error")
            return step()

        llm.step = fail
        with pytest.raises(EngineDead, match=r"vLLM died: RuntimeError: CUDA error"):
            await engine.update(weights(1), 1)
        with pytest.raises(EngineDead, match=r"vLLM died"):
            await flying
        with pytest.raises(EngineDead, match=r"vLLM died"):
            await engine.generate([1], Sampling(max_tokens=9), session="b")

    run(use, WeightSyncMode.in_flight)
