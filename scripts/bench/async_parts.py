"""Parts of the runs that scripts/bench/async_training.py times: a model by script, slow tools, a
slow update. Times are multiplied by the environment variable BENCH_SCALE.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from agenttrain import EngineInputs, EngineSpec, ScriptedEngine, ToolContext
from agenttrain.algorithms.objectives.base import ObjectiveInputs, ObjectiveOutput
from agenttrain.algorithms.objectives.config import objective
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.tools.builtin.sql import Sql

MEDIAN_S, P99_S = 0.5, 8.0
"""Of a tool call, lognormal."""
SIGMA = math.log(P99_S / MEDIAN_S) / 2.3263
UPDATE_S = 2.0
TURNS = 4
"""Turns with a call, before the last one."""
CALL = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call><|im_end|>'


def scaled(seconds: float) -> float:
    """Return a time as this run has it."""
    return seconds * float(os.environ.get("BENCH_SCALE", "1"))


def tool_seconds(context: ToolContext) -> float:
    """Return the time of a call: the same in every run."""
    rng = random.Random(f"{context.rollout_id}-{context.turn}")
    return scaled(rng.lognormvariate(math.log(MEDIAN_S), SIGMA))


async def wait(context: ToolContext) -> str:
    """Wait for something."""
    await asyncio.sleep(tool_seconds(context))
    return "ok"


class SlowSql(Sql):
    """The shop's tool, which takes its time."""

    async def __call__(self, query: str, context: ToolContext) -> str:
        """Run a query.

        Args:
            query: One SELECT statement.
        """
        await asyncio.sleep(tool_seconds(context))
        return await asyncio.to_thread(super().__call__, query, context)


def build(settings: TransformersSettings, inputs: EngineInputs) -> ScriptedEngine:
    """Call the tool in four turns, then end."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    call, end = (
        tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (CALL, "7<|im_end|>")
    )

    def script(ids: Sequence[int], session: str, turn: int) -> tuple[int, ...]:
        return call if turn < TURNS else end

    return ScriptedEngine(script, keeps_sent=False, max_context=1024)


SCRIPTED = EngineSpec(settings=TransformersSettings, build=build, standalone=True)


def chance(rollout) -> float:
    """A reward that differs within a group, so that there is an update."""
    return float(random.Random(rollout.rollout_id).random() < 0.5)


@dataclass
class SlowSettings:
    """No settings."""


@objective()
def slow(inputs: ObjectiveInputs, settings: SlowSettings) -> ObjectiveOutput:
    """Take as long as the update of a large model; one microbatch a step."""
    time.sleep(scaled(UPDATE_S))
    ratio = (inputs.logprobs_S - inputs.behaviour_S).exp().clamp(max=2)
    return ObjectiveOutput(loss_S=-ratio * inputs.advantages_S * 1e-6)
