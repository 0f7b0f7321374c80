"""Settings that stand beside a tool's `_target_`, and checks of them before anything is started.

Limits and `stop` of any tool (`ToolSettings`), MCP servers, and texts to search.
"""

from __future__ import annotations

import builtins
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import field
from enum import StrEnum
from pathlib import Path
from string import Template
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from agenttrain.utils.data_fields import Data, DataWhere
from agenttrain.utils.files import PACKAGE
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.redaction import (
    hide_in_settings,
    hide_secrets,
    is_web_address,
    names_variable,
)
from agenttrain.utils.sections import SETTINGS, Flag, Number, Whole


class Isolation(StrEnum):
    """Where the calls of a tool run."""

    thread = "thread"
    """In this process; a call that takes too long is left behind."""
    process = "process"
    """In worker processes of the tool's own; a call that takes too long is killed."""


def _are_builtins(errors: object) -> bool:
    """Return True for a list of built-in errors, for which no other module is imported."""
    return isinstance(errors, list) and all(
        re.fullmatch(r"builtins\.\w+", str(error)) for error in errors
    )


@dataclass(config=SETTINGS)
class ToolLimits:
    """Limits of one tool; they stand beside its `_target_`."""

    timeout_s: Number = Field(default=10.0, gt=0)
    """Seconds a call may take before the model reads a timeout error."""
    concurrency: Whole = Field(default=64, ge=1)
    """Calls of this tool at once, over all rollouts; isolation=process: at most as many workers."""
    max_calls: Whole | None = Field(default=None, ge=1)
    """Calls of this tool in a rollout, one more is answered with an error; None: no limit."""
    max_result_tokens: Whole | None = Field(default=None, ge=1)
    """Tokens of one of its results; None: rollout.max_result_tokens."""
    retries: Whole = Field(default=2, ge=0)
    """Times a call is made again after a fault of the infrastructure; then the rollout fails."""
    # Only built-in errors are data, which a stranger's run may set: others import a module.
    retry_on: Annotated[list[str], DataWhere(_are_builtins)] = field(default_factory=list)
    """Errors that are such faults besides ToolUnavailable, e.g. [builtins.ConnectionError]."""
    retry_backoff_s: Number = Field(default=0.5, ge=0)
    """Seconds before a call is made again, doubled each time."""
    isolation: Data[Isolation] = Isolation.thread
    """`thread`: calls run in this process; `process`: in workers of the tool's own, where a call
    that takes too long is killed."""

    @field_validator("retry_on")
    @classmethod
    def _are_errors(cls, paths: list[str]) -> list[str]:
        """Return `paths`; raise ValueError for a builtin that is no exception."""
        for path in paths:
            module, _, name = path.rpartition(".")
            if module != "builtins":  # other modules are imported when the tool is built
                continue
            error = getattr(builtins, name, None)
            if not (isinstance(error, type) and issubclass(error, Exception)):
                types = [n for n, v in vars(builtins).items() if isinstance(v, type)]
                hint = did_you_mean(name, [n for n in types if n.endswith("Error")])
                raise ValueError(f"{path}: is no exception{hint}")
        return paths

    @model_validator(mode="after")
    def _check(self) -> Self:
        default_backoff_s = ToolLimits.retry_backoff_s  # pydantic keeps defaults on the class
        if self.retries == 0 and self.retry_backoff_s != default_backoff_s:
            raise ValueError(
                f"retry_backoff_s={self.retry_backoff_s:g}: has no effect with retries=0; "
                "leave one of them out"
            )
        return self


@dataclass(config=SETTINGS)
class ToolSettings(ToolLimits):
    """Settings of one tool, beside its `_target_`."""

    stop: Flag = False
    """A call to it ends the rollout, as one to a tool that `stop_tools` names; where the section
    makes several tools, a call to any of them."""


