"""`agenttrain tools`: what the model can call, and what a call of it gives."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NoReturn

from rich.console import Console
from rich.json import JSON
from rich.padding import Padding
from rich.text import Text

from agenttrain.config.errors import ConfigError
from agenttrain.config.schema import RunConfig
from agenttrain.config.suggest import did_you_mean
from agenttrain.rollout.build import build_tools
from agenttrain.rollout.environments import Environments
from agenttrain.rollout.episode import begin, end
from agenttrain.rollout.row_tools import RowTools
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import AgenttrainError, Rollout, Task, ToolCall, ToolContext, ToolResult

EXAMPLES: Mapping[str, Any] = {"string": "…", "integer": 1, "number": 1.5, "boolean": True}
"""A value of each JSON type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for beside the overrides."""

    calls: tuple[ToolCall, ...]
    as_json: bool


def parse(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Take ``--call NAME JSON`` (any number of them) and ``--json`` out of the arguments."""
    parser = argparse.ArgumentParser(prog="agenttrain tools", allow_abbrev=False, add_help=False)
    parser.add_argument("--call", nargs=2, action="append", default=[])
    parser.add_argument("--json", action="store_true")
    parser.error = _refuse  # type: ignore[method-assign]
    parsed, rest = parser.parse_known_args(list(arguments))
    calls = tuple(
        ToolCall(id=f"call_{number}", name=name, arguments=_arguments(name, text))
        for number, (name, text) in enumerate(parsed.call)
    )
    return Options(calls=calls, as_json=parsed.json), rest


def show(config: RunConfig, options: Options, task: Callable[[], Task]) -> int:
    """Print the tools; call those asked for on `task`. Exit code 1 when a call has an error.

    Raises ConfigError for tools that cannot be built and for calls of tools that are not there.
    """
    try:
        toolbox, environments = build_tools(config)
        results = asyncio.run(_try(toolbox, environments, options.calls, task))
    except (AgenttrainError, OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    console = Console()
    if options.as_json:
        boxes: list[tuple[str | None, Toolbox]] = [(None, toolbox), *environments.toolboxes.items()]
        tools = [
            {**_described(box, schema), "environment": name}
            for name, box in boxes
            for schema in box.schemas()
        ]
        plain = {"tools": tools, "calls": [_result(result) for result in results]}
        print(json.dumps(plain, indent=2, ensure_ascii=False))
    elif options.calls:
        for result in results:
            _print_result(console, result)
    else:
        _print_all(console, toolbox, environments)
    return int(any(result.error for result in results))


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f'{message}; write --call NAME JSON, e.g. --call add \'{{"a": 1, "b": 2}}\'')


def _arguments(name: str, text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--call {name} {text}: is not JSON: {error}; quote it for the shell, e.g. --call "
            f"{name} '{{\"a\": 1}}'"
        ) from error
    if not isinstance(arguments, dict):
        raise ConfigError(f"--call {name} {text}: must be an object of arguments, e.g. {{}}")
    return arguments


async def _try(
    toolbox: Toolbox,
    environments: Environments,
    calls: Sequence[ToolCall],
    task: Callable[[], Task],
) -> list[ToolResult]:
    try:
        return await _call(toolbox, environments, calls, task()) if calls else []
    finally:
        await toolbox.aclose()
        await environments.aclose()


async def _call(
    toolbox: Toolbox, environments: Environments, calls: Sequence[ToolCall], task: Task
) -> list[ToolResult]:
    """One result per call, one after the other as in the turns of one rollout of the task."""
    known = RowTools(task, toolbox, environments).names
    for call in calls:
        if call.name not in known:
            raise ValueError(
                f"--call {call.name}: there is no such tool{did_you_mean(call.name, known)}; the "
                f"tools of the first row are: {', '.join(known) or 'none'}"
            )
    rollout = Rollout(task=task, rollout_id="try")
    episode = await begin(rollout, environments, seed=0, group_seed=0)
    results: list[ToolResult] = []
    try:
        tools = RowTools(task, toolbox, environments, episode)
        for turn, call in enumerate(calls):
            context = ToolContext(
                rollout_id="try", task=task, turn=turn, call_id=call.id, tool=call.name
            )
            results += await tools.execute([call], partial(_same, context))
        await toolbox.release("try")
    finally:
        await end(rollout, episode)
    return results


def _same(context: ToolContext, call: ToolCall) -> ToolContext:
    return context


def _described(toolbox: Toolbox, schema: dict[str, Any]) -> dict[str, Any]:
    name = schema["function"]["name"]
    limits = asdict(toolbox.limits(name))
    return {
        "name": name,
        "stop_tool": name in toolbox.stop_tools,
        "limits": limits,
        "schema": schema,
    }


def _result(result: ToolResult) -> dict[str, Any]:
    return {
        "name": result.call.name,
        "arguments": result.call.arguments,
        "content": result.content,
        "error": result.error,
        "seconds": result.seconds,
    }


def _print_all(console: Console, toolbox: Toolbox, environments: Environments) -> None:
    _print_tools(console, toolbox)
    for name, methods in environments.toolboxes.items():
        console.print(Text(f"environment {name}", "bold"))
        _print_tools(console, methods)
    if not toolbox.names and not environments.tool_names:
        console.print("this run has no tools")


def _print_tools(console: Console, toolbox: Toolbox) -> None:
    for schema in toolbox.schemas():
        tool = _described(toolbox, schema)
        limits = {k: v for k, v in tool["limits"].items() if v not in (None, [])}
        told = ", ".join(f"{name} {value}" for name, value in limits.items())
        title = Text.assemble((tool["name"], "bold cyan"), ("  stop tool", "magenta"))
        console.print(title if tool["stop_tool"] else Text(tool["name"], "bold cyan"))
        console.print(
            Padding(JSON.from_data(schema, ensure_ascii=False), (0, 0, 0, 2), expand=False)
        )
        console.print(Padding(Text(told, "dim"), (0, 0, 0, 2), expand=False))
        example = json.dumps(dict(_examples(schema)), ensure_ascii=False)
        console.print(
            Padding(
                Text(f"try it: --call {tool['name']} '{example}'", "dim"),
                (0, 0, 1, 2),
                expand=False,
            )
        )


def _examples(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A value for each argument that is required, as far as a type says one."""
    parameters = schema["function"].get("parameters", {})
    for name in parameters.get("required", ()):
        yield name, _example(parameters.get("properties", {}).get(name, {}))


def _example(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    if schema.get("type") == "array":
        return [_example(schema.get("items", {}))]
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        return {name: _example(properties.get(name, {})) for name in schema.get("required", ())}
    return EXAMPLES.get(str(schema.get("type")), "…")


def _print_result(console: Console, result: ToolResult) -> None:
    arguments = json.dumps(result.call.arguments, ensure_ascii=False)
    console.print(Text.assemble((result.call.name, "bold cyan"), " ", arguments))
    console.print(_inset(Text(result.content)))
    error = f"error: {result.error}" if result.error else "no error"
    style = "red" if result.error else "dim"
    console.print(
        Padding(Text(f"{result.seconds:.3f} s, {error}", style), (0, 0, 1, 2), expand=False)
    )


def _inset(shown: Text | JSON, below: int = 0) -> Padding:
    return Padding(shown, (0, 0, below, 2), expand=False)
