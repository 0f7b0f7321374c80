"""A taskset of verifiers: make a number out of three others."""

import ast
import operator
import random

import verifiers.v1 as vf

__all__ = ["Countdown"]

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def evaluate(expression: str) -> tuple[int, list[int]]:
    """Return the value of an expression such as ``3 * (2 + 7)``, and the numbers in it."""
    numbers: list[int] = []

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("only whole numbers, +, -, * and brackets are allowed")

    try:
        return value(ast.parse(expression.strip(), mode="eval").body), numbers
    except SyntaxError as error:
        raise ValueError("this is no expression") from error


class CalculatorConfig(vf.ToolsetConfig, vf.SharedToolsetConfig):
    """It has no settings."""


class Calculator(vf.Toolset[CalculatorConfig, vf.State]):
    """A tool that all rollouts share."""

    @vf.tool
    async def evaluate(self, expression: str) -> int:
        """Compute an expression, e.g. 3 * (2 + 7)."""
        return evaluate(expression)[0]


class CountdownData(vf.TaskData):
    """A task: the numbers to use, each once, and the number to make."""

    numbers: list[int]
    target: int


class CountdownTask(vf.Task[CountdownData, vf.State, vf.TaskConfig]):
    """Scored by the last answer of the model."""

    @vf.reward
    async def right(self, trace) -> float:
        """The expression makes the target out of the numbers."""
        try:
            value, numbers = evaluate(trace.last_reply or "")
        except (ValueError, RecursionError):
            return 0.0
        return float(value == self.data.target and sorted(numbers) == sorted(self.data.numbers))

    @vf.reward(weight=0.1)
    async def computed(self, trace) -> float:
        """The model tried an expression with the tool before it answered."""
        return float(any(message.tool_calls for message in trace.assistant_messages))


class CountdownConfig(vf.TasksetConfig):
    """Which tasks."""

    task: vf.TaskConfig = vf.TaskConfig()
    count: int = 200


class Countdown(vf.Taskset[CountdownTask, CountdownConfig]):
    """Tasks that have a solution."""

    @classmethod
    def toolsets(cls, config):
        """Start one calculator for all tasks."""
        return [Calculator(CalculatorConfig())]

    def load(self):
        """Yield the tasks, always the same."""
        for number in range(self.config.count):
            rng = random.Random(number)
            a, b, c = (rng.randint(1, 9) for _ in range(3))
            first, second = (rng.choice([*OPERATORS.values()]) for _ in range(2))
            numbers, target = rng.sample([a, b, c], 3), second(first(a, b), c)
            prompt = (
                f"Make {target} out of {', '.join(map(str, numbers))}, each used once, with +, -, "
                "* and brackets. Answer with the expression alone."
            )
            yield CountdownTask(
                CountdownData(prompt=prompt, numbers=numbers, target=target), self.config.task
            )


if __name__ == "__main__":
    Calculator.run()
