"""What a rule is: what is read, against what, held for how long, and which runbook.

A rule's id is its runbook's id. Windows and hold times are written for a target at true scale; `scaled` fits
them to a target's `time_scale`, never below what its scrape interval can show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from probe.alerts.expr import Aggregate, Compare, Expr, Leaf, Logical, leaves, look_back_s, metric_of, with_times
from probe.store import Target

MIN_SCRAPES_PER_WINDOW = 6
MIN_SCRAPES_PER_HOLD = 2


@dataclass(frozen=True)
class ValueSignal:
    """`value comparison threshold`, where `when` holds too.

    With `floor` not met, the value is shown but does not alert: too little traffic to judge. `condition` takes the
    place of `value comparison threshold` where one number does not say it. `per`: labels the vectors keep, () for one
    number a target; any of them in breach is the target's breach. `sentence` says the value to people, with the fields
    {value}, {numerator}, {denominator}, {window}, {threshold} and, by `per`, {where}.
    """

    value: Expr
    sentence: str
    unit: Literal["ratio", "percent", "seconds", "count"] = "count"
    when: Expr | None = None
    floor: Expr | None = None
    condition: Expr | None = None
    numerator: Expr | None = None
    denominator: Expr | None = None
    floor_unit: str = ""
    per: tuple[str, ...] = ()

    @cached_property
    def readings(self) -> tuple[Leaf, ...]:
        """What the value is made of."""
        return tuple(leaves(self.value))

    @property
    def parts(self) -> tuple[Expr, ...]:
        """Every expression of the signal."""
        found = (self.value, self.when, self.floor, self.condition, self.numerator, self.denominator)
        return tuple(part for part in found if part is not None)

    def mapped(self, change: Callable[[Expr], Expr]) -> ValueSignal:
        """The signal with all its expressions changed."""

        def part(expr: Expr | None) -> Expr | None:
            return None if expr is None else change(expr)

        return dataclasses.replace(
            self,
            value=change(self.value),
            when=part(self.when),
            floor=part(self.floor),
            condition=part(self.condition),
            numerator=part(self.numerator),
            denominator=part(self.denominator),
        )


@dataclass(frozen=True)
class EventMatch:
    """An event kind, and values its data must have (one of each tuple); no values match any event of the kind."""

    kind: str
    data: Mapping[str, tuple[object, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class EventSignal:
    """Number of matching events; over once the target was up for `recover_s` on end after the last of them."""

    matches: tuple[EventMatch, ...]
    recover_s: float


@dataclass(frozen=True)
class AbsenceSignal:
    """`up` of a target that should be up: not stopped on purpose, and not within `grace_s` of a start.

    The grace is not scaled: a drill's engine loads its model at the speed of any other.
    """

    grace_s: float


@dataclass(frozen=True)
class QualitySignal:
    """Fall of accuracy in the rounds of a quality canary, paired against its baseline.

    The metrics are counts of questions of one round: asked, lost, gained, without a usable answer. A round is worse
    when accuracy fell beyond the rule's threshold with a 95% interval clear of zero, or when more than
    `invalid_threshold` of the answers are none. The newest `min_rounds` rounds in the window must all be worse. A round
    takes its time at any scale, so the window is never scaled below `min_window_s`.
    """

    items: str
    lost: str
    gained: str
    invalid: str
    min_rounds: int
    invalid_threshold: float
    min_window_s: float


@dataclass(frozen=True)
class BreachSignal:
    """Isolation breaches: what the engine itself counted in the window, plus what an isolation probe found.

    `counter` grows by one for every block of another identity that is served. `probes` and `leaks` are counts of one
    round of the probe, by check; the newest reading of each check counts until a newer one replaces it, for `rounds_s`
    at most (not scaled): nothing but another round shows that a leak is gone.
    """

    counter: str
    probes: str
    leaks: str
    rounds_s: float


Signal = ValueSignal | EventSignal | AbsenceSignal | QualitySignal | BreachSignal
Comparison = Literal[">", "<", ">=", "<=", "=="]


@dataclass(frozen=True)
class Rule:
    """One alert. The condition is `value comparison threshold`; all times in seconds.

    hold_s: how long the condition must be seen to hold before the alert fires (not scaled below `min_hold_s`).
    keep_firing_s: how long it must be seen to be clear before the alert resolves.
    inhibited_by: rules which, firing on the same target, explain this one: it fires too, but nobody is told.
    """

    id: str
    title: str
    severity: Literal["warning", "critical"]
    signal: Signal
    threshold: float
    window_s: float
    hold_s: float
    comparison: Comparison = ">"
    keep_firing_s: float = 0.0
    min_hold_s: float = 0.0
    inhibited_by: tuple[str, ...] = ()

    @property
    def runbook(self) -> str:
        """The id of the runbook: the rule's own."""
        return self.id

    @cached_property
    def compared(self) -> Expr | None:
        """`value comparison threshold` (or what stands for it), by the labels `per`; None for other signals."""
        if not isinstance(self.signal, ValueSignal):
            return None
        return self.signal.condition or Compare(self.comparison, self.signal.value, self.threshold)

    @property
    def condition(self) -> Expr | None:
        """The whole condition, one number a target where it holds: what is exported. None for other signals."""
        found = self.compared
        if found is None or not isinstance(self.signal, ValueSignal):
            return None
        for also in (self.signal.floor, self.signal.when):
            if also is not None:
                found = Logical("and", found, also)
        if self.signal.per:
            found = Aggregate("min" if self.comparison in ("<", "<=") else "max", found)
        return found

    @property
    def metrics(self) -> frozenset[str]:
        """Canonical metrics the rule reads."""
        signal = self.signal
        if isinstance(signal, ValueSignal):
            return frozenset({"up", *(metric_of(leaf) for part in signal.parts for leaf in leaves(part))})
        if isinstance(signal, QualitySignal):
            return frozenset({signal.items, signal.lost, signal.gained, signal.invalid})
        if isinstance(signal, BreachSignal):
            return frozenset({"up", signal.counter, signal.probes, signal.leaks})
        return frozenset({"up"})

    @property
    def look_back_s(self) -> dict[str, float]:
        """How far back the rule looks at each scraped metric, in seconds."""
        signal = self.signal
        reach = dict.fromkeys(self.metrics - self.round_metrics, self.window_s)
        if isinstance(signal, EventSignal):
            reach["up"] = self.window_s + signal.recover_s
        if isinstance(signal, ValueSignal):
            reach = {"up": 0.0}
            for leaf in (leaf for part in signal.parts for leaf in leaves(part)):
                reach[metric_of(leaf)] = max(reach.get(metric_of(leaf), 0.0), look_back_s(leaf))
        return reach

    @property
    def round_metrics(self) -> frozenset[str]:
        """Those of `metrics` that are not scraped: whoever measured a round writes them to the store."""
        signal = self.signal
        if isinstance(signal, QualitySignal):
            return self.metrics
        return frozenset({signal.probes, signal.leaks}) if isinstance(signal, BreachSignal) else frozenset()

    @property
    def rounds_s(self) -> float:
        """How far back its rounds count, in seconds."""
        return self.signal.rounds_s if isinstance(self.signal, BreachSignal) else self.window_s


def scaled(rule: Rule, target: Target) -> Rule:
    """The rule as it applies to a target: times multiplied by its `time_scale`, with minimums."""
    scale, interval = target.time_scale, target.scrape_interval_s

    def shrink(seconds: float) -> float:
        return max(seconds * scale, MIN_SCRAPES_PER_HOLD * interval) if seconds > 0 else 0.0

    def fit(seconds: float) -> float:
        return max(seconds * scale, MIN_SCRAPES_PER_WINDOW * interval)

    signal = rule.signal
    if isinstance(signal, EventSignal):
        signal = dataclasses.replace(signal, recover_s=shrink(signal.recover_s))
    if isinstance(signal, ValueSignal):
        signal = signal.mapped(lambda part: with_times(part, fit))
    window_s = max(rule.window_s * scale, signal.min_window_s) if isinstance(signal, QualitySignal) else None
    return dataclasses.replace(
        rule,
        signal=signal,
        window_s=fit(rule.window_s) if window_s is None else window_s,
        hold_s=max(shrink(rule.hold_s), rule.min_hold_s),
        keep_firing_s=shrink(rule.keep_firing_s),
    )
