"""Rollouts whose tools take their time: what the tool loop adds to the slowest rollout.

Scenario: 64 rollouts of 2 to 8 turns, one call in every turn but the last. A call takes a
log-normal time, median 50 ms, sigma 1, drawn beforehand: all sides wait for the same times. The
answers are scripted, so that sampling costs nothing; what is measured is `collect`, with prompts,
ledgers and a reward. `critical` is the largest sum of one rollout's tool times: no loop can be
faster.

    critical_path_s               seconds of the slowest of 64 rollouts, its tools alone
    wall_over_critical            wall / critical, asynchronous tool
    wall_over_critical_blocking   the same with a blocking one (`time.sleep`), in threads
    wall_over_critical_1000       1000 rollouts at once, asynchronous
    wall_over_critical_1000_blocking
    cpu_us_per_turn_1000          CPU microseconds of the process per turn of these, asynchronous:
                                  times the turns, over the critical path, no wall can be less
    cpu_us_per_turn_1000_blocking
    loop_lag_1000_s               longest stop of the event loop with 1000 rollouts, asynchronous

Beside TRL, with 64 rollouts of 4 calls each, in the same run:

    trl_critical_path_s           seconds of the slowest of them, its tools alone
    trl_async_s, trl_sync_s       through TRL's loop
    speedup_vs_trl_async          trl_async_s / our wall, asynchronous tool
    speedup_vs_trl_sync           trl_sync_s / our wall, blocking tool

TRL's side is `GRPOTrainer._tool_call_loop` of the installed TRL (1.16), not ours rewritten. The
trainer is made without its __init__, and bound are: `_generate_single_turn` (the same scripted
completions, by how many turns a prompt has had), the tokenizer with TRL's own Qwen3 template and
response schema, the tool dictionaries that `_generate_and_score_completions` fills, the event loop
that __init__ starts (`start_event_loop_in_daemon`), and plain limits that nothing here reaches. The
prompts' tokenisation and all that follows the loop are left out of its time.

With the transformers engine and the bundled agent, 64 rollouts of its own task whose `sql` takes
such times (median of 50 ms):

    transformers_wall_s           wall, rollout.deterministic=false
    transformers_wall_lockstep_s  wall, rollout.deterministic=true: bits repeat, replies are awaited
    transformers_alone_s          wall where the tool takes no time
    transformers_critical_s       largest sum of one rollout's tool times
    transformers_wall_over_bound  transformers_wall_s / the larger of the last two
"""

from __future__ import annotations

import asyncio
import copy
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
from transformers import AutoTokenizer

from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.loading import load_chat
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.collector import Collector, collect
from agenttrain.rollout.config import RolloutConfig
from agenttrain.rollout.request import BatchRequest
from agenttrain.runs.loading import make_engine, make_policy
from agenttrain.runs.setup import prepare
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.tools.config import ToolLimits
from agenttrain.tools.tool import FunctionTool, Tool
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import Rollout, Task, ToolContext
from agenttrain.utils.model_path import model_folder

MEDIAN_S, SIGMA, TURNS = 0.05, 1.0, 8
ANSWER = "It is done.<|im_end|>"
PLAIN = 300
"""From here on, the tokenizer's ids are plain text."""
MESSAGE = {"role": "user", "content": "go"}


@dataclass(frozen=True, slots=True)
class Scenario:
    """The tool times of every rollout, one per call."""

    seconds: list[list[float]]

    @property
    def critical_s(self) -> float:
        """The slowest rollout's."""
        return max(map(sum, self.seconds))

    def text(self, rollout: int, turn: int) -> str:
        """What the model says."""
        if turn == len(self.seconds[rollout]):
            return ANSWER
        arguments = f'{{"rollout": {rollout}, "turn": {turn}}}'
        call = f'{{"name": "wait", "arguments": {arguments}}}'
        return f"<tool_call>\n{call}\n</tool_call><|im_end|>"

    def tool(self, *, blocking: bool) -> Callable[..., Any]:
        """The tool `wait`, of either kind."""

        def wait(rollout: int, turn: int) -> str:
            """Wait.

            Args:
                rollout: Whose call it is.
                turn: Which call of it.
            """
            time.sleep(self.seconds[rollout][turn])
            return "done"

        async def wait_async(rollout: int, turn: int) -> str:
            await asyncio.sleep(self.seconds[rollout][turn])
            return "done"

        wait_async.__name__, wait_async.__doc__ = wait.__name__, wait.__doc__
        return wait if blocking else wait_async


def scenario(rollouts: int, calls: int | None = None) -> Scenario:
    """Drawn with one seed: the same for all sides and runs; `calls` each, or from 1 to 7."""
    draw = random.Random(0)
    return Scenario(
        [
            [
                draw.lognormvariate(math.log(MEDIAN_S), SIGMA)
                for _ in range(calls or draw.randint(1, TURNS - 1))
            ]
            for _ in range(rollouts)
        ]
    )


