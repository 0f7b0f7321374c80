"""Sampling speed of the transformers engine against `model.generate` and continuous batching.

    python scripts/bench/engine.py [--quick] [--json FILE]

Workload: n concurrent rollouts of 4 turns; prompts uniform in 100-200 tokens, completions in
8-48, replies in 10-60, the same for all sides. Lengths are fixed by budgets, without stop
ids, so that all sides sample the same number of tokens. Model: the bundled one, else a random Qwen3
of that shape; float32 on CPU. Every figure is the best of several repeats that take turns.

Figures, for n = 1, 32, 128 (tokens are sampled tokens; --quick: n = 1, 32, fewer repeats):

tokens_per_s_{n}              the engine, deterministic mode (the default of training)
tokens_per_s_free_{n}         the engine, requests served as they come
tokens_per_s_generate_{n}     `model.generate` turn by turn: all rollouts' whole histories as one
                              left-padded batch, each row stopped at its budget; the batch ends with
                              its longest completion. It is not asked for log-probabilities.
tokens_per_s_continuous_32    transformers' continuous batching, one manager kept over all turns,
                              with log-probabilities (for the record: no seeds per request)
speedup_vs_generate_{n}       tokens_per_s_{n} / tokens_per_s_generate_{n}
speedup_free_vs_generate_{n}  tokens_per_s_free_{n} / tokens_per_s_generate_{n}
prefilled_tokens_{n}          ids the engine prefilled; a history is never prefilled twice
prefilled_tokens_generate_{n} ids `model.generate` prefilled, padding left out
threads                       torch's threads
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from agenttrain.engines.config import Sampling
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine

BUNDLED = Path(__file__).parents[2] / "agenttrain/data/models/shop"
TURNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One rollout's ids and lengths; replies[k] follows completion k."""

    prompt: list[int]
    budgets: list[int]
    replies: list[list[int]]


def load_model() -> Any:
    """The bundled model, or a random one of its shape."""
    if (BUNDLED / "config.json").exists():
        return Qwen3ForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    config = Qwen3Config(
        vocab_size=600,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).float().eval()


def plans(count: int, vocabulary: int, seed: int = 0) -> list[Plan]:
    """`count` rollouts with random ids."""
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(10, vocabulary) for _ in range(rng.randint(low, high))]

    return [
        Plan(
            prompt=ids(100, 200),
            budgets=[rng.randint(8, 48) for _ in range(TURNS)],
            replies=[ids(10, 60) for _ in range(TURNS)],
        )
        for _ in range(count)
    ]


async def _rollout(engine: TransformersEngine, plan: Plan, name: str) -> None:
    ids = list(plan.prompt)
    for turn, budget in enumerate(plan.budgets):
        sampling = Sampling(max_tokens=budget, seed=turn)
        completion = await engine.generate(ids, sampling, session=name)
        ids += [*completion.token_ids, *plan.replies[turn]]
    await engine.release(name)


async def _engine(model: Any, todo: list[Plan], deterministic: bool) -> tuple[float, int]:
    engine = TransformersEngine(
        model, TransformersSettings(max_rows=max(len(todo), 2), max_context=1024)
    )
    await engine.generate([1, 2], Sampling(max_tokens=1), session="warm-up")
    await engine.release("warm-up")
    before = engine.stats.prefilled_tokens
    names = [f"rollout-{i}" for i in range(len(todo))]
    start = time.perf_counter()
    if deterministic:
        engine.expect(names)
    await asyncio.gather(*map(_rollout, [engine] * len(todo), todo, names))
    seconds = time.perf_counter() - start
    await engine.aclose()
    return seconds, engine.stats.prefilled_tokens - before


class RowBudgets(StoppingCriteria):
    """Ends row i after budgets[i] tokens."""

    def __init__(self, width: int, budgets: list[int]) -> None:
        self.ends = width + torch.tensor(budgets)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def generate_turn(model: Any, histories: list[list[int]], budgets: list[int]) -> list[list[int]]:
    """One turn of all rollouts as one left-padded batch."""
    width = max(map(len, histories))
    ids = torch.tensor([[0] * (width - len(h)) + h for h in histories])
    mask = torch.tensor([[0] * (width - len(h)) + [1] * len(h) for h in histories])
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max(budgets),
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([RowBudgets(width, budgets)]),
    )
    rows = output[:, width:].tolist()
    return [row[:budget] for row, budget in zip(rows, budgets, strict=True)]


