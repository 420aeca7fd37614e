"""Reading PromQL's syntax tree: uses of metrics and what surrounds them, labels that survive, constants, quantities.

The tree is `promql_parser`'s. Nothing here knows any engine's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser as promql

COMPARISONS = {">": "<", "<": ">", ">=": "<=", "<=": ">=", "==": "==", "!=": "!="}
SET_OPERATORS = ("and", "or", "unless")
_NO_VALUE_FUNCTIONS = ("absent", "absent_over_time", "present_over_time", "timestamp")
RATES = ("rate", "irate", "increase")


@dataclass(frozen=True)
class Use:
    """One selector, its metric's name ("" where only a pattern says it) and its ancestors, outermost first."""

    name: str
    selector: Any
    path: tuple[Any, ...]

    @property
    def function(self) -> str:
        """The function that reads the selector's window, "" for an instant selector."""
        if not self.path or not isinstance(self.path[-1], promql.MatrixSelector):
            return ""
        call = self.path[-2] if len(self.path) > 1 else None
        return str(call.func.name) if isinstance(call, promql.Call) else "range"

    @property
    def counts(self) -> bool:
        """Whether the value is used, not only the existence or the labels of the series."""
        inner: Any = self.selector
        for node in reversed(self.path):
            if function(node) in _NO_VALUE_FUNCTIONS or operator(node) in ("count", "group", "count_values"):
                return False
            if operator(node) in ("and", "unless") and node.rhs.prettify() == inner.prettify() and _only_sets(inner):
                return False
            inner = node
        return True

    @property
    def window_s(self) -> float:
        last = self.path[-1] if self.path else None
        return float(last.range.total_seconds()) if isinstance(last, promql.MatrixSelector) else 0.0


@dataclass(frozen=True)
class Comparison:
    """`value op threshold`, the constant always on the right. `path`: the ancestors of `node`."""

    node: Any
    value: Any
    op: str
    threshold: float
    path: tuple[Any, ...]


def _only_sets(node: Any) -> bool:
    """Whether nothing inside is compared or computed."""
    return all(operator(part) in SET_OPERATORS for part, _ in walk(node) if isinstance(part, promql.BinaryExpr))


def children(node: Any) -> list[Any]:
    """The direct parts of a node that are expressions."""
    if isinstance(node, promql.BinaryExpr):
        return [node.lhs, node.rhs]
    if isinstance(node, promql.AggregateExpr):
        return [node.expr] if node.param is None else [node.param, node.expr]
    if isinstance(node, promql.Call):
        return list(node.args)
    if isinstance(node, promql.ParenExpr | promql.UnaryExpr | promql.SubqueryExpr):
        return [node.expr]
    if isinstance(node, promql.MatrixSelector):
        return [node.vector_selector]
    return []


