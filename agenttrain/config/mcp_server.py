"""MCP servers: checks of one before it is started or called."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from string import Template
from typing import Any
from urllib.parse import urlsplit

MCP_SERVER = "agenttrain.tools.mcp.McpServer"


def without_password(text: str) -> str:
    """Hide what stands before the host of the addresses in a text, unless it is a variable's name.

    Example: ``http://me:secret@host/mcp`` -> ``http://***@host/mcp``; ``http://me:$SECRET@host/mcp``
    stays.
    """

    def hidden(match: re.Match[str]) -> str:
        return match[0] if _is_named(match[2]) else f"{match[1]}***@"

    return re.sub(r"(\w://)([^/\s?#]+)@", hidden, text)


def _is_named(credentials: str) -> bool:
    """Return whether the secret of ``name:secret``, or ``secret``, is a variable: ``$NAME``."""
    name, _, secret = credentials.partition(":")
    return re.fullmatch(r"\$(\w+|\{\w+\})", secret or name) is not None


def check_mcp_server(
    command: object = None,
    url: object = None,
    allow: object = None,
    prefix: object = "",
    env: object = None,
    headers: object = None,
    start_timeout_s: object = 30.0,
    reconnect_s: object = 5.0,
) -> None:
    """Raise ValueError, beginning with the argument and its value, for what cannot work."""
    if (command is None) == (url is None):
        given = "both are given" if command is not None else "none is given"
        raise ValueError(
            f"command or url: {given}; a server is either started here, e.g. "
            "command=[python,my_server.py], or reached, e.g. url=http://127.0.0.1:8000/mcp"
        )
    if command is not None:
        _check_command(command, expanded("env", env).get("PATH"))
    if url is not None:
        _check_url(url)
    for name, value, other in (("env", env, url), ("headers", headers, command)):
        if value and other is not None:
            started = "a server that is started" if name == "env" else "a url"
            raise ValueError(f"{name}={value}: is of use with {started} only; leave it out")
        expanded(name, value)
    if allow is not None and (not isinstance(allow, list | tuple) or not allow):
        raise ValueError(
            f"allow={allow}: must be a list of the server's tools; leave it out for all"
        )
    if not isinstance(prefix, str):
        raise ValueError(f"prefix={prefix}: must be a text, e.g. files_")
    for name, value in (("start_timeout_s", start_timeout_s), ("reconnect_s", reconnect_s)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise ValueError(f"{name}={value}: must be a number of seconds above 0")


def expanded(name: str, values: object) -> dict[str, str]:
    """Fill ``$NAME`` in the texts of `env`, `headers` or `url` with our environment's NAME.

    So that secrets need not stand in a configuration, which every run keeps a copy of. Example:
    ``{"Authorization": "Bearer $TOKEN"}``. Raises ValueError when NAME is not set.
    """
    if not isinstance(values, Mapping | None):
        raise ValueError(f"{name}={values}: must be a mapping of names to texts")
    texts = {}
    for key, value in (values or {}).items():
        try:
            texts[str(key)] = Template(str(value)).substitute(os.environ)
        except KeyError as error:
            variable = error.args[0]
            raise ValueError(
                f"{name}={values}: ${variable} of {key} is not set in the environment; "
                f"export {variable}=… first"
            ) from None
        except ValueError as error:
            raise ValueError(f"{name}={values}: {key}: {error}; write $$ for a dollar") from None
    return texts


def _check_command(command: object, path: str | None) -> None:
    if not isinstance(command, list | tuple) or not command:
        words = command.split() if isinstance(command, str) else []
        words = words or ["python", "my_server.py"]
        raise ValueError(
            f"command={command!r}: must be a list of words, e.g. command=[{','.join(words)}]"
        )
    words = [str(word) for word in command]
    if shutil.which(words[0], path=path) is None:
        raise ValueError(
            f"command=[{', '.join(words)}]: there is no program {words[0]!r} on the PATH; install "
            "it, or give its whole path"
        )


def _check_url(url: Any) -> None:
    hidden = without_password(str(url))
    try:
        parts = urlsplit(url)
        complete = parts.scheme in ("http", "https") and bool(parts.hostname)
    except (ValueError, AttributeError, TypeError):
        complete = False
    if not complete:
        raise ValueError(f"url={hidden}: must be a whole address, e.g. http://127.0.0.1:8000/mcp")
    # Every file and message of the run would repeat credentials in the address.
    credentials, at, _ = urlsplit(str(url)).netloc.rpartition("@")
    if at and not _is_named(credentials):
        raise ValueError(
            f"url={hidden}: holds credentials, which the run's files would keep; put them into the "
            "environment and write their names: "
            f"'url={hidden.replace('***', '$NAME:$PASSWORD')}', or "
            "'headers={Authorization: Bearer $TOKEN}'"
        )
    expanded("url", {"url": str(url)})