def time_generate(model: Any, todo: list[Plan]) -> tuple[float, int]:
    """(seconds, prefilled ids) of `model.generate` turn by turn."""
    histories = [list(plan.prompt) for plan in todo]
    prefilled = 0
    start = time.perf_counter()
    for turn in range(TURNS):
        prefilled += sum(map(len, histories))
        answers = generate_turn(model, histories, [plan.budgets[turn] for plan in todo])
        for history, answer, plan in zip(histories, answers, todo, strict=True):
            history += [*answer, *plan.replies[turn]]
    return time.perf_counter() - start, prefilled


def time_engine(model: Any, todo: list[Plan], *, deterministic: bool) -> tuple[float, int]:
    """(seconds, prefilled ids) of the engine."""
    return asyncio.run(_engine(model, todo, deterministic))


async def _continuous_rollout(manager: Any, plan: Plan, name: str) -> None:
    loop = asyncio.get_running_loop()
    ids = list(plan.prompt)
    for turn, budget in enumerate(plan.budgets):
        future: asyncio.Future[Any] = loop.create_future()

        def settle(output: Any, future: asyncio.Future[Any] = future) -> None:
            if output.is_finished() and not future.done():
                future.set_result(output)

        request = f"{name}-{turn}"
        manager.register_result_handler(request, settle)
        manager.add_request(ids, request_id=request, max_new_tokens=budget, eos_token_id=-1)
        ids = ids + (await future).generated_tokens + plan.replies[turn]


def time_continuous(model: Any, todo: list[Plan]) -> tuple[float, int]:
    """(seconds, 0) of transformers' continuous batching."""
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=16,
            num_blocks=2048,
            max_batch_tokens=2048,
            return_logprobs=True,
            use_cuda_graph=False,
            seed=0,
        ),
    )
    manager.start()

    async def run() -> float:
        await _continuous_rollout(manager, todo[0], "warm-up")
        start = time.perf_counter()
        names = [f"rollout-{i}" for i in range(len(todo))]
        await asyncio.gather(*map(_continuous_rollout, [manager] * len(todo), todo, names))
        return time.perf_counter() - start

    seconds = asyncio.run(run())
    manager.stop()
    manager.destroy()
    return seconds, 0


def measure(model: Any, count: int, repeats: int) -> dict[str, float]:
    """The figures of `count` concurrent rollouts."""
    todo = plans(count, model.config.vocab_size)
    sides: dict[str, Callable[[], tuple[float, int]]] = {
        "": lambda: time_engine(model, todo, deterministic=True),
        "_free": lambda: time_engine(model, todo, deterministic=False),
        "_generate": lambda: time_generate(model, todo),
    }
    runs = {side: [run()] for side, run in sides.items()}
    for _ in range(repeats - 1):
        for side, run in sides.items():
            runs[side].append(run())
    if count == 32:
        runs["_continuous"] = [time_continuous(model, todo)]
    tokens = sum(sum(plan.budgets) for plan in todo)
    speed = {side: tokens / min(seconds for seconds, _ in times) for side, times in runs.items()}
    figures = {f"tokens_per_s{side}_{count}": round(value, 1) for side, value in speed.items()}
    for side in ("", "_free"):
        ratio = speed[side] / speed["_generate"]
        figures[f"speedup{side}_vs_generate_{count}"] = round(ratio, 3)
    for side in ("", "_generate"):
        figures[f"prefilled_tokens{side}_{count}"] = runs[side][0][1]
    return figures


def main() -> None:
    """Print the figures, and write them to --json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="n = 1 and 32, two repeats")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model = load_model()
    figures: dict[str, float] = {"threads": torch.get_num_threads()}
    for count in (1, 32) if options.quick else (1, 32, 128):
        # One rollout takes a fraction of a second: more repeats, less noise.
        repeats = (2 if options.quick else 4) * (3 if count == 1 else 1)
        figures |= measure(model, count, repeats)
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
