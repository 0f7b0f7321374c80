"""engine=transformers with images: its logprobs are those of transformers' own forward pass."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import vision_kit

from agenttrain.engines.base import EngineError, ImagesRefused
from agenttrain.engines.config import Sampling
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine
from agenttrain.engines.vision import Layout
from agenttrain.types import Completion, PlacedImage
from agenttrain.utils.image_files import picture_of

PAD = vision_kit.pad()
SIZES = ((16, 8), (24, 8), (16, 16), (40, 24), (8, 8))


def with_images(rng: random.Random, images: int, text: int = 8) -> tuple[list[int], list]:
    """Random ids with so many images in random places, and the images at their positions."""
    ids: list[int] = [rng.randrange(7, 300) for _ in range(rng.randint(1, text))]
    placed = []
    for _ in range(images):
        image = vision_kit.picture(*rng.choice(SIZES), seed=rng.randrange(1000))
        placed.append(PlacedImage(image, len(ids), vision_kit.placeholders().grid(image)))
        ids += [PAD] * placed[-1].tokens
        ids += [rng.randrange(7, 300) for _ in range(rng.randint(1, text))]
    return ids, placed


def own_logprobs(
    model: torch.nn.Module, ids: Sequence[int], images: Sequence[PlacedImage], first: int
) -> torch.Tensor:
    """Logprobs of the ids from `first` on, by transformers alone: its features, its positions."""
    tokens = torch.tensor([ids])
    keywords = {}
    if images:
        made = vision_kit.vision()._processor(
            images=[picture_of(one.image) for one in images], return_tensors="pt"
        )
        kinds = torch.zeros_like(tokens)
        for one in images:
            kinds[0, one.start : one.end] = 1
        keywords = {
            "pixel_values": made["pixel_values"],
            "image_grid_thw": made["image_grid_thw"],
            "mm_token_type_ids": kinds,
        }
    model.model.rope_deltas = None
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False, **keywords).logits[0]
    scores = logits.log_softmax(-1)[first - 1 : -1]
    return scores.gather(-1, tokens[0, first:, None])[:, 0]


@pytest.mark.parametrize("kind", vision_kit.KINDS)
def test_positions_are_those_of_transformers(kind: str) -> None:
    model, rng = vision_kit.model(kind=kind), random.Random(0)
    for _ in range(30):
        ids, images = with_images(rng, rng.randint(1, 4))
        kinds = torch.zeros(1, len(ids), dtype=torch.long)
        for one in images:
            kinds[0, one.start : one.end] = 1
        grids = torch.tensor([[1, 2 * one.grid[0], 2 * one.grid[1]] for one in images])
        theirs, delta = model.model.get_rope_index(torch.tensor([ids]), kinds, grids)
        layout = Layout(tuple(images))
        ours = layout.positions(0, len(ids) + 3)
        assert np.array_equal(ours[:, : len(ids)], theirs[:, 0].numpy())
        assert (ours[:, -1] == len(ids) + 2 + int(delta)).all()
        cut = rng.randrange(len(ids) + 3)
        assert np.array_equal(layout.positions(cut, len(ids) + 3), ours[:, cut:])


async def converse(
    engine: TransformersEngine, number: int, images: int, turns: int = 3
) -> list[tuple[list[int], list[PlacedImage], Completion]]:
    """A conversation whose replies hold images too."""
    rng = random.Random(number)
    ids, placed = with_images(rng, images)
    log = []
    for turn in range(turns):
        sampling = Sampling(max_tokens=rng.randint(2, 6), seed=number * 100 + turn)
        completion = await engine.generate(ids, sampling, session=f"{number}", images=placed)
        log.append((list(ids), list(placed), completion))
        ids += completion.token_ids
        more, own = with_images(rng, rng.randint(0, 2))
        placed += [replace(one, start=one.start + len(ids)) for one in own]
        ids += more
    await engine.release(f"{number}")
    return log


@pytest.mark.parametrize("kind", vision_kit.KINDS)
def test_logprobs_are_those_of_one_forward_pass(kind: str) -> None:
    """Conversations of 0 to 3 images and more in their replies, in one batch."""
    model, vision = vision_kit.model(kind=kind), vision_kit.vision()
    engine = TransformersEngine(model, TransformersSettings(max_rows=4), vision)

    async def run() -> list:
        logs = await asyncio.gather(*(converse(engine, number, number % 4) for number in range(8)))
        await engine.aclose()
        return logs

    gap = 0.0
    shown = set()
    for log in asyncio.run(run()):
        for ids, images, completion in log:
            shown |= {one.image.sha256 for one in images}
            known = own_logprobs(model, [*ids, *completion.token_ids], images, len(ids))
            gap = max(gap, float((known - torch.tensor(completion.logprobs)).abs().max()))
    assert gap < 1e-4
    assert vision.computed == len(shown)  # once per image, over all turns


def test_the_same_ids_with_another_image_share_no_cache() -> None:
    """Rows copy from equal prompts: equal placeholders of other images are not equal."""
    model = vision_kit.model()
    engine = TransformersEngine(model, None, vision_kit.vision())
    images = [vision_kit.picture(16, 16, seed) for seed in (1, 2)]
    ids = [*range(10, 40), PAD, PAD, PAD, PAD, *range(40, 70)]

    async def run() -> list[Completion]:
        made = await asyncio.gather(
            *(
                engine.generate(
                    ids,
                    Sampling(max_tokens=4, seed=1),
                    session=f"{seed} {copy}",
                    images=[PlacedImage(image, 30, (2, 2))],
                )
                for copy in range(2)
                for seed, image in enumerate(images)
            )
        )
        await engine.aclose()
        return made

    completions = asyncio.run(run())
    assert engine.stats.copied_tokens > 0  # the copies of each
    for index, completion in enumerate(completions):
        placed = [PlacedImage(images[index % 2], 30, (2, 2))]
        known = own_logprobs(model, [*ids, *completion.token_ids], placed, len(ids))
        assert torch.allclose(known, torch.tensor(completion.logprobs), atol=1e-4)


@pytest.mark.parametrize(
    ("start", "grid"), [(0, (2, 2)), (1, (1, 4)), (1, (2, 3))], ids=["place", "grid", "more"]
)
def test_images_that_are_not_at_their_placeholders_are_refused(
    start: int, grid: tuple[int, int]
) -> None:
    engine = TransformersEngine(vision_kit.model(), None, vision_kit.vision())
    image = vision_kit.picture(16, 16)

    async def run() -> None:
        try:
            await engine.generate(
                [7, PAD, PAD, PAD, PAD, 8],
                Sampling(max_tokens=2),
                session="s",
                images=[PlacedImage(image, start, grid)],
            )
        finally:
            await engine.aclose()

    with pytest.raises(EngineError, match="has 4 placeholders"):
        asyncio.run(run())


def test_an_engine_without_vision_refuses_images() -> None:
    engine = TransformersEngine(vision_kit.model())
    image = vision_kit.picture(8, 8)
    with pytest.raises(ImagesRefused):
        asyncio.run(
            engine.generate(
                [7, PAD, 8], Sampling(), session="s", images=[PlacedImage(image, 1, (1, 1))]
            )
        )
