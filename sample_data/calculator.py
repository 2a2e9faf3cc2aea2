"""The environment of the sample tasks: one instance a rollout, with one tool that does the arithmetic.

It follows the ``environment_factory`` convention: ``reset`` takes a task's fields, and every other public method is a
tool whose schema comes from its signature and docstring. Nothing the model writes is ever executed: the expression is
parsed and only integer arithmetic is walked.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
#: Longer expressions are refused before they are parsed, so neither depth nor size of a number can hurt.
_MAX_CHARACTERS = 64


class Calculator:
    """A pocket calculator for one rollout."""

    def reset(self, **task: Any) -> None:
        """Nothing is kept between rollouts, so there is nothing to prepare; the task's fields are accepted."""

    def calculate(self, expression: str) -> str:
        """Work out an arithmetic expression.

        Args:
            expression: Whole numbers joined by +, - or *, for example 12*34.

        Returns:
            The value, as a decimal integer.

        Raises:
            ValueError: The expression is not such arithmetic.
        """
        if not isinstance(expression, str):
            raise ValueError(f"expression must be a string, got {type(expression).__name__}")
        if len(expression) > _MAX_CHARACTERS:
            raise ValueError(f"expression has {len(expression)} characters, at most {_MAX_CHARACTERS} are read")
        try:
            tree = ast.parse(expression.strip(), mode="eval")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"cannot read {expression!r} as arithmetic") from error
        return str(_value(tree.body, expression))


def _value(node: ast.expr, expression: str) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, expression)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_value(left, expression), _value(right, expression))
    raise ValueError(f"{expression!r} is not whole numbers joined by +, - or *")
