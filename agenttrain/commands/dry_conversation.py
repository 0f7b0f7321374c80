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
from typing import Any

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

    It calls a tool after a user's message and answers ``ok`` after a tool result, unless the
    request demands another form of answer: a call, a call of one tool, or JSON.
    """

    components: Components
    task: Task
    questions: dict[str, Question] = field(default_factory=dict)
    """The last request of each session of the engine."""

    def __call__(self, token_ids: Sequence[int], session: str, turn: int) -> list[int]:
        """Return the ids of turn `turn` of `session`; the prompt's `token_ids` are not read."""
        question = self.questions[session]
        column_texts, words = task_texts(self.task)
        # Texts of the row, from which arguments and JSON are made.
        texts, rng = [*column_texts, *words], random.Random(self.components.config.seed)
        calls: tuple[ToolCall, ...] = ()
        content = ""
        if (tool := self._tool_to_call(question)) is not None:
            arguments = arguments_for(tool, texts, rng)
            calls = (ToolCall(id=f"call_{turn}_0", name=tool["name"], arguments=arguments),)
        elif question.form.schema is not None:
            content = json.dumps(example(json.loads(question.form.schema), texts, rng))
        else:
            content = "ok"
        reply = AssistantTurn(content=content, reasoning=None, calls=calls)
        after = question.messages[-1]["role"]  # role of the message that the turn answers
        return turn_ids(self.components.chat, reply, question.schemas, after)

    def _tool_to_call(self, question: Question) -> dict[str, Any] | None:
        """Return the tool that the next turn calls. None: it answers.

        After a user's message it is a tool that does not stop the rollout. After a tool result the
        turn calls only if the request demands it, and then a stop tool. A tool that the request
        names goes before both, and any tool will do if there is none of these.
        """
        tools = [schema["function"] for schema in question.schemas]
        after_tool = question.messages[-1]["role"] == "tool"
        if not tools or (after_tool and not question.form.call):
            return None
        stop_names = self.components.stop_tools(self.task)
        stop_tools = [tool for tool in tools if tool["name"] in stop_names]
        other_tools = [tool for tool in tools if tool["name"] not in stop_names]
        named = [tool for tool in tools if tool["name"] == question.form.tool]
        candidates = named or (stop_tools if after_tool else other_tools) or tools
        return candidates[0]


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
