"""inspect-ai: an evaluation of one sample with its basic solvers."""

import json
import sys
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def add():
    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One number.
            b: The other.
        """
        return a + b

    return execute


task = json.loads(sys.stdin.readline())
sample = Sample(input=task["messages"][-1]["content"])
(log,) = eval(
    Task(dataset=[sample], solver=[use_tools(add()), generate()]),
    model=f"openai/{task['model']}",
    display="none",
    log_dir=tempfile.mkdtemp(),
)
assert log.status == "success", log.error
print(log.samples[0].output.completion)
