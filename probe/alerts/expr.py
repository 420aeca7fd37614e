"""What a rule reads, as a small expression over canonical metrics: one object, evaluated here, exported as PromQL.

A value is a vector: numbers by labels, within one target. `Aggregate` decides which labels are left; without any, a
vector holds at most one number, the target's. Two vectors combine where their labels are equal, so both sides of an
operator are aggregated alike. Comparisons filter, as in PromQL: the left side where they hold, nothing elsewhere.
`probe.alerts.arithmetic` evaluates, `probe.export.promql` writes PromQL.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Match = tuple[tuple[str, str], ...]
"""Labels a series must carry: (name, value). The value of `le` is compared as a number."""


@dataclass(frozen=True)
class Instant:
    """The newest sample of each series, unless it is stale."""

    metric: str
    match: Match = ()


@dataclass(frozen=True)
class Increase:
    """Growth of each counter over `window_s`, ending `offset_s` ago: resets counted, extrapolated to the window."""

    metric: str
    window_s: float
    match: Match = ()
    offset_s: float = 0.0


@dataclass(frozen=True)
class OverTime:
    """Mean, least or greatest value of each gauge's samples in the window."""

    how: Literal["avg", "min", "max"]
    metric: str
    window_s: float
    match: Match = ()


@dataclass(frozen=True)
class Changes:
    """How often each series' value changed in the window."""

    metric: str
    window_s: float
    match: Match = ()


@dataclass(frozen=True)
class Derivative:
    """Slope of each gauge per second over the window, by least squares."""

    metric: str
    window_s: float
    match: Match = ()


@dataclass(frozen=True)
class Quantile:
    """The q-quantile of a histogram's growth over the window, from the buckets of all engines merged."""

    q: float
    metric: str
    window_s: float


@dataclass(frozen=True)
class Aggregate:
    """Sum, greatest or least by the labels `by`; by none: of the whole target."""

    how: Literal["sum", "max", "min"]
    of: Expr
    by: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClampMin:
    """At least `least`."""

    of: Expr
    least: float


@dataclass(frozen=True)
class Arithmetic:
    """Number by number where the labels are equal; x / 0 is infinite, 0 / 0 is NaN."""

    op: Literal["+", "-", "*", "/"]
    left: Expr
    right: Expr | float


@dataclass(frozen=True)
class Compare:
    """The left side where the comparison with the right holds (never with NaN)."""

    op: Literal[">", "<", ">=", "<=", "=="]
    left: Expr
    right: Expr | float


@dataclass(frozen=True)
class Logical:
    """`and`: the left where the right has equal labels; `unless`: where it has not; `or`: both, the left first."""

    op: Literal["and", "or", "unless"]
    left: Expr
    right: Expr


Leaf = Instant | Increase | OverTime | Changes | Derivative | Quantile
Expr = Leaf | Aggregate | ClampMin | Arithmetic | Compare | Logical


def leaves(expr: Expr) -> Iterator[Leaf]:
    """The readings an expression is made of, from left to right."""
    if isinstance(expr, Aggregate | ClampMin):
        yield from leaves(expr.of)
    elif isinstance(expr, Arithmetic | Compare | Logical):
        yield from leaves(expr.left)
        if not isinstance(expr.right, float | int):
            yield from leaves(expr.right)
    else:
        yield expr


def metric_of(leaf: Leaf) -> str:
    """The canonical series a leaf reads."""
    return f"{leaf.metric}_bucket" if isinstance(leaf, Quantile) else leaf.metric


def look_back_s(leaf: Leaf) -> float:
    """How far back a leaf looks, in seconds; 0 for the newest sample."""
    if isinstance(leaf, Instant):
        return 0.0
    return leaf.window_s + (leaf.offset_s if isinstance(leaf, Increase) else 0.0)


def rebuilt(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """The expression with every part of it changed, from the inside out."""
    if isinstance(expr, Aggregate | ClampMin):
        return change(dataclasses.replace(expr, of=rebuilt(expr.of, change)))
    if isinstance(expr, Logical):
        return change(Logical(expr.op, rebuilt(expr.left, change), rebuilt(expr.right, change)))
    if isinstance(expr, Arithmetic | Compare):
        right = expr.right if isinstance(expr.right, float | int) else rebuilt(expr.right, change)
        return change(dataclasses.replace(expr, left=rebuilt(expr.left, change), right=right))
    return change(expr)


def with_times(expr: Expr, fit: Callable[[float], float]) -> Expr:
    """The expression with every window and offset replaced by `fit(seconds)`."""

    def change(part: Expr) -> Expr:
        if isinstance(part, Increase):
            offset_s = fit(part.offset_s) if part.offset_s else 0.0
            return dataclasses.replace(part, window_s=fit(part.window_s), offset_s=offset_s)
        if isinstance(part, OverTime | Changes | Derivative | Quantile):
            return dataclasses.replace(part, window_s=fit(part.window_s))
        return part

    return rebuilt(expr, change)
