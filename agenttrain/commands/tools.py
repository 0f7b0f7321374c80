"""`agenttrain tools`: the tools that the model can call, and the results of calls."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.json import JSON
from rich.padding import Padding
from rich.text import Text

from agenttrain.commands.schema_examples import arguments_for
from agenttrain.commands.verb import STDOUT, as_config_error, write_report
from agenttrain.data.tasks import TaskSource
from agenttrain.environments.environments import Environments
from agenttrain.rollout.episode import end_episode, start_episode
from agenttrain.rollout.row_tools import RowTools
from agenttrain.runs.setup import Components
from agenttrain.settings.run_config import RunConfig
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import Rollout, RolloutMachine, Task, ToolCall, ToolContext, ToolResult
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.redaction import shell_command

TRIED = "try"
"""Name of the rollout of which the calls are a part."""
SEARCHED = 10_000
"""Rows that are searched for a task's id: rows without end are computed one by one."""


def show(
    config: RunConfig, args: Namespace, calls: Sequence[ToolCall], overrides: Sequence[str]
) -> int:
    """Print the tools, or the results of calls. Return exit code 1 if a call has an error.

    If the arguments name a row of data.train, its tools are printed, and calls are made for it;
    otherwise calls are made for the first row. Raises ConfigError for tools that cannot be built,
    and for rows and tools that do not exist.
    """
    with as_config_error():
        components = Components(config)
        toolbox, environments = components.toolbox, components.environments
        row_tools, results = asyncio.run(_tools_and_results(components, args, calls))
    # Environment, for a heading -> its tools. None, without a heading: the tools of no environment
    # or, if a row is named, all of that row's.
    tools: dict[str | None, list[dict[str, Any]]] = {None: _describe_tools(row_tools or toolbox)}
    if row_tools is None:
        tools |= {
            name: _describe_tools(methods) for name, methods in environments.toolboxes.items()
        }
    report = {
        "tools": [{**tool, "environment": name} for name, box in tools.items() for tool in box],
        "calls": [
            {
                "name": result.call.name,
                "arguments": result.call.arguments,
                "content": result.content,
                "error": result.error,
                "seconds": result.seconds,
            }
            for result in results
        ],
    }
    write_report(report, args.json)
    if args.json != STDOUT:  # there the JSON takes the place of the text
        if calls:
            _print_results(results)
        else:
            row = [] if args.row is None else ["--row", str(args.row)]
            row += [] if args.task is None else ["--task", args.task]
            _print_tools(tools, [*overrides, *row])
            if not any(tools.values()):
                print(f"{'this run' if row_tools is None else 'this row'} has no tools")
    return int(any(result.error for result in results))


def _print_results(results: Sequence[ToolResult]) -> None:
    """Print each call with its result, time and error."""
    console = Console()
    for result in results:
        arguments = json.dumps(result.call.arguments, ensure_ascii=False)
        console.print(Text.assemble((result.call.name, "bold cyan"), " ", arguments))
        console.print(_indented(Text(result.content)))
        outcome = f"error: {result.error}" if result.error else "no error"
        style = "red" if result.error else "dim"
        console.print(_indented(Text(f"{result.seconds:.3f} s, {outcome}", style), below=1))


def _print_tools(
    tools: Mapping[str | None, Sequence[dict[str, Any]]], words: Sequence[str]
) -> None:
    """Print tools, those of an environment below its name; `words` are for a command to copy."""
    console = Console()
    for environment, described in tools.items():
        if environment is not None:
            console.print(Text(f"environment {environment}", "bold"))
        for tool in described:
            _print_tool(console, tool, words)


async def _tools_and_results(
    components: Components, args: Namespace, calls: Sequence[ToolCall]
) -> tuple[RowTools | None, list[ToolResult]]:
    """Return the tools of the row that --row or --task names, and the results of the calls.

    Without a named row the tools are None, and calls are made for the first row of data.train.
    """
    names_row = args.row is not None or args.task is not None
    try:
        if not calls and not names_row:
            return None, []
        toolbox, environments = components.toolbox, components.environments
        task = _find_row(args, components.tasks.by_key["data.train"])
        tools_of = f"row {task.task_id}" if names_row else "the first row"
        machines = components.machines
        machine = None
        if machines is not None and calls:  # as for a rollout, whose name is TRIED
            machine = await machines.start(TRIED, task)
        results = await _make_calls(toolbox, environments, calls, task, tools_of, machine)
        tools = RowTools(task, toolbox, environments)
        results = [_clip(result, tools, components) for result in results]
        return tools if names_row else None, results
    finally:
        await components.aclose()


