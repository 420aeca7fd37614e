"""Counters, gauges and histograms: rates where they belong and nowhere else, quantiles that keep `le`, windows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql

from probe.check.expression import RATES, Use, bare, carries_le, function, grouping, operator, uses, walk
from probe.check.finding import Finding
from probe.check.query import PANEL, VARIABLE
from probe.check.replacements import COUNTER_MEANT
from probe.check.subject import Subject, text_of

_COUNTER_FUNCTIONS = (*RATES, "resets", "changes", "absent_over_time", "present_over_time", "count_over_time", "range")
_SCRAPES = 4
_VARIABLE_INTERVAL = re.compile(r"\[\s*(\$__interval|\$\{__interval\}|\[\[__interval\]\])\s*(?=[\]:])")
_ANY_WINDOW = re.compile(r"\[([^\]:\[]+)\]")
_LITERAL_WINDOW = re.compile(r"\[\s*((?:\d+(?:ms|[smhdwy]))+)\s*\]")


def check_rates(subject: Subject) -> Iterator[Finding]:
    yield from _rate_on_gauge(subject)
    if subject.query.kind != VARIABLE:
        yield from _counter_without_rate(subject)
    yield from _rate_of_a_sum(subject)
    yield from _quantiles(subject)
    yield from _interval_in_rate(subject)
    yield from _short_windows(subject)


def _rate_on_gauge(subject: Subject) -> Iterator[Finding]:
    for name, use in {use.name: use for use in subject.uses if use.function in RATES}.items():
        meaning = subject.meaning(use)
        if meaning.type != "gauge":
            continue
        counter = COUNTER_MEANT.get(name, "")
        if counter and subject.vocabulary.resolve(counter).status != "live":
            counter = ""
        yield subject.finding(
            "rate-on-gauge",
            f"{name} is a gauge: {use.function}() takes each fall of it for a restart and adds it up.",
            f"{use.function}({counter}[...])" if counter else f"{name} itself, avg_over_time() or deriv() of it",
            at=name,
            corrected=subject.rename({name: counter}) if counter else None,
        )


def _counter_without_rate(subject: Subject) -> Iterator[Finding]:
    """One finding for each metric; the text is corrected for all of them at once."""
    found: dict[str, Use] = {}
    for use in subject.uses:
        meaning = subject.meaning(use)
        if not meaning.grows or meaning.part == "_created" or not use.counts:
            continue
        if use.function not in _COUNTER_FUNCTIONS and not _inside_rate(use):
            found.setdefault(use.name, use)
    corrected = _with_rates(subject, list(found.values()))
    for name, use in found.items():
        kind = "a bucket of a histogram" if subject.meaning(use).part == "_bucket" else "a counter"
        how = (
            f"{use.function}() of it is wrong after every restart"
            if use.function
            else "it is the total since the start"
        )
        yield subject.finding(
            "no-rate-on-counter",
            f"{name} is {kind}: {how}, not what happens now.",
            f"rate({name}[{subject.rate_window}]), or increase() for a number in a window",
            at=name,
            corrected=corrected,
        )


def _inside_rate(use: Use) -> bool:
    """A subquery's rate: `rate(x[5m:1m])`."""
    return any(function(node) in RATES for node in use.path) and any(
        isinstance(node, promql.SubqueryExpr) for node in use.path
    )


def _with_rates(subject: Subject, wanting: list[Use]) -> str | None:
    """The text with a rate around each metric, where each stands once and without a window of its own."""
    text = str(subject.query.text)
    how, window = _as_the_rest(subject)
    for use in wanting:
        pattern = re.compile(rf"(?<![\w:]){re.escape(use.name)}(?![\w:])(\s*\{{(?:[^{{}}\"']|\"[^\"]*\"|'[^']*')*\}})?")
        if use.function or use.selector.offset is not None or len(pattern.findall(text)) != 1:
            return None
        text = pattern.sub(lambda match: f"{how}({match[0]}[{window}])", text)
    return text


def _as_the_rest(subject: Subject) -> tuple[str, str]:
    """The function and window that the expression uses elsewhere, so that both sides of a quotient agree."""
    functions = [use.function for use in subject.uses if use.function in ("rate", "increase")]
    windows = _ANY_WINDOW.findall(subject.query.text)
    return (functions[0], windows[0].strip()) if functions and windows else ("rate", subject.rate_window)


def _rate_of_a_sum(subject: Subject) -> Iterator[Finding]:
    """`rate(sum(x)[5m:])`: a restart of one replica is a fall of the sum."""
    for use in subject.uses:
        kinds = [_kind(node) for node in use.path]
        if "rate" in kinds and subject.meaning(use).grows:
            after = kinds[kinds.index("rate") :]
            if "subquery" in after and "aggregate" in after[after.index("subquery") :]:
                yield subject.finding(
                    "no-rate-on-counter",
                    f"rate() of a sum of {use.name}: when one replica restarts the sum falls, and rate() takes the "
                    "whole remaining sum for new events.",
                    f"sum(rate({use.name}[{subject.rate_window}]))",
                    at=use.name,
                )


