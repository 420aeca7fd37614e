"""The alert rules on the window: fitted to the engine, their windows no longer than what was watched.

A rule keeps its expression and its threshold. What is shortened is said; what needs a past that was not watched (a
baseline of a day, a slope of an hour, rounds of a canary) is not judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from probe.alerts.evaluate import LIFECYCLE_KINDS, Outcome, View, evaluate
from probe.alerts.expr import Derivative, Increase, leaves, with_times
from probe.alerts.fit import UnfitError, fitted
from probe.alerts.rule import QualitySignal, Rule, ValueSignal, scaled
from probe.alerts.rules import DEFAULT_RULES
from probe.dialects import load_dialect
from probe.doctor.figures import Figures
from probe.doctor.finding import NotJudged

LEAST_SLOPE_S = 900.0
LEAST_BASELINE_S = 1200.0


@dataclass(frozen=True)
class Judged:
    """A rule as it was judged. `usual_s`: its own window, where that is longer than what was watched."""

    rule: Rule
    outcome: Outcome
    usual_s: float | None


def judge(figures: Figures, rules: Sequence[Rule] = DEFAULT_RULES) -> tuple[list[Judged], list[NotJudged]]:
    """Every rule's outcome at the end of the window, and those that cannot be judged."""
    observed = figures.observed
    newest = max((sample.ts for sample in observed.samples), default=observed.until)
    target = dataclasses.replace(observed.target, created_at=0.0)
    unseen = frozenset(event.id for event in observed.events if event.ts >= observed.since)
    lifecycle = [event for event in observed.events if event.kind in LIFECYCLE_KINDS]
    view = View(target, figures.window, lifecycle, newest, unseen)
    judged: list[Judged] = []
    skipped: list[NotJudged] = []
    span_s = max(observed.until - observed.history_from, 0.0)
    for rule in rules:
        if isinstance(rule.signal, QualitySignal):
            skipped.append(NotJudged(rule.id, "needs rounds of a quality canary: `kvoncall quality`"))
            continue
        try:
            whole = scaled(_fitted(rule.id, target.engine, observed.version), target)
            fit = shortened(whole, span_s)
        except UnfitError as error:
            skipped.append(NotJudged(rule.id, str(error)))
            continue
        outcome = evaluate(fit, view)
        if outcome.verdict == "no_data":
            skipped.append(NotJudged(rule.id, outcome.coverage.removeprefix("no data: ")))
            continue
        judged.append(Judged(fit, outcome, whole.window_s if whole.window_s > span_s else None))
    return judged, skipped


@cache
def _fitted(rule_id: str, engine: str, version: str | None) -> Rule:
    """A rule as an engine's version has it: the same for every window."""
    return fitted(next(rule for rule in DEFAULT_RULES if rule.id == rule_id), load_dialect(engine, version), version)


def shortened(rule: Rule, span_s: float) -> Rule:
    """The rule with windows of at most `span_s` seconds; raises `UnfitError` where it would mean something else."""
    signal = rule.signal
    if isinstance(signal, ValueSignal):
        read = [leaf for part in signal.parts for leaf in leaves(part)]
        if any(isinstance(leaf, Derivative) for leaf in read) and span_s < LEAST_SLOPE_S:
            raise UnfitError(f"needs {LEAST_SLOPE_S / 60:.0f} minutes: `kvoncall watch`, then doctor NAME")
        offsets = [leaf.offset_s for leaf in read if isinstance(leaf, Increase) and leaf.offset_s]
        if offsets and span_s < max(offsets) + LEAST_BASELINE_S:
            raise UnfitError("needs its own past as a baseline: `kvoncall watch` for half an hour, then doctor NAME")
        longest = {leaf.window_s for leaf in read if isinstance(leaf, Increase) and leaf.offset_s}

        def fit(seconds: float) -> float:
            return span_s - max(offsets) if seconds in longest and seconds > span_s else min(seconds, span_s)

        signal = signal.mapped(lambda part: with_times(part, fit))
    return dataclasses.replace(rule, signal=signal, window_s=min(rule.window_s, span_s))
