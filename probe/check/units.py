"""What an expression measures and in which unit: thresholds and panels of the wrong scale.

`quantity` follows a value from the metric to the comparison: aggregations and filters keep its unit, a constant factor
scales it, a quotient of two parts of one thing is a ratio.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import promql_parser as promql

from probe.check.expression import (
    COMPARISONS,
    Comparison,
    Use,
    bare,
    constant,
    function,
    operator,
    same_number,
    uses,
    walk,
)
from probe.check.finding import Finding
from probe.check.query import PANEL
from probe.check.subject import Subject, text_of

_KEEP_UNIT = ("max", "min", "avg", "quantile", "topk", "bottomk", "limitk")
_FIRST_ARGUMENT = (
    "abs",
    "ceil",
    "floor",
    "round",
    "clamp",
    "clamp_max",
    "clamp_min",
    "sort",
    "sort_desc",
    "label_replace",
)
_BETWEEN_TOKENS = re.compile(r"inter_token|per_output_token")


@dataclass(frozen=True)
class Quantity:
    """`kind`: ratio or seconds. The value is `factor` times that; `name`: the metric it comes from."""

    kind: str
    factor: float
    name: str


def quantity(subject: Subject, node: Any) -> Quantity | None:
    node = bare(node)
    if isinstance(node, promql.VectorSelector):
        return _of_metric(subject, node)
    if isinstance(node, promql.AggregateExpr):
        return quantity(subject, node.expr) if operator(node) in _KEEP_UNIT else None
    if isinstance(node, promql.MatrixSelector):
        return quantity(subject, node.vector_selector)
    if isinstance(node, promql.SubqueryExpr):
        return quantity(subject, node.expr)
    if isinstance(node, promql.Call):
        return _of_call(subject, node)
    return _of_binary(subject, node) if isinstance(node, promql.BinaryExpr) else None


def _of_metric(subject: Subject, selector: Any) -> Quantity | None:
    meaning = subject.meaning(Use(str(selector.name or ""), selector, ()))
    if meaning.type == "gauge" and meaning.unit in ("ratio", "seconds"):
        return Quantity(meaning.unit, 1.0, meaning.name)
    return None


def _of_call(subject: Subject, node: Any) -> Quantity | None:
    name = function(node)
    if name == "histogram_quantile":
        for use in uses(node):
            meaning = subject.meaning(use)
            if meaning.part == "_bucket" and meaning.unit == "seconds":
                return Quantity("seconds", 1.0, meaning.base)
        return None
    if name.endswith("_over_time") and name.split("_")[0] in ("avg", "max", "min", "last", "quantile"):
        return quantity(subject, node.args[-1])
    return quantity(subject, node.args[0]) if name in _FIRST_ARGUMENT else None


def _of_binary(subject: Subject, node: Any) -> Quantity | None:
    op, left, right = operator(node), constant(node.lhs), constant(node.rhs)
    if op in ("and", "or", "unless") or op in COMPARISONS:
        if node.modifier is not None and node.modifier.return_bool:
            return None
        return quantity(subject, node.rhs if left is not None else node.lhs)
    if op == "-" and left is not None:  # 1 - hit rate
        inner = quantity(subject, node.rhs)
        return inner if inner is not None and inner.kind == "ratio" and same_number(left, inner.factor) else None
    if op in ("*", "/") and right:
        inner = quantity(subject, node.lhs)
        return inner and replace(inner, factor=inner.factor * right if op == "*" else inner.factor / right)
    if op == "*" and left:
        inner = quantity(subject, node.rhs)
        return inner and replace(inner, factor=inner.factor * left)
    return _of_quotient(subject, node) if op == "/" else None


def _of_quotient(subject: Subject, node: Any) -> Quantity | None:
    above, below = uses(node.lhs), uses(node.rhs)
    if len(above) != 1 or len(below) != 1:
        return None
    top, bottom = subject.meaning(above[0]), subject.meaning(below[0])
    if not top.grows or not bottom.grows:
        return None
    if top.base == bottom.base and top.part == "_sum" and bottom.part == "_count":
        return Quantity("seconds", 1.0, top.base) if top.unit == "seconds" else None
    share = top.base == bottom.base and (top.part, bottom.part) in (("", ""), ("_bucket", "_count"))
    hits = top.name.replace("hits", "queries") == bottom.name and top.name != bottom.name
    accepted = top.name.replace("accepted", "draft") == bottom.name and top.name != bottom.name
    return Quantity("ratio", 1.0, top.name) if share or hits or accepted else None


def check_units(subject: Subject) -> Iterator[Finding]:
    for comparison in subject.comparisons:
        measured = quantity(subject, comparison.value)
        if measured is not None and measured.kind == "ratio":
            yield from _percent(subject, comparison, measured)
        elif measured is not None:
            yield from _seconds(subject, comparison, measured)
    yield from _quantile_argument(subject)
    yield from _panel_unit(subject)


def _percent(subject: Subject, comparison: Comparison, measured: Quantity) -> Iterator[Finding]:
    limit, threshold, op = measured.factor, comparison.threshold, comparison.op
    per_cent = same_number(limit, 100.0)
    beyond = threshold > limit * (1 + 1e-9)
    if beyond or (op == ">" and same_number(threshold, limit)) or (threshold < 0 and op in ("<", "<=", "==")):
        right = threshold / 100 * limit
        effect = subject.effect if op in (">", ">=", "==") else "the comparison is always true"
        why = f"`{text_of(comparison.value)}` goes from 0 to {limit:g} and is compared with {threshold:g}: {effect}."
        fits = beyond and 0 < right <= limit
    elif per_cent and 0 < threshold <= 1 and op in (">", ">=", "<", "<="):
        right, fits = threshold * 100, True
        why = f"`{text_of(comparison.value)}` goes from 0 to 100 and is compared with {threshold:g}."
    else:
        return
    yield subject.finding(
        "percent-scale",
        why,
        f"{op} {right:g}" if fits else f"a threshold between 0 and {limit:g}",
        at=measured.name,
        corrected=_with_threshold(subject, comparison, right) if fits else None,
    )


def _with_threshold(subject: Subject, comparison: Comparison, threshold: float) -> str | None:
    """The text with another number; None where the number stands more than once or is not written as such."""
    text = str(subject.query.text)
    constant_side = comparison.node.rhs if constant(comparison.node.rhs) is not None else comparison.node.lhs
    if not isinstance(bare(constant_side), promql.NumberLiteral):
        return None
    found = [
        match
        for match in re.finditer(r"(?<![\w.:\"'])\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.\"'])", text)
        if same_number(float(match[0]), comparison.threshold)
    ]
    if len(found) != 1:
        return subject.rewrite(comparison.node, f"{text_of(comparison.value)} {comparison.op} {threshold:g}")
    return text[: found[0].start()] + f"{threshold:g}" + text[found[0].end() :]


def _seconds(subject: Subject, comparison: Comparison, measured: Quantity) -> Iterator[Finding]:
    between = bool(_BETWEEN_TOKENS.search(measured.name))
    threshold, op = comparison.threshold, comparison.op
    if same_number(measured.factor, 1.0) and threshold >= (
        10 if between else 200 if "first_token" in measured.name else 3600
    ):
        right = threshold / 1000
        why = (
            f"`{text_of(comparison.value)}` is in seconds: {threshold:g} of them are "
            f"{threshold / 60:.3g} minutes; {subject.effect}."
        )
    elif same_number(measured.factor, 1000.0) and 0 < threshold < (1 if between else 10):
        right = threshold * 1000
        why = f"`{text_of(comparison.value)}` is in milliseconds and is compared with {threshold:g} ms."
    else:
        return
    yield subject.finding(
        "seconds-scale",
        why,
        f"{op} {right:g}",
        at=measured.name,
        corrected=_with_threshold(subject, comparison, right),
    )


def _quantile_argument(subject: Subject) -> Iterator[Finding]:
    for node, _ in walk(subject.tree):
        is_call = function(node) in ("histogram_quantile", "quantile_over_time") and len(node.args) == 2
        argument = node.args[0] if is_call else node.param if operator(node) == "quantile" else None
        share = constant(argument) if argument is not None else None
        if share is not None and 1 < share <= 100:
            yield subject.finding(
                "percent-scale",
                f"a quantile goes from 0 to 1: {share:g} gives +Inf.",
                f"{share / 100:g}",
            )


def _panel_unit(subject: Subject) -> Iterator[Finding]:
    """Grafana multiplies by nothing: unit "percent" shows 0.9 as 0.9%, "percentunit" as 90%."""
    measured = quantity(subject, subject.tree) if subject.query.kind == PANEL else None
    if measured is None:
        return
    unit = subject.query.unit
    wrong = {
        ("ratio", 1.0, "percent"): ("percent-scale", "percentunit", "from 0 to 1"),
        ("ratio", 100.0, "percentunit"): ("percent-scale", "percent", "from 0 to 100"),
        ("seconds", 1.0, "ms"): ("seconds-scale", "s", "in seconds"),
        ("seconds", 1000.0, "s"): ("seconds-scale", "ms", "in milliseconds"),
    }.get((measured.kind, measured.factor, unit))
    if wrong is not None:
        code, right, meant = wrong
        yield subject.finding(
            code,
            f"the panel's unit is {unit!r}, but `{_cut(text_of(subject.tree))}` is {meant}: what is shown is off by "
            f"a factor of {100 if measured.kind == 'ratio' else 1000}.",
            f"unit {right!r}",
            at=measured.name,
        )


def _cut(text: str) -> str:
    return text if len(text) <= 70 else text[:67] + "..."
