"""An agent's task, and the address at which the policy answers it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from agenttrain.agents.transport import EndpointClient, EndpointTransport
from agenttrain.rewards.function import TRUSTED_PACKAGES, as_reward
from agenttrain.types import AgenttrainError, RolloutMachine, Task

MODEL_VARIABLES = (
    *("OPENAI_MODEL", "ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"),
    *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")),
)
"""Environment variables in which programs look for the name of their model."""
SMALL_MODEL_VARIABLES = ("ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
"""Those for a program's small model: a cheap one for side work such as titles."""


class AgentFailed(AgenttrainError):
    """An agent crashed. The message is a predicate: ``ended with exit code 1``."""


def agent_reward(value: object) -> float | None:
    """Return an agent's reward, e.g. a number of numpy, as a float or None. Raises AgentFailed."""
    # The repr of an object of the agent's own class would run its code.
    is_trusted = type(value).__module__.partition(".")[0] in TRUSTED_PACKAGES
    if isinstance(value, bool) or not is_trusted:
        text = value if is_trusted else f"an object of {type(value).__name__}"
        raise AgentFailed(f"gave reward={text}; a reward is a finite number")
    try:
        return as_reward(value)
    except ValueError as error:
        raise AgentFailed(f"gave a reward that is none: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """One rollout, as the agent that attempts it gets it.

    Example, with the `openai` package::

        async def solve(agent: AgentTask) -> None:
            async with agent.http_client() as http:
                client = AsyncOpenAI(
                    base_url=agent.base_url, api_key=agent.api_key, http_client=http
                )
                await client.chat.completions.create(model=agent.model, messages=agent.messages)
    """

    rollout_id: str
    task: Task
    url: str
    """Address of the rollout, e.g. ``http://127.0.0.1:4711/5f0c…``. `/reward` and `/finish` are
    below it, and it is the base URL of Anthropic's clients."""
    api_key: str
    model: str
    """Name of the policy in requests."""
    has_frozen: bool = False
    """True if `agent.models` has frozen models, which answer but are not trained. A program's small
    model may be one of them, so `environment` does not replace its name by the policy's."""
    machine: RolloutMachine | None = field(default=None, repr=False)
    """Container of the rollout, for a function that runs commands; None with runtime=bwrap."""
    transport: Callable[[], EndpointTransport] | None = field(default=None, repr=False)
    """Makes the transport by which requests reach the endpoint within the run's process, without a
    socket. None: they go over the network."""

    @property
    def base_url(self) -> str:
        """Base URL of OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of the task's messages."""
        return [dict(message) for message in self.task.messages]

    def http_client(self, **options: Any) -> httpx.AsyncClient:
        """Return an HTTP client for an agent in the run's process.

        Requests to the endpoint carry the rollout's key and need no socket. Other addresses are
        reached as by any client. `options` are those of `httpx.AsyncClient`.
        """
        options = {"base_url": self.url, "timeout": None, **options}
        if self.transport is None or "transport" in options:
            return httpx.AsyncClient(**options)
        return EndpointClient(self.transport(), **options)

    def line(self) -> str:
        """Return the task as a line of JSON. Raises AgentFailed for columns without JSON."""
        try:
            return json.dumps(
                {
                    "rollout_id": self.rollout_id,
                    "task_id": self.task.task_id,
                    "messages": self.messages,
                    "columns": dict(self.task.columns),
                    "url": self.url,
                    "base_url": self.base_url,
                    "api_key": self.api_key,
                    "model": self.model,
                },
                default=str,
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise AgentFailed(f"cannot be sent its task as JSON: {error}") from error

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return a program's environment: the `inherited` variables, and how it finds the policy.

        A name of a model in `inherited` stays, because `agent.models` says what it stands for. The
        other MODEL_VARIABLES get the policy's name. With frozen models those of the small model (a
        program's cheap model for side work) are not set, because it may be a frozen one.
        """
        left_to_program = SMALL_MODEL_VARIABLES if self.has_frozen else ()
        variables = [name for name in MODEL_VARIABLES if name not in left_to_program]
        # The base URL of OpenAI's clients ends in /v1. Anthropic's clients append /v1 themselves.
        return {
            **dict.fromkeys(variables, self.model),
            **inherited,
            "AGENTTRAIN_URL": self.url,
            "AGENTTRAIN_ROLLOUT": self.rollout_id,
            "AGENTTRAIN_MODEL": self.model,
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_API_BASE": self.base_url,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.api_key,
        }