def walk(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Every node with its ancestors."""
    yield node, path
    for child in children(node):
        yield from walk(child, (*path, node))


def uses(tree: Any) -> list[Use]:
    """All selectors of an expression."""
    return [Use(metric_name(node), node, path) for node, path in walk(tree) if isinstance(node, promql.VectorSelector)]


def metric_name(selector: Any) -> str:
    if selector.name:
        return str(selector.name)
    for matcher in selector.matchers.matchers:
        if matcher.name == "__name__" and matcher.op == promql.MatchOp.Equal:
            return str(matcher.value)
    return ""


def bare(node: Any) -> Any:
    """A node without the parentheses around it."""
    while isinstance(node, promql.ParenExpr):
        node = node.expr
    return node


def constant(node: Any) -> float | None:
    """The value of an expression of numbers alone."""
    node = bare(node)
    if isinstance(node, promql.NumberLiteral):
        return float(node.val)
    if isinstance(node, promql.UnaryExpr):
        value = constant(node.expr)
        return None if value is None else -value
    if isinstance(node, promql.BinaryExpr) and str(node.op) in _ARITHMETIC:
        right = constant(node.rhs)  # first: chains lean to the left
        left = constant(node.lhs) if right is not None else None
        if left is None or right is None:
            return None
        try:
            return _ARITHMETIC[str(node.op)](left, right)
        except (ZeroDivisionError, OverflowError, ValueError):
            return math.nan
    return None


_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "^": lambda a, b: math.pow(a, b),
    "%": math.fmod,
}


def comparisons(tree: Any) -> list[Comparison]:
    """All comparisons of something with a constant."""
    found = []
    for node, path in walk(tree):
        op = str(node.op) if isinstance(node, promql.BinaryExpr) else ""
        if op not in COMPARISONS:
            continue
        right, left = constant(node.rhs), constant(node.lhs)
        if right is not None and left is None:
            found.append(Comparison(node, bare(node.lhs), op, right, path))
        elif left is not None and right is None:
            found.append(Comparison(node, bare(node.rhs), COMPARISONS[op], left, path))
    return found


def operator(node: Any) -> str:
    """The operator of a binary expression or of an aggregation, else ""."""
    return str(node.op) if isinstance(node, promql.BinaryExpr | promql.AggregateExpr) else ""


def function(node: Any) -> str:
    return str(node.func.name) if isinstance(node, promql.Call) else ""


def grouping(aggregate: Any) -> tuple[str, tuple[str, ...]]:
    """("by", labels), ("without", labels) or ("", ()) of an aggregation."""
    if aggregate.modifier is None:
        return "", ()
    word = "by" if aggregate.modifier.type == promql.AggModifierType.By else "without"
    return word, tuple(str(label) for label in aggregate.modifier.labels)


def carries_le(node: Any) -> bool | None:
    """Whether the result of an expression has the label `le`; None where that cannot be known."""
    node = bare(node)
    if isinstance(node, promql.VectorSelector):
        name = metric_name(node)
        return None if not name else name.endswith("_bucket")
    if isinstance(node, promql.MatrixSelector):
        return carries_le(node.vector_selector)
    if isinstance(node, promql.SubqueryExpr | promql.UnaryExpr):
        return carries_le(node.expr)
    if isinstance(node, promql.AggregateExpr):
        word, labels = grouping(node)
        if operator(node) in ("topk", "bottomk", "limitk", "limit_ratio"):
            return carries_le(node.expr)
        if (word == "by" and "le" not in labels) or (word == "without" and "le" in labels) or not word:
            return False
        return carries_le(node.expr)
    if isinstance(node, promql.Call):
        return _call_carries_le(node)
    if isinstance(node, promql.BinaryExpr):
        return _binary_carries_le(node)
    return False


def _call_carries_le(node: Any) -> bool | None:
    name = function(node)
    if name in ("histogram_quantile", "vector", "scalar", "time", "absent", "absent_over_time"):
        return False
    if name in ("label_replace", "label_join"):
        return None
    vectors = [argument for argument in node.args if constant(argument) is None]
    return carries_le(vectors[0]) if vectors else False


def _binary_carries_le(node: Any) -> bool | None:
    if constant(node.rhs) is not None:
        return carries_le(node.lhs)
    if constant(node.lhs) is not None:
        return carries_le(node.rhs)
    if operator(node) == "or":
        sides = (carries_le(node.lhs), carries_le(node.rhs))
        return sides[0] if sides[0] == sides[1] else None
    return carries_le(node.rhs) if _many_is_right(node) else carries_le(node.lhs)


def _many_is_right(node: Any) -> bool:
    return node.modifier is not None and node.modifier.card == promql.VectorMatchCardinality.OneToMany


def matches_on_le(node: Any) -> bool:
    """Whether `le` takes part in pairing the two sides of a binary expression."""
    matching = node.modifier.matching if node.modifier is not None else None
    if matching is None:
        return True
    named = "le" in matching.labels
    return named if matching.type == promql.LabelModifierType.Include else not named


def same_number(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9)
