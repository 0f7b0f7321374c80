"""10,000 rollouts in flight in one process: what the event loop, the ledger and the toolbox cost.

A rollout has a prompt of about 550 tokens and 4 turns of 70 to 79: three calls of an asynchronous
tool that returns 55 tokens, then an answer. The engine is the scripted one and answers after
0.5 s, the tool after 0.1 s: all rollouts are in flight together and wait most of the time, as they
do on an engine of many GPUs. What is measured is one `collect` in a process of its own, with
prompts (one per group of 8), suffixes, parsing, ledgers and a reward. Seconds are of the process's
CPU: other work on the machine hardly changes them. Each is the fewest of some repetitions.

    turns_per_s_10000        turns per CPU second of the process, 10,000 rollouts in flight
    turns_per_s_1000         the same with 1,000
    us_per_turn_10000        CPU microseconds of a turn, 1e6 / turns_per_s_10000
    us_per_turn_1000
    us_per_turn_growth       us_per_turn_10000 / us_per_turn_1000: 1 where nothing is quadratic
    kb_per_rollout           KiB that a rollout takes at the most, 10,000 in flight: what the
                             process's resident memory grows by, from before them to its peak
    core_share_10000         CPU seconds / wall seconds: the share of a core
    wall_over_critical_10000 wall seconds / the 2.3 s that one rollout waits for
    loop_lag_s_10000         longest stop of the event loop
    tokens_per_rollout       what it holds in the end
    bare_turns_per_s_10000   side by side: coroutines that await the same engine and the same tool
                             as often, with as many tokens, and do nothing else
    bare_kb_per_rollout      their memory
    over_bare_10000          our CPU seconds / theirs
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

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
from agenttrain.tools.config import ToolLimits
from agenttrain.tools.tool import FunctionTool
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import Rollout, Task
from agenttrain.utils.model_path import model_folder

CALLS, ENGINE_S, TOOL_S = 3, 0.5, 0.1
TURNS = CALLS + 1
CRITICAL_S = TURNS * ENGINE_S + CALLS * TOOL_S
GROUP = 8
THOUGHT = "The lamp costs more than the chair, so the price of the table is next. " * 2
CALL = '<tool_call>\n{"name": "look", "arguments": {"key": "lamp"}}\n</tool_call><|im_end|>'
FOUND = "table: 17, chair: 4, lamp: 23, shelf: 40, " * 2
QUESTION = "Which of these is the cheapest, and where does it stand? " * 20


async def look(key: str) -> str:
    """Look something up.

    Args:
        key: Its name.
    """
    await asyncio.sleep(TOOL_S)
    return FOUND


def turns(rollout: Rollout) -> float:
    """A reward."""
    return float(rollout.turns)


def make_chat() -> Chat:
    """Of the bundled model."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder("bundled:shop"))
    return load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig())


def make_engine(chat: Chat) -> ScriptedEngine:
    """Three calls, then an answer; a real engine's answers are ids already."""
    texts = [THOUGHT + CALL] * CALLS + [THOUGHT + "It is the chair.<|im_end|>"]
    script = [tuple(chat.encoder.encode(text)) for text in texts]
    return ScriptedEngine(script, delay=ENGINE_S, max_context=10**5, keeps_sent=False)


async def ours(count: int) -> dict[str, float]:
    """One `collect`."""
    chat = make_chat()
    collector = Collector(
        engine=make_engine(chat),
        chat=chat,
        toolbox=Toolbox(
            {"look": FunctionTool(look)},
            limits={"look": ToolLimits(timeout_s=600.0, concurrency=count)},
        ),
        rubric=Rubric({"turns": turns}, {"turns": 1.0}),
        limits=RolloutConfig(max_turns=TURNS, max_completion_tokens=10**5, concurrency=count),
    )
    tasks = [
        Task(task_id=str(i), messages=({"role": "user", "content": f"{QUESTION} {i}"},))
        for i in range(count // GROUP)
    ]

    request = BatchRequest(tasks=tasks, samples=GROUP, sampling=Sampling(), seed_path=(0, "bench"))

    async def work() -> dict[str, float]:
        collected = await collect(collector, request)
        assert all(rollout.turns == TURNS for rollout in collected.rollouts)
        assert len(collected.rollouts) == count
        tokens = sum(rollout.length for rollout in collected.rollouts)
        return {"loop_lag_s": collected.loop_lag_s, "tokens": tokens / count}

    return await timed(work)


async def bare(count: int) -> dict[str, float]:
    """As many awaits of the same, and as many ids."""
    chat = make_chat()
    engine, sampling = make_engine(chat), Sampling(max_tokens=512, stop_token_ids=(2,))
    prompt = array("q", chat.encode_plain(QUESTION))
    reply = array("q", chat.encode_plain(FOUND))

    async def one(session: str) -> array[int]:
        ids = prompt[:]
        for turn in range(TURNS):
            completion = await engine.generate(ids, sampling, session=session)
            ids.extend(completion.token_ids)
            if turn < CALLS:
                await look("lamp")
                ids.extend(reply)
        return ids

    async def work() -> dict[str, float]:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(str(i))) for i in range(count)]
        return {"tokens": sum(len(task.result()) for task in running) / count}

    return await timed(work)


async def timed(work: Callable[[], Awaitable[dict[str, float]]]) -> dict[str, float]:
    """What the work says, its seconds, and KiB at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _status("VmRSS")
    started, cpu = time.perf_counter(), time.process_time()
    told = await work()
    seconds = {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
    return {**told, **seconds, "kb": float(_status("VmHWM") - before)}


def _status(field: str) -> int:
    """KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def fewest(variant: str, count: int, repeats: int) -> dict[str, float]:
    """The repetition with the fewest CPU seconds, each in a process of its own."""
    command = [sys.executable, __file__, "--one", variant, str(count)]
    runs = []
    for _ in range(repeats):
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        runs.append(json.loads(output.splitlines()[-1]))
    return min(runs, key=lambda run: run["cpu_s"])


def measure(quick: bool) -> dict[str, float]:
    """All figures; `quick` repeats less."""
    repeats = 1 if quick else 3
    small, large = (fewest("ours", count, repeats) for count in (1_000, 10_000))
    beside = fewest("bare", 10_000, repeats)
    all_turns = 10_000 * TURNS
    us_small, us_large = (
        1e6 * run["cpu_s"] / (count * TURNS) for run, count in ((small, 1_000), (large, 10_000))
    )
    return {
        "turns_per_s_10000": 1e6 / us_large,
        "turns_per_s_1000": 1e6 / us_small,
        "us_per_turn_10000": us_large,
        "us_per_turn_1000": us_small,
        "us_per_turn_growth": us_large / us_small,
        "kb_per_rollout": large["kb"] / 10_000,
        "core_share_10000": large["cpu_s"] / large["wall_s"],
        "wall_over_critical_10000": large["wall_s"] / CRITICAL_S,
        "loop_lag_s_10000": large["loop_lag_s"],
        "tokens_per_rollout": large["tokens"],
        "bare_turns_per_s_10000": all_turns / beside["cpu_s"],
        "bare_kb_per_rollout": beside["kb"] / 10_000,
        "over_bare_10000": large["cpu_s"] / beside["cpu_s"],
    }


def one(arguments: Sequence[str]) -> None:
    """What a child process does."""
    variant, count = arguments
    work = {"ours": ours, "bare": bare}[variant]
    print(json.dumps(asyncio.run(work(int(count)))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2:])
    else:
        harness.run(__doc__ or "", measure)
