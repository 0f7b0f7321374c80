"""The transformers engine with a copy of the weights, which change while it samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
from async_kit import PATIENCE_S, until
from engine_kit import ids_of, sharp_model

from agenttrain.engines.base import EngineError, OwnNumberFormat, Separate
from agenttrain.engines.config import Sampling
from agenttrain.engines.transformers.apart import TransformersCopy
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.training.config import WeightSyncMode
from agenttrain.types import Completion

MODELS = [sharp_model(seed) for seed in (1, 2, 3)]
"""The weights of versions 0, 1 and 2."""
PROMPT = ids_of(4, 40)
LONG = Sampling(max_tokens=400, seed=3)


@asynccontextmanager
async def copy(mode: WeightSyncMode) -> AsyncIterator[TransformersCopy]:
    """A copy with the weights of version 0."""
    engine = TransformersCopy(sharp_model(9), TransformersSettings(max_rows=4), mode)
    try:
        await load(engine, 0)
        yield engine
    finally:
        await engine.aclose()


async def load(engine: TransformersCopy, version: int) -> None:
    await engine.update(iter(MODELS[version].state_dict().items()), version)


async def tokens(engine: TransformersCopy, count: int) -> None:
    """Wait until the engine has decoded so many tokens."""
    await until(lambda: engine.stats.decoded_tokens >= count)


async def across_updates(engine: TransformersCopy) -> list[Completion]:
    """Two turns, during which the weights change twice."""
    asked = [
        asyncio.create_task(engine.generate([*PROMPT, number], LONG, session=f"s{number}"))
        for number in (7, 8)
    ]
    for version in (1, 2):
        await tokens(engine, 60 * version)
        await load(engine, version)
    return await asyncio.gather(*asked)


def gaps(prompt: list[int], completion: Completion) -> list[float]:
    """Largest gap of each span to a full forward pass under the weights of its label."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    found, start = [], 0
    for version, count in completion.versions:
        with torch.no_grad():
            logits = MODELS[version](input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = logits.gather(-1, ids[0, len(prompt) :, None])[:, 0][start : start + count]
        given = torch.tensor(completion.logprobs[start : start + count])
        found.append(float((own - given).abs().max()))
        start += count
    assert start == len(completion.token_ids)
    return found


def test_it_is_an_engine_that_is_sent_weights() -> None:
    async def main() -> None:
        async with copy(WeightSyncMode.drain) as engine:
            assert isinstance(engine, Separate) and isinstance(engine, OwnNumberFormat)
            with torch.no_grad():
                logits = MODELS[0](input_ids=torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
            expected = logits.gather(-1, torch.tensor(PROMPT)[1:, None])[:, 0].tolist()
            assert await engine.score(PROMPT) == pytest.approx(expected, abs=1e-5)
            with pytest.raises(EngineError, match="update to version 1 failed"):
                await engine.update(iter({"lm_head.weight": torch.zeros(1)}.items()), 1)

    asyncio.run(main())


def test_every_span_is_of_the_weights_of_its_label() -> None:
    """abort_resume: the new weights read all tokens again."""

    async def main() -> list[Completion]:
        async with copy(WeightSyncMode.abort_resume) as engine:
            return await across_updates(engine)

    for number, completion in zip((7, 8), asyncio.run(main()), strict=True):
        assert [version for version, _ in completion.versions] == [0, 1, 2]
        assert max(gaps([*PROMPT, number], completion)) < 1e-4


def test_an_update_waits_for_the_turns_that_decode() -> None:
    """drain: turns in flight end with their weights, a turn that begins meanwhile gets the new."""

    async def main() -> None:
        async with copy(WeightSyncMode.drain) as engine:
            first = asyncio.create_task(engine.generate(PROMPT, LONG, session="a"))
            await tokens(engine, 20)
            updating = asyncio.create_task(load(engine, 1))
            await until(lambda: engine._worker.scheduler.draining or updating.done())
            second = asyncio.create_task(engine.generate(PROMPT, LONG, session="b"))
            await updating
            old, new = await asyncio.gather(first, second)
            assert old.versions == ((0, 400),) and new.versions == ((1, 400),)
            assert max(*gaps(PROMPT, old), *gaps(PROMPT, new)) < 1e-4

    asyncio.run(main())


def test_an_update_that_waits_for_turns_fails_at_a_close() -> None:
    async def main() -> list[object]:
        async with copy(WeightSyncMode.drain) as engine:
            turn = asyncio.create_task(engine.generate(PROMPT, LONG, session="a"))
            await tokens(engine, 20)
            updating = asyncio.create_task(load(engine, 1))
            await until(lambda: engine._worker.scheduler.draining or updating.done())
        waiting = asyncio.gather(turn, updating, return_exceptions=True)
        return await asyncio.wait_for(waiting, PATIENCE_S)

    assert all(isinstance(result, EngineError) for result in asyncio.run(main()))


def test_keys_and_values_of_old_weights_stay_where_they_are() -> None:
    """in_flight: a session keeps its own; a new one with the same prompt copies none of them."""

    async def main() -> None:
        async with copy(WeightSyncMode.in_flight) as engine:
            first = asyncio.create_task(engine.generate(PROMPT, LONG, session="a"))
            await tokens(engine, 20)
            await load(engine, 1)
            prefilled = engine.stats.prefilled_tokens
            new = await engine.generate(PROMPT, LONG, session="b")
            old = await first
            assert [version for version, _ in old.versions] == [0, 1]
            before, after = gaps(PROMPT, old)
            assert before < 1e-4 < after  # its later tokens see keys of both weights
            assert new.versions == ((1, 400),) and max(gaps(PROMPT, new)) < 1e-4
            assert engine.stats.copied_tokens == 0
            # Only the new session's prompt was read.
            assert engine.stats.prefilled_tokens == prefilled + len(PROMPT)
            # A third one copies from the second, whose keys are all of the new weights.
            third = await engine.generate(PROMPT, LONG, session="c")
            assert third.token_ids == new.token_ids
            assert engine.stats.copied_tokens == len(PROMPT) - 1

    asyncio.run(main())
