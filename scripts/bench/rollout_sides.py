"""What scripts/bench/rollout.py measures: our loop, TRL's, and vLLM's engine alone."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from tools import Scenario, turns
from transformers import Qwen3Config, Qwen3ForCausalLM

from agenttrain.chat.chat import Chat
from agenttrain.engines.config import Sampling
from agenttrain.engines.vllm.engine import VllmEngine
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.collector import Collected, Collector, collect
from agenttrain.rollout.config import RolloutConfig
from agenttrain.rollout.request import BatchRequest
from agenttrain.tools.config import ToolLimits
from agenttrain.tools.tool import FunctionTool
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import Completion, Finish, Rollout, Task

CONTEXT = 8192
PROMPT_WORDS = 520
PLAIN = 300
"""From here on, the tokenizer's ids are plain text."""
MEDIAN_TOKENS, SIGMA_TOKENS, LEAST, MOST = 32, 1.2, 8, 1024
GROUP = 8
TOOLS = {"instant": (0.0, 0.0), "fast": (0.005, 0.0), "50ms": (0.05, 1.0), "slow": (0.25, 1.0)}
"""Median in seconds and sigma of the log-normal time that a tool takes."""
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
    rollouts: list[Rollout]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlMeasured:
    """TRL's first generation and tool loop."""

    time: Time
    steps: int
    """Decode steps of the engine."""
    completion_ids: list[list[int]]
    """Tokens of each rollout after its prompt."""
    tool_masks: list[list[int]]
    """1 for each of them that counts as sampled, 0 for a reply's."""


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
        self, token_ids: Sequence[int], sampling: Sampling, *, session: str, **others: Any
    ) -> Completion:
        """As `Engine.generate`; a session ends with the rollout's group and its number therein."""
        group, sample = map(int, session.split("-")[-2:])
        rollout = group * GROUP + sample
        turn = len(self.sent[rollout])
        self.sent[rollout].append(list(token_ids))
        length = self._plan.lengths[rollout][turn]
        drawn = await self._engine.generate(
            token_ids, Sampling(max_tokens=length, seed=rollout), session=session, **others
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


def make_plan(
    chat: Chat, tokenizer: Any, rollouts: int, turns: int, *, tool: str, seed: int = 0
) -> Plan:
    """Drawn with one seed; `tool` of TOOLS."""
    draw = random.Random(turns + 1000 * seed)
    median_s, sigma_s = TOOLS[tool]
    seconds = [
        [median_s * draw.lognormvariate(0, sigma_s) for _ in range(turns - 1)]
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

    request = BatchRequest(tasks=tasks, samples=GROUP, sampling=Sampling(), seed_path=(0, "bench"))

    async def run() -> Collected:
        with timed(times):
            done = await collect(collector, request)
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
        rollouts=collected.rollouts,
    )


def cached_at_first(engine: VllmEngine, plan: Plan, runner: asyncio.Runner) -> int:
    """Prompt tokens that the cache serves in the first turn: those of another rollout."""
    cached = engine.stats.cached_tokens

    async def first() -> None:
        one = Sampling(max_tokens=1)
        await asyncio.gather(*(engine.generate(ids, one, session="") for ids in plan.prompts))

    runner.run(first())
    return engine.stats.cached_tokens - cached


def trls(engine: VllmEngine, trainer: Any, plan: Plan) -> TrlMeasured:
    """TRL's tool loop, its first generation included."""
    from trl.chat_template_utils import parse_response
    from trl.generation.vllm_generation import extract_logprobs

    tool = plan.scenario.tool(blocking=False)
    count = len(plan.prompts)
    trainer.tools = [tool]
    trainer._sync_tool_dicts = [{} for _ in range(count)]
    trainer._async_tool_dicts = [{"wait": tool} for _ in range(count)]
    turns_, steps = itertools.count(), 0
    # What TRL's vLLM decodes every token with; it does not ask for requests without.
    engine._driver.llm.output_processor.tokenizer = trainer._tokenizer

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
    # Its requests have no seeds: the same texts each time, or one is now and then read as no call.
    torch.manual_seed(0)
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
    return TrlMeasured(time=times[0], steps=steps, tool_masks=result[0], completion_ids=result[2])


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
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        llm.add_request(str(index), {"prompt_token_ids": ids}, parameters)
    while llm.has_unfinished_requests():
        steps += 1
        for output in llm.step():
            outputs[int(output.request_id)] = output
    return [outputs[index] for index in range(len(prompt_ids))], steps


def as_ours(tokens: int, *, seed: int) -> Any:
    """The `SamplingParams` of a request that samples so many tokens, as `VllmEngine` asks."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=tokens,
        seed=seed,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def alone(engine: VllmEngine, sent: list[list[list[int]]], lengths: list[list[int]]) -> Time:
    """vLLM's own engine with these requests; a turn's comes when the turn before is sampled."""
    llm = engine._driver.llm

    def add(rollout: int, turn: int) -> None:
        parameters = as_ours(lengths[rollout][turn], seed=rollout)
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


def decode_step_s(engine: VllmEngine, prompt: list[int], rows: int) -> float:
    """Seconds of a decode step with so many rows, the mean of 40."""
    llm, mixed, measured = engine._driver.llm, 20, 40

    def run() -> float:
        for row in range(rows):
            parameters = as_ours(2 * mixed + measured, seed=row)
            llm.add_request(str(row), {"prompt_token_ids": prompt}, parameters)
        for _ in range(mixed):  # prompts are read
            llm.step()
        started = time.perf_counter()
        for _ in range(measured):
            llm.step()
        seconds = time.perf_counter() - started
        while llm.has_unfinished_requests():
            llm.step()
        return seconds / measured

    return on_engine(engine, run)


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
