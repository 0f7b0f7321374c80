"""Parameters that are dataclasses, pydantic models and the like: schema, instances, refusals."""

from __future__ import annotations

import asyncio
import enum
import json
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple, NotRequired, TypedDict

import pydantic
import pytest

from agenttrain.environments.environment import EnvironmentKind, Start
from agenttrain.environments.environments import Environments
from agenttrain.tools.build import build_toolbox
from agenttrain.tools.tool import FunctionTool
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import Task, ToolCall, ToolContext, ToolError, ToolResult


class Color(enum.Enum):
    red = "r"
    blue = "b"


@dataclass
class Line:
    """A line of an order.

    Attributes:
        sku: Which article.
    """

    sku: str
    count: int = field(default=1, metadata={"description": "How many."})
    color: Color | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError("count must be positive")


LINE = {
    "type": "object",
    "properties": {
        "sku": {"type": "string", "description": "Which article."},
        "count": {"type": "integer", "description": "How many.", "default": 1},
        "color": {"type": "string", "enum": ["r", "b"], "nullable": True},
    },
    "required": ["sku"],
    "additionalProperties": False,
}


class Street(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=5)


class Address(pydantic.BaseModel):
    street: Street
    zip: int = pydantic.Field(ge=1, description="Postal code.")

    @pydantic.model_validator(mode="after")
    def known(self) -> Address:
        if self.zip == 13:
            raise ValueError("nobody lives there")
        return self


class Options(TypedDict):
    gift: bool
    extra: NotRequired[list[Line]]


class Point(NamedTuple):
    x: float
    y: float = 0.0


def order(
    lines: list[Line],
    to: Address,
    options: Options,
    how: Literal["air", "sea"] = "air",
    color: Color = Color.red,
    best: Line | None = None,
    at: tuple[Point, ...] = (),
    named: dict[str, Line | Point] | None = None,
) -> str:
    """Order.

    Args:
        lines: What.
        to: Where.
        options: More.
        how: Way.
        color: Of the box.
        best: First.
        at: Places.
        named: Others.
    """
    return repr((lines, to, options, how, color, best, at, named))


GOOD = {"lines": [{"sku": "a"}], "to": {"street": {"name": "x"}, "zip": 9}, "options": {"gift": 1}}
GOOD["options"] = {"gift": True}


def ask(toolbox: Toolbox, **arguments: object) -> ToolResult:
    call = ToolCall(id="c", name=toolbox.names[0], arguments=arguments)
    context = ToolContext(rollout_id="r", task=None, turn=0, call_id="c")  # type: ignore[arg-type]

    async def main() -> ToolResult:
        try:
            return (await toolbox.execute([call], lambda _: context))[0]
        finally:
            await toolbox.aclose()

    return asyncio.run(main())


def test_the_model_sees_what_the_types_hold():
    shown = FunctionTool(order).schema["function"]["parameters"]
    properties = shown["properties"]
    assert shown["required"] == ["lines", "to", "options"]
    assert properties["lines"] == {"type": "array", "items": LINE, "description": "What."}
    assert properties["to"] == {
        "type": "object",
        "properties": {
            "street": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 5}},
                "required": ["name"],
            },
            "zip": {"type": "integer", "minimum": 1, "description": "Postal code."},
        },
        "required": ["street", "zip"],
        "description": "Where.",
    }
    assert properties["options"] == {
        "type": "object",
        "properties": {"gift": {"type": "boolean"}, "extra": {"type": "array", "items": LINE}},
        "required": ["gift"],
        "additionalProperties": False,
        "description": "More.",
    }
    assert properties["how"]["enum"] == ["air", "sea"]
    assert properties["color"] == {
        "type": "string",
        "enum": ["r", "b"],
        "description": "Of the box.",
    }
    assert properties["best"] == {**LINE, "nullable": True, "description": "First."}
    point = {"x": {"type": "number"}, "y": {"type": "number", "default": 0.0}}
    assert properties["at"]["items"]["properties"] == point
    assert properties["named"]["additionalProperties"]["anyOf"][0] == LINE


