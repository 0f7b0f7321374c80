"""The text path with support for images: the calls that it makes are those without."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import parts
import pytest
import tiny
import torch
import training_cases
import vision_kit

from agenttrain.engines.config import Sampling
from agenttrain.engines.transformers.engine import TransformersEngine
from agenttrain.engines.vision import Vision
from agenttrain.training.batch import make_sequences
from agenttrain.training.config import SharePrefix
from agenttrain.training.logprobs import Scorer

PACKAGE = Path(__file__).parents[2] / "agenttrain"
OF_IMAGES = {
    str(PACKAGE / name)
    for name in (
        *("images.py", "engines/vision.py", "training/images.py", "tracking/pictures.py"),
        *("rollout/image_replies.py", "data/images.py", "chat/vision.py"),
    )
}


@contextmanager
def calls_of_images() -> Iterator[Counter[str]]:
    """Count the calls, in this thread, of functions in the modules of images."""
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename in OF_IMAGES:
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def text_model() -> torch.nn.Module:
    return tiny.model()


@contextmanager
def passes(module: Any) -> Iterator[list[set[str]]]:
    """The names of the arguments of each forward pass of a module."""
    made: list[set[str]] = []

    def note(_: Any, __: Any, keywords: dict[str, Any]) -> None:
        made.append({name for name, value in keywords.items() if value is not None})

    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield made
    finally:
        handle.remove()


def test_a_rollout_of_texts_calls_nothing_of_images() -> None:
    with calls_of_images() as calls:
        done = parts.rollout(parts.call("add", '{"a": 3, "b": 4}'), "7<|im_end|>")
    assert len(done.tool_results) == 1
    assert calls == Counter()


@pytest.mark.parametrize(
    ("make", "vision"),
    [(text_model, lambda: None), (vision_kit.model, vision_kit.vision)],
    ids=["a model of texts", "a model that sees"],
)
def test_texts_make_the_same_passes_and_compute_no_features(
    make: Callable[[], Any], vision: Callable[[], Vision | None]
) -> None:
    model, sees = make(), vision()
    engine = TransformersEngine(model, None, sees)

    async def sample() -> None:
        await engine.generate([7, 8, 9], Sampling(max_tokens=4, seed=0), session="s")
        await engine.aclose()

    with passes(model) as sampled:
        asyncio.run(sample())
    # The prompt, and each token but the last.
    assert len(sampled) == 4
    assert all("input_ids" in names and "inputs_embeds" not in names for names in sampled)

    scorer = Scorer(
        model,
        temperature=1.0,
        logits_budget_mb=64,
        share_prefix=SharePrefix.never,
        vision=sees,
    )
    sequences = make_sequences(training_cases.with_tool())
    with passes(model.model) as scored, calls_of_images() as calls, scorer.ready():
        for microbatch in scorer.pack(sequences, 10_000, torch.device("cpu")):
            scorer(microbatch)
    assert len(scored) == 1
    assert "input_ids" in scored[0] and "inputs_embeds" not in scored[0]
    assert calls == Counter()
    assert sees is None or sees.computed == 0
