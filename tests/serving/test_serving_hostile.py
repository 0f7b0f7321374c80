"""Requests that no honest client sends to `agenttrain serve`: none gets a server's error."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import hostile_requests
import httpx
import parts
import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from agenttrain.chat.wire.http import MAX_HEAD, BoundedHead, body_limit
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.serving.answers import ChatServer
from agenttrain.serving.app import build_app, listen

TOOLS = parts.toolbox().schemas()
ASK = [{"role": "user", "content": "what is 3 + 4?"}]
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
HONEST: list[dict[str, Any]] = [
    {"model": "agent", "messages": ASK, "temperature": 0.5, "max_tokens": 9, "stop": ["x"]},
    {"messages": ASK, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}},
    {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            *ASK,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "7"},
        ],
        "tools": TOOLS,
        "seed": 3,
    },
]
HONEST += hostile_requests.responses(TOOLS[0]["function"])
CONTEXT = 4096
ROUTES = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/models",
    "/health",
    "/v1/none",
    "/v1/chat/%ff",
)
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def app() -> Starlette:
    text = parts.ids("It is 7.<|im_end|>")
    engine = ScriptedEngine(lambda ids, session, turn: text, max_context=CONTEXT)
    return build_app(ChatServer(engine=engine, chat=parts.chat(), model="agent"))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as opened:
        yield opened


async def send(app: Starlette, method: str, path: str, **request: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
        return await client.request(method, path, **request)


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(
    body=hostile_requests.bodies(HONEST),
    headers=hostile_requests.headers,
    method=st.sampled_from(("POST", "POST", "POST", "GET", "OPTIONS", "HEAD", "DELETE")),
    path=st.sampled_from((*ROUTES[:2] * 6, *ROUTES)),
)
def test_no_request_makes_the_server_fail(app, runner, body, headers, method, path) -> None:
    response = runner.run(send(app, method, path, content=body, headers={**JSON, **headers}))
    assert response.status_code < 500, response.text
    if response.status_code >= 400 and method != "HEAD":
        assert response.json()["error"]["message"]


DIGITS = "9" * 400
DEEP = {"type": "function", "function": {"name": "f", "parameters": hostile_requests.nested(400)}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (f'"temperature": {DIGITS}', "temperature"),
        (f'"top_p": {DIGITS}', "top_p"),
        (f'"top_k": {DIGITS}', "top_k"),
        (f'"n": {DIGITS}', "n"),
        ('"temperature": 1e-300', "temperature"),
        ('"temperature": NaN', None),
        ('"top_p": 1e999', None),
        (f'"seed": {"9" * 4400}', None),
        ('"\\ud800": 1', "?"),
        (f'"tools": [{json.dumps(DEEP)}]', None),
    ],
)
def test_values_beyond_all_reason_are_refused(app, runner, fields: str, param: str | None) -> None:
    body = f'{{"messages": {json.dumps(ASK)}, {fields}}}'
    response = runner.run(send(app, "POST", ROUTES[0], content=body.encode(), headers=JSON))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("LocalHost:1", 200),
        ("evil.example", 400),
        ("localhost.evil.example", 400),
        ("10.0.0.5:8000", 400),
        ("user@evil.example", 400),
        ("[", 400),
        ("", 400),
    ],
)
def test_a_foreign_host_is_refused(app, runner, host: str, status: int) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", ROUTES[0])):
        body = {} if method == "GET" else {"content": json.dumps({"messages": ASK})}
        response = runner.run(send(app, method, path, headers={**JSON, "host": host}, **body))
        assert response.status_code == status
        assert status == 200 or response.json()["error"]["code"] == "unknown_host"


def test_a_server_for_others_is_asked_by_address_or_by_a_name_it_was_given(runner) -> None:
    server = ChatServer(engine=ScriptedEngine([]), chat=parts.chat(), model="agent")
    names = {"[fe80::1]": 200, "10.0.0.5:80": 200, "gpu1": 200, "evil.example": 400}
    for name, status in names.items():
        app = build_app(server, hosts=("gpu1",), any_address=True)
        response = runner.run(send(app, "GET", "/health", headers={"host": name}))
        assert (name, response.status_code) == (name, status)
    every = build_app(server, hosts=("*",))
    response = runner.run(send(every, "GET", "/health", headers={"host": "evil.example"}))
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (JSON, 200),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
        ({}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "text/plain; application/json", "origin": "http://evil.example"}, 415),
    ],
)
def test_a_page_cannot_post_to_it(app, runner, headers: dict[str, str], status: int) -> None:
    """A page's request with the type of JSON is preceded by OPTIONS, which is refused."""
    body = json.dumps({"messages": ASK})
    response = runner.run(send(app, "POST", ROUTES[0], content=body, headers=headers))
    assert response.status_code == status
    assert "access-control-allow-origin" not in response.headers
    assert runner.run(send(app, "OPTIONS", ROUTES[0], headers=headers)).status_code == 405


@pytest.mark.parametrize("announced", [True, False])
def test_no_more_of_a_body_is_read_than_the_context_can_hold(app, runner, announced: bool) -> None:
    limit, piece, taken = body_limit(CONTEXT), 2**16, []
    assert limit == 2**18 + 8 * CONTEXT

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            taken.append(piece)
            yield b" " * piece

    headers = {**JSON, **({"content-length": str(1000 * piece)} if announced else {})}
    response = runner.run(send(app, "POST", ROUTES[0], content=endless(), headers=headers))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert sum(taken) <= (0 if announced else limit + piece)


LONG = b"x" * (4 * MAX_HEAD)
BEGUN = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + LONG + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        BEGUN + b"a: " + LONG + b"\r\n\r\n",
        BEGUN + b"a: " + LONG * 4,  # and no end
        BEGUN + b"".join(b"a%d: x\r\n" % i for i in range(40_000)) + b"\r\n",
        BEGUN + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\na: " + LONG * 4,
    ],
    ids=["address", "header", "unfinished", "many", "trailer"],
)
def test_a_long_head_ends_the_connection(app, head: bytes) -> None:
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedHead, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with socket.create_connection(listener.getsockname(), timeout=10) as client:
            try:
                client.sendall(head)
                answer = b"".join(iter(lambda: client.recv(2**16), b""))
                assert b"HTTP/1.1 400 " in answer
            except ConnectionError:  # it was closed with bytes that nobody had read
                pass
        small = {**JSON, "a": "x" * (MAX_HEAD // 2)}
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/models"
        assert httpx.get(url, headers=small).status_code == 200
    finally:
        server.should_exit = True
        thread.join(20)
