"""An MCP server for the tests: stdio, or `http PORT`."""

from __future__ import annotations

import asyncio
import base64
import os
import sys

import mcp_types as types
from mcp.server import MCPServer
from mcp.server.mcpserver import Context, Image
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

server = MCPServer("tests")
waiting: list[asyncio.Event] = []


class Address(BaseModel):
    city: str = Field(description="Where.")
    number: int


class Person(BaseModel):
    name: str
    home: Address


RED = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
"""A picture of one red pixel."""


@server.tool()
def echo(text: str) -> str:
    """Say it again."""
    return text


@server.tool()
def describe(person: Person, shout: bool = False) -> str:
    """Describe a person."""
    return f"{person.name} lives in {person.home.city} {person.home.number}{'!' * shout}"


@server.tool()
def structured() -> types.CallToolResult:
    """Content without text."""
    return types.CallToolResult(content=[], structured_content={"town": "Óbidos", "people": [1, 2]})


@server.tool()
def several() -> types.CallToolResult:
    """Two texts and a link."""
    return types.CallToolResult(
        content=[
            types.TextContent(type="text", text="one"),
            types.TextContent(type="text", text="two"),
            types.ResourceLink(type="resource_link", name="three", uri="file:///three"),
        ]
    )


@server.tool()
def picture() -> Image:
    """A picture."""
    return Image(data=base64.b64decode(RED), format="png")


@server.tool()
def fail(why: str) -> str:
    """Refuse."""
    raise ToolError(why)


@server.tool()
def fail_with_a_picture() -> types.CallToolResult:
    """Refuse, and show why."""
    return types.CallToolResult(
        content=[
            types.TextContent(type="text", text="no such page"),
            types.ImageContent(type="image", data=RED, mime_type="image/png"),
        ],
        is_error=True,
    )


@server.tool()
async def meet(people: int) -> str:
    """Wait until so many are here."""
    waiting.append(asyncio.Event())
    if len(waiting) >= people:
        for event in waiting:
            event.set()
    await waiting[-1].wait()
    return "met"


@server.tool()
def noise() -> str:
    """Write a megabyte to stderr."""
    sys.stderr.write("noise\n" * 180_000)
    return "quiet again"


@server.tool()
def header(key: str, context: Context) -> str:
    """A header of the request."""
    return context.request_context.request.headers.get(key, "")


@server.tool()
def variable(name: str) -> str:
    """A variable of the environment."""
    return os.environ.get(name, "not set")


def main() -> None:
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", port=int(sys.argv[2]))
        return
    print("garbage before the first message", file=sys.stderr)
    server.run("stdio")


if __name__ == "__main__":
    main()