def turns(rollout: Rollout) -> float:
    """The number of turns, as a reward."""
    return float(rollout.turns)


def measure(quick: bool) -> dict[str, float]:
    """All figures; `quick` repeats less."""
    tokenizer = copy.copy(AutoTokenizer.from_pretrained(model_folder("bundled:shop")))
    trl = make_trl(tokenizer)
    chat = load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig())
    repeats = 1 if quick else 5
    few, many = scenario(64), scenario(1000)
    walls = {b: median_of(chat, few, b, 2 * repeats + 1).wall_s for b in (False, True)}
    async_1000, blocking_1000 = (median_of(chat, many, b, repeats) for b in (False, True))
    turns_1000 = sum(len(seconds) + 1 for seconds in many.seconds)
    same = scenario(64, 4)
    trl_s = {blocking: trl_wall(trl, same, blocking) for blocking in (False, True)}
    beside = {b: median_of(chat, same, b, 2 * repeats + 1).wall_s for b in (False, True)}
    return {
        "critical_path_s": few.critical_s,
        "wall_over_critical": walls[False] / few.critical_s,
        "wall_over_critical_blocking": walls[True] / few.critical_s,
        "wall_over_critical_1000": async_1000.wall_s / many.critical_s,
        "wall_over_critical_1000_blocking": blocking_1000.wall_s / many.critical_s,
        "cpu_us_per_turn_1000": 1e6 * async_1000.cpu_s / turns_1000,
        "cpu_us_per_turn_1000_blocking": 1e6 * blocking_1000.cpu_s / turns_1000,
        "loop_lag_1000_s": async_1000.loop_lag_s,
        "trl_critical_path_s": same.critical_s,
        "trl_async_s": trl_s[False],
        "trl_sync_s": trl_s[True],
        "speedup_vs_trl_async": trl_s[False] / beside[False],
        "speedup_vs_trl_sync": trl_s[True] / beside[True],
        **transformers(quick),
    }


def median_of(chat: Chat, plan: Scenario, blocking: bool, repeats: int) -> Timed:
    """Median seconds of `collect`, and the longest stop of its event loop."""
    measured = [ours(chat, plan, blocking) for _ in range(repeats)]
    return Timed(
        statistics.median(timed.wall_s for timed in measured),
        statistics.median(timed.cpu_s for timed in measured),
        max(timed.loop_lag_s for timed in measured),
        measured[0].turns,
    )


def ours(chat: Chat, plan: Scenario, blocking: bool) -> Timed:
    """One `collect`."""
    count = len(plan.seconds)
    ids: dict[str, tuple[int, ...]] = {}

    def answer(token_ids: Sequence[int], session: str, turn: int) -> tuple[int, ...]:
        text = plan.text(int(session.split("-")[-2]), turn)
        if text not in ids:
            ids[text] = tuple(chat.encoder.encode(text))
        return ids[text]

    for index, seconds in enumerate(plan.seconds):  # a real engine's answers are ids already
        for turn in range(len(seconds) + 1):
            answer((), f"-{index}-0", turn)
    tool = FunctionTool(plan.tool(blocking=blocking))
    limits = {"wait": ToolLimits(timeout_s=60.0, concurrency=count)}
    collector = Collector(
        engine=ScriptedEngine(answer, max_context=10**5),
        chat=chat,
        toolbox=Toolbox({"wait": tool}, limits=limits, threads=count),
        rubric=Rubric({"turns": turns}, {"turns": 1.0}),
        limits=RolloutConfig(max_turns=TURNS, max_completion_tokens=10**5, concurrency=count),
    )
    tasks = [
        # No two tasks of a data set are the same.
        Task(task_id=str(i), messages=({"role": "user", "content": f"go, {i}"},))
        for i in range(count)
    ]
    timed = asyncio.run(run(collector, tasks, 1))
    assert timed.turns == [len(s) + 1 for s in plan.seconds]
    return timed


@dataclass(frozen=True, slots=True)
class Timed:
    """One `collect`."""

    wall_s: float
    cpu_s: float
    """Of all threads."""
    loop_lag_s: float
    turns: list[int]


async def run(collector: Collector, tasks: Sequence[Task], samples: int) -> Timed:
    """All rollouts of the tasks."""
    request = BatchRequest(
        tasks=tasks, samples=samples, sampling=Sampling(), seed_path=(0, "bench")
    )
    started, cpu = time.perf_counter(), time.process_time()
    collected = await collect(collector, request)
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    await collector.toolbox.aclose()
    # asyncio.run would spend seconds on the repr of what a large result returned here.
    return Timed(wall, cpu, collected.loop_lag_s, [r.turns for r in collected.rollouts])


