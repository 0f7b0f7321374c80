"""Tools of MCP servers: real server processes, over stdio and over streamable HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import mcp_plain_server
import psutil
import pytest

from agenttrain.tools.build import build_toolbox
from agenttrain.tools.mcp.server import McpServer, inline_references
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import Task, ToolCall, ToolContext, ToolError, ToolResult, ToolUnavailable

pytestmark = pytest.mark.skipif(
    find_spec("mcp") is None, reason="needs the MCP SDK: pip install 'agenttrain[mcp]'"
)

SERVER = str(Path(__file__).parents[1] / "kit" / "mcp_server.py")
COMMAND = [sys.executable, SERVER]
PLAIN = [sys.executable, str(Path(__file__).parents[1] / "kit" / "mcp_plain_server.py")]
CONTEXT = ToolContext(rollout_id="r", task=Task(task_id="t", messages=()), turn=0, call_id="c")
TARGET = "agenttrain.tools.mcp.server.McpServer"


async def answers(toolbox: Toolbox, *calls: tuple[str, dict]) -> list[ToolResult]:
    numbered = [
        ToolCall(id=f"call_{i}", name=name, arguments=arguments)
        for i, (name, arguments) in enumerate(calls)
    ]
    return await toolbox.execute(numbered, lambda call: CONTEXT)


def ask(toolbox: Toolbox, name: str, **arguments: object) -> str:
    """One call, on an event loop of its own: the connection survives many."""
    (result,) = asyncio.run(answers(toolbox, (name, arguments)))
    return result.content


def gone(pid: int) -> bool:
    """Whether a process ends, within ten seconds."""
    for _ in range(500):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def started(command: list[str], **settings: object) -> Toolbox:
    return build_toolbox({"demo": {"_target_": TARGET, "command": command, **settings}})


@pytest.fixture(scope="module")
def toolbox() -> Iterator[Toolbox]:
    made = started(COMMAND, env={"COLOUR": "$MCP_TEST_COLOUR"}, timeout_s=20)
    yield made
    asyncio.run(made.aclose())


@pytest.fixture(scope="module", autouse=True)
def colour() -> Iterator[None]:
    os.environ["MCP_TEST_COLOUR"] = "blue"
    yield
    del os.environ["MCP_TEST_COLOUR"]


def test_every_tool_has_the_servers_schema(toolbox: Toolbox) -> None:
    schemas = {schema["function"]["name"]: schema["function"] for schema in toolbox.schemas()}
    assert len(schemas) == 11
    assert schemas["echo"]["description"] == "Say it again."
    parameters = schemas["describe"]["parameters"]
    assert parameters["required"] == ["person"]
    # The nested object stands where the server refers to it.
    home = parameters["properties"]["person"]["properties"]["home"]
    assert home["properties"]["city"] == {
        "description": "Where.",
        "title": "City",
        "type": "string",
    }
    assert home["required"] == ["city", "number"]
    assert "$ref" not in str(parameters)


@pytest.mark.parametrize(
    ("name", "arguments", "content", "error"),
    [
        ("echo", {"text": "Óbidos 北京 🎈\n\x00"}, "Óbidos 北京 🎈\n\x00", None),
        (
            "describe",  # "3" is coerced by the server's own schema
            {"person": {"name": "Ada", "home": {"city": "Kirn", "number": "3"}}, "shout": "true"},
            "Ada lives in Kirn 3!",
            None,
        ),
        ("structured", {}, '{"town": "Óbidos", "people": [1, 2]}', None),
        ("several", {}, "one\ntwo\nthree: file:///three", None),
        ("noise", {}, "quiet again", None),
        ("variable", {"name": "COLOUR"}, "blue", None),
        ("variable", {"name": "MCP_TEST_COLOUR"}, "not set", None),
        (
            "fail",
            {"why": "no such file"},
            "Error: Error executing tool fail: no such file",
            ToolError.exception,
        ),
        ("fail_with_a_picture", {}, "Error: no such page", ToolError.exception),
        (
            "picture",
            {},
            "[image of 1x1 pixels (b1ff9c8e)]",
            None,
        ),
        ("echo", {"txt": 1}, "unknown argument 'txt'", ToolError.invalid_arguments),
    ],
)
def test_what_the_model_reads(toolbox, name, arguments, content, error) -> None:
    (result,) = asyncio.run(answers(toolbox, (name, arguments)))
    assert result.error == error
    assert result.content == content or (error and content in result.content)


def test_calls_run_at_once_on_one_connection(toolbox: Toolbox) -> None:
    # Nobody gets an answer before all twelve are there.
    results = asyncio.run(answers(toolbox, *[("meet", {"people": 12})] * 12))
    assert [result.content for result in results] == ["met"] * 12


def test_a_slow_call_is_given_up_and_cancelled_on_the_server() -> None:
    toolbox = started(PLAIN, timeout_s=0.1)
    try:
        assert ask(toolbox, "sleep") == "Error: timed out after 0.1 s"
        assert asyncio.run(toolbox._entries["cancelled"].tool({}, CONTEXT)) == "1"
    finally:
        asyncio.run(toolbox.aclose())


def test_a_killed_server_comes_back_and_its_calls_are_made_again() -> None:
    toolbox = started(PLAIN, timeout_s=30, prefix="demo_")
    assert toolbox.names == ("demo_pid", "demo_echo", "demo_sleep", "demo_die", "demo_cancelled")

    async def kill_while_calls_run() -> list[ToolResult]:
        (first,) = await answers(toolbox, ("demo_pid", {}))
        running = asyncio.create_task(answers(toolbox, *[("demo_sleep", {})] * 8))
        await asyncio.sleep(0.1)
        os.kill(int(first.content), signal.SIGKILL)
        return [first, *await running, *await answers(toolbox, ("demo_pid", {}))]

    try:
        first, *slept, last = asyncio.run(kill_while_calls_run())
        assert [result.content for result in slept] == ["sleep"] * 8
        assert first.content != last.content
        # A call that ends the server each time is not made for ever, and the server is back.
        assert "broke die off 3 times" in ask(toolbox, "demo_die")
        assert ask(toolbox, "demo_echo") == "echo"
        process = int(ask(toolbox, "demo_pid"))
    finally:
        asyncio.run(toolbox.aclose())
    assert gone(process)


def test_a_server_that_stays_away_is_nobodys_fault(tmp_path: Path) -> None:
    command = [*PLAIN, str(tmp_path / "marker")]
    server = McpServer(command=command, reconnect_s=0.3, allow=["pid"])
    (tool,) = server.tools()
    os.kill(int(asyncio.run(tool({}, CONTEXT))), signal.SIGKILL)
    with pytest.raises(ToolUnavailable, match=r"did not come back within 0\.3 s"):
        asyncio.run(tool({}, CONTEXT))
    asyncio.run(tool.close())
    asyncio.run(tool.close())
    with pytest.raises(ToolUnavailable, match="is closed"):
        asyncio.run(tool({}, CONTEXT))


@pytest.mark.slow
def test_nothing_is_left_at_exit() -> None:
    script = (
        "import asyncio, sys; from agenttrain.tools.mcp.server import McpServer\n"
        "(tool,) = McpServer(command=sys.argv[1:], allow=['pid']).tools()\n"
        "print(asyncio.run(tool({}, None)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *PLAIN], capture_output=True, text=True, check=True
    )
    assert gone(int(done.stdout))
    assert done.stderr == ""


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def serve(port: int) -> subprocess.Popen[bytes]:
    """A server on this port, once it answers."""
    process = subprocess.Popen(
        [*COMMAND, "http", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for _ in range(500):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.02)
    raise AssertionError("the server did not start")


def test_streamable_http_with_headers_and_a_server_that_is_gone_and_back(port: int) -> None:
    process = serve(port)
    section = {
        "_target_": TARGET,
        "url": f"http://127.0.0.1:{port}/mcp",
        "headers": {"X-Key": "is $MCP_TEST_COLOUR"},
        "allow": ["header", "echo", "meet"],
        "reconnect_s": 20,
        "timeout_s": 30,
    }
    toolbox = build_toolbox({"web": section}, ["echo"])
    try:
        assert ask(toolbox, "header", key="x-key") == "is blue"
        assert ask(toolbox, "echo", text="北京") == "北京"
        results = asyncio.run(answers(toolbox, *[("meet", {"people": 5})] * 5))
        assert [result.content for result in results] == ["met"] * 5
        process.kill()
        process.wait()

        async def call_and_start_again() -> list[ToolResult]:
            calling = asyncio.create_task(answers(toolbox, ("echo", {"text": "back"})))
            await asyncio.sleep(0.2)
            restarted.append(await asyncio.to_thread(serve, port))
            return await calling

        restarted: list[subprocess.Popen[bytes]] = []
        (result,) = asyncio.run(call_and_start_again())
        process = restarted[0]
        assert result.content == "back"
    finally:
        asyncio.run(toolbox.aclose())
        process.kill()
        process.wait()


class Gateway(BaseHTTPRequestHandler):
    """An MCP endpoint of the standard library, which answers with a status when told to."""

    session = "one"
    refusals: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        started = request["method"] == "initialize"
        if self.refusals:
            self.send_error(self.refusals.pop())
        elif "id" not in request:
            self.send_response(202)
            self.end_headers()
        elif not started and self.headers.get("Mcp-Session-Id") != self.session:
            self.send_error(404)
        else:
            found = mcp_plain_server.result(request["method"], request.get("params", {}))
            body = json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": found}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Mcp-Session-Id", self.session)
            self.end_headers()
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.send_error(405)

    do_DELETE = do_GET

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


def test_a_server_behind_a_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as gateway:
        threading.Thread(target=gateway.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{gateway.server_port}/mcp"
        (tool,) = McpServer(url=url, allow=["echo"]).tools()

        def call() -> object:
            return asyncio.run(tool({}, CONTEXT))

        assert call() == "echo"
        monkeypatch.setattr(Gateway, "session", "two")  # it was started anew and knows nobody
        assert call() == "echo"
        monkeypatch.setattr(Gateway, "refusals", [503, 429])
        assert call() == "echo"
        monkeypatch.setattr(Gateway, "refusals", [503] * 3)
        with pytest.raises(ToolUnavailable, match="broke echo off 3 times: Server returned an er"):
            call()
        monkeypatch.setattr(Gateway, "refusals", [401] * 9)
        with pytest.raises(ValueError, match=r"cannot connect: .*\(HTTP 401\); .* these headers"):
            McpServer(url=url)
        asyncio.run(tool.close())
        gateway.shutdown()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"command": PLAIN, "allow": ["ekho"]},
            r"tools\.demo\.allow=\[ekho\]: the server has no tool 'ekho' \(did you mean "
            r"'echo'\?\); it has: pid, echo, sleep, die, cancelled",
        ),
        (
            {"command": [sys.executable, "-c", "import sys; sys.exit('no licence')"]},
            r"tools\.demo\.command=\[.*\]: the server does not answer: Connection closed; its "
            "last line on stderr: no licence; run the command in a terminal to see why",
        ),
        (
            {
                "command": [sys.executable, "-c", "import sys; sys.stdin.read()"],
                "start_timeout_s": 0.5,
            },
            "does not answer: no answer within 0.5 s; it wrote nothing to stderr; run the command",
        ),
        (
            {"url": "http://127.0.0.1:9/mcp"},
            r"tools\.demo\.url=http://127\.0\.0\.1:9/mcp: cannot connect: .*; is an MCP server "
            "running there",
        ),
        ({"command": PLAIN, "timeout_s": 0}, r"tools\.demo\.timeout_s=0"),
    ],
)
def test_servers_that_cannot_be_used(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        build_toolbox({"demo": {"_target_": TARGET, **settings}})


def test_names_are_checked_when_the_tools_are_listed() -> None:
    echo = {"_target_": TARGET, "command": PLAIN, "allow": ["echo"]}
    with pytest.raises(
        ValueError, match=r"tools\.b\..*: its tool 'echo' is the second of that name; .* prefix"
    ):
        build_toolbox({"a": echo, "b": echo})
    with pytest.raises(ValueError, match="stop_tools: there is no tool 'ekho'"):
        build_toolbox({"a": echo}, ["ekho"])


def test_without_the_sdk_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(
        ValueError, match=r"need the `mcp` package: pip install 'agenttrain\[mcp\]'"
    ):
        McpServer(command=COMMAND)


@pytest.mark.slow
def test_references_are_put_in_place() -> None:
    schema = {
        "type": "object",
        "properties": {
            "$ref": {"type": "string"},
            "home": {"$ref": "#/$defs/Address", "description": "Where."},
            "all": {"type": "array", "items": {"$ref": "#/$defs/Address"}},
        },
        "$defs": {
            "Address": {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}},
            "City": {"type": "string"},
        },
    }
    address = {"type": "object", "properties": {"city": {"type": "string"}}}
    assert inline_references(schema) == {
        "type": "object",
        "properties": {
            "$ref": {"type": "string"},
            "home": {**address, "description": "Where."},
            "all": {"type": "array", "items": address},
        },
    }
    endless = {"$defs": {"Tree": {"items": {"$ref": "#/$defs/Tree"}}}, "$ref": "#/$defs/Tree"}
    assert inline_references(endless) == endless
    nowhere = {"properties": {"home": {"$ref": "#/$defs/Address"}}}
    assert inline_references(nowhere) == nowhere


def test_what_keeps_references_from_being_put_in_place() -> None:
    tree = {"items": {"$ref": "#/$defs/Tree"}}
    unused = {
        "properties": {"home": {"$ref": "#/$defs/Id"}},
        "$defs": {"Id": {"type": "integer"}, "Tree": tree},
    }
    assert inline_references(unused) == {"properties": {"home": {"type": "integer"}}}
    deep: dict = {}
    for _ in range(3000):
        deep = {"properties": {"x": deep}}
    assert inline_references(deep) is not deep and set(inline_references(deep)) == {"properties"}


def test_references_to_schemas_that_allow_everything_or_nothing_are_put_in_place() -> None:
    schema = {
        "properties": {
            "note": {"$ref": "#/$defs/Any", "description": "Of any type."},
            "old": {"$ref": "#/$defs/None"},
        },
        "$defs": {"Any": True, "None": False},
    }
    assert inline_references(schema) == {
        "properties": {"note": {"description": "Of any type."}, "old": {"not": {}}}
    }


def test_references_of_older_drafts_and_to_other_properties_are_put_in_place() -> None:
    schema = {
        "properties": {"home": {"$ref": "#/definitions/Id"}, "work": {"$ref": "#/properties/home"}},
        "definitions": {"Id": {"type": "integer"}},
    }
    assert inline_references(schema) == {
        "properties": {"home": {"type": "integer"}, "work": {"type": "integer"}}
    }
