"""Deterministic mode of the transformers engine: the same batches, the same bits."""

import asyncio
import contextlib
import random

import pytest
import tiny

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import Sampling
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine

NAMES = [f"s{i}" for i in range(10)]


@contextlib.contextmanager
def batches_of(model):
    """Every forward pass's ids and positions, in order."""
    seen = []

    def record(module, args, kwargs):
        seen.append((kwargs["input_ids"].tolist(), kwargs["position_ids"].tolist()))

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    yield seen
    handle.remove()


async def rollout(engine, name, delays):
    """1-4 turns with random replies; tools take as long as `delays` says."""
    rng = random.Random(name)
    ids, completions = [rng.randrange(7, 300) for _ in range(rng.randint(3, 30))], []
    try:
        await asyncio.sleep(delays.random() * 0.01)
        if name == "s3":
            return []
        for turn in range(rng.randint(1, 4)):
            sampling = Sampling(max_tokens=rng.randint(1, 12), seed=turn, stop_token_ids=(9,))
            completions.append(await engine.generate(ids, sampling, session=name))
            ids += completions[-1].token_ids
            ids += [rng.randrange(7, 300) for _ in range(rng.randint(1, 12))]
            await asyncio.sleep(delays.random() * 0.01)
        return completions
    finally:
        await engine.release(name)


def run(seed, max_rows=4, steps=2, rejoin_steps=2):
    """Two steps of ten rollouts each; (completions, batches)."""
    model = tiny.model(initializer_range=0.4)
    delays = random.Random(seed)

    async def main():
        config = TransformersSettings(max_rows=max_rows, rejoin_steps=rejoin_steps)
        engine = TransformersEngine(model, config)
        done = []
        with batches_of(model) as seen:
            for step in range(steps):
                engine.expect(NAMES)
                started = delays.sample(NAMES, len(NAMES))
                tasks = {
                    name: asyncio.create_task(rollout(engine, name, delays)) for name in started
                }
                done.append([await tasks[name] for name in NAMES])
                await engine.update((), step + 1)
        await engine.aclose()
        return done, seen

    return asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("rejoin_steps", [1, 2])
def test_random_delays_change_neither_a_bit_nor_a_batch(rejoin_steps):
    first, batches = run(seed=1, rejoin_steps=rejoin_steps)
    again, batches_again = run(seed=2, rejoin_steps=rejoin_steps)
    assert first == again  # logprobs included, to the last bit
    assert batches == batches_again
    # Nor does what the engine did before: both steps ask the same.
    half = len(batches) // 2
    assert batches[:half] == batches[half:]
    assert [[c.logprobs for c in log] for log in first[0]] == [
        [c.logprobs for c in log] for log in first[1]
    ]
    assert [c.versions[0][0] for c in first[1][0]] == [1] * len(first[1][0])
    assert max(len(ids) for ids, _ in batches) <= 4


def test_without_expectations_the_batches_follow_the_arrivals():
    model = tiny.model(initializer_range=0.4)

    async def main(seed):
        engine = TransformersEngine(model, TransformersSettings(max_rows=4))
        delays = random.Random(seed)
        with batches_of(model) as seen:
            done = await asyncio.gather(*(rollout(engine, name, delays) for name in NAMES))
        await engine.aclose()
        return [[c.token_ids for c in log] for log in done], seen

    first, batches = asyncio.run(main(1))
    again, batches_again = asyncio.run(main(2))
    assert first == again  # the same tokens, from the same seeds …
    assert batches != batches_again  # … in other batches


def test_a_cancelled_session_counts_as_released():
    async def main():
        engine = TransformersEngine(tiny.model(), TransformersSettings(max_rows=2))
        engine.expect(["a", "b", "c"])
        slow, quick = Sampling(max_tokens=400), Sampling(max_tokens=3)
        a, b, c = (
            asyncio.create_task(engine.generate([5], s, session=n))
            for n, s in (("a", slow), ("b", quick), ("c", quick))
        )
        await b
        a.cancel()  # while it decodes, or while the engine waits for b
        await engine.release("b")
        await c
        b = asyncio.create_task(engine.generate([5], quick, session="b"))
        with pytest.raises(EngineError, match="not among the sessions"):
            await b
        await engine.release("c")
        free = await engine.generate([5], quick, session="b")
        await engine.aclose()
        return free

    assert len(asyncio.run(asyncio.wait_for(main(), 60)).token_ids) == 3


def test_a_refused_call_and_its_release_hold_nobody_up():
    async def main():
        engine = TransformersEngine(tiny.model(), TransformersSettings(max_context=16))
        engine.expect(["a", "b"])
        b = asyncio.create_task(engine.generate([5], Sampling(max_tokens=3), session="b"))
        with pytest.raises(EngineError, match="leave no room"):
            await engine.generate([5] * 16, Sampling(max_tokens=3), session="a")
        assert not b.done()
        await engine.release("a")
        await b
        await engine.aclose()

    asyncio.run(asyncio.wait_for(main(), 60))
