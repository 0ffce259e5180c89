"""Filter of runs, such as ``grpo.beta < 0.01 and oracle > 0.8``.

In: the text of a filter, and rows. Out: the rows that match. The text is parsed as a Python
expression, and only comparisons, ``and``, ``or``, ``not``, ``in``, names and constants are
accepted; nothing is ever evaluated by Python. A missing value matches no comparison.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
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
_Value = Callable[[Callable[[str], Any]], Any]


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
        self.where, self._names = where, dict[str, None]()
        self._value = self._compiled(self._parsed())
        #: Names of the values that it uses.
        self.names = tuple(self._names)

    def matches(self, value: Callable[[str], Any]) -> bool:
        """Tell whether a run matches, given its values by name (KeyError: it has none).

        Raises
        ------
        ConfigurationError
            It compares a text with a number.
        """
        return _is_true(self._value(value))

    def _parsed(self) -> ast.expr:
        try:
            return ast.parse(self.where.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else "it is nested too deeply"
            raise self._refusal(f"is not understood: {reason}") from error

    def _compiled(self, tree: ast.expr) -> _Value:
        """A function of a run's values; refuses everything that a filter may not contain."""
        match tree:
            case ast.BoolOp(op=op, values=parts):
                joined, several = all if isinstance(op, ast.And) else any, self._each(parts)
                return lambda run: joined(map(_is_true, several(run)))
            case ast.UnaryOp(op=ast.Not(), operand=part):
                negated = self._compiled(part)
                return lambda run: not _is_true(negated(run))
            case ast.UnaryOp(op=ast.USub(), operand=part):
                number = self._compiled(part)
                return lambda run: -n if isinstance(n := number(run), int | float) else _MISSING
            case ast.Compare(left=left, ops=ops, comparators=others) if all(
                type(op) in _COMPARISONS for op in ops
            ):
                sides = self._each([left, *others])
                return lambda run: all(map(self._compared, pairwise(sides(run)), ops))
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                items = self._each(parts)
                return lambda run: list(items(run))
            case ast.Constant(value=constant):
                return lambda _: constant
        name = self._name(tree)
        self._names[name] = None

        def named(run: Callable[[str], Any]) -> Any:
            try:
                return run(name)
            except KeyError:
                return _MISSING

        return named

    def _each(self, parts: Sequence[ast.expr]) -> Callable[[Callable[[str], Any]], Iterator[Any]]:
        values = [self._compiled(part) for part in parts]
        return lambda run: (value(run) for value in values)

    def _name(self, tree: ast.expr) -> str:
        """``grpo.beta``; a metric that is no Python name is ``metric["pass@1"]``."""
        match tree:
            case ast.Name(id=name):
                return name
            case ast.Attribute(value=value, attr=name):
                return f"{self._name(value)}.{name}"
            case ast.Subscript(value=ast.Name(id="metric"), slice=ast.Constant(value=str(name))):
                return name
        raise self._refusal(f"has `{ast.unparse(tree)}`")

    def _compared(self, pair: tuple[Any, Any], op: ast.cmpop) -> bool:
        left, right = pair
        ordered = isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
        if _MISSING in pair or (ordered and None in pair):
            return False
        try:
            return bool(_COMPARISONS[type(op)](left, right))
        except TypeError as error:
            raise self._refusal(f"compares {left!r} with {right!r}") from error

    def _refusal(self, problem: str) -> ConfigurationError:
        return ConfigurationError(
            f"The filter {self.where!r} {problem}.",
            expected="comparisons of columns, metrics and configuration fields with numbers or "
            "quoted texts, joined by and, or, not",
            fix="""write it as in --where 'grpo.beta < 0.01 and oracle > 0.8' or --where '"try" """
            """in note and state == "done"'; a metric with other signs is metric["pass@1"]""",
        )


def _is_true(value: Any) -> bool:
    return value is not _MISSING and bool(value)
