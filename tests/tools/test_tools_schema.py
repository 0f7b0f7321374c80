"""Functions -> schemas: what the model sees, what it does not, and what is refused."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, Field

from agenttrain.tools.arguments import ArgumentSchema, InvalidArguments
from agenttrain.tools.tool import FunctionTool
from agenttrain.types import Task, ToolContext

CONTEXT = ToolContext(rollout_id="r", task=Task(task_id="t", messages=()), turn=0, call_id="c")


def lookup(
    key: str, table: dict, context: ToolContext, limit: int | None = None, how: Literal["a"] = "a"
) -> str:
    """Look up a key.

    Args:
        key: What to look up.
        table: Where to look.
        limit: Most hits.
        how: In which way.
    """
    return f"{key} {table} {context.rollout_id} {limit}"


def test_schema_without_bound_arguments_context_and_return():
    tool = FunctionTool(lookup, bound={"table": {"x": 1}})
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look up a key.",
            "parameters": {
                "type": "object",
                "properties": {
                    "key": {"type": "string", "description": "What to look up."},
                    "limit": {"type": "integer", "nullable": True, "description": "Most hits."},
                    "how": {"type": "string", "enum": ["a"], "description": "In which way."},
                },
                "required": ["key"],
            },
        },
    }
    assert tool.call({"key": "k"}, CONTEXT) == "k {'x': 1} r None"


def test_the_name_is_the_configurations():
    tool = FunctionTool(lookup, name="search", bound={"table": {}})
    assert tool.name == tool.schema["function"]["name"] == "search"


def test_partial_arguments_are_bound():
    inner = functools.partial(lookup, table={"x": 1}, limit=5)
    tool = FunctionTool(functools.partial(inner, limit=2), name="lookup")
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["key", "how"]
    assert tool.call({"key": "k"}, CONTEXT) == "k {'x': 1} r 2"


def test_methods_and_callable_instances_keep_their_state():
    class Counter:
        total = 0

        def __call__(self, step: int) -> int:
            """Count on.

            Args:
                step: By how much.
            """
            self.total += step
            return self.total

        async def reset(self) -> str:
            """Start again."""
            self.total = 0
            return "ok"

    counter = Counter()
    count, reset = FunctionTool(counter, name="count"), FunctionTool(counter.reset)
    assert [count.call({"step": 2}, CONTEXT), count.call({"step": 3}, CONTEXT)] == [2, 5]
    assert (count.blocking, reset.blocking) == (True, False)
    assert reset.schema["function"] == {
        "name": "reset",
        "description": "Start again.",
        "parameters": {"type": "object", "properties": {}},
    }


def test_a_context_of_another_type_is_the_models():
    def tell(context: str) -> str:
        """Tell.

        Args:
            context: Some text.
        """
        return context

    tool = FunctionTool(tell)
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["context"]
    assert tool.call({"context": "x"}, CONTEXT) == "x"


def no_type(key) -> str:
    """Look up.

    Args:
        key: What.
    """


def no_docstring(key: str, limit: int) -> str: ...


def no_description(key: str, limit: int) -> str:
    """Look up.

    Args:
        key: What.
    """


def variable(*keys: str) -> str:
    """Look up.

    Args:
        keys: What.
    """


def strange(key: ToolContext) -> str:
    """Look up.

    Args:
        key: What.
    """


def unresolved(key: NoSuchName) -> str:  # type: ignore[name-defined]  # noqa: F821
    """Look up.

    Args:
        key: What.
    """


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (no_type, r"parameter 'key' has no type; annotate it, e\.g\. `key: str`"),
        (
            no_docstring,
            r'add\n    """What it does, in a line\.\n\n    Args:\n        key: What it means\.\n'
            r'        limit: What it means\.\n    """',
        ),
        (no_description, r"does not describe limit; add to it\n    Args:\n        limit: What"),
        (variable, r"`\*keys: .*str.*` cannot be described to a model"),
        (strange, r"no JSON schema can be made of it"),
        (unresolved, r"'NoSuchName' is not defined; import it at run time"),
    ],
)
def test_what_is_missing_is_quoted(function, remedy):
    with pytest.raises(ValueError, match=remedy) as caught:
        FunctionTool(function)
    where = f"tool '{function.__name__}' (test_tools_schema.{function.__name__})"
    assert str(caught.value).startswith(where)


def test_a_bound_argument_that_is_no_parameter_is_refused():
    with pytest.raises(
        ValueError, match=r"no parameter 'tabel' to bind \(did you mean 'table'\?\)"
    ):
        FunctionTool(lookup, bound={"tabel": {}})


def taking(annotation: Any, doc: str = "Take.\n\nArgs:\n    value: It.") -> FunctionTool:
    def tool(value: Any) -> Any:
        return value

    tool.__doc__, tool.__annotations__["value"] = doc, annotation
    return FunctionTool(tool)


def shown(tool: FunctionTool) -> dict[str, Any]:
    return tool.schema["function"]["parameters"]["properties"]["value"]


def called(tool: FunctionTool, value: Any) -> Any:
    arguments = ArgumentSchema(tool.schema["function"]["parameters"]).read({"value": value})
    return tool.call(arguments, CONTEXT)