def _clip(result: ToolResult, tools: RowTools, components: Components) -> ToolResult:
    """Return the result with its text clipped as in a rollout, as the model reads it."""
    limit = tools.limits(result.call.name).max_result_tokens
    limit = limit or components.config.rollout.max_result_tokens
    if len(result.content.encode()) <= limit:  # a token has a byte or more: no tokenizer is needed
        return result
    return replace(result, content=components.chat.clip(result.content, limit))


def _find_row(args: Namespace, rows: TaskSource) -> Task:
    """Return the named row, else the first one that training takes."""
    if args.row is not None:
        if args.row >= len(rows):
            raise ValueError(f"--row {args.row}: data.train has {len(rows):,} rows, from 0 on")
        return rows.row(args.row)
    if args.task is None:
        return rows.tasks(0, 1)[0]
    searched = min(len(rows), SEARCHED)
    names = []
    for number in range(searched):
        task = rows.row(number)
        if task.task_id == args.task:
            return task
        names.append(task.task_id)
    where = "data.train" if searched == len(rows) else f"the first {searched:,} rows of data.train"
    raise ValueError(
        f"--task {args.task}: no row of {where} has this task_id{did_you_mean(args.task, names)}"
    )


async def _make_calls(
    toolbox: Toolbox,
    environments: Environments,
    calls: Sequence[ToolCall],
    task: Task,
    tools_of: str,
    machine: RolloutMachine | None,
) -> list[ToolResult]:
    """Make the calls one after the other, as in the turns of one rollout of the task.

    `tools_of` names the row in errors: ``row 7``. `machine` is the row's container, if it has one.
    """
    tool_names = RowTools(task, toolbox, environments).names
    for call in calls:
        if call.name not in tool_names:
            raise ValueError(
                f"--call {call.name}: there is no such tool{did_you_mean(call.name, tool_names)}; "
                f"the tools of {tools_of} are: {', '.join(tool_names) or 'none'}"
            )
    if not calls:
        return []
    rollout = Rollout(task=task, rollout_id=TRIED)
    episode = await start_episode(rollout, environments, seed=0, group_seed=0, machine=machine)
    results: list[ToolResult] = []
    try:
        tools = RowTools(task, toolbox, environments, episode)
        contexts = {
            call.id: ToolContext(
                rollout_id=TRIED,
                task=task,
                turn=turn,
                call_id=call.id,
                tool=call.name,
                machine=machine,
            )
            for turn, call in enumerate(calls)
        }
        for call in calls:
            results += await tools.execute([call], lambda executed: contexts[executed.id])
        # Not after an error: the command ends, and the tools with it.
        await toolbox.release(TRIED)
    finally:
        await end_episode(rollout, episode)
    return results


def _describe_tools(tools: Toolbox | RowTools) -> list[dict[str, Any]]:
    """Return the tools as plain data."""
    schemas = tools.schemas() if isinstance(tools, Toolbox) else tools.schemas
    names = [schema["function"]["name"] for schema in schemas]
    return [
        {
            "name": name,
            "stop_tool": name in tools.stop_tools,
            "limits": asdict(tools.limits(name)),
            "schema": schema,
        }
        for name, schema in zip(names, schemas, strict=True)
    ]


def _print_tool(console: Console, tool: Mapping[str, Any], words: Sequence[str]) -> None:
    """Print a tool's schema and limits, and a call as an example."""
    limits = {name: value for name, value in tool["limits"].items() if value not in (None, [])}
    title = Text.assemble((tool["name"], "bold cyan"), ("  stop tool", "magenta"))
    console.print(title if tool["stop_tool"] else Text(tool["name"], "bold cyan"))
    console.print(_indented(JSON.from_data(tool["schema"], ensure_ascii=False)))
    limited = ", ".join(f"{name} {value}" for name, value in limits.items())
    console.print(_indented(Text(limited, "dim")))
    # A value for each required argument, by its type.
    arguments = arguments_for(tool["schema"]["function"], ["…"], None)
    values = json.dumps(arguments, ensure_ascii=False)
    command = shell_command(["tools", *words, "--call", tool["name"], values])
    # soft_wrap: a command broken over lines cannot be copied.
    console.print(Text(f"  try it: {command}\n", "dim"), soft_wrap=True)


def _indented(content: Text | JSON, below: int = 0) -> Padding:
    """Return the content indented, with `below` empty lines after it."""
    return Padding(content, (0, 0, below, 2), expand=False)
