"""The parts of gpu.py with vLLM in this process, alone and through `VllmEngine`.

`sampling`, `sampling_1024`: 256 and 1,024 requests at once, of 128 random ids and 256 sampled
tokens each, on one engine. `raw` is what vLLM's `LLM.generate` does, on the thread that steps the
engine; `agenttrain` is `VllmEngine.generate`, a coroutine for each request. Settings:

    none       neither seeds nor log-probabilities (raw alone: the engine always returns them)
    seed       a seed for each request (raw alone)
    logprobs   the log-probability of each sampled token
    both       seeds and log-probabilities, as a run asks for them

Figures: sampled tokens per second in each round, all sides in turns after a warm-up with both, and
`agenttrain_over_raw`, the median over the rounds of the quotient with the same settings.

`sync`: weight syncs of the bundled agent (0.65 million parameters) and of the model of `--shape`,
whose weights change in between. Figures, medians over the syncs after the first, whose own are
under `first`:

    seconds         of the whole sync
    send, load, probe, check    of its parts, as `time/sync_<part>_s`
    gap             mean gap of the probe, in nats
    parameters, bytes           of what is sent

`kernel` is vLLM's attention backend.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from gpu_step import TINY, VOCABULARY, build_model

from agenttrain.engines.config import Sampling
from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.engines.vllm.engine import VllmEngine
from agenttrain.training.config import WeightSyncConfig
from agenttrain.training.weight_sync import SyncProbe, sync
from agenttrain.utils.model_path import model_folder

PROMPT, SAMPLED = 128, 256
SETTINGS = {"none": (), "seed": ("seed",), "logprobs": ("logprobs",), "both": ("seed", "logprobs")}
OURS = ("logprobs", "both")
"""Settings that `VllmEngine` has."""
ROUNDS, QUICK_ROUNDS = 2, 1
SYNCS, QUICK_SYNCS = 8, 3


def build_engine(folder: Path, dtype: str, *, max_context: int = 1024) -> VllmEngine:
    """Return an engine with a model of a folder."""
    # On a CPU vLLM's default is half of the machine's memory.
    size = {"memory_share": 0.4} if torch.cuda.is_available() else {"kv_cache_mb": 256}
    return VllmEngine(folder, VllmSettings(max_context=max_context, **size), dtype=dtype)


def backend(engine: VllmEngine) -> str:
    """Return the name of vLLM's attention backend."""
    model = engine._driver.llm.model_executor.driver_worker.worker.get_model()
    names = {
        module.get_attn_backend().get_name()
        for module in model.modules()
        if hasattr(module, "get_attn_backend")
    }
    return ",".join(sorted(names)) or "unknown"


def measure_sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Measure tokens per second of 256 requests."""
    return sample(options, 8 if options.quick else 256)


def measure_sampling_1024(options: argparse.Namespace) -> dict[str, Any]:
    """Measure tokens per second of 1,024 requests."""
    return sample(options, 32 if options.quick else 1024)


def sample(options: argparse.Namespace, count: int) -> dict[str, Any]:
    """Measure tokens per second of `count` requests at once."""
    vocabulary = TINY["vocabulary"] if options.shape == "tiny" else VOCABULARY
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    sampled = 8 if options.shape == "tiny" else SAMPLED
    draw = random.Random(0)
    prompts = [[draw.randrange(10, vocabulary) for _ in range(PROMPT)] for _ in range(count)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        build_model(options.shape, vocabulary, device).save_pretrained(folder)
        gc.collect()
        torch.cuda.empty_cache()  # of the model, which is in the folder
        engine = build_engine(Path(folder), "bfloat16")
        sides: dict[str, Callable[[int], None]] = {
            f"raw/{name}": partial(sample_raw, engine, prompts, sampled, settings)
            for name, settings in SETTINGS.items()
        }
        for name in OURS:
            seeded = "seed" in SETTINGS[name]
            sides[f"agenttrain/{name}"] = partial(
                sample_ours, engine, runner, prompts, sampled, seeded
            )
        figures = {
            "kernel": backend(engine),
            "requests": count,
            **rates(sides, rounds, count * sampled, engine),
        }
        runner.run(engine.aclose())
    return figures


def rates(
    sides: dict[str, Callable[[int], None]], rounds: int, tokens: int, engine: VllmEngine
) -> dict[str, Any]:
    """Return each side's tokens per second by round, and ours over vLLM's."""
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(-1, rounds):
        for name, side in sides.items():
            if round_ < 0 and not name.endswith("/both"):  # warms up
                continue
            engine._stepper.call(engine._driver.llm.reset_prefix_cache).result()
            started = time.perf_counter()
            side(round_ * 10_000)
            rate = tokens / (time.perf_counter() - started)
            if round_ >= 0:
                measured[name].append(rate)
            print(f"round {round_} {name:20} {rate:9.0f} tokens/s", flush=True)
    over_raw = {
        name: statistics.median(
            ours / raw
            for ours, raw in zip(
                measured[f"agenttrain/{name}"], measured[f"raw/{name}"], strict=True
            )
        )
        for name in OURS
    }
    return {"tokens_per_s": measured, "agenttrain_over_raw": over_raw}


def sample_raw(
    engine: VllmEngine, prompts: list[list[int]], tokens: int, settings: tuple[str, ...], seed: int
) -> None:
    """Do what `LLM.generate` does, on the thread that steps the engine."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = engine._driver.llm

    def generate() -> int:
        for index, ids in enumerate(prompts):
            more: dict[str, Any] = {}
            if "seed" in settings:
                more["seed"] = seed + index
            if "logprobs" in settings:
                more |= {"logprobs": 0, "flat_logprobs": True}
            parameters = SamplingParams(
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                **more,
            )
            llm.add_request(str(index), {"prompt_token_ids": ids}, parameters)
        sampled = 0
        while llm.has_unfinished_requests():
            sampled += sum(len(output.outputs[0].token_ids) for output in llm.step())
        return sampled

    assert engine._stepper.call(generate).result() == tokens * len(prompts)


