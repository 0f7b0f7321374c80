"""Real parts for tests of the loop: the tiny tokenizer's chat, typed tools, scripted answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tiny

from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.loading import load_chat
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.collector import Collected, Collector, collect
from agenttrain.rollout.config import RolloutConfig, RolloutRequest
from agenttrain.rollout.ledger import verify
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import BatchRequest, RolloutContext
from agenttrain.tools.config import ToolLimits
from agenttrain.tools.tool import FunctionTool
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import Rollout, Task

LIMITS = RolloutConfig(
    max_turns=4, max_turn_tokens=200, max_completion_tokens=1000, max_result_tokens=100
)
TASK = Task(task_id="t", messages=({"role": "user", "content": "what is 3 + 4?"},))


def chat() -> Chat:
    """The chat of the tiny tokenizer."""
    return load_chat(tiny.tokenizer(), ChatTemplateConfig(), ResponseSchemaConfig())


def ids(text: str) -> tuple[int, ...]:
    """Token ids of a text, control tokens included."""
    return tuple(tiny.tokenizer().encode(text, add_special_tokens=False))


def call(name: str, arguments: str) -> str:
    """A completion that is one call; `arguments` is its JSON text."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|im_end|>'


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


def final_answer(answer: str) -> str:
    """Hand in the answer.

    Args:
        answer: The answer.
    """
    return "ok"


def toolbox(
    *functions: Callable[..., object],
    stop_tools: Sequence[str] = (),
    limits: Mapping[str, ToolLimits] | None = None,
) -> Toolbox:
    """A toolbox of functions; `add` and `final_answer` when none are given."""
    tools = [FunctionTool(function) for function in functions or (add, final_answer)]
    return Toolbox({tool.name: tool for tool in tools}, stop_tools=stop_tools, limits=limits)


def script(*answers: str) -> Callable[[Sequence[int], str, int], tuple[int, ...]]:
    """Turn n of every rollout is the n-th answer."""
    return lambda token_ids, session, turn: ids(answers[turn])


def rollout(
    *answers: str,
    tools: Toolbox | None = None,
    task: Task = TASK,
    max_context: int = 4096,
    engine: ScriptedEngine | None = None,
    **limits: Any,
) -> Rollout:
    """Run one rollout whose completions are `answers`, and check its ledger."""
    return asyncio.run(
        arollout(*answers, tools=tools, task=task, max_context=max_context, engine=engine, **limits)
    )


async def arollout(
    *answers: str,
    tools: Toolbox | None = None,
    task: Task = TASK,
    max_context: int = 4096,
    engine: ScriptedEngine | None = None,
    **limits: Any,
) -> Rollout:
    """`rollout` inside a running event loop."""
    tools = tools or toolbox()
    the_chat = chat()
    done = await run_rollout(
        RolloutRequest(task=task),
        RolloutContext(
            engine=engine or ScriptedEngine(script(*answers), max_context=max_context),
            chat=the_chat,
            toolbox=tools,
            limits=replace(LIMITS, **limits),
        ),
    )
    if done.turns:
        verify(done, the_chat, tools.schemas(task.tools))
    return done


async def acollect(
    collector: Collector, tasks: Sequence[Task], samples: int = 1, seed: int = 0
) -> Collected:
    """Collect with default sampling."""
    request = BatchRequest(
        tasks=tasks, samples=samples, sampling=Sampling(), seed_path=(seed, "test", 1)
    )
    return await collect(collector, request)
