"""Arithmetic: three functions of two numbers, and an evaluator of expressions."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable

from agenttrain.types import ToolFailure

MAX_LENGTH = 200
"""Characters of an expression."""
MAX_BITS = 1000
"""Bits of an intermediate integer."""
TOO_LARGE = "the number is too large"

ALLOWED = re.compile(r"[0-9eE.+\-*/%() ]+")
BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def add(a: float, b: float) -> float:
    """Return a + b.

    Args:
        a: A number.
        b: A number.
    """
    return a + b


def subtract(a: float, b: float) -> float:
    """Return a - b.

    Args:
        a: A number.
        b: A number.
    """
    return a - b


def multiply(a: float, b: float) -> float:
    """Return a * b.

    Args:
        a: A number.
        b: A number.
    """
    return a * b


def calculator(expression: str) -> float:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % **, and parentheses.
    """
    if len(expression) > MAX_LENGTH:
        raise ToolFailure(f"the expression is longer than {MAX_LENGTH} characters")
    # Check the characters first: Python's parser warns about odd names and literals.
    if not ALLOWED.fullmatch(expression):
        raise ToolFailure("only numbers, + - * / // % ** and parentheses are allowed")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolFailure(f"cannot read the expression: {expression}") from None
    except ZeroDivisionError:
        raise ToolFailure("division by zero") from None
    except OverflowError:
        raise ToolFailure(TOO_LARGE) from None
    if not math.isfinite(value):
        raise ToolFailure(TOO_LARGE)
    # 6.0 is shown as 6. From 2**53 on, a float may not be the exact result.
    is_exact = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if is_exact else value


def _evaluate(node: ast.expr) -> float:
    """Return the value of a node; raise SyntaxError for one that is no arithmetic."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        return UNARY[type(node.op)](_evaluate(node.operand))
    if not (isinstance(node, ast.BinOp) and type(node.op) in BINARY):
        raise SyntaxError
    left, right = _evaluate(node.left), _evaluate(node.right)
    if (
        isinstance(node.op, ast.Pow)
        and isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() * abs(right) > MAX_BITS
    ):
        # The power has at most so many bits. Computing it could take seconds.
        raise OverflowError
    value = BINARY[type(node.op)](left, right)
    if isinstance(value, complex):
        raise ToolFailure("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError
    return value
