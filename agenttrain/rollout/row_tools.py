"""The tools of one dataset row, and checks of rows against a run's tools before sampling begins.

The model may see the run's tools, those of the row's environment, and tools that the row brings
(`RowTools`). `turn_sampling` adds the grammar of their calls under `rollout.structured_calls`.
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
from agenttrain.data.tasks import COLUMN_SAMPLE, RowError, TaskSource
from agenttrain.engines.config import Sampling
from agenttrain.environments.environment import Episode
from agenttrain.environments.environments import Environments
from agenttrain.rollout.config import RolloutConfig
from agenttrain.tools.arguments import ArgumentSchema, InvalidArguments
from agenttrain.tools.config import ToolLimits
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import (
    RowTool,
    Task,
    ToolCall,
    ToolContext,
    ToolError,
    ToolResult,
    Trajectory,
)
from agenttrain.utils.json_schema import SchemaResolver
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.seeds import derive_seed

ContextOf = Callable[[ToolCall], ToolContext]


class RowTools:
    """The tools that the rollouts of one row may call; any other name is an unknown tool.

    Declared tools are those of the run and the methods of the row's environment. The row lists some
    of them, and may bring tools of its own (`RowTool`): the model sees the listed ones.

    A tool that the row brings has only a schema. Its executor, a declared tool, runs its calls. A
    dispatcher is an executor of any tool: it takes ``name: str, arguments: dict``. Any other
    executor gets the arguments as its own. Calls to the environment run one after the other, in
    call order; all other calls run concurrently.
    """

    def __init__(
        self,
        task: Task,
        toolbox: Toolbox,
        environments: Environments,
        episode: Episode | None = None,
        *,
        executed: bool = True,
    ) -> None:
        """Take the tools that `task` lists, all of them if it lists none.

        With `executed` False no call is run, as in demonstrations, and a tool of the row needs no
        executor. Raises ValueError for tools that the row cannot have.
        """
        self._toolbox = toolbox
        self._methods = environments.toolbox_of(environments.kind_of(task))
        """The methods of the row's environment; `_toolbox` has the tools of the run."""
        self._episode = episode
        declared = (*toolbox.names, *self._methods.names)
        listed = declared if task.tools is None else task.tools
        self.row_tools = {tool.name: tool for tool in listed if isinstance(tool, RowTool)}
        """The row's own tools, by name."""
        self.names = tuple(tool.name if isinstance(tool, RowTool) else tool for tool in listed)
        for tool in listed:
            if isinstance(tool, str) and tool not in declared:
                raise ValueError(
                    f"tools: there is no tool {tool!r}{did_you_mean(tool, declared)}; the tools "
                    f"are: {', '.join(declared) or 'none'}"
                )
        duplicate = next((name for name in self.names if self.names.count(name) > 1), None)
        if duplicate is not None:
            raise ValueError(
                f"tools: {duplicate!r} is there twice; a name can have one meaning only"
            )
        self._arguments = {
            name: self._check_row_tool(tool, executed=executed)
            for name, tool in self.row_tools.items()
        }
        """Readers of the arguments of the row's own tools, by name."""
        self.schemas: list[dict[str, Any]] = [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": self.row_tools[name].description,
                    "parameters": dict(self.row_tools[name].parameters),
                },
            }
            if name in self.row_tools
            else self._declared_schema(name)
            for name in self.names
        ]
        """Schemas as the model sees them, in the row's order."""
        declared_stop_tools = toolbox.stop_tools | self._methods.stop_tools
        self.stop_tools = frozenset(
            name for name in self.names if self._executor(name) in declared_stop_tools
        )
        """Names of the tools that end the rollout: a tool of the row does if its executor does."""

    async def execute(
        self,
        calls: Sequence[ToolCall],
        context_of: ContextOf,
        on_answered: Callable[[str], None] = lambda call_id: None,
    ) -> list[ToolResult]:
        """Run calls; return one result per call, in call order. Faults are error results.

        `on_answered` is called with the id of each call that has its result.
        """
        # In call order: a step for each call that can run, a result for each that cannot.
        prepared = [self._prepare(call) for call in calls]
        for item in prepared:
            if isinstance(item, ToolResult):
                on_answered(item.call.id)
        steps = [item for item in prepared if isinstance(item, _Step)]
        method_steps = [step for step in steps if step.is_method]
        other_steps = [step for step in steps if not step.is_method]

        async def run_methods() -> list[ToolResult]:
            """Run the calls to the environment one after the other, until its episode ends."""
            results: list[ToolResult] = []
            for step in method_steps:
                ended = self._episode is not None and self._episode.done
                if ended or any(result.done for result in results):
                    text = "Error: the episode is over; this call was not run"
                    results.append(ToolResult(call=step.call, content=text, error=ToolError.limit))
                    on_answered(step.call.id)
                else:
                    results += await _run_steps(self._methods, [step], context_of, on_answered)
            return results

        method_results: list[ToolResult] = []
        if method_steps:
            method_results, other_results = await asyncio.gather(
                run_methods(), _run_steps(self._toolbox, other_steps, context_of, on_answered)
            )
        else:  # most turns: spared the cost of two asyncio tasks
            other_results = await _run_steps(self._toolbox, other_steps, context_of, on_answered)
        # Back to the order of the calls. Both lists of results are in that order: each step takes
        # the next result of its kind, and calls that did not run have their results already.
        from_methods, from_others = iter(method_results), iter(other_results)
        results = []
        for item in prepared:
            if isinstance(item, _Step):
                item = next(from_methods if item.is_method else from_others)
            results.append(item)
        return [replace(r, stop=True) if r.call.name in self.stop_tools else r for r in results]

    def limits(self, name: str) -> ToolLimits:
        """Return the limits of a visible tool; a tool of the row has those of its executor."""
        executor = self._executor(name)
        if executor in self._methods.names:
            return self._methods.limits(executor)
        return self._toolbox.limits(executor) if executor in self._toolbox.names else ToolLimits()

    def _prepare(self, call: ToolCall) -> _Step | ToolResult:
        """Return the step that runs a call, or the call's error result.

        Example: the row brings the tool `lookup_city`, whose executor, a declared tool, is
        `lookup`. A call ``lookup_city(name="Bonn")`` is executed as ``lookup(name="Bonn")``. If
        `lookup` takes any tool's calls (a dispatcher), it is executed as
        ``lookup(name="lookup_city", arguments={"name": "Bonn"})``.
        """
        if call.malformed is not None:  # the toolbox answers it with the error
            return _Step(call=call, executed_call=call, is_method=False)
        if call.name not in self.names:
            hint = did_you_mean(call.name, self.names)
            text = f"unknown tool {call.name!r}{hint}; tools: {', '.join(self.names) or 'none'}"
            return ToolResult(call=call, content=f"Error: {text}", error=ToolError.unknown_tool)
        executed_call = call  # the call of a declared tool that answers `call`
        if call.name in self.row_tools:
            executor = self.row_tools[call.name].executor
            try:
                arguments = self._arguments[call.name].read(call.arguments)
            except InvalidArguments as error:
                text = f"Error: {error}"
                return ToolResult(call=call, content=text, error=ToolError.invalid_arguments)
            if _is_dispatcher(self._declared_schema(executor)):
                arguments = {"name": call.name, "arguments": arguments}
            executed_call = replace(call, name=executor, arguments=arguments)
        is_method = executed_call.name in self._methods.names  # of the environment
        return _Step(call=call, executed_call=executed_call, is_method=is_method)

    def _executor(self, name: str) -> str:
        """Return the name of the declared tool that does the work of a visible one."""
        return self.row_tools[name].executor if name in self.row_tools else name

    def _declared_schema(self, name: str) -> dict[str, Any]:
        toolbox = self._methods if name in self._methods.names else self._toolbox
        return toolbox.schemas([name])[0]

    def _check_row_tool(self, tool: RowTool, *, executed: bool) -> ArgumentSchema:
        """Return the reader of the arguments of a tool that the row brings.

        `executed` False: its calls are never run, so any executor will do. Raises ValueError for
        parameters that cannot be read, or an executor that cannot run the calls.
        """
        if executed:
            self._check_executor_exists(tool)
        try:
            arguments = ArgumentSchema(tool.parameters)
        except ValueError as error:
            raise ValueError(f"tools: {tool.name!r}: its parameters are {error}") from error
        if executed:
            self._check_executor_fits(tool, arguments)
        return arguments

    def _check_executor_exists(self, tool: RowTool) -> None:
        """Raise ValueError unless the executor of a row's tool is a tool of the run."""
        declared = (*self._toolbox.names, *self._methods.names)
        if tool.executor not in declared:
            hint = did_you_mean(tool.executor, declared)
            remedy = ""
            if tool.executor == tool.name:  # the default: the row names no executor
                remedy = (
                    "; data.executor=… names the tool of the run that does the work of such tools"
                )
            raise ValueError(
                f"tools: {tool.name!r}: executor={tool.executor!r} is no tool of this "
                f"run{hint}; its tools are: {', '.join(declared) or 'none'}{remedy}"
            )

    def _check_executor_fits(self, tool: RowTool, arguments: ArgumentSchema) -> None:
        """Raise ValueError unless the executor of a row's tool can take the tool's `arguments`."""
        executor = self._declared_schema(tool.executor)
        if _is_dispatcher(executor):  # it takes the arguments of any tool, as one object
            return
        # Any other executor gets the arguments that the model gave the row's tool.
        accepted = _parameters(executor)
        resolver = SchemaResolver(executor["function"].get("parameters") or {})
        required = resolver.expand(resolver.root).get("required", [])
        unknown = [name for name in arguments.names if name not in accepted]
        # The executor requires them, and the model may leave them out.
        missing = [name for name in required if name not in arguments.required]
        if unknown or missing:
            raise ValueError(
                f"tools: {tool.name!r}: its parameters do not fit its executor "
                f"{tool.executor!r}, which takes {', '.join(accepted) or 'none'} "
                f"({', '.join(required) or 'none'} required): "
                f"{', '.join(unknown or missing)} is the difference; change the row, or let the "
                "executor take `name: str, arguments: dict`"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A call of the model's, and the call of a declared tool that answers it.

    Example: the row's tool `lookup_city` has the executor `lookup`. A call of `lookup_city` is
    answered by the `executed_call` of `lookup`. For any other tool both calls are the same.
    """

    call: ToolCall
    executed_call: ToolCall
    is_method: bool
    """True if the declared tool is a method of the environment."""


async def _run_steps(
    toolbox: Toolbox,
    steps: Sequence[_Step],
    context_of: ContextOf,
    on_answered: Callable[[str], None],
) -> list[ToolResult]:
    """Run steps concurrently; return their results in order.

    A step is a call of the model's, `call`, and the call of a declared tool that answers it,
    `executed_call`: another one if a tool of the row has an executor. The result names the model's
    call. `on_answered` gets the id of each call that has ended: later calls may wait for it.
    """

    async def run_step(step: _Step) -> ToolResult:
        """Run the step's `executed_call` in `toolbox`; return the result of its `call`."""
        try:
            (result,) = await toolbox.execute([step.executed_call], lambda _: context_of(step.call))
        finally:  # also after an error: a call that waits for this one would wait for ever
            on_answered(step.call.id)
        if step.executed_call is step.call:
            return result
        # The model reads the answer to its own call; the executor's name is for the record.
        return replace(result, call=step.call, executor=step.executed_call.name)

    if len(steps) == 1:  # most turns: spared the cost of a task
        return [await run_step(steps[0])]
    return await asyncio.gather(*map(run_step, steps))


def _is_dispatcher(schema: dict[str, Any]) -> bool:
    """Return True for an executor of several row tools: it takes ``name`` and ``arguments``."""
    return {"name", "arguments"}.issubset(_parameters(schema))


def _parameters(schema: dict[str, Any]) -> list[str]:
    """Return the names of a tool's parameters."""
    resolver = SchemaResolver(schema["function"].get("parameters") or {})
    return resolver.property_names(resolver.root)


def turn_sampling(
    sampling: Sampling,
    trajectory: Trajectory,
    chat: Chat,
    tools: RowTools,
    limits: RolloutConfig,
    *,
    budget: int,
) -> Sampling:
    """Return the sampling of a rollout's next turn: its budget, its seed and what may end it.

    With `structured_calls` it has a grammar too. Raises ChatError if none can be made.
    """
    grammar = None
    if limits.structured_calls:
        grammar = chat.grammar(tools.schemas, after=trajectory.messages[-1]["role"])
    return replace(
        sampling,
        max_tokens=budget,
        seed=derive_seed(sampling.seed, trajectory.turns),
        stop_token_ids=sampling.stop_token_ids or chat.stop_token_ids,
        grammar=grammar,
    )


CHECKED = 20_000
"""Number of rows of a dataset that are checked, from the first on."""
Schemas = list[dict[str, Any]]


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
    """Return the tool sets of rows that list no tools: the run's, with each environment's."""
    schemas = toolbox.schemas()
    return [schemas + methods.schemas() for methods in environments.toolboxes.values()] or [schemas]


def checked_rows(source: TaskSource) -> int:
    """Return how many rows of a source are checked before a run, from the first on."""
    is_endless = len(source) == sys.maxsize
    return COLUMN_SAMPLE if is_endless else min(len(source), CHECKED)


def row_tool_sets(
    key: str,
    source: TaskSource,
    toolbox: Toolbox,
    environments: Environments,
    *,
    executed: bool = True,
) -> Iterator[Schemas]:
    """Yield each different tool set of the rows that list their tools.

    Only the first `checked_rows(source)` rows are read. `executed` False: no call will be run.
    Raises RowError for a row with tools that it cannot have; `key` (data.train) begins the message.
    """
    yielded: set[str] = set()
    for index in range(checked_rows(source)):
        task = source.row(index)
        try:
            tools = RowTools(task, toolbox, environments, executed=executed)
        except ValueError as error:
            # `source.where` names the row, by its file and line if there is a file.
            raise RowError(f"{key}: {source.where(index)}: {error}") from error
        key_of_set = json.dumps(tools.schemas)
        if task.tools is not None and key_of_set not in yielded:
            yielded.add(key_of_set)
            yield tools.schemas


SETTING = "rollout.structured_calls=true"


def check_grammars(chat: Chat, sets: Iterable[Sequence[Mapping[str, Any]]]) -> None:
    """Raise ChatError, naming the tool, if calls to one of these tools have no grammar.

    A rollout fails if its row has another tool without a grammar.
    """
    chat.grammar(())  # raises if the format of calls has no grammar at all
    tools = {repr(schema): schema for schemas in sets for schema in schemas}
    for schema in tools.values():
        if problem := grammar_problem(chat.grammar([schema])):
            raise ChatError(
                f"{SETTING}: no grammar can be made of the parameters of the tool "
                f"{schema['function']['name']!r}: {problem}; change its schema, or leave "
                "structured_calls out"
            )
