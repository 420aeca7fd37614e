"""Expressions over canonical metrics as PromQL for one engine's version: the same value, by Prometheus.

Text is laid out for reading: one line where it fits, else an operand a line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from probe.alerts.expr import (
    Aggregate,
    Arithmetic,
    Changes,
    ClampMin,
    Compare,
    Derivative,
    Expr,
    Increase,
    Instant,
    Leaf,
    Logical,
    OverTime,
    Quantile,
    metric_of,
)
from probe.export.naming import Names, Selected

WIDTH = 96


@dataclass(frozen=True)
class _Text:
    """A rendered part; `joined`: its outermost operator stands between two parts."""

    text: str
    joined: bool = False

    @property
    def operand(self) -> str:
        return _enclosed("", self.text) if self.joined else self.text


def promql(expr: Expr, names: Names) -> str:
    """The expression; raises `NotExposedError` where the version lacks one of its metrics."""
    return _render(expr, names).text


def _render(expr: Expr, names: Names) -> _Text:
    if isinstance(expr, Aggregate):
        by = ", ".join(names.labels(expr.by))
        return _Text(_enclosed(f"{expr.how} by ({by}) ", _render(expr.of, names).text))
    if isinstance(expr, ClampMin):
        inner = _render(expr.of, names)
        return _Text(_enclosed("clamp_min", _listed(inner.text, number(expr.least))))
    if isinstance(expr, Arithmetic | Compare | Logical):
        right = expr.right
        text = number(right) if isinstance(right, float | int) else _render(right, names).operand
        return _Text(_joined(_render(expr.left, names).operand, expr.op, text), joined=True)
    return _leaf(expr, names)


def _leaf(leaf: Leaf, names: Names) -> _Text:
    found = names.select(metric_of(leaf), () if isinstance(leaf, Quantile) else leaf.match)
    if isinstance(leaf, Quantile):
        return _quantile(leaf, found, names)
    if isinstance(leaf, Changes):
        found = dataclasses.replace(found, factor=1.0)  # a change is one in any unit
    whole: Leaf = leaf
    if isinstance(leaf, OverTime | Derivative):
        # The capacity stands still: its mean is its value, whatever is asked of what is used.
        whole = OverTime("avg", leaf.metric, leaf.window_s, leaf.match)
    return _reading(found, lambda selector: _read(leaf, selector), lambda selector: _read(whole, selector))


def reading(found: Selected, read: Callable[[str], str]) -> str:
    """A canonical series in its unit, where `read` makes PromQL of a selector."""
    return _reading(found, read, read).text


def _reading(found: Selected, read: Callable[[str], str], read_whole: Callable[[str], str]) -> _Text:
    text = _Text(_of_one_rank(read(found.selector), found.ranks))
    if found.over is not None:
        ignoring = f"/ ignoring ({', '.join(found.ignoring)})" if found.ignoring else "/"
        whole = _of_one_rank(read_whole(found.over), found.ranks)
        text = _Text(_joined(text.operand, ignoring, f"({whole} > 0)"), joined=True)
    if found.only_with is not None:
        on = f"and on ({', '.join(found.only_with_on)})"
        text = _Text(_joined(text.operand, on, found.only_with), joined=True)
    if found.factor != 1.0:
        text = _Text(_joined(text.operand, "*", number(found.factor)), joined=True)
    return text


def _of_one_rank(text: str, ranks: tuple[str, ...]) -> str:
    return _enclosed(f"max without ({', '.join(ranks)}) ", text) if ranks else text


def _read(leaf: Leaf, selector: str) -> str:
    if isinstance(leaf, Instant):
        return selector
    ranged = f"{selector}[{duration(leaf.window_s)}]"
    if isinstance(leaf, Increase):
        return f"increase({ranged}{f' offset {duration(leaf.offset_s)}' if leaf.offset_s else ''})"
    if isinstance(leaf, OverTime):
        return f"{leaf.how}_over_time({ranged})"
    return f"changes({ranged})" if isinstance(leaf, Changes) else f"deriv({ranged})"


def _quantile(leaf: Quantile, found: Selected, names: Names) -> _Text:
    return _quantile_of(leaf.q, leaf.metric, lambda s: f"increase({s}[{duration(leaf.window_s)}])", found, names)


def quantile(q: float, metric: str, names: Names, read: Callable[[str], str]) -> str:
    """The q-quantile of a histogram by target, where `read` makes PromQL of the selector of its buckets."""
    return _quantile_of(q, metric, read, names.select(f"{metric}_bucket"), names).text


def _quantile_of(q: float, metric: str, read: Callable[[str], str], found: Selected, names: Names) -> _Text:
    by = ", ".join((*names.labels(()), "le"))
    buckets = _enclosed(f"sum by ({by}) ", reading(found, read))
    text = _Text(_enclosed("histogram_quantile", _listed(number(q), buckets)))
    factor = names.select(f"{metric}_sum").factor  # what scales its values, not the counts of its buckets
    return text if factor == 1.0 else _Text(_joined(text.text, "*", number(factor)), joined=True)


def _listed(first: str, second: str) -> str:
    line = f"{first}, {second}"
    return line if _fits(line) else f"{first},\n{second}"


def _joined(left: str, op: str, right: str) -> str:
    line = f"{left} {op} {right}"
    if _fits(line):
        return line
    if "\n" not in right and len(right) < 24 and "\n" in left:
        return f"{left} {op} {right}"
    return f"{left}\n{op}\n{right}"


def _enclosed(before: str, inner: str) -> str:
    line = f"{before}({inner})"
    if _fits(line):
        return line
    indented = "\n".join(f"  {row}" for row in inner.split("\n"))
    return f"{before}(\n{indented}\n)"


def _fits(text: str) -> bool:
    return "\n" not in text and len(text) <= WIDTH


def number(value: float) -> str:
    """A number as PromQL reads it."""
    return repr(float(value)).removesuffix(".0")


def duration(seconds: float) -> str:
    """A span of time as PromQL writes it: 300 is 5m, 5400 is 1h30m."""
    left, text = round(seconds * 1000), ""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, left = divmod(left, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"
