"""Filter of runs, such as ``grpo.beta < 0.01 and oracle > 0.8``.

In: the text of a filter, and rows. Out: the rows that match. The text is parsed as a Python
expression, and only comparisons, ``and``, ``or``, ``not``, ``in``, names and constants are
accepted; nothing is ever evaluated by Python. A missing value matches no comparison.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from typing import Any

from refiner_core.contract.errors import ConfigurationError

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}
_MISSING = object()


class RunFilter:
    """A filter of runs.

    Parameters
    ----------
    where
        Its text.

    Raises
    ------
    ConfigurationError
        The text is not understood.
    """

    def __init__(self, where: str) -> None:
        self.where, self._tree = where, _parsed(where)
        #: Names of the values that it uses.
        self.names = tuple(_names(self._tree, where))

    def matches(self, value: Callable[[str], Any]) -> bool:
        """Tell whether a run matches, given its values by name (KeyError: it has none).

        Raises
        ------
        ConfigurationError
            It compares a text with a number.
        """
        return _is_true(_value(self._tree, value, self.where))


def _is_true(value: Any) -> bool:
    return value is not _MISSING and bool(value)


def _parsed(where: str) -> ast.expr:
    try:
        return ast.parse(where.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else "it is nested too deeply"
        raise _refusal(where, f"is not understood: {reason}") from error


def _names(tree: ast.expr, where: str) -> Iterator[str]:
    """Names of the values that a filter uses; refuses everything that it may not contain."""
    match tree:
        case ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
            for part in parts:
                yield from _names(part, where)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=part):
            yield from _names(part, where)
        case ast.Compare(left=left, ops=ops, comparators=others):
            if not all(type(op) in _COMPARISONS for op in ops):
                raise _refusal(where, f"has `{ast.unparse(tree)}`")
            for part in (left, *others):
                yield from _names(part, where)
        case ast.Constant():
            pass
        case _:
            yield _name(tree, where)


def _name(tree: ast.expr, where: str) -> str:
    """``grpo.beta``; a metric that is no Python name is ``metric["pass@1"]``."""
    match tree:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_name(value, where)}.{name}"
        case ast.Subscript(value=ast.Name(id="metric"), slice=ast.Constant(value=str(name))):
            return name
    raise _refusal(where, f"has `{ast.unparse(tree)}`")


def _value(tree: ast.expr, value: Callable[[str], Any], where: str) -> Any:
    match tree:
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_is_true(_value(part, value, where)) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_is_true(_value(part, value, where)) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return not _is_true(_value(part, value, where))
        case ast.UnaryOp(operand=part):
            number = _value(part, value, where)
            return -number if isinstance(number, int | float) else _MISSING
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [_value(part, value, where) for part in (left, *others)]
            pairs = zip(values, ops, values[1:], strict=False)
            return all(_compared(a, op, b, where) for a, op, b in pairs)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part, value, where) for part in parts]
        case ast.Constant(value=constant):
            return constant
    try:
        return value(_name(tree, where))
    except KeyError:
        return _MISSING


def _compared(left: Any, op: ast.cmpop, right: Any, where: str) -> bool:
    if left is _MISSING or right is _MISSING:
        return False
    ordered = isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    if ordered and (left is None or right is None):
        return False
    try:
        return bool(_COMPARISONS[type(op)](left, right))
    except TypeError as error:
        raise _refusal(where, f"compares {left!r} with {right!r}") from error


def _refusal(where: str, problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"The filter {where!r} {problem}.",
        expected="comparisons of columns, metrics and configuration fields with numbers or quoted "
        "texts, joined by and, or, not",
        fix="""write it as in --where 'grpo.beta < 0.01 and oracle > 0.8' or --where '"try" in """
        """note and state == "done"'; a metric with other signs is metric["pass@1"]""",
    )
