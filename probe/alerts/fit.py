"""A rule as it applies to one engine: latency bounds that are bucket bounds there, labels its metrics really carry.

The built-in evaluation and the export fit a rule alike. A rule that would mislead on an engine does not fit, and its
reading says why.
"""

from __future__ import annotations

import dataclasses
from functools import cache

from probe.alerts.expr import Aggregate, Expr, Increase, leaves, metric_of, rebuilt
from probe.alerts.rule import Rule, ValueSignal, scaled
from probe.dialects import Dialect, DialectError, canonical_names, load_dialect
from probe.dialects.model import HISTOGRAM_SUFFIXES, base_name
from probe.store import Target


class UnfitError(Exception):
    """A rule cannot be judged on an engine; the message is the reason, without a full stop."""


def fitted(rule: Rule, dialect: Dialect, version: str | None = None) -> Rule:
    """The rule for an engine's version; raises `UnfitError`. Rules that read no value are the same everywhere."""
    signal = rule.signal
    if not isinstance(signal, ValueSignal):
        return rule
    read = sorted(rule.metrics - {"up"})
    if rule.comparison == "==" and "generation_tokens_total" in read:
        source = dialect.source_at("generation_tokens_total", version)
        if source is not None and source.at_finish:
            raise UnfitError("tokens are counted when a request ends, so that a long answer would look like a stall")
    signal = _with_bounds(signal, dialect)
    told = [metric for metric in read if _labels(dialect, metric, version) is not None]
    for label in signal.per:
        without = [metric for metric in told if not carries(dialect, metric, label, version)]
        if without and len(without) < len(told):
            signal = signal.mapped(lambda part, label=label: without_label(part, label))  # type: ignore[misc]
            signal = dataclasses.replace(signal, per=tuple(name for name in signal.per if name != label))
    return dataclasses.replace(rule, signal=signal)


def applied_to(target: Target, rule: Rule) -> tuple[Rule, str | None]:
    """The rule as it is evaluated on a target: fitted to its engine, scaled to its clock; and why not, if it is not."""
    why = None
    try:
        version = target.facts.get("version")
        rule = fitted(rule, load_dialect(target.engine, version if isinstance(version, str) else None))
    except DialectError:
        pass  # nothing of the target can be read, as every scrape says
    except UnfitError as error:
        why = f"not judged on {target.engine}: {error}"
    return scaled(rule, target), why


@cache
def split_histogram(canonical: str) -> tuple[str, str]:
    """(metric, suffix) of a histogram's series, (name, "") of anything else."""
    for suffix in HISTOGRAM_SUFFIXES:
        base = canonical.removesuffix(suffix)
        known = canonical_names().get(base)
        if base != canonical and known is not None and known.type == "histogram":
            return base, suffix
    return canonical, ""


def carries(dialect: Dialect, canonical: str, label: str, version: str | None = None) -> bool:
    """Whether the series of a canonical metric have a canonical label in a version.

    Where metrics are told by rank, they are told by replica too as soon as there are several.
    """
    labels = _labels(dialect, canonical, version) or ()
    by_rank = label == "engine" and any(rank in labels for rank in dialect.ranks)
    return by_rank or exposed_label(dialect, label) in labels


def exposed_label(dialect: Dialect, canonical: str) -> str | None:
    """The exposed name of a canonical label; None for one that the engine does not have."""
    if canonical == "model_name":
        return dialect.model_label
    if canonical == "engine":
        return dialect.engine_label
    renamed = next((s.labels for m in dialect.metrics for s in m.sources if s.labels), {})
    return next((exposed for exposed, name in renamed.items() if name == canonical), canonical)


def without_label(expr: Expr, label: str) -> Expr:
    """The expression aggregated by target where it was by a label that not all its metrics carry."""

    def drop(part: Expr) -> Expr:
        if not isinstance(part, Aggregate):
            return part
        return dataclasses.replace(part, by=tuple(name for name in part.by if name != label))

    return rebuilt(expr, drop)


def _labels(dialect: Dialect, canonical: str, version: str | None) -> tuple[str, ...] | None:
    """Exposed labels of a metric; None where the version does not expose it or they are not known."""
    source = dialect.source_at(split_histogram(canonical)[0], version)
    form = dialect.exposed_at(version).get(base_name(dialect, source.name)) if source is not None else None
    return form.labels if form is not None else None


def _with_bounds(signal: ValueSignal, dialect: Dialect) -> ValueSignal:
    """The signal with latency bounds that are bucket bounds of this engine."""
    sentence = signal.sentence
    bounds = [(leaf, bound) for part in signal.parts for leaf in leaves(part) if (bound := _bound(leaf)) is not None]
    for leaf, bound in bounds:
        metric = split_histogram(metric_of(leaf))[0]
        if metric not in dialect.slo:
            raise UnfitError(f"no bucket bound of {metric} is known to judge it by")
        sentence = sentence.replace(f"{bound:g} s", f"{dialect.slo[metric]:g} s")

    def fit(leaf: Expr) -> Expr:
        if not isinstance(leaf, Increase) or _bound(leaf) is None:
            return leaf
        bound = f"{dialect.slo[split_histogram(leaf.metric)[0]]:g}"
        match = tuple((label, bound if label == "le" else value) for label, value in leaf.match)
        return dataclasses.replace(leaf, match=match)

    return dataclasses.replace(signal.mapped(lambda part: rebuilt(part, fit)), sentence=sentence)


def _bound(leaf: Expr) -> float | None:
    match = leaf.match if isinstance(leaf, Increase) else ()
    return next((float(value) for label, value in match if label == "le"), None)
