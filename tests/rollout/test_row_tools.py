"""Tools per row: what a model sees, what its calls run, and what a row cannot ask for."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import datasets
import parts
import pytest
import worlds
from parts import LIMITS, add, call, ids, script, toolbox

from agenttrain.data.build import build_tasks
from agenttrain.data.config import FILE_ROWS, DataConfig
from agenttrain.data.tasks import RowError, TaskSource, read_tools, to_task, with_executor
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.environments.environment import EnvironmentKind
from agenttrain.environments.environments import Environments
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.collector import Collector
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.rollout.row_tools import (
    RowTools,
    check_collisions,
    row_tool_sets,
    tool_sets,
)
from agenttrain.runs.row_checks import check_rows
from agenttrain.tools.config import ToolLimits
from agenttrain.tools.toolbox import Toolbox
from agenttrain.tracking.metrics import rollout_metrics
from agenttrain.types import Rollout, RowTool, StopReason, Task, ToolContext, ToolError

BYE = "done<|im_end|>"
NONE = Environments()
CITY = {
    "name": "lookup_city",
    "description": "Find a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["city"],
    },
    "executor": "lookup",
}


def lookup(name: str, arguments: dict, context: ToolContext) -> str:
    """Run one of a row's own tools.

    Args:
        name: Of the row's tool.
        arguments: Of the call.
    """
    return f"{name} {arguments} as {context.tool} for {context.task.task_id}"


def plus(a: int, b: int = 1) -> int:
    """Add.

    Args:
        a: A number.
        b: Another.
    """
    return a + b


def row(*tools: Any, number: int = 0, **columns: Any) -> Task:
    return to_task({"prompt": "go", "tools": list(tools), "task_id": number, **columns}, number)


def prompt(done: Rollout) -> str:
    return parts.chat().decode(done.trajectories[0].spans[0].token_ids)


async def arun(the_task: Task, *answers: str, tools: Toolbox) -> Rollout:
    return await run_rollout(
        RolloutRequest(task=the_task),
        RolloutContext(
            engine=ScriptedEngine(script(*answers)), chat=parts.chat(), toolbox=tools, limits=LIMITS
        ),
    )


def test_a_row_sees_and_calls_only_the_tools_that_it_lists():
    done = asyncio.run(
        arun(row("final_answer"), call("add", '{"a": 1, "b": 2}'), BYE, tools=toolbox())
    )
    assert done.tool_results[0].error is ToolError.unknown_tool
    assert done.tool_results[0].content == "Error: unknown tool 'add'; tools: final_answer"
    assert "Tools:\nfinal_answer(answer)<|im_end|>" in prompt(done)


def test_a_row_without_tools():
    done = asyncio.run(arun(row(), call("add", '{"a": 1, "b": 2}'), BYE, tools=toolbox()))
    assert done.tool_results[0].content == "Error: unknown tool 'add'; tools: none"
    assert "Tools:" not in prompt(done)


def test_the_order_of_the_row_is_the_order_of_the_prompt():
    tools = toolbox(add, plus)
    names = [s["function"]["name"] for s in RowTools(row("plus", "add"), tools, NONE).schemas]
    assert names == ["plus", "add"]


def test_a_tool_of_the_rows_own_is_run_by_its_executor():
    the_task = row(CITY, number=7)
    asked = call("lookup_city", '{"city": "Oslo", "limit": "3"}')
    done = asyncio.run(arun(the_task, asked, BYE, tools=toolbox(lookup)))
    (result,) = done.tool_results
    # The arguments are read by the row's own schema: "3" is a number there.
    assert result.content == "lookup_city {'city': 'Oslo', 'limit': 3} as lookup_city for 7"
    assert (result.call.name, result.executor) == ("lookup_city", "lookup")
    assert "Tools:\nlookup_city(city, limit)<|im_end|>" in prompt(done)
    (schema,) = RowTools(the_task, toolbox(lookup), NONE).schemas
    assert schema["function"] == {key: CITY[key] for key in ("name", "description", "parameters")}


def test_an_executor_with_parameters_of_its_own_gets_the_arguments():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tool = {"name": "next", "description": "Next.", "parameters": schema, "executor": "plus"}
    done = asyncio.run(arun(row(tool), call("next", '{"a": 4}'), BYE, tools=toolbox(plus)))
    assert done.tool_results[0].content == "5"


def test_wrong_arguments_are_told_by_the_rows_schema():
    asked = call("lookup_city", '{"cty": "Oslo"}')
    done = asyncio.run(arun(row(CITY), asked, BYE, tools=toolbox(lookup)))
    assert done.tool_results[0].error is ToolError.invalid_arguments
    assert "unknown argument 'cty' (did you mean 'city'?)" in done.tool_results[0].content


def test_the_executor_itself_is_no_tool_of_the_row():
    asked = call("lookup", '{"name": "x", "arguments": {}}')
    done = asyncio.run(arun(row(CITY), asked, BYE, tools=toolbox(lookup)))
    assert done.tool_results[0].error is ToolError.unknown_tool


def test_calls_of_both_kinds_are_answered_in_order():
    both = "\n".join(
        c.replace("<|im_end|>", "")
        for c in (
            call("add", '{"a": 1, "b": 2}'),
            call("lookup_city", '{"city": "Oslo"}'),
            call("nope", "{}"),
            call("add", '{"a": 3, "b": 4}'),
        )
    )
    done = asyncio.run(arun(row("add", CITY), both + "<|im_end|>", BYE, tools=toolbox(add, lookup)))
    assert [r.content[:11] for r in done.tool_results] == ["3", "lookup_city", "Error: unkn", "7"]
    assert [m["tool_call_id"] for m in done.trajectories[0].messages if m["role"] == "tool"] == [
        r.call.id for r in done.tool_results
    ]


def test_a_rows_tool_whose_executor_is_a_stop_tool_ends_the_rollout():
    tools = toolbox(lookup, stop_tools=["lookup"])
    done = asyncio.run(arun(row(CITY), call("lookup_city", '{"city": "Oslo"}'), tools=tools))
    assert done.stop_reason is StopReason.stop_tool


def test_tools_of_an_environment_are_narrowed_too():
    the_worlds = Environments({"maze": EnvironmentKind("maze", worlds.Maze)})
    tools = RowTools(row("look", exit=3), toolbox(), the_worlds)
    assert tools.names == ("look",)
    with pytest.raises(ValueError, match=r"no tool 'mov' \(did you mean 'move'\?\); the tools are"):
        RowTools(row("mov"), toolbox(), the_worlds)


def test_an_environments_method_runs_a_rows_own_tool():
    class Desk(worlds.Life):
        def lookup(self, name: str, arguments: dict) -> str:
            """Run a tool of the row's.

            Args:
                name: Which.
                arguments: With what.
            """
            return f"{name} at the desk"

    done = asyncio.run(
        run_rollout(
            RolloutRequest(task=row(CITY)),
            RolloutContext(
                engine=ScriptedEngine(script(call("lookup_city", '{"city": "Oslo"}'), BYE)),
                chat=parts.chat(),
                toolbox=toolbox(),
                limits=LIMITS,
                environments=Environments({"desk": EnvironmentKind("desk", Desk)}),
            ),
        )
    )
    assert done.tool_results[0].content == "lookup_city at the desk"


def test_collected_groups_have_their_own_prompts_and_count_executors():
    tasks = [row("add", number=0), row(CITY, number=1)]
    asked = [call("add", '{"a": 1, "b": 2}'), call("lookup_city", '{"city": "Oslo"}')]

    def answer(token_ids, session, turn):
        return ids(BYE if turn else asked[int(session.split("-")[2])])

    collector = Collector(
        engine=ScriptedEngine(answer),
        chat=parts.chat(),
        toolbox=toolbox(add, lookup),
        rubric=Rubric({"turns": lambda rollout: float(rollout.turns)}),
        limits=replace(LIMITS),
    )
    collected = asyncio.run(parts.acollect(collector, tasks, samples=2))
    assert [len(group) for group in collected.groups] == [2, 2]
    assert (
        collected.groups[0][0].trajectories[0].spans[0]
        != collected.groups[1][0].trajectories[0].spans[0]
    )
    metrics = rollout_metrics(collected.groups, tools=collector.metric_names.tools)
    assert (metrics["tools/add/calls"], metrics["tools/lookup/calls"]) == (2.0, 2.0)
    assert "tools/lookup_city/calls" not in metrics


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (
            ["ad"],
            r"tools: there is no tool 'ad' \(did you mean 'add'\?\); the tools are: add, look",
        ),
        (["add", "add"], r"tools: 'add' is there twice"),
        ([{**CITY, "executor": "lokup"}], r"executor='lokup' is no tool .*did you mean 'lookup'"),
        (
            [{**CITY, "parameters": {"type": "objekt"}}],
            r"'lookup_city': its parameters are not a JSON schema",
        ),
        (
            [{**CITY, "executor": "add"}],
            r"do not fit its executor 'add', which takes a, b \(a, b required\): city, limit is",
        ),
    ],
)
def test_what_a_row_cannot_have(tools, message):
    with pytest.raises(ValueError, match=message):
        RowTools(row(*tools), toolbox(add, lookup), NONE)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, r"data row 4: tools=3: give a list of names"),
        ("[1", r"data row 4: tools: '\[1' is not JSON"),
        ([3], r"3 is neither a name nor a tool with name, description, parameters and executor"),
        ([{**CITY, "excutor": "x"}], r"'excutor' is no key of a tool \(did you mean 'executor'"),
        ([{"description": "x"}], r"needs a name, and may have description, parameters"),
        ([{"name": "x", "parameters": "[]"}], r"needs a name, and may have description, param"),
        ([{"function": {"name": "x"}, "fnuction": 1}], r"'fnuction' is no key of a tool"),
    ],
)
def test_a_column_that_cannot_be_read(value, message):
    with pytest.raises(ValueError, match=message):
        read_tools(value, 4)


def test_tables_may_hold_json_text():
    expected = ("add", RowTool(**CITY))
    assert read_tools(json.dumps(["add", CITY]), 0) == expected
    assert (
        read_tools(["add", {**CITY, "parameters": json.dumps(CITY["parameters"])}], 0) == expected
    )
    assert read_tools(None, 0) is None


def test_rows_are_checked_before_a_run_and_their_tool_sets_found():
    rows = [
        {"prompt": "a"},
        {"prompt": "b", "tools": ["add"]},
        {"prompt": "c", "tools": ["add"]},
        {"prompt": "d", "tools": [CITY]},
    ]
    tools = toolbox(add, lookup)
    found = list(row_tool_sets("data.train", TaskSource(rows), tools, NONE))
    names = [[schema["function"]["name"] for schema in schemas] for schemas in found]
    assert names == [["add"], ["lookup_city"]]
    rows.append({"prompt": "e", "tools": ["nope"]})
    with pytest.raises(RowError, match=r"^data\.train: data row 4: tools: there is no tool 'nope'"):
        list(row_tool_sets("data.train", TaskSource(rows), tools, NONE))


def test_the_template_is_certified_with_the_tools_of_rows():
    rows = TaskSource([{"prompt": "b", "tools": [CITY]}, {"prompt": "b", "tools": []}])
    assert check_rows(parts.chat(), toolbox(add, lookup), NONE, {"data.train": rows}) == {
        CITY["name"]
    }


def test_an_environment_may_not_hide_a_tool_of_the_run():
    the_worlds = Environments({"maze": EnvironmentKind("maze", worlds.Maze)})
    assert len(tool_sets(toolbox(), the_worlds)[0]) == 4
    with pytest.raises(ValueError, match=r"environment\.maze: its method 'move' has the name of a"):
        check_collisions(toolbox(worlds.Maze().move), the_worlds)


OPENAI = {
    "type": "function",
    "function": {
        "name": "lookup_city",
        "description": CITY["description"],
        "parameters": CITY["parameters"],
        "strict": True,
    },
}


@pytest.mark.parametrize("as_text", [None, "list", "items", "parameters"])
def test_openais_form_of_a_tool_as_objects_and_as_text(as_text):
    tool: Any = OPENAI
    if as_text == "parameters":
        text = json.dumps(OPENAI["function"]["parameters"])
        tool = {**OPENAI, "function": {**OPENAI["function"], "parameters": text}}
    column: Any = [json.dumps(tool) if as_text == "items" else tool]
    if as_text == "list":
        column = json.dumps(column)
    (read,) = read_tools(column, 0)
    assert isinstance(read, RowTool)
    assert (read.name, read.executor) == ("lookup_city", "lookup_city")
    assert read.parameters == CITY["parameters"]
    (given,) = read_tools(with_executor(column, "lookup"), 0)
    assert (given.name, given.executor) == ("lookup_city", "lookup")
    # One that the row names stays, and names of the run's tools are left alone.
    named = with_executor(["add", {**CITY, "executor": "other"}], "lookup")
    assert read_tools(named, 0)[0] == "add"
    assert read_tools(named, 0)[1].executor == "other"


def test_a_tool_without_description_and_parameters():
    (read,) = read_tools([{"type": "function", "function": {"name": "now"}}], 0)
    assert (read.description, read.parameters) == ("now", {"type": "object", "properties": {}})


def test_a_tool_of_a_row_needs_an_executor_unless_calls_are_demonstrated():
    task = row(OPENAI)
    with pytest.raises(ValueError, match=r"executor='lookup_city' is no .*data\.executor=… names"):
        RowTools(task, toolbox(add, lookup), NONE)
    shown = RowTools(task, toolbox(add), NONE, executed=False)
    assert [schema["function"]["name"] for schema in shown.schemas] == ["lookup_city"]
    assert shown.limits("lookup_city") == ToolLimits()


def test_columns_of_the_datasets_package(tmp_path):
    """A dataset that was saved and read again: struct columns have None for what a row lacks."""
    plain = {"type": "object", "properties": {}}
    now = {"type": "function", "function": {"name": "now", "description": "", "parameters": plain}}
    rows = [{"prompt": "a", "tools": [OPENAI]}, {"prompt": "b", "tools": [now]}]
    texts = [{**one, "tools": json.dumps(one["tools"])} for one in rows]
    for name, table in (("objects", rows), ("texts", texts)):
        datasets.Dataset.from_list(table).save_to_disk(tmp_path / name)
        config = DataConfig(
            train={"_target_": FILE_ROWS, "path": str(tmp_path / name)}, executor="lookup"
        )
        source = build_tasks(config, seed=0).train
        first, second = (RowTools(source.row(i), toolbox(lookup), NONE) for i in (0, 1))
        assert first.row_tools["lookup_city"].parameters == CITY["parameters"]
        assert first.row_tools["lookup_city"].executor == "lookup"
        assert second.schemas[0]["function"] == {
            "name": "now",
            "description": "now",
            "parameters": plain,
        }
