"""The tools of one row, and checks of rows against a run's tools before anything is sampled.

A row's model sees tools of the run's, its environment's, and its own (`RowTools`). `turn_sampling`
makes the request of a turn, with the grammar of its calls under `rollout.structured_calls`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agenttrain.chat.chat import Chat
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.grammar import grammar_problem
from agenttrain.data.tasks import COLUMN_SAMPLE, TaskSource
from agenttrain.environments.environment import Episode
from agenttrain.environments.environments import Environments
from agenttrain.rollout.config import RolloutConfig
from agenttrain.tools.arguments import ArgumentSchema, InvalidArguments, without_nullable
from agenttrain.tools.config import ToolLimits
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import (
    AgenttrainError,
    RowTool,
    Sampling,
    Task,
    ToolCall,
    ToolContext,
    ToolError,
    ToolResult,
    Trajectory,
)
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.seeds import derive_seed

ContextOf = Callable[[ToolCall], ToolContext]
DISPATCHED = {"name", "arguments"}
"""Parameters of an executor that is told which of a row's tools was called."""


class RowTools:
    """Runs the calls of one row's rollouts; tools that the row does not have do not exist.

    A row's own tool is run by its executor: one whose parameters are ``name: str, arguments:
    dict`` gets both, any other the arguments as its own. Calls of an environment run one after the
    other, in call order; all others at once.
    """

    def __init__(
        self,
        task: Task,
        toolbox: Toolbox,
        environments: Environments,
        episode: Episode | None = None,
    ) -> None:
        """Raises ValueError, saying what to change, for tools that the row cannot have."""
        self._toolbox = toolbox
        self._methods = environments.toolbox_of(environments.kind_of(task))
        self._episode = episode
        declared = (*toolbox.names, *self._methods.names)
        listed = declared if task.tools is None else task.tools
        self.own = {tool.name: tool for tool in listed if isinstance(tool, RowTool)}
        self.names = tuple(tool.name if isinstance(tool, RowTool) else tool for tool in listed)
        _check_names(self.names, listed, declared)
        self._arguments = {name: self._read_schema(tool) for name, tool in self.own.items()}
        self.schemas = [self._schema(name) for name in self.names]
        """Schemas as the model sees them, in the row's order."""
        stops = toolbox.stop_tools | self._methods.stop_tools
        self.stop_tools = frozenset(n for n in self.names if self._runs(n) in stops)

    async def execute(self, calls: Sequence[ToolCall], context_of: ContextOf) -> list[ToolResult]:
        """One result per call, in call order, faults as error results."""
        steps = [self._prepare(call) for call in calls]
        methods = [step for step in steps if isinstance(step, _Step) and step.method]
        others = [step for step in steps if isinstance(step, _Step) and not step.method]
        of_environment: list[ToolResult] = []
        if methods:
            of_environment, of_run = await asyncio.gather(
                self._in_order(methods, context_of), _run(self._toolbox, others, context_of)
            )
        else:  # without the cost of two tasks
            of_run = await _run(self._toolbox, others, context_of)
        found = {True: iter(of_environment), False: iter(of_run)}
        results = [
            step if isinstance(step, ToolResult) else next(found[step.method]) for step in steps
        ]
        return [replace(r, stop=True) if r.call.name in self.stop_tools else r for r in results]

    def limits(self, name: str) -> ToolLimits:
        """The limits of a visible tool; a row's own tool has its executor's."""
        runs = self._runs(name)
        toolbox = self._methods if runs in self._methods.names else self._toolbox
        return toolbox.limits(runs)

    def _prepare(self, call: ToolCall) -> _Step | ToolResult:
        """Return the step to run for a call, or its error result."""
        if call.malformed is not None:
            return _Step(call=call, passed=call, method=False)
        if call.name not in self.names:
            hint = did_you_mean(call.name, self.names)
            text = f"unknown tool {call.name!r}{hint}; tools: {', '.join(self.names) or 'none'}"
            return ToolResult(call=call, content=f"Error: {text}", error=ToolError.unknown_tool)
        try:
            passed = self._passed(call) if call.name in self.own else call
        except InvalidArguments as error:
            text = f"Error: {error}"
            return ToolResult(call=call, content=text, error=ToolError.invalid_arguments)
        return _Step(call=call, passed=passed, method=passed.name in self._methods.names)

    def _runs(self, name: str) -> str:
        """Name of the declared tool that does the work of a visible one."""
        return self.own[name].executor if name in self.own else name

    async def _in_order(self, steps: Sequence[_Step], context_of: ContextOf) -> list[ToolResult]:
        results: list[ToolResult] = []
        for step in steps:
            over = self._episode is not None and self._episode.done
            if over or any(result.done for result in results):
                text = "Error: the episode is over; this call was not run"
                results.append(ToolResult(call=step.call, content=text, error=ToolError.limit))
            else:
                results += await _run(self._methods, [step], context_of)
        return results

    def _passed(self, call: ToolCall) -> ToolCall:
        """The call of the executor that a call of the row's own tool is."""
        executor = self.own[call.name].executor
        arguments = self._arguments[call.name].read(call.arguments)
        if _parameters(self._declared(executor)).keys() >= DISPATCHED:
            arguments = {"name": call.name, "arguments": arguments}
        return replace(call, name=executor, arguments=arguments)

    def _schema(self, name: str) -> dict[str, Any]:
        if name not in self.own:
            return self._declared(name)
        tool = self.own[name]
        function = {
            "name": name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
        }
        return {"type": "function", "function": function}

    def _declared(self, name: str) -> dict[str, Any]:
        toolbox = self._methods if name in self._methods.names else self._toolbox
        return toolbox.schemas([name])[0]

    def _read_schema(self, tool: RowTool) -> ArgumentSchema:
        declared = (*self._toolbox.names, *self._methods.names)
        where = f"tools: {tool.name!r}"
        if tool.executor not in declared:
            hint = did_you_mean(tool.executor, declared)
            raise ValueError(
                f"{where}: executor={tool.executor!r} is no tool of this run{hint}; its tools are: "
                f"{', '.join(declared) or 'none'}"
            )
        try:
            read = ArgumentSchema(tool.parameters)
        except ValueError as error:
            raise ValueError(f"{where}: its parameters are {error}") from error
        _check_passing(tool, self._declared(tool.executor), where)
        return read


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A call, and the call of a declared tool that answers it."""

    call: ToolCall
    passed: ToolCall
    method: bool
    """The declared tool is a method of the environment."""


async def _run(toolbox: Toolbox, steps: Sequence[_Step], context_of: ContextOf) -> list[ToolResult]:
    originals = {id(step.passed): step.call for step in steps}
    results = await toolbox.execute(
        [step.passed for step in steps], lambda passed: context_of(originals[id(passed)])
    )
    return [
        result
        if step.passed is step.call
        else replace(result, call=step.call, executor=step.passed.name)
        for step, result in zip(steps, results, strict=True)
    ]


def _check_names(
    names: Sequence[str], listed: Sequence[str | RowTool], declared: Sequence[str]
) -> None:
    for tool in listed:
        if isinstance(tool, str) and tool not in declared:
            raise ValueError(
                f"tools: there is no tool {tool!r}{did_you_mean(tool, declared)}; the tools are: "
                f"{', '.join(declared) or 'none'}"
            )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"tools: {twice!r} is there twice; a name can have one meaning only")


def _check_passing(tool: RowTool, executor: dict[str, Any], where: str) -> None:
    """Raise ValueError where an executor without `name, arguments` cannot take the arguments."""
    takes = _parameters(executor)
    if takes.keys() >= DISPATCHED:
        return
    required = executor["function"]["parameters"].get("required", [])
    given = tool.parameters.get("properties", {})
    wrong = [n for n in given if n not in takes] or [
        n for n in required if n not in tool.parameters.get("required", [])
    ]
    if wrong:
        raise ValueError(
            f"{where}: its parameters do not fit its executor {tool.executor!r}, which takes "
            f"{', '.join(takes) or 'none'} ({', '.join(required) or 'none'} required): "
            f"{', '.join(wrong)} is the difference; change the row, or let the executor take "
            "`name: str, arguments: dict`"
        )


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    return schema["function"].get("parameters", {}).get("properties", {})


def turn_sampling(
    sampling: Sampling,
    trajectory: Trajectory,
    chat: Chat,
    tools: RowTools,
    limits: RolloutConfig,
    *,
    budget: int,
) -> Sampling:
    """How the next turn is sampled: `sampling` is the rollout's, `budget` what the turn may have.

    Raises ChatError where the format of calls has no grammar, and the limits ask for one.
    """
    grammar = None
    if limits.structured_calls:
        grammar = grammar_of(chat, tools.schemas, after=trajectory.messages[-1]["role"])
    return replace(
        sampling,
        max_tokens=budget,
        seed=derive_seed(sampling.seed, trajectory.turns),
        stop_token_ids=sampling.stop_token_ids or chat.stop_token_ids,
        grammar=grammar,
    )


def grammar_of(chat: Chat, schemas: Sequence[Mapping[str, Any]], *, after: str = "user") -> str:
    """`Chat.grammar` of the tools whose arguments are read as `ArgumentSchema` reads them."""
    return chat.grammar([_plain(schema) for schema in schemas], after=after)


def _plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    function = schema["function"]
    parameters = without_nullable(function.get("parameters") or {})
    return {**schema, "function": {"name": function["name"], "parameters": parameters}}


CHECKED = 20_000
"""Rows of a dataset that are checked, from the first on."""
Schemas = list[dict[str, Any]]


class RowError(AgenttrainError, ValueError):
    """A row asks for tools or an environment that it cannot have; names the row."""


def check_collisions(toolbox: Toolbox, environments: Environments) -> None:
    """Raise ValueError when an environment's method has the name of one of the run's tools."""
    for name, methods in environments.toolboxes.items():
        for tool in methods.names:
            if tool in toolbox.names:
                raise ValueError(
                    f"environment.{name}: its method {tool!r} has the name of a tool of the run "
                    f"(tools.{tool}); rename the method, or leave the tool out"
                )


def tool_sets(toolbox: Toolbox, environments: Environments) -> list[Schemas]:
    """Return the tools of rows that list none: the run's with each environment's."""
    run = toolbox.schemas()
    return [run + methods.schemas() for methods in environments.toolboxes.values()] or [run]


def row_tool_sets(
    key: str, source: TaskSource, toolbox: Toolbox, environments: Environments
) -> Iterator[Schemas]:
    """Yield the tools of rows of `source` that list theirs: each set once, the first rows' first.

    Of rows that are generated without end only the first are looked at. Raises RowError that
    begins with `key` (data.train) and names the row.
    """
    seen: set[str] = set()
    count = COLUMN_SAMPLE if len(source) == sys.maxsize else min(len(source), CHECKED)
    for index in range(count):
        try:
            task = source.row(index)
            tools = RowTools(task, toolbox, environments)
        except ValueError as error:
            reason = str(error).removeprefix(f"data row {index}: ")
            raise RowError(f"{key}: {source.where(index)}: {reason}") from error
        names = json.dumps(tools.schemas)
        if task.tools is not None and names not in seen:
            seen.add(names)
            yield tools.schemas


KEY = "rollout.structured_calls=true"


def check_grammars(chat: Chat, sets: Iterable[Sequence[Mapping[str, Any]]]) -> None:
    """Raise ChatError where calls of these sets of tools have no grammar, naming the first tool.

    A set that only exists later, a row's own behind those that are looked at, fails its rollouts.
    """
    chat.grammar(())  # whether calls have one at all
    tools = {repr(schema): schema for schemas in sets for schema in schemas}
    for schema in tools.values():
        if problem := grammar_problem(grammar_of(chat, [schema])):
            raise ChatError(
                f"{KEY}: no grammar can be made of the parameters of the tool "
                f"{schema['function']['name']!r}: {problem}; change its schema, or leave "
                "structured_calls out"
            )
