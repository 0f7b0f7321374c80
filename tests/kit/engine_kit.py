"""What the transformers engine's tests share: a sharp tiny model and its plain forward pass."""

import asyncio
import contextlib
import random
from dataclasses import replace

import tiny
import torch

from agenttrain.engines.config import Sampling
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine

PLAIN = Sampling(max_tokens=8, seed=1)


def sharp_model(seed=0, **overrides):
    """Large weights: the next token depends strongly on the whole context."""
    return tiny.model(seed, initializer_range=0.4, **overrides)


@contextlib.asynccontextmanager
async def running(model, **config):
    """An engine that is closed at the end."""
    engine = TransformersEngine(model, TransformersSettings(**config))
    try:
        yield engine
    finally:
        await engine.aclose()


def ids_of(seed, count):
    rng = random.Random(seed)
    return [rng.randrange(7, 300) for _ in range(count)]


def expected_logprobs(model, prompt, completion, sampling):
    """[T] By one forward pass over everything, filters by plain loops, in float64."""
    ids = [*prompt, *completion.token_ids]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].double()
    rows = (logits / (sampling.temperature or 1.0)).softmax(-1)
    return [
        float(torch.log(_filtered(row.tolist(), sampling)[token]))
        for row, token in zip(rows, completion.token_ids, strict=True)
    ]


def _filtered(probabilities, sampling):
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    kept = order[: sampling.top_k or None] if sampling.temperature else order
    if sampling.temperature and (sampling.top_p < 1 or sampling.min_p > 0):
        total, mass, best = sum(probabilities[i] for i in kept), 0.0, probabilities[order[0]]
        count = 0
        while count < len(kept) and mass < sampling.top_p * total:
            if probabilities[kept[count]] < sampling.min_p * best:
                break
            mass += probabilities[kept[count]]
            count += 1
        kept = kept[:count]
    result = torch.zeros(len(probabilities), dtype=torch.float64)
    result[kept] = torch.tensor([probabilities[i] for i in kept], dtype=torch.float64)
    return result / result.sum()


async def converse(engine, session, sampling, turns=3, seed=0, pause=None):
    """A rollout of several turns with random replies: [(ids sent, sampling, completion)]."""
    rng = random.Random(f"{session} {seed}")
    ids, log = ids_of(session, rng.randint(3, 40)), []
    for turn in range(turns):
        asked = replace(sampling, max_tokens=rng.randint(2, 12), seed=sampling.seed + turn)
        completion = await engine.generate(ids, asked, session=session)
        log.append((list(ids), asked, completion))
        ids += [*completion.token_ids, *ids_of(f"{session} {turn}", rng.randint(1, 20))]
        if pause is not None:
            await asyncio.sleep(pause.random() * 0.004)
    await engine.release(session)
    return log
