"""Calculator and final_answer, and toolboxes built from configuration."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenttrain.tools.build import build_toolbox
from agenttrain.tools.builtin.calculator import calculator
from agenttrain.tools.config import ToolLimits
from agenttrain.tools.tool import FunctionTool, Tool
from agenttrain.types import Task, ToolCall, ToolContext, ToolFailure

HERE = __name__
CONTEXT = ToolContext(rollout_id="r", task=Task(task_id="t", messages=()), turn=0, call_id="c")


def run(toolbox, name: str, **arguments: object) -> str:
    call = ToolCall(id="c", name=name, arguments=arguments)
    return asyncio.run(toolbox.execute([call], lambda call: CONTEXT))[0].content


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", 14),
        ("(2 + 3) * -4", -20),
        ("7 / 2", 3.5),
        ("6 / 2", 3),
        ("7 // 2 + 7 % 4", 6),
        ("2 ** 10", 1024),
        ("1e3 + .5", 1000.5),
        (" 1 ", 1),
    ],
)
def test_calculator(expression, value):
    found = calculator(expression)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("9 ** 9 ** 9 ** 9", "the number is too large"),
        ("2 ** -99999", "the number is too large"),
        ("*".join(["9" * 60] * 3) + "**29", "the number is too large"),
        ("10.0 ** 400", "the number is too large"),
        ("1e308 * 10", "the number is too large"),
        ("(-8) ** 0.5", "the result is not a real number"),
        ("__import__('os')", "only numbers"),
        ("1 if 2 else 3", "only numbers"),
        ("(1, 2)", "only numbers"),
        ("1 +", "cannot read the expression: 1 +"),
        ("007", "cannot read the expression: 007"),
        ("()", "cannot read the expression"),
        ("", "only numbers"),
        ("(" * 100 + "1" + ")" * 100, "longer than 200 characters"),
        ("-" * 199 + "1", None),
    ],
)
def test_calculator_refuses(expression, message):
    if message is None:
        assert calculator(expression) == -1
        return
    with pytest.raises(ToolFailure) as caught:
        calculator(expression)
    assert message in str(caught.value)


@given(st.text(alphabet="0123456789eE.+-*/%() ", max_size=40))
def test_calculator_gives_a_number_or_says_why(expression):
    try:
        assert isinstance(calculator(expression), int | float)
    except ToolFailure as failure:
        assert str(failure)


def test_bundled_tools_from_configuration():
    names = ("add", "subtract", "multiply", "calculator")
    tools = {name: {"_target_": f"agenttrain.tools.builtin.calculator.{name}"} for name in names}
    tools["final_answer"] = {"_target_": "agenttrain.tools.builtin.final_answer.final_answer"}
    toolbox = build_toolbox(tools, ["final_answer"])
    assert toolbox.names == (*names, "final_answer")
    assert toolbox.stop_tools == {"final_answer"}
    assert run(toolbox, "add", a="12", b=5) == "17"
    assert run(toolbox, "subtract", a=12, b=5.0) == "7.0"
    assert run(toolbox, "multiply", a=7, b=3) == "21"
    assert run(toolbox, "calculator", expression="1+1") == "2"
    assert run(toolbox, "final_answer", answer=37) == "ok"


def test_stop_beside_a_target_adds_to_the_list():
    final = {"_target_": "agenttrain.tools.builtin.final_answer.final_answer"}
    add = {"_target_": "agenttrain.tools.builtin.calculator.add"}
    assert build_toolbox({"final": {**final, "stop": True}}).stop_tools == {"final"}
    assert build_toolbox({"final": {**final, "stop": False}}).stop_tools == set()
    both = {"final": {**final, "stop": True}, "add": add}
    assert build_toolbox(both, ["add"]).stop_tools == {"final", "add"}
    assert build_toolbox(both, ["final"]).stop_tools == {"final"}
    apart = {"final": {**final, "stop": True, "isolation": "process"}}
    assert build_toolbox(apart).stop_tools == {"final"}
    with pytest.raises(ValueError, match=r"tools\.final\.stop=yes: expected true or false"):
        build_toolbox({"final": {**final, "stop": "yes"}})


def scale(value: int, factor: int) -> int:
    """Scale.

    Args:
        value: A number.
        factor: By what.
    """
    return value * factor


class Shifter:
    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, value: int) -> int:
        """Shift.

        Args:
            value: A number.
        """
        return value + self.by


class Mute:
    """Cannot be called."""


def make_scale(factor: int) -> Tool:
    return FunctionTool(scale, name="made", bound={"factor": factor})


CONSTANT = 3


def slow() -> str:
    """Take a second."""
    time.sleep(1)
    return "late"


def test_functions_classes_and_factories_with_bound_arguments():
    toolbox = build_toolbox(
        {
            "triple": {"_target_": f"{HERE}.scale", "factor": 3},
            "shift": {"_target_": f"{HERE}.Shifter", "by": 10},
            "made": {"_target_": f"{HERE}.make_scale", "factor": 5},
        }
    )
    assert [run(toolbox, name, value="2") for name in toolbox.names] == ["6", "12", "10"]
    for schema in toolbox.schemas():
        assert list(schema["function"]["parameters"]["properties"]) == ["value"]


class Several:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def tools(self) -> list[Tool]:
        return [
            FunctionTool(scale, name="scaled", bound={"factor": self.factor}),
            FunctionTool(slow),
        ]


@pytest.mark.filterwarnings("ignore:tool slow. a call still runs")
def test_one_section_may_make_several_tools_with_its_limits():
    section = {"_target_": f"{HERE}.Several", "factor": 4, "timeout_s": 0.4}
    toolbox = build_toolbox({"any": section}, ["scaled"])
    assert toolbox.names == ("scaled", "slow")
    assert run(toolbox, "scaled", value=2) == "8"
    assert run(toolbox, "slow") == "Error: timed out after 0.4 s"
    with pytest.raises(ValueError, match="its tool 'slow' is the second of that name"):
        build_toolbox({"slow": {"_target_": f"{HERE}.slow"}, "any": section})


@pytest.mark.filterwarnings("ignore:tool slow. a call still runs")
def test_limits_stand_beside_the_target():
    toolbox = build_toolbox({"slow": {"_target_": f"{HERE}.slow", "timeout_s": 0.05}})
    assert run(toolbox, "slow") == "Error: timed out after 0.05 s"
    assert ToolLimits().timeout_s > 1  # so that it was the setting


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, r"tools\.x=\{\}: there is no _target_; add one, e\.g\. tools\.x\._target_="),
        (None, r"tools\.x=None: there is no _target_"),
        ({"_target_": 3}, r"tools\.x\._target_=3: expected a dotted path"),
        ({"_target_": "no_such_pkg.f"}, r"there is no module 'no_such_pkg'; install"),
        ({"_target_": f"{HERE}.scal"}, r"has no 'scal' \(did you mean 'scale'\?\)"),
        ({"_target_": f"{HERE}.CONSTANT"}, r"3 is not a function or a class"),
        (
            {"_target_": f"{HERE}.Mute"},
            r"its instances cannot be called; give the class a __call__",
        ),
        ({"_target_": f"{HERE}.Shifter"}, r"Shifter' with \{\}: missing .*'by'"),
        ({"_target_": f"{HERE}.Shifter", "to": 1}, r"'to': 1\}: missing .*'by'"),
        ({"_target_": f"{HERE}.scale", "facto": 1}, r"bind \(did you mean 'factor'\?\)"),
        ({"_target_": f"{HERE}.slow", "timeout_s": 0}, r"x\.timeout_s=0: must be more than 0"),
        ({"_target_": f"{HERE}.slow", "timeout_s": "1"}, r"x\.timeout_s=1: expected a number"),
        (
            {"_target_": f"{HERE}.slow", "concurrency": 1.5},
            r"x\.concurrency=1\.5: expected a whole number",
        ),
    ],
)
def test_a_section_that_cannot_work(section, message):
    with pytest.raises(ValueError, match=message):
        build_toolbox({"x": section})


def test_a_module_that_fails_on_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_tools.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "faulty_tools.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="importing it failed: No module named 'a_pack"):
        build_toolbox({"x": {"_target_": "broken_tools.f"}})
    with pytest.raises(ValueError, match="importing it failed: ZeroDivisionError"):
        build_toolbox({"x": {"_target_": "faulty_tools.f"}})