def make_trl(tokenizer: Any) -> Any:
    """TRL's trainer with what its tool loop reads; the template becomes TRL's, also for us."""
    import trl
    from trl.chat_template_utils import add_response_schema
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import start_event_loop_in_daemon

    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text()
    add_response_schema(tokenizer)
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    _, trainer.async_loop, ready = start_event_loop_in_daemon(name="bench")
    ready.wait()
    trainer.processing_class = trainer._tokenizer = tokenizer
    trainer.chat_template = (templates / "qwen3_training.jinja").read_text()
    trainer.chat_template_kwargs = {}
    trainer.environment_factories = None
    trainer._is_vlm = trainer.use_vllm = False
    trainer.max_tool_calling_iterations = TURNS
    trainer.max_completion_length = 10**5
    trainer.model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**6))
    return trainer


def trl_wall(trainer: Any, plan: Scenario, blocking: bool) -> float:
    """Seconds of `_tool_call_loop` for the scenario."""
    from trl.chat_template_utils import parse_response

    tokenizer, count = trainer._tokenizer, len(plan.seconds)
    tool = plan.tool(blocking=blocking)
    trainer.tools = [tool]
    trainer._sync_tool_dicts = [{"wait": tool} if blocking else {} for _ in range(count)]
    trainer._async_tool_dicts = [{} if blocking else {"wait": tool} for _ in range(count)]
    prompts = [[dict(MESSAGE)] for _ in range(count)]
    # The first token of a prompt tells whose it is; nothing else looks at it.
    prompt_ids = [[PLAIN + index, *tokenizer.encode("go<|im_end|>")] for index in range(count)]
    begins = tokenizer.encode("<tool_response>")[0]

    def generate(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[Any], None]:
        texts = [plan.text(ids[0] - PLAIN, ids.count(begins)) for ids in prompt_ids]
        return [tokenizer.encode(text) for text in texts], None

    trainer._generate_single_turn = generate
    started = time.perf_counter()
    completion_ids, _ = generate(prompt_ids)
    completions = [
        [parse_response(tokenizer, ids, prefix=prompt, tools=[tool])]
        for ids, prompt in zip(completion_ids, prompt_ids, strict=True)
    ]
    result = trainer._tool_call_loop(
        prompts, prompt_ids, completion_ids, completions, None, None, {}
    )
    wall = time.perf_counter() - started
    calls, failures = result[4:6]
    assert (calls, failures) == (sum(map(len, plan.seconds)), 0)
    return wall


class Slow:
    """A tool that takes a drawn time, which depends on the rollout and the turn only."""

    def __init__(self, tool: Tool, scale: float) -> None:
        self.name, self.schema = tool.name, tool.schema
        self.waited: dict[str, float] = {}
        self._tool, self._scale = tool, scale

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> object:
        """Wait, then call the tool itself."""
        draw = random.Random(f"{context.rollout_id} {context.turn}")
        seconds = self._scale * draw.lognormvariate(math.log(MEDIAN_S), SIGMA)
        self.waited[context.rollout_id] = self.waited.get(context.rollout_id, 0.0) + seconds
        await asyncio.sleep(seconds)
        return await self._tool(arguments, context)

    async def release(self, rollout_id: str) -> None:
        """Free what the tool holds for a rollout."""
        release = getattr(self._tool, "release", None)
        if release is not None:
            await release(rollout_id)


def transformers(quick: bool) -> dict[str, float]:
    """The bundled agent with its own engine."""
    repeats = 1 if quick else 3
    with hydra_session(Source()):
        config = compose_run(["tracker.console=false"], Source()).config
    prepared = prepare(config)
    policy = make_policy(config, config.algorithm, temperature=config.rollout.temperature)
    sampling = prepared.collector(make_engine(config, policy, None, verb="train"))
    tasks = prepared.tasks.train.tasks(0, 8)

    def wall(scale: float, deterministic: bool) -> tuple[float, float]:
        slow = Slow(prepared.toolbox.tool("sql"), scale)
        tools = {"sql": slow, "final_answer": prepared.toolbox.tool("final_answer")}
        collector = replace(
            sampling,
            toolbox=Toolbox(tools, stop_tools=["final_answer"]),
            limits=replace(config.rollout, max_turns=TURNS, deterministic=deterministic),
        )
        return asyncio.run(run(collector, tasks, 8)).wall_s, max(slow.waited.values())

    wall(0.0, False)  # warms up
    alone, free, lockstep = (
        min(wall(scale, deterministic) for _ in range(repeats))
        for scale, deterministic in ((0.0, False), (1.0, False), (1.0, True))
    )
    return {
        "transformers_wall_s": free[0],
        "transformers_wall_lockstep_s": lockstep[0],
        "transformers_alone_s": alone[0],
        "transformers_critical_s": free[1],
        "transformers_wall_over_bound": free[0] / max(alone[0], free[1]),
    }


if __name__ == "__main__":
    harness.run(__doc__ or "", measure)