def even(value: int) -> int:
    if value % 2:
        raise ValueError("must be even")
    return value


@dataclass
class Item:
    name: str


SMALL = Annotated[int, Field(ge=1, le=3)]


@pytest.mark.parametrize(
    ("annotation", "keywords"),
    [
        (SMALL, {"type": "integer", "minimum": 1, "maximum": 3}),
        (SMALL | None, {"type": "integer", "minimum": 1, "maximum": 3, "nullable": True}),
        (
            list[SMALL],
            {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 3}},
        ),
        (Annotated[str, Field(pattern="^a")], {"type": "string", "pattern": "^a"}),
        (Annotated[list[int], Field(min_length=1)], {"minItems": 1}),
        (list[Annotated[Item, "An item."]], {}),
        (datetime.date, {"type": "string", "format": "date"}),
        (set[int], {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
        (dict[int, str], {"type": "object", "additionalProperties": {"type": "string"}}),
    ],
)
def test_metadata_of_annotations_is_shown(annotation, keywords):
    assert shown(taking(annotation)).items() >= {**keywords, "description": "It."}.items()


def test_descriptions_of_annotations_stand_in_for_the_docstrings():
    for annotation in (Annotated[str, "Words."], Annotated[str, Field(description="Words.")]):
        assert shown(taking(annotation, "Take."))["description"] == "Words."
        assert shown(taking(annotation))["description"] == "It."  # as it was before
    item = shown(taking(list[Annotated[Item, "An item."]]))["items"]
    assert item["description"] == "An item."


@pytest.mark.parametrize(
    ("annotation", "value", "result"),
    [
        (SMALL, 2, 2),
        (dict[int, str], {"1": "one"}, {1: "one"}),
        (dict[int, Item], {"1": {"name": "a"}}, {1: Item("a")}),
        (tuple[int, str], [1, "a"], (1, "a")),
        (tuple[int, ...], [1, 2, 3], (1, 2, 3)),
        (set[int], [1, 2], {1, 2}),
        (datetime.date, "2024-05-01", datetime.date(2024, 5, 1)),
        (datetime.datetime | None, None, None),
        (Annotated[int, AfterValidator(even)], 2, 2),
        (Item | str, {"name": "a"}, Item("a")),
        (int | str, "5", "5"),
        (int | datetime.date | str, "5", "5"),  # the first option that takes it as it is
        (float, 1, 1),
    ],
)
def test_the_function_gets_what_its_annotation_says(annotation, value, result):
    got = called(taking(annotation), value)
    assert (got, type(got)) == (result, type(result))


@pytest.mark.parametrize(
    ("annotation", "value", "place"),
    [
        (SMALL, 99, "value: 99 is greater"),
        (list[SMALL], [0], "value[0]: 0 is less"),
        (dict[int, str], {"x": "one"}, "value.x: "),
        (tuple[int, str], [1], "value[1]: "),
        (tuple[int, str], [1, "a", 2], "value: "),
        (datetime.date, "tomorrow", "value: "),
        (Annotated[int, AfterValidator(even)], 3, "value: Value error, must be even"),
    ],
)
def test_what_an_annotation_refuses_is_an_invalid_call(annotation, value, place):
    with pytest.raises(InvalidArguments) as caught:
        called(taking(annotation), value)
    assert str(caught.value).startswith(place)


@pytest.mark.parametrize("annotation", [complex, Callable[[int], int], type, object()])
def test_what_json_lacks_is_refused(annotation):
    with pytest.raises(ValueError, match=r"parameter 'value': .* has no JSON; use one of str"):
        taking(annotation)


@pytest.mark.parametrize(
    "doc",
    [
        "Take.\n\nArgs:\n    value (int): It.",
        "Take.\n\nArgs:\n    value (Optional[dict(str)], optional): It.",
        "Take.\n\nArguments:\n    value: It.",
        "Take.\n\nParameters:\n    value (int): It.\n\nReturns:\n    Nothing.",
        "Take.\n\nArgs: \n    value: It.",
        "Take.\r\n\r\n    Args:\r\n        value: It.\r\n",
        "Take.\n\nArgs:\n    other (str): Bound.\n    value: It.\n    third (int): Bound too.",
    ],
)
def test_docstrings_of_the_field(doc):
    tool = taking(int, doc)
    assert tool.schema["function"]["description"] == "Take."
    assert shown(tool) == {"type": "integer", "description": "It."}


def test_choices_of_a_docstring():
    tool = taking(str, 'Take.\n\nArgs:\n    value: It. (choices: ["a", " b"])')
    assert shown(tool) == {"type": "string", "enum": ["a", "b"], "description": "It."}
    with pytest.raises(ValueError, match="choices: a, b"):
        taking(str, "Take.\n\nArgs:\n    value: It. (choices: a, b)")


def test_a_function_that_yields_is_no_tool():
    def parts() -> Iterator[str]:
        """Say."""
        yield "a"

    async def later() -> Any:
        """Say."""
        yield "a"

    class Says:
        def __call__(self) -> Iterator[str]:
            """Say."""
            yield "a"

    for function in (parts, later, Says(), functools.partial(parts)):
        with pytest.raises(ValueError, match="yields its result in parts"):
            FunctionTool(function)