def test_the_function_gets_instances():
    given = {
        "lines": json.dumps([{"sku": "a", "count": "2", "color": "b"}]),  # as models write them
        "to": {"street": {"name": "x"}, "zip": "9"},
        "options": {"gift": "true", "extra": [{"sku": "e"}]},
        "how": "sea",
        "color": "b",
        "best": None,
        "at": [{"x": 1}],
        "named": {"p": {"x": 2, "y": 3}, "l": {"sku": "n"}},
    }
    result = ask(Toolbox({"order": FunctionTool(order)}), **given)
    expected = (
        [Line("a", 2, Color.blue)],
        Address(street=Street(name="x"), zip=9),
        {"gift": True, "extra": [Line("e")]},
        "sea",
        Color.blue,
        None,
        (Point(1.0),),
        {"p": Point(2.0, 3.0), "l": Line("n")},
    )
    assert (result.error, result.content) == (None, repr(expected))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lines": [{"sku": "a"}, {"sku": "b", "count": 0}]}, "lines[1]: count must be positive"),
        ({"lines": [{"count": 2}]}, "lines[0]: 'sku' is a required property"),
        (
            {"lines": [{"sku": "a", "n": 2}]},
            "lines[0]: Additional properties are not allowed ('n' ",
        ),
        ({"lines": {"sku": "a"}}, 'lines must be array, not {"sku": "a"}'),
        (
            {"lines": [{"sku": "a", "color": "green"}]},
            "lines[0].color must be one of 'r', 'b', null",
        ),
        (
            {"to": {"street": {"name": "long street"}, "zip": 9}},
            "to.street.name: 'long street' is t",
        ),
        ({"to": {"street": {"name": "x"}, "zip": 13}}, "to: Value error, nobody lives there"),
        ({"options": {}}, "options: 'gift' is a required property"),
        ({"color": "red"}, "color must be one of 'r', 'b', not 'red'"),
        ({"named": {"a": {"sku": "n", "count": -1}}}, "named.a: count must be positive"),
        ({"best": "x"}, "best must be object or null, not 'x'"),
    ],
)
def test_what_is_no_instance_is_an_invalid_call_that_says_why(changes, problem):
    result = ask(Toolbox({"order": FunctionTool(order)}), **{**GOOD, **changes})
    assert result.error is ToolError.invalid_arguments
    assert result.content.startswith(f"Error: {problem}")


class Rejected(Exception):
    """An error of somebody else's, whose `errors` are not pydantic's."""

    def errors(self) -> list[str]:
        return ["too dear"]


@dataclass
class Budget:
    cents: int

    def __post_init__(self) -> None:
        raise Rejected("over the limit")


def spend(budget: Budget) -> str:
    """Spend.

    Args:
        budget: What.
    """
    return "spent"


def test_the_reason_of_an_error_with_errors_of_its_own_is_its_text():
    result = ask(Toolbox({"spend": FunctionTool(spend)}), budget={"cents": 1})
    assert result.error is ToolError.invalid_arguments
    assert result.content == "Error: budget: over the limit"


async def count(lines: list[Line]) -> int:
    """Count.

    Args:
        lines: What.
    """
    return sum(line.count for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_instances_are_made_where_the_tool_runs(isolation):
    section = {"_target_": f"{__name__}.count", "isolation": isolation}
    given = {"good": [{"sku": "a", "count": 3}, {"sku": "b"}], "bad": [{"sku": "a", "count": 0}]}
    good, bad = (ask(build_toolbox({"count": section}), lines=lines) for lines in given.values())
    assert (good.error, good.content) == (None, "4")
    assert (bad.error, bad.content) == (
        ToolError.invalid_arguments,
        "Error: lines[0]: count must be positive",
    )


class Shop:
    """An environment whose method takes instances."""

    def buy(self, line: Line) -> str:
        """Buy.

        Args:
            line: What.
        """
        return f"{line.sku} {line.count}"


def test_methods_of_environments_get_instances_too():
    async def main() -> list[ToolResult]:
        environments = Environments({"shop": EnvironmentKind("shop", Shop)})
        kind, toolbox = environments.kinds["shop"], environments.toolboxes["shop"]
        await kind.start(Start(rollout_id="r", row={}, seed=0, group_seed=0))
        context = ToolContext(
            rollout_id="r", task=Task(task_id="t", messages=()), turn=0, call_id="c"
        )
        lines = [{"sku": "a", "count": 2}, {"sku": "a", "count": 0}]
        calls = [ToolCall(id="c", name="buy", arguments={"line": line}) for line in lines]
        results = await toolbox.execute(calls, lambda _: context)
        await environments.aclose()
        return results

    good, bad = asyncio.run(main())
    assert (good.error, good.content) == (None, "a 2")
    assert (bad.error, bad.content) == (
        ToolError.invalid_arguments,
        "Error: line: count must be positive",
    )


@dataclass
class Node:
    children: list[Node]


class Tree(pydantic.BaseModel):
    children: list[Tree]


@dataclass
class Odd:
    when: Annotated[complex, "When."]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Node, r"parameter 'value': Node\.children: Node contains itself"),
        (Tree, r"parameter 'value': Tree contains itself"),
        (Odd, r"parameter 'value': Odd\.when: <class 'complex'> has no JSON; use one of str"),
    ],
)
def test_types_that_no_schema_can_be_made_of_are_refused(kind, problem):
    def tool(value: str) -> None:
        """Take.

        Args:
            value: It.
        """

    tool.__annotations__["value"] = kind
    with pytest.raises(ValueError, match=problem):
        FunctionTool(tool)
