"""Computes integer arithmetic as a shell does: `(1024 + 8) * 2`."""

from __future__ import annotations

import ast
import operator


def _divide(a: int, b: int) -> int:
    """Division that rounds towards zero, as in C."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _divide,
    ast.Mod: lambda a, b: a - b * _divide(a, b),
}  # fmt: skip


def compute(text: str) -> int | None:
    """The value of an expression of digits, parentheses and + - * / %; None for any other text."""
    if "#" in text:  # a number in another base
        return None
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
    raise ValueError("no sum of whole numbers")
