"""Classes whose public methods are tools, in `tools`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from file_tools import Files

from agenttrain.tools.build import build_toolbox
from agenttrain.tools.tool import public_methods
from agenttrain.types import Task, ToolCall, ToolContext

HERE = __name__


class More(Files):
    def count(self) -> int:
        """How many files there are."""
        return self.size


class Bare:
    def find(self, key):
        """Find."""


class Undocumented:
    def find(self, key: str) -> str:
        return key


def context(call: ToolCall) -> ToolContext:
    return ToolContext(
        rollout_id="r1", task=Task(task_id="t", messages=()), turn=0, call_id=call.id
    )


def execute(section: dict[str, Any], *calls: tuple[str, dict[str, Any]]) -> list[str]:
    async def run() -> list[str]:
        box = build_toolbox({"files": section})
        contents = []
        for name, arguments in calls:
            results = await box.execute([ToolCall(id="c", name=name, arguments=arguments)], context)
            contents.append(results[0].content)
        await box.release("r1")
        await box.aclose()
        return contents

    return asyncio.run(run())


def test_every_public_method_is_a_tool_of_one_object():
    Files.closed, Files.released = 0, []
    said = execute(
        {"_target_": f"{HERE}.Files"},
        ("write", {"name": "a.txt", "text": "hello"}),
        ("read", {"name": "a.txt"}),
        ("suffix", {"name": "a.txt"}),
    )
    assert said == ["ok", "hello for r1", "txt"]
    assert (Files.closed, Files.released) == (1, ["r1"])


def test_bound_arguments_and_limits_are_those_of_the_object():
    section = {"_target_": f"{HERE}.Files", "readonly": True, "timeout_s": 3.0}
    assert execute(section, ("write", {"name": "a", "text": "b"})) == [
        "Error: PermissionError: read only"
    ]


def test_what_is_a_method_for_the_model():
    assert public_methods(Files) == ["write", "read", "suffix"]
    assert public_methods(More) == ["write", "read", "suffix", "count"]
    schemas = build_toolbox({"files": {"_target_": f"{HERE}.Files"}}).schemas()
    read = next(s["function"] for s in schemas if s["function"]["name"] == "read")
    assert read == {
        "name": "read",
        "description": "Read a file.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "description": "Of the file."}},
            "required": ["name"],
        },
    }


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (
            {"a": {"_target_": f"{HERE}.Files"}, "b": {"_target_": f"{HERE}.More"}},
            r"tools\.b.*its tool 'write' is the second of that name; rename one of the two",
        ),
        (
            {"a": {"_target_": f"{HERE}.Files", "isolation": "process"}},
            r"a\.isolation=process: it makes the tools write, read, suffix, which cannot be moved",
        ),
        (
            {"a": {"_target_": f"{HERE}.Bare"}},
            r"'key' has no type; annotate it, e\.g\. `key: str`\nor begin its name with _",
        ),
        (
            {"a": {"_target_": f"{HERE}.Undocumented"}},
            r'no docstring; add\n    """What it does, in a line\.\n\n    Args:\n        key:',
        ),
    ],
)
def test_classes_that_cannot_be_tools(tools, message):
    with pytest.raises(ValueError, match=message):
        build_toolbox(tools)


def test_stop_tools_may_be_methods():
    box = build_toolbox({"files": {"_target_": f"{HERE}.Files"}}, ["write"])
    assert box.stop_tools == {"write"}
    box = build_toolbox({"files": {"_target_": f"{HERE}.Files", "stop": True}})
    assert box.stop_tools == set(box.names) > {"write"}
    with pytest.raises(ValueError, match="there is no tool 'files'"):
        build_toolbox({"files": {"_target_": f"{HERE}.Files"}}, ["files"])
