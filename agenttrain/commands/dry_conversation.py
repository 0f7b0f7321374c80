"""`agenttrain check` of an outside agent: one conversation with a scripted model.

The agent is started as a run starts it, with the run's first task. The model calls the first tool
that it is sent with arguments that fit its schema, and answers once it has the reply. A client that
rewrites its history is seen by its second request.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agenttrain.agents.config import OnFailure
from agenttrain.agents.restarts import Restart
from agenttrain.agents.runner import Agents
from agenttrain.chat.wire.normal import Question
from agenttrain.commands.rehearse.command import CONTEXT
from agenttrain.commands.rehearse.stub import task_texts, turn_ids
from agenttrain.commands.schema_examples import arguments_for, example
from agenttrain.engines.config import Sampling
from agenttrain.engines.registry import spec_of
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.config import RolloutRequest
from agenttrain.runs.setup import Components, context_of
from agenttrain.settings.run_config import RunConfig
from agenttrain.types import (
    AgenttrainError,
    AssistantTurn,
    ConfigError,
    Rollout,
    StopReason,
    Task,
    ToolCall,
)
from agenttrain.utils.temporary import TemporaryFolder

NAME = "check"
"""Name of the rollout."""
FAILED = (StopReason.error, StopReason.aborted)


@dataclass(slots=True)
class DryModel:
    """Stand-in for a model, which writes the turns that `ScriptedEngine` returns.

    It makes one call after a user's message, and answers otherwise. If the request demands a call
    or JSON, it writes that. Such a call after a tool result is of a stop tool, if there is one.
    """

    components: Components
    task: Task
    questions: dict[str, Question] = field(default_factory=dict)
    """The last request of each session of the engine."""

    def __call__(self, token_ids: Sequence[int], session: str, turn: int) -> list[int]:
        """Return the ids of turn `turn` of `session`; the prompt's `token_ids` are not read."""
        question, config = self.questions[session], self.components.config
        after = question.messages[-1]["role"]  # role of the message that the turn answers
        # What the request demands of the answer: a tool, any call, or JSON by a schema.
        form = question.form
        tools = [schema["function"] for schema in question.schemas]
        after_tool = after == "tool"
        stop_tools = self.components.stop_tools(self.task)
        # After a user's message an ordinary tool, after a tool result a stop tool, if there is one.
        suitable = [tool for tool in tools if (tool["name"] in stop_tools) == after_tool]
        demanded = [tool for tool in tools if tool["name"] == form.tool]
        candidates = demanded or suitable or tools
        column_texts, words = task_texts(self.task)
        texts, rng = [*column_texts, *words], random.Random(config.seed)
        calls: tuple[ToolCall, ...] = ()
        content = "ok"
        if form.schema is not None:
            content = json.dumps(example(json.loads(form.schema), texts, rng))
        if candidates and (form.call or not after_tool):
            tool, content = candidates[0], ""  # JSON is written after the call's result
            arguments = arguments_for(tool, texts, rng)
            calls = (ToolCall(id=f"call_{turn}_0", name=tool["name"], arguments=arguments),)
        reply = AssistantTurn(content=content, reasoning=None, calls=calls)
        return turn_ids(self.components.chat, reply, question.schemas, after)


def converse(config: RunConfig) -> str:
    """Let the run's outside agent converse with a scripted model, and return a report.

    The report lists the restarts: requests whose history differs from what was said before. Raises
    ConfigError if the agent fails.
    """
    agent = config.agent
    if not agent.command and agent._target_ is None:
        return "agent          is started by somebody else: no conversation to check"
    key, value = "_target_", agent._target_
    if agent.command:
        key, value = "command", f"[{', '.join(agent.command)}]"
    try:
        components = Components(config)
        tasks = components.tasks.train.tasks(0, 1)
        differences: list[tuple[Restart, str]] = []
        rollout = asyncio.run(_attempt(components, tasks[0], differences))
    except (AgenttrainError, OSError, ValueError) as error:
        raise ConfigError(f"agent.{key}={value}: {error}") from error
    if rollout.stop_reason in FAILED or not rollout.turns:
        raise ConfigError(
            f"agent.{key}={value}: failed in a conversation with a scripted model, which calls "
            f"the first tool and then answers: {rollout.error}"
        )
    count = len(differences)
    lines = [
        f"agent          {rollout.turns} turns of a scripted model, {rollout.stop_reason}: "
        f"{count} restart{'' if count == 1 else 's'}"
    ]
    if rollout.turns == 1:
        lines[0] += "; with a single turn there is no history to compare"
    lines += [f"               {kind}: {difference}" for kind, difference in differences]
    if differences:
        lines.append(
            "               the client rewrote what came before, and each time another trajectory "
            "begins"
        )
    return "\n".join(lines)


async def _attempt(
    components: Components, task: Task, differences: list[tuple[Restart, str]]
) -> Rollout:
    """Let the agent attempt the task; add its restarts, with their reasons, to `differences`."""
    config = components.config
    context = context_of(config) or CONTEXT
    model = DryModel(components, task)
    # No limit cuts a scripted turn, and a failure of the agent is an error.
    limits = replace(config.rollout, max_turn_tokens=context, max_completion_tokens=context)
    # As in the run: requests are answered in a fixed order if its engine can repeat a run.
    in_lockstep = config.rollout.deterministic is not False and spec_of(config.engine).deterministic
    with TemporaryFolder() as folder:
        agents = Agents(
            replace(config.agent, on_failure=OnFailure.error),
            components.chat,
            folder,
            lockstep=in_lockstep,
            on_request=model.questions.__setitem__,  # gets the session and its question
            on_restart=lambda kind, rollout_id, difference: differences.append((kind, difference)),
        )
        sampling = Sampling(temperature=config.rollout.temperature)
        attempt = RolloutRequest(task=task, sampling=sampling, rollout_id=NAME)
        # Nobody looks at the requests, so the engine need not keep them.
        engine = ScriptedEngine(model, keeps_sent=False, max_context=context)
        try:
            return await agents.attempt(attempt, engine, limits)
        finally:
            await agents.aclose()
