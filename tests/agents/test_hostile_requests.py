"""Requests that no honest client sends to the endpoint: none gets a server's error."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agent_kit
import hostile_requests
import httpx
import parts
import pytest
from agent_kit import ADD, ASK, TOOLS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agenttrain.agents.config import AgentConfig
from agenttrain.agents.runner import Agents
from agenttrain.agents.task import AgentTask
from agenttrain.engines.config import Sampling
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.ledger import verify

# Hostile requests edit what was answered.
pytestmark = pytest.mark.filterwarnings("ignore:agent/restarts:RuntimeWarning")
INPUT = TOOLS[0]["function"]["parameters"]
TOOL = {"name": "add", "input_schema": INPUT}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
USE = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 3}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "7"}]}
THOUGHT = {"type": "thinking", "thinking": "I add", "signature": "s"}
HONEST: list[dict[str, Any]] = [
    {"model": "policy", "messages": ASK, "tools": TOOLS, "temperature": 1, "stream": True},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            *ASK,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "7"},
        ],
        "tools": TOOLS,
        "stop": ["x"],
    },
    {
        "model": "policy",
        "max_tokens": 20,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            *ASK,
            {"role": "assistant", "content": [THOUGHT, USE]},
            {"role": "user", "content": [RESULT]},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "auto"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": []},
    },
    {"reward": 0.5},
    {"messages": ASK, "reward": 1, "api": "anthropic"},
    *hostile_requests.responses(TOOLS[0]["function"]),
]
ROUTES = (
    *("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/messages/count_tokens"),
    *("/finish", "/reward", "/v1/models", "/v1/none"),
)


Asked = tuple[str, str, bytes, dict[str, bytes]]
"""Method, path, body and headers."""


@dataclass(slots=True)
class Endpoint:
    """The endpoint of an event loop."""

    runner: asyncio.Runner
    agents: Agents
    names: Iterator[int]

    def send(
        self, requests: list[tuple[str, str, bytes, dict[str, bytes]]]
    ) -> list[httpx.Response]:
        """Send requests of one rollout one after the other, and check its ledger."""
        responses = []

        async def drive(agent: AgentTask) -> None:
            async with agent.http_client() as client:
                for method, path, body, headers in requests:
                    response = await client.request(method, path, content=body, headers=headers)
                    responses.append(response)

        attempt = RolloutRequest(
            task=parts.TASK, sampling=Sampling(), rollout_id=f"r-{next(self.names)}"
        )
        agent_kit._drives.append(drive)
        try:
            done = self.runner.run(
                self.agents.attempt(
                    attempt, agent_kit.engine_of(ADD, "It is 7.<|im_end|>"), parts.LIMITS
                )
            )
        finally:
            agent_kit._drives.pop()
        assert "the agent raised" not in str(done.error), done.error
        if done.turns:
            verify(done, self.agents.chat, [])
        return responses


@pytest.fixture(scope="module", params=["refuse", "override"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    config = AgentConfig(name="endpoint", _target_="agent_kit.driven", on_sampling=request.param)
    agents = Agents(config, agent_kit.shared_chat(), Path(tempfile.mkdtemp()))
    with asyncio.Runner() as runner:
        yield Endpoint(runner, agents, itertools.count())
        runner.run(agents.aclose())


hostile = st.tuples(
    st.sampled_from(("POST",) * 8 + ("GET", "PUT")),
    st.sampled_from((*ROUTES[:3] * 3, *ROUTES)),
    hostile_requests.bodies(HONEST),
    hostile_requests.headers,
)


def check_answers(endpoint: Endpoint, requests: list[Asked]) -> None:
    """Send them; none may get a server's error, and each error has its words."""
    for (method, path, *_), response in zip(requests, endpoint.send(requests), strict=True):
        assert response.status_code < 500, (method, path, response.text)
        if response.status_code >= 400:
            assert response.json()["error"]["message"]


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(requests=st.lists(hostile, min_size=1, max_size=4))
def test_no_request_makes_the_endpoint_fail(endpoint: Endpoint, requests) -> None:
    check_answers(endpoint, requests)


responses = st.tuples(
    st.just("POST"),
    st.just("/v1/responses"),
    hostile_requests.bodies(hostile_requests.responses(TOOLS[0]["function"])),
    st.just({}),
)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("endpoint", ["override"], indirect=True)
@settings(max_examples=1250, suppress_health_check=list(HealthCheck))
@given(requests=st.lists(responses, min_size=8, max_size=8))
def test_ten_thousand_hostile_responses(endpoint: Endpoint, requests) -> None:
    check_answers(endpoint, requests)


ASKED = json.dumps({"messages": ASK}).encode()
DIGITS = b"9" * 400


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/finish", b'{"messages": 5}', {}, 400),
        ("/finish", b'{"messages": {"a": 1}}', {}, 400),
        ("/finish", b'{"messages": [5]}', {}, 400),
        ("/finish", b'{"reward": ' + DIGITS + b"}", {}, 400),
        ("/reward", b'{"reward": ' + DIGITS + b"}", {}, 400),
        ("/reward", b'{"reward": NaN}', {}, 400),
        (ROUTES[0], ASKED, {"x-stainless-retry-count": b"9" * 4400}, 200),
        (ROUTES[0], ASKED, {"x-stainless-retry-count": b"\xb2"}, 200),
        (ROUTES[0], ASKED[:-1] + b', "temperature": 1e-300}', {}, 400),
        (ROUTES[0], ASKED[:-1] + b', "max_tokens": ' + DIGITS + b"}", {}, 200),
        (ROUTES[0], ASKED[:-1] + b', "\\ud800": 1}', {}, 400),
        (ROUTES[1], ASKED[:-1] + b', "stop_sequences": 5}', {}, 400),
        (ROUTES[1], ASKED[:-1] + b', "model": {}}', {}, 400),
        (ROUTES[1], ASKED[:-1] + b', "temperature": ' + DIGITS + b"}", {}, 400),
    ],
)
@pytest.mark.parametrize("endpoint", ["refuse"], indirect=True)
def test_values_beyond_all_reason(endpoint, path, body, headers, status: int) -> None:
    (response,) = endpoint.send([("POST", path, body, headers)])
    assert response.status_code == status, response.text
