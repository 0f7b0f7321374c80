"""Experts of rollouts with images, replayed in training, with a tiny Qwen3.5-MoE that sees."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import vision_kit
from training_cases import TASK

from agenttrain.engines.config import Sampling
from agenttrain.engines.routers import find_routers, intercepting
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine
from agenttrain.training.batch import make_sequences
from agenttrain.training.config import SharePrefix
from agenttrain.training.logprobs import Scorer
from agenttrain.types import Origin, PlacedImage, Rollout, Routes, Trajectory
from agenttrain.utils.image_files import picture_of

PAD = vision_kit.pad()
SIZES = ((16, 8), (24, 8), (40, 24))
KIND = "qwen3_5_moe"


def context(rng: random.Random, start: int, images: int) -> tuple[list[int], list[PlacedImage]]:
    """Random ids with so many images among them, to stand at `start`."""
    ids = [rng.randrange(7, 300) for _ in range(4)]
    placed = []
    for _ in range(images):
        image = vision_kit.picture(*rng.choice(SIZES), seed=rng.randrange(100))
        grid = vision_kit.placeholders().grid(image)
        placed.append(PlacedImage(image, start + len(ids), grid))
        ids += [PAD] * placed[-1].tokens
        ids += [rng.randrange(7, 300) for _ in range(3)]
    return ids, placed


async def sample(engine: TransformersEngine, number: int) -> Rollout:
    """Two turns, with images in the prompt, which all rollouts share, and in the reply."""
    grown = Rollout(task=TASK, rollout_id=f"g-{number}", group_id="g", sample=number, reward=1.0)
    (trajectory,) = grown.trajectories
    prompts, replies = random.Random(7), random.Random(number)
    for turn, rng in enumerate((prompts, replies)):
        ids, placed = context(rng, 0, images=1 + turn * number % 3)
        trajectory.append_context(ids, Origin.tool if turn else Origin.prompt, placed)
        completion = await engine.generate(
            list(trajectory.token_ids),
            Sampling(max_tokens=4, seed=10 * number + turn),
            session=grown.rollout_id,
            images=trajectory.images,
        )
        trajectory.append_sampled(completion, trajectory.token_ids)
    return grown


def sampled(model: Any) -> list[Rollout]:
    vision = vision_kit.vision()

    async def run() -> list[Rollout]:
        settings = TransformersSettings(max_rows=3)
        engine = TransformersEngine(model, settings, vision, record_routes=True)
        try:
            return await asyncio.gather(*(sample(engine, number) for number in range(4)))
        finally:
            await engine.aclose()

    return asyncio.run(run())


def own_pass(model: Any, trajectory: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprobs [T - 1] and experts [T, L, K] of transformers' own pass over the pixels."""
    tokens = torch.tensor([list(trajectory.token_ids)])
    routers = find_routers(model)
    experts_TLK = torch.zeros((tokens.shape[1], routers.layers, routers.top_k), dtype=torch.long)

    def record(router: Any, experts: torch.Tensor) -> None:
        experts_TLK[:, router.layer] = experts.reshape(tokens.shape[1], -1)

    pictures = [picture_of(placed.image) for placed in trajectory.images]
    pixels = vision_kit.vision()._processor(images=pictures, return_tensors="pt")
    kinds = torch.zeros_like(tokens)
    for placed in trajectory.images:
        kinds[0, placed.start : placed.end] = 1
    model.model.rope_deltas = None
    with torch.no_grad(), intercepting(model, routers.routers, record):
        logits = model(input_ids=tokens, use_cache=False, mm_token_type_ids=kinds, **pixels).logits
    logprobs = logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    return logprobs, experts_TLK


def scores(model: Any, rollouts: list[Rollout], share: SharePrefix, budget: int) -> dict:
    """Sequence key -> logprobs of its sampled tokens, with their recorded experts."""
    scorer = Scorer(
        model,
        temperature=1.0,
        logits_budget_mb=64,
        share_prefix=share,
        vision=vision_kit.vision(),
        replays_routes=True,
    )
    assert scorer.packed
    sequences = [s for one in rollouts for s in make_sequences(one, replays_routes=True)]
    by_key = {}
    with torch.no_grad(), scorer.ready():
        for microbatch in scorer.pack(sequences, budget, torch.device("cpu")):
            logprobs_S, _ = scorer(microbatch)
            lengths = [one.sampled_length for one in microbatch.sequences]
            for one, own in zip(microbatch.sequences, logprobs_S.split(lengths), strict=True):
                by_key[one.key] = own
    return by_key


def with_next_experts(rollout: Rollout) -> None:
    """Replace every recorded expert by the next one of the four."""
    (trajectory,) = rollout.trajectories
    for place, span in enumerate(trajectory.spans):
        if span.routes is not None:
            experts = (np.frombuffer(span.routes.experts, dtype="<u2") + 1) % 4
            routes = Routes(
                experts=experts.astype("<u2").tobytes(),
                layers=span.routes.layers,
                top_k=span.routes.top_k,
            )
            trajectory.spans[place] = replace(span, routes=routes)


@pytest.mark.parametrize("share", [SharePrefix.never, SharePrefix.always])
def test_experts_of_rollouts_with_images_are_recorded_and_replayed(share: SharePrefix) -> None:
    model = vision_kit.model(kind=KIND)
    rollouts = sampled(model)
    replayed = scores(model, rollouts, share, budget=10_000)
    assert len(replayed) == 4
    for sequence in (s for one in rollouts for s in make_sequences(one, replays_routes=True)):
        logprobs, experts_TLK = own_pass(model, sequence.trajectory)
        places = sequence.targets_S
        recorded = sequence.routes.experts_RLK.long().sort(-1).values
        assert sequence.routes.positions_R.equal(places)
        assert recorded.equal(experts_TLK[places].sort(-1).values)
        torch.testing.assert_close(replayed[sequence.key], logprobs[places], atol=1e-4, rtol=0)

    for one in rollouts:
        with_next_experts(one)
    alone = scores(model, rollouts, SharePrefix.never, budget=1)
    packed = scores(model, rollouts, share, budget=10_000)
    for key, logprobs_S in alone.items():
        assert (logprobs_S - replayed[key]).abs().max() > 0.05
        torch.testing.assert_close(packed[key], logprobs_S, atol=1e-4, rtol=0)
