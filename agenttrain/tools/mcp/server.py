"""Tools of an MCP server (modelcontextprotocol.io), used through the `mcp` SDK."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agenttrain.tools.config import check_mcp_server, expand_variables
from agenttrain.tools.mcp.connection import (
    CannotConnect,
    Connection,
    StderrTail,
    http_transport,
    process_transport,
)
from agenttrain.tools.tool import Tool
from agenttrain.types import Image, ToolContext, ToolFailure
from agenttrain.utils.data_fields import Data
from agenttrain.utils.image_files import read_image
from agenttrain.utils.json_schema import SchemaResolver
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.redaction import hide_secrets


class McpServer:
    """A server whose tools become tools of the run, with the server's own schemas.

    The tools are listed once, when the run is built. After a failure the connection is made again
    and the call is sent again. A server that does not come back ends the rollout without a score.
    Example::

        McpServer(command=["python", "files_server.py"], allow=["read", "list"], prefix="files_")
        McpServer(url="http://127.0.0.1:8000/mcp", headers={"Authorization": "Bearer $TOKEN"})
    """

    def __init__(
        self,
        *,
        command: Sequence[str] | None = None,
        url: str | None = None,
        allow: Data[Sequence[str] | None] = None,
        prefix: Data[str] = "",
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        start_timeout_s: Data[float] = 30.0,
        reconnect_s: Data[float] = 5.0,
    ) -> None:
        """Start `command` (stdio) or connect to `url` (streamable HTTP), and list the tools.

        Only tools in `allow` are used (None: all), named `prefix` + their name. The command's
        environment has PATH, HOME, the other variables that the SDK passes on, and `env`. In `env`,
        `headers` and `url`, ``$NAME`` is the variable NAME of this process. Reconnecting may take
        `reconnect_s` seconds, which count as part of a call's timeout_s. Raises ValueError for
        settings that cannot work, and for a server that does not answer within `start_timeout_s`.
        """
        check_mcp_server(command, url, allow, prefix, env, headers, start_timeout_s, reconnect_s)
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise ValueError(
                "MCP servers need the `mcp` package: pip install 'agenttrain[mcp]'"
            ) from error
        self._command = None if command is None else [str(word) for word in command]
        self._url, self._prefix = url, prefix
        self._env, self._headers = (
            expand_variables("env", env),
            expand_variables("headers", headers),
        )
        self._stderr = StderrTail()
        self._refused: list[int] = []
        """HTTP status of the last refused request of the connection in use, if there was one."""
        self._connection = Connection(
            self._make_client, start_timeout_s=start_timeout_s, reconnect_s=reconnect_s
        )
        try:
            server_tools = self._connection.start()
            names = [tool.name for tool in server_tools]
            if not names:
                raise ValueError("the MCP server has no tools")
            for name in allow or ():
                if name not in names:
                    raise ValueError(
                        f"allow=[{', '.join(map(str, allow or ()))}]: the server has no tool "
                        f"{name!r}{did_you_mean(str(name), names)}; it has: {', '.join(names)}"
                    )
            # In the server's order.
            self._used_tools = [
                tool for tool in server_tools if allow is None or tool.name in allow
            ]
        except CannotConnect as error:
            self._connection.close()
            raise ValueError(self._cannot_connect(error)) from error
        except ValueError:
            self._connection.close()
            raise

    def tools(self) -> list[Tool]:
        """Return the server's tools."""
        tools: list[Tool] = []
        for tool in self._used_tools:  # `mcp_types.Tool`
            name = f"{self._prefix}{tool.name}"
            function = {
                "name": name,
                "description": tool.description or tool.title or "",
                "parameters": inline_references(tool.input_schema),
            }
            tools.append(
                McpTool(
                    name=name,
                    schema={"type": "function", "function": function},
                    remote_name=tool.name,
                    connection=self._connection,
                )
            )
        return tools

    def _make_client(self) -> Any:
        """Make a new client, which connects when it is entered."""
        from mcp import Client

        if self._command is not None:
            return Client(process_transport(self._command, self._env, self._stderr))
        self._refused.clear()
        # Expanded only here: `_url` stands in errors, where no secret may.
        url = expand_variables("url", {"url": self._url})["url"]
        return Client(http_transport(url, self._headers, self._refused))

    def _cannot_connect(self, error: CannotConnect) -> str:
        """Return the message for a server that cannot be reached or does not answer."""
        if self._command is None:
            status = f" (HTTP {self._refused[-1]})" if self._refused else ""
            return hide_secrets(
                f"url={self._url}: cannot connect: {error}{status}; is an MCP server running "
                "there, and does it take these headers?"
            )
        line = self._stderr.last_line()
        reason = f"its last line on stderr: {line}" if line else "it wrote nothing to stderr"
        return (
            f"command=[{', '.join(self._command)}]: the server does not answer: {error}; {reason}; "
            "run the command in a terminal to see why"
        )


@dataclass(slots=True, kw_only=True, eq=False)
class McpTool:
    """One tool of a server, which `McpServer.tools` makes. All share the server's connection."""

    name: str
    schema: dict[str, Any]
    remote_name: str
    """Its name without the prefix."""
    connection: Connection

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> object:
        """Call the tool; return the texts and images of its result, else its structured content.

        Raises ToolFailure for an error of the protocol, for an error result, and for content that
        the model cannot read, such as a sound.
        """
        from mcp import MCPError

        try:
            result = await self.connection.call(self.remote_name, arguments)
        except MCPError as error:
            raise ToolFailure(error.message) from error
        texts: list[str] = []
        parts: list[str | Image] = []  # texts and images, up to the last image
        for block in result.content:
            if block.type == "text":
                texts.append(block.text)
            elif block.type == "resource_link":
                texts.append(f"{block.name}: {block.uri}")
            elif block.type == "resource" and hasattr(block.resource, "text"):
                texts.append(block.resource.text)
            elif block.type == "image":
                try:
                    picture = read_image(base64.b64decode(block.data))
                except ValueError as error:
                    raise ToolFailure(f"the result holds a broken image: {error}") from error
                parts += ["\n".join(texts), picture]
                texts = []
            else:
                # A sound or an embedded file that is no text. A sound has a MIME type itself, an
                # embedded file that of its resource.
                holder = block.resource if block.type == "resource" else block
                kind = getattr(holder, "mime_type", None)
                raise ToolFailure(
                    f"the result holds something that is neither text nor an image "
                    f"({kind or block.type})"
                )
        if result.is_error:
            # The message may be in texts on both sides of an image.
            texts = [part for part in parts if isinstance(part, str) and part] + texts
            raise ToolFailure("\n".join(texts) or "the tool failed and did not say why")
        if parts:
            return [*parts, "\n".join(texts)]
        return result.structured_content if not texts else "\n".join(texts)

    async def close(self) -> None:
        """Close the connection, which all tools of the server share."""
        # In a thread: closing blocks until the server has ended.
        await asyncio.get_running_loop().run_in_executor(None, self.connection.close)


def inline_references(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each ``$ref`` of a schema by the part of the schema that it means.

    Chat templates that list parameters one by one do not follow references. A schema that contains
    itself, or has a reference that leads nowhere, stays as it is. Example: ``{"properties":
    {"home": {"$ref": "#/$defs/Address"}}, "$defs": {"Address": {"type": "object"}}}`` ->
    ``{"properties": {"home": {"type": "object"}}}``
    """
    resolver = SchemaResolver(schema)
    try:
        return dict(schema) if resolver.problem() else resolver.inlined()
    # It contains itself, or is nested too deeply, which the check of arguments reports.
    except (ValueError, RecursionError):
        return dict(schema)
