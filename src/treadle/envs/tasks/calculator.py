"""Arithmetic in a text, computed without running it: `calculate("3 * (14 + 8)") == 66`. Pure."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

LONGEST = 200  # characters
_LARGEST = 10**30
_LARGEST_EXPONENT = 64

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> Number:
    """Numbers, + - * / // % ** and parentheses. ValueError says what is wrong; a whole result is an int."""
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    not_arithmetic = f"{expression!r} is no arithmetic expression"
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError: null bytes before 3.11.4, surrogates
        raise ValueError(not_arithmetic) from None
    try:
        result = _value(tree.body)
    except RecursionError:
        raise ValueError(not_arithmetic) from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the numbers get too large") from None
    return int(result) if result == int(result) else result


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)  # type: ignore[arg-type]  # just checked
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > _LARGEST_EXPONENT:
            raise ValueError(f"an exponent is at most {_LARGEST_EXPONENT}")
        return _bounded(_BINARY[type(node.op)](left, right))
    raise ValueError(f"only numbers, + - * / // % ** and parentheses, not {ast.unparse(node)!r:.40}")


def _bounded(number: Number) -> Number:
    if isinstance(number, complex) or math.isnan(number):
        raise ValueError("the result is no number")
    if abs(number) > _LARGEST:
        raise ValueError("the numbers get too large")
    return number