MCP_SERVER = "agenttrain.tools.mcp.server.McpServer"


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
    """Raise ValueError, which begins ``argument=value``, for settings that cannot work."""
    if (command is None) == (url is None):
        problem = "both are given" if command is not None else "none is given"
        raise ValueError(
            f"command or url: {problem}; a server is either started here, e.g. "
            "command=[python,my_server.py], or reached, e.g. url=http://127.0.0.1:8000/mcp"
        )
    if command is not None:
        path = expand_variables("env", env).get("PATH")
        if not isinstance(command, list | tuple) or not command:
            words = command.split() if isinstance(command, str) else []
            words = words or ["python", "my_server.py"]
            raise ValueError(
                f"command={command!r}: must be a list of words, e.g. command=[{','.join(words)}]"
            )
        words = [str(word) for word in command]
        if shutil.which(words[0], path=path) is None:
            raise ValueError(
                f"command=[{', '.join(words)}]: there is no program {words[0]!r} on the PATH; "
                "install it, or give its whole path"
            )
    if url is not None:
        _check_url(url)
    # `env` is for servers that are started, `headers` for those that are reached.
    for name, value, excluded_by in (("env", env, url), ("headers", headers, command)):
        if value and excluded_by is not None:
            kind = "a server that is started" if name == "env" else "a url"
            hidden = hide_in_settings({name: value})[name]
            raise ValueError(f"{name}={hidden}: is of use with {kind} only; leave it out")
        expand_variables(name, value)
    if allow is not None and (not isinstance(allow, list | tuple) or not allow):
        raise ValueError(
            f"allow={allow}: must be a list of the server's tools; leave it out for all"
        )
    if not isinstance(prefix, str):
        raise ValueError(f"prefix={prefix}: must be a text, e.g. files_")
    for name, value in (("start_timeout_s", start_timeout_s), ("reconnect_s", reconnect_s)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise ValueError(f"{name}={value}: must be a number of seconds above 0")


def expand_variables(name: str, values: object) -> dict[str, str]:
    """Fill in ``$NAME`` in the texts of a setting with the environment variable NAME.

    Secrets then need not stand in a configuration, of which every run keeps a copy. Example:
    ``{"Authorization": "Bearer $TOKEN"}``. `name` is that of the setting, for errors. Raises
    ValueError if NAME is not set.
    """
    if not isinstance(values, Mapping | None):
        raise ValueError(f"{name}={hide_in_settings(values)}: must be a mapping of names to texts")
    shown = hide_in_settings({name: values})[name]
    texts = {}
    for key, value in (values or {}).items():
        try:
            texts[str(key)] = Template(str(value)).substitute(os.environ)
        except KeyError as error:
            variable = error.args[0]
            raise ValueError(
                f"{name}={shown}: ${variable} of {key} is not set in the environment; "
                f"export {variable}=… first"
            ) from None
        except ValueError as error:
            raise ValueError(f"{name}={shown}: {key}: {error}; write $$ for a dollar") from None
    return texts


def _check_url(url: Any) -> None:
    """Raise ValueError for an incomplete address, for one with credentials in plain text, and for
    one that names an environment variable which is not set."""
    hidden = hide_secrets(str(url))
    if not is_web_address(url):
        raise ValueError(f"url={hidden}: must be a whole address, e.g. http://127.0.0.1:8000/mcp")
    # Every file and message of the run would repeat credentials in the address.
    credentials, at, _ = urlsplit(str(url)).netloc.rpartition("@")
    if at and not names_variable(credentials):
        raise ValueError(
            f"url={hidden}: holds credentials, which the run's files would keep; put them into the "
            "environment and write their names: "
            f"'url={hidden.replace('***', '$NAME:$PASSWORD')}', or "
            "'headers={Authorization: Bearer $TOKEN}'"
        )
    expand_variables("url", {"url": str(url)})  # raises for a variable that is not set


SEARCH = "agenttrain.tools.builtin.search.Search"
BUNDLED = "bundled:"
TEXTS = (".md", ".markdown", ".txt")
"""Files of a folder that are read."""
ROWS = (".jsonl", ".csv", ".parquet")
"""Files that have a text in each row."""


def check_corpus(
    path: object = None,
    k: object = 3,
    max_chars: object = 500,
    text_column: object = "text",
    title_column: object = "title",
) -> Path:
    """Return the folder or file at `path`; raises ValueError that begins ``argument=value``.

    ``bundled:encyclopedia`` is the packaged folder of that name.
    """
    for name, value in (("k", k), ("max_chars", max_chars)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value}: must be a whole number of at least 1")
    for name, column in (("text_column", text_column), ("title_column", title_column)):
        if not isinstance(column, str) or not column:
            raise ValueError(f"{name}={column}: must be the name of a column")
    if path is None:
        raise ValueError("has no path; set the folder or file to search, e.g. path=docs/")
    folder_or_file = Path(str(path)).expanduser()
    if str(path).startswith(BUNDLED):
        folders = PACKAGE / "data" / "documents"
        names = sorted(folder.name for folder in folders.iterdir() if folder.is_dir())
        bundled = str(path).removeprefix(BUNDLED)
        if bundled not in names:
            raise ValueError(
                f"path={path}: there is no such bundled folder{did_you_mean(bundled, names)}; "
                f"there are: {', '.join(names)}"
            )
        folder_or_file = folders / bundled
    if folder_or_file.is_dir():
        if next(text_files(folder_or_file), None) is None:
            raise ValueError(f"path={path}: the folder has no files ending in {', '.join(TEXTS)}")
    elif not folder_or_file.is_file():
        raise ValueError(f"path={path}: there is no such folder or file")
    elif folder_or_file.suffix not in (*TEXTS, *ROWS):
        endings = ", ".join((*TEXTS, *ROWS))
        raise ValueError(f"path={path}: its ending must be one of {endings}")
    return folder_or_file


def text_files(folder: Path) -> Iterator[Path]:
    """Yield the text files in a folder and below it, without hidden ones."""
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.suffix in TEXTS and not hidden and file.is_file():
            yield file


HOOKS = ("reset", "done", "state", "user", "reward", "call_tool", "close")
"""Methods of an environment that are no tools."""
LIFE_CYCLE = ("release", "close")
"""Methods of a class in `tools` that are no tools."""
