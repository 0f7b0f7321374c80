"""Functions -> schemas: what the model sees, what it does not, and what is refused."""

from __future__ import annotations

import functools
from typing import Literal

import pytest

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
