"""An endpoint over a scripted engine, and one rollout at it that a test drives by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import parts

from agenttrain.agents.config import AgentConfig
from agenttrain.agents.runner import Agents
from agenttrain.agents.task import AgentTask
from agenttrain.chat.chat import Chat
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.ledger import verify
from agenttrain.types import Rollout

TOOLS = parts.toolbox().schemas()
ASK = [{"role": "user", "content": "what is 3 + 4?"}]
ADD = parts.call("add", '{"a": 3,   "b": 4}')
"""A call with spacing of its own, which rendering it again would lose."""
Drive = Callable[[AgentTask], Any]
_drives: list[Drive] = []


async def driven(agent: AgentTask) -> Any:
    """The agent of `rollout`: what the test passed."""
    return await _drives[-1](agent)


def engine_of(*answers: str, max_context: int = 4096) -> ScriptedEngine:
    """An engine whose n-th request, in whatever session, gets the n-th answer, then the last."""
    count = iter(range(10**9))
    return ScriptedEngine(
        lambda ids, session, turn: parts.ids(answers[min(next(count), len(answers) - 1)]),
        max_context=max_context,
    )


UNCHANGED = Sampling()


def rollout(
    drive: Drive,
    *answers: str,
    folder: Path = Path("/tmp"),
    engine: ScriptedEngine | None = None,
    lockstep: bool = False,
    limits: dict[str, Any] | None = None,
    chat: Chat | None = None,
    sampling: Sampling = UNCHANGED,
    **settings: Any,
) -> Rollout:
    """Let `drive` be the agent of one rollout, and check its ledger."""
    return asyncio.run(
        arollout(
            drive,
            *answers,
            folder=folder,
            engine=engine,
            lockstep=lockstep,
            limits=limits,
            chat=chat,
            sampling=sampling,
            **settings,
        )
    )


async def arollout(
    drive: Drive,
    *answers: str,
    folder: Path,
    engine: ScriptedEngine | None = None,
    lockstep: bool = False,
    limits: dict[str, Any] | None = None,
    chat: Chat | None = None,
    sampling: Sampling = UNCHANGED,
    **settings: Any,
) -> Rollout:
    """`rollout` inside a running event loop."""
    if "command" not in settings:
        settings.setdefault("_target_", f"{__name__}.driven")
    chat = chat or shared_chat()
    agents = Agents(AgentConfig(name="endpoint", **settings), chat, folder, lockstep=lockstep)
    _drives.append(drive)
    try:
        done = await agents.attempt(
            RolloutRequest(task=parts.TASK, sampling=sampling, rollout_id="rollout"),
            engine or engine_of(*answers),
            replace(parts.LIMITS, **(limits or {})),
        )
    finally:
        _drives.pop()
        await agents.aclose()
    if done.turns:
        verify(done, chat, [])
    return done


_chats: list[Chat] = []


def shared_chat() -> Chat:
    """One chat for all tests: certificates of its tools are made once."""
    if not _chats:
        _chats.append(parts.chat())
    return _chats[0]


@asynccontextmanager
async def client(agent: AgentTask) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client of the rollout."""
    headers = {"authorization": f"Bearer {agent.api_key}"}
    async with httpx.AsyncClient(
        base_url=agent.url, headers=headers, timeout=120, verify=False
    ) as opened:
        yield opened


async def post(
    http: httpx.AsyncClient,
    messages: Sequence[Any],
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> httpx.Response:
    """Ask for a completion."""
    fields.setdefault("tools", TOOLS)
    return await http.post(
        "/v1/chat/completions", json={"messages": list(messages), **fields}, headers=headers
    )


async def ask(http: httpx.AsyncClient, messages: Sequence[Any], **fields: Any) -> dict[str, Any]:
    """Ask for a completion; return its message."""
    response = await post(http, messages, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


def reply(message: dict[str, Any], *texts: str) -> list[dict[str, Any]]:
    """The message and replies to its calls."""
    calls = message["tool_calls"]
    return [
        message,
        *(
            {"role": "tool", "tool_call_id": call["id"], "content": text}
            for call, text in zip(calls, texts, strict=True)
        ),
    ]


def arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the message's first call."""
    return json.loads(message["tool_calls"][0]["function"]["arguments"])