def sample_ours(
    engine: VllmEngine,
    runner: asyncio.Runner,
    prompts: list[list[int]],
    tokens: int,
    seeded: bool,
    seed: int,
) -> None:
    """Await a completion of each prompt."""

    async def generate() -> None:
        completions = await asyncio.gather(
            *(
                engine.generate(
                    ids,
                    Sampling(max_tokens=tokens, seed=seed + index if seeded else None),
                    session=str(index),
                )
                for index, ids in enumerate(prompts)
            )
        )
        assert all(len(completion.token_ids) == tokens for completion in completions)

    runner.run(generate())


def measure_sync(options: argparse.Namespace) -> dict[str, Any]:
    """Measure weight syncs of the bundled agent and of the shape."""
    syncs = options.rounds or (QUICK_SYNCS if options.quick else SYNCS)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bundled = model_folder("bundled:shop")
    agent = transformers.AutoModelForCausalLM.from_pretrained(bundled).to(device).eval()
    figures = {"bundled": measure_model(bundled, agent, "float32", syncs)}
    del agent
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = TINY["vocabulary"] if options.shape == "tiny" else VOCABULARY
        model = build_model(options.shape, vocabulary, device)
        model.save_pretrained(folder)
        figures[options.shape] = measure_model(Path(folder), model, "bfloat16", syncs)
    return figures


def measure_model(folder: Path, model: Any, dtype: str, syncs: int) -> dict[str, Any]:
    """Measure weight syncs of a model."""
    draw = random.Random(0)
    prompt = [draw.randrange(model.config.vocab_size) for _ in range(PROMPT)]
    measured: list[dict[str, float]] = []
    probe: SyncProbe | None = None
    with asyncio.Runner() as runner:
        engine = build_engine(folder, dtype)
        kernel = backend(engine)
        for version in range(1, syncs + 2):
            change_weights(model, seed=version)
            started = time.perf_counter()
            probe = runner.run(
                sync(
                    SimpleNamespace(model=model),  # all that it reads of a policy
                    engine,
                    version,
                    WeightSyncConfig(),
                    probe,
                    prompt_ids=prompt,
                )
            )
            seconds = time.perf_counter() - started
            assert probe is not None
            metrics = {**probe.metrics(), **engine.metrics()}
            parts = {
                part: metrics[f"time/sync_{part}_s"] for part in ("send", "load", "probe", "check")
            }
            measured.append({"seconds": seconds, **parts, "gap": probe.gap.mean})
            print(f"sync {version} {seconds:.3f} s {parts}", flush=True)
        form = engine.dtype.itemsize
        runner.run(engine.aclose())
    gc.collect()
    first, *others = measured
    parameters = sum(weight.numel() for weight in model.parameters())
    return {
        "kernel": kernel,
        **{name: statistics.median(one[name] for one in others) for name in first},
        "first": first,
        "parameters": parameters,
        "bytes": parameters * form,
    }


@torch.no_grad()
def change_weights(model: Any, seed: int) -> None:
    """Add noise of a hundredth of each weight's spread, as training would change it."""
    generator = torch.Generator(device=model.device).manual_seed(seed)
    for weight in model.parameters():
        noise = torch.empty_like(weight).normal_(generator=generator)
        weight.add_(noise * (weight.float().std().item() if weight.numel() > 1 else 0.0) * 0.01)