def _kind(node: Any) -> str:
    if function(node) in RATES:
        return "rate"
    if isinstance(node, promql.SubqueryExpr):
        return "subquery"
    return "aggregate" if isinstance(node, promql.AggregateExpr) else ""


def _quantiles(subject: Subject) -> Iterator[Finding]:
    for node, _ in walk(subject.tree):
        if function(node) != "histogram_quantile" or len(node.args) != 2:
            continue
        argument = bare(node.args[1])
        inside = uses(argument)
        if not inside or any(subject.meaning(use).status == "foreign" for use in inside):
            continue  # native histograms and recorded buckets need no le
        name = inside[0].name
        aggregates = [part for part, _ in walk(argument) if isinstance(part, promql.AggregateExpr)]
        if carries_le(argument) is False:
            dropped = bool(aggregates) and any(use.name.endswith("_bucket") for use in inside)
            yield subject.finding(
                "quantile-without-le",
                f"histogram_quantile needs buckets, and {'the aggregation drops le' if dropped else f'{name} is none'}"
                f": {subject.effect}.",
                "sum by (le, ...) (rate(..._bucket[...]))",
                at=name,
                corrected=_keep_le(subject, aggregates[0]) if dropped else None,
            )
        elif carries_le(argument) and not aggregates:
            inner = text_of(argument)
            yield subject.finding(
                "quantile-without-le",
                f"the quantile is taken of each series of {name} alone (every replica and engine its own), not of the "
                "service: one slow replica with a single request decides.",
                f"sum by (le) ({inner}), with the labels you want to tell apart after le",
                at=name,
                corrected=subject.rewrite(node.args[1], f"sum by (le, model_name) ({inner})")
                if "model_name" in (subject.vocabulary.labels_of(subject.meaning(inside[0])) or ())
                else subject.rewrite(node.args[1], f"sum by (le) ({inner})"),
            )


def _keep_le(subject: Subject, aggregate: Any) -> str | None:
    word, labels = grouping(aggregate)
    op, inner = operator(aggregate), text_of(aggregate.expr)
    if aggregate.param is not None:
        return None
    if word == "without":
        rest = [label for label in labels if label != "le"]
        return subject.rewrite(aggregate, f"{op} without ({', '.join(rest)}) ({inner})")
    return subject.rewrite(aggregate, f"{op} by ({', '.join(('le', *labels))}) ({inner})")


def _interval_in_rate(subject: Subject) -> Iterator[Finding]:
    text = subject.query.text
    match = _VARIABLE_INTERVAL.search(text)
    if subject.query.kind != PANEL or match is None or not any(use.function in RATES for use in subject.uses):
        return
    yield subject.finding(
        "interval-in-rate",
        "$__interval shrinks to less than two scrapes when one zooms in: rate() has nothing to work on and the panel "
        "goes empty.",
        "$__rate_interval",
        at=match[1] if match[1].startswith("$__") else "",
        corrected=_VARIABLE_INTERVAL.sub("[$__rate_interval", text),
    )


def _short_windows(subject: Subject) -> Iterator[Finding]:
    """Windows written as numbers; of `$__rate_interval` Grafana takes care."""
    written = {_window_s(text) for text in _LITERAL_WINDOW.findall(subject.query.text)}
    scrape = subject.settings.scrape_interval_s
    told: set[float] = set()
    for use in subject.uses:
        window = use.window_s
        if use.function not in RATES or window not in written or window in told or subject.meaning(use).engine is None:
            continue
        told.add(window)
        if window < _SCRAPES * scrape:
            yield subject.finding(
                "fixed-window-too-short",
                f"{use.function}() over {window:g} s holds {window / scrape:.3g} scrapes at one each {scrape:g} s: one "
                "late or lost scrape leaves it empty, and `for` starts anew.",
                f"a window of at least {_SCRAPES * scrape:g} s (or --scrape-interval, if you scrape more often)",
                at=use.name,
            )
        elif subject.query.interval_s is not None and window < subject.query.interval_s:
            yield subject.finding(
                "fixed-window-too-short",
                f"the group is evaluated each {subject.query.interval_s:g} s and looks at {window:g} s: what happens "
                "in between is never seen.",
                f"a window of at least {subject.query.interval_s:g} s",
                at=use.name,
            )


def _window_s(text: str) -> float:
    return float(promql.parse_duration(text).total_seconds())
