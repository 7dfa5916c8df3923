"""Scoring of Countdown: an expression of given numbers with a target value."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from llmrl.rewards.answers import extract_answer

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_CHARACTERS = frozenset("0123456789+-*/() ")
_MAX_CHARACTERS = 200


def evaluate_expression(expression: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of an expression of integers, `+ - * /` and parentheses, and the numbers that it uses.

    Raises ValueError if the expression is invalid or divides by zero.

    Example:
        >>> evaluate_expression("(1 + 2) / 2")
        (Fraction(3, 2), [1, 2, 2])
    """
    if len(expression) > _MAX_CHARACTERS or not _CHARACTERS.issuperset(expression):
        raise ValueError(f"expression must be at most {_MAX_CHARACTERS} digits, + - * / ( ) and spaces.")
    numbers: list[int] = []

    def value_of(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value_of(node.operand)
        raise ValueError("expression has something other than whole numbers, + - * / and parentheses.")

    try:
        return value_of(ast.parse(expression.strip(), mode="eval").body), numbers
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(f"expression cannot be evaluated: {type(error).__name__}.") from error


def is_countdown_right(completion: str, target: int, numbers: Sequence[int], *, reasoning: bool = False) -> bool:
    """Return whether the answer's expression has the target's value and uses each number at most once.

    The expression is the last line of the answer; text after `=` is ignored.

    Example:
        >>> is_countdown_right("(3 + 5) * 2 = 16", 16, [2, 3, 5, 7]), is_countdown_right("8 * 2", 16, [2, 3, 5])
        (True, False)
    """
    given = extract_answer(completion, reasoning=reasoning)
    if given is None:
        return False
    try:
        value, used = evaluate_expression(given.splitlines()[-1].partition("=")[0].strip())
    except ValueError:
        return False
    return value == target and not Counter(used) - Counter(numbers)
