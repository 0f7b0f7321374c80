"""Overhead of the tool loop per turn, in microseconds of one core, by length of the history.

Measured with the scripted engine and a tool that returns at once, so that what remains is the
loop's own work: budget, ledger, parsing, tool dispatch, rendering of the suffix. The figures:

    turn_overhead_us_200      a whole turn at a history of 200 tokens (median of rollouts)
    turn_overhead_us_20000    the same at 20,000 tokens
    suffix_parse_us_200       suffix and parse alone
    suffix_parse_us_20000     the same at 20,000 tokens
    suffix_parse_us_200000    the same at 200,000 tokens
    full_render_us_20000      side by side: rendering and tokenising the whole conversation once,
                              what a loop without incremental suffixes pays per turn
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import replace

import harness
from transformers import AutoTokenizer

from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.loading import load_chat
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.config import RolloutConfig, RolloutRequest
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.tools.tool import FunctionTool
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import Finish, Origin, Rollout, Task
from agenttrain.utils.model_path import model_folder

TURNS = 16
CALL = (
    '<tool_call>\n{"name": "echo", "arguments": {"text": "SELECT price"}}\n</tool_call><|im_end|>'
)


async def echo(text: str) -> str:
    """Return the text.

    Args:
        text: What to return.
    """
    return text


def measure(quick: bool) -> dict[str, float]:
    """All figures; `quick` repeats less."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder("bundled:shop"))
    chat = load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig())
    toolbox = Toolbox({"echo": FunctionTool(echo)})
    repeats = 5 if quick else 30
    figures = {
        f"turn_overhead_us_{history}": asyncio.run(turn_us(chat, toolbox, history, repeats))
        for history in (200, 20_000)
    }
    for history in (200, 20_000, 200_000):
        figures[f"suffix_parse_us_{history}"] = suffix_parse_us(chat, toolbox, history, repeats)
    figures["full_render_us_20000"] = render_us(chat, toolbox, 20_000, 3 if quick else 10)
    return figures


async def turn_us(chat: Chat, toolbox: Toolbox, history: int, repeats: int) -> float:
    """Microseconds per turn: rollouts of 16 turns less rollouts of one, over 15 turns."""
    call = tuple(chat.encoder.encode(CALL))
    task = Task(task_id="bench", messages=({"role": "user", "content": "go"},))
    prompt = (chat.prompt_ids(task.messages, toolbox.schemas()) * history)[:history]
    limits = RolloutConfig(max_turns=TURNS, max_completion_tokens=10**6, max_turn_tokens=512)

    async def seconds(turns: int) -> float:
        engine = ScriptedEngine(lambda *_: call, max_context=10**7)
        started = time.perf_counter()
        await run_rollout(
            RolloutRequest(task=task, prompt_ids=prompt),
            RolloutContext(
                engine=engine, chat=chat, toolbox=toolbox, limits=replace(limits, max_turns=turns)
            ),
        )
        return time.perf_counter() - started

    await seconds(TURNS)
    long = statistics.median([await seconds(TURNS) for _ in range(repeats)])
    short = statistics.median([await seconds(1) for _ in range(repeats)])
    return (long - short) / (TURNS - 1) * 1e6


def suffix_parse_us(chat: Chat, toolbox: Toolbox, history: int, repeats: int) -> float:
    """Microseconds to parse a call, make the suffix of its reply and append it to the ledger."""
    ids = chat.encoder.encode(CALL)
    schemas = toolbox.schemas()
    rollout = Rollout(task=Task(task_id="bench", messages=()), rollout_id="bench")
    rollout.trajectories[0].append_context(
        (chat.encode_plain("lamp ") * history)[:history], Origin.prompt
    )
    times = []
    for index in range(repeats * 20):
        started = time.perf_counter()
        turn = chat.parse(ids, schemas, turn=index)
        reply = {"role": "tool", "tool_call_id": turn.calls[0].id, "content": f"{index}, lamp"}
        suffix = chat.suffix(
            turn, [reply], completion_ids=ids, finish=Finish.stop, generation_prompt=True
        )
        for origin, token_ids in suffix:
            rollout.trajectories[0].append_context(token_ids, origin)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def render_us(chat: Chat, toolbox: Toolbox, history: int, repeats: int) -> float:
    """Microseconds to render and tokenise a whole conversation of about `history` tokens."""
    exchange = [
        {"role": "user", "content": "how much does the lamp cost? " * 10},
        {"role": "assistant", "content": "it costs 17 " * 10},
    ]
    one = len(chat.prompt_ids(exchange, toolbox.schemas()))
    conversation = exchange * max(history // one, 1)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        chat.prompt_ids(conversation, toolbox.schemas())
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    harness.run(__doc__ or "", measure)
