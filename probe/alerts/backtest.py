"""Would a rule have fired? It is evaluated again on stored samples, step by step, with its own state machine.

A history is read once; another threshold or hold time is then judged without reading anything again. A breach is
*visible to users* while the target does not answer, or more than `VISIBLE_SHARE` of the requests of the last five
minutes were slower than the latency objective's bound; lead time is how long before that the rule had fired.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from probe.alerts.arithmetic import Moment, holds
from probe.alerts.arithmetic import evaluate as vector
from probe.alerts.evaluate import LIFECYCLE_KINDS, Verdict, View, evaluate
from probe.alerts.expr import Compare, Expr, leaves, look_back_s, metric_of
from probe.alerts.fit import applied_to
from probe.alerts.rule import Rule, ValueSignal
from probe.alerts.rules import ITL_BOUND_S, LATENCY_OBJECTIVE, TTFT_BOUND_S, burn
from probe.alerts.state import Progress, step
from probe.alerts.window import Window
from probe.store import Event, Sample, Target

VISIBLE_SHARE = 0.05
VISIBLE_WINDOW_S = 300.0
WEEK_S = 7 * 86_400.0
LEAST_FOR_WEEKS_S = 6 * 3600.0
MAX_STEPS = 50_000

_SLOW: tuple[Expr, ...] = tuple(
    Compare(">", burn(metric, bound, VISIBLE_WINDOW_S), VISIBLE_SHARE / (1 - LATENCY_OBJECTIVE))
    for metric, bound in (("ttft_seconds", TTFT_BOUND_S), ("itl_seconds", ITL_BOUND_S))
)


class BacktestError(Exception):
    """A rule cannot be tested on what is there; the message is one sentence."""


@dataclass(frozen=True)
class Step:
    """One moment: the value shown, and either the number to compare (`judged`) or a verdict that is final.

    `enough`: the traffic floor is met. `visible`: users feel it.
    """

    ts: float
    value: float | None
    judged: float | None
    enough: bool
    verdict: Verdict | None
    visible: bool


@dataclass(frozen=True)
class Firing:
    """One time the alert would have fired. `lead_s`: how long before users felt it; None when they did not,
    negative when they felt it first."""

    pending_at: float
    firing_at: float
    resolved_at: float | None
    worst: float | None
    lead_s: float | None


@dataclass(frozen=True)
class Backtest:
    """What a rule would have done from `since` to `until` (Unix seconds), of which `covered_s` have data."""

    rule: Rule
    target: str
    since: float
    until: float
    covered_s: float
    firings: tuple[Firing, ...]
    visible_breaches: int
    missed_breaches: int

    @property
    def pages_per_week(self) -> float | None:
        """Firings by the time that has data; None where that is too short to speak of weeks."""
        return len(self.firings) * WEEK_S / self.covered_s if self.covered_s >= LEAST_FOR_WEEKS_S else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "rule": self.rule.id,
            "target": self.target,
            "threshold": self.rule.threshold,
            "hold_s": self.rule.hold_s,
            "since": self.since,
            "until": self.until,
            "covered_s": self.covered_s,
            "firings": [dataclasses.asdict(firing) for firing in self.firings],
            "firing_s": sum((f.resolved_at or self.until) - f.firing_at for f in self.firings),
            "pages_per_week": self.pages_per_week,
            "visible_breaches": self.visible_breaches,
            "missed_breaches": self.missed_breaches,
        }


def needed_metrics(rule: Rule) -> dict[str, float]:
    """Canonical metrics a backtest reads, and how far before its start, in seconds (rule unscaled)."""
    reach = {**dict.fromkeys(rule.round_metrics, rule.rounds_s), **rule.look_back_s}
    for expr in _SLOW:
        for leaf in leaves(expr):
            reach[metric_of(leaf)] = max(reach.get(metric_of(leaf), 0.0), look_back_s(leaf))
    return reach


class History:
    """One rule on one target's samples, evaluated at every step; `judge` it with any threshold and hold time."""

    def __init__(
        self,
        rule: Rule,
        target: Target,
        samples: Sequence[Sample],
        events: Sequence[Event],
        since: float,
        until: float,
        step_s: float | None = None,
    ) -> None:
        self.rule, why = applied_to(target, rule)
        if why is not None:
            raise BacktestError(f"{rule.id} is {why}")
        self.target = target
        self.since, self.until = since, until
        self.step_s = max(step_s or target.scrape_interval_s, (until - since) / MAX_STEPS)
        self._window = Window(dict.fromkeys(needed_metrics(rule), math.inf))
        self._window.add(samples)
        self._events = sorted((e for e in events if e.kind in LIFECYCLE_KINDS), key=lambda e: (e.ts, e.id))
        self.steps = tuple(self._steps())

    @property
    def can_compare(self) -> bool:
        """Whether the rule compares one number with a threshold that can be moved."""
        return isinstance(self.rule.signal, ValueSignal) and self.rule.signal.condition is None

    def _steps(self) -> list[Step]:
        times = [e.ts for e in self._events]
        steps, seen, active_since = [], 0, None
        for i in range(int((self.until - self.since) / self.step_s) + 1):
            now = self.since + i * self.step_s
            known = bisect.bisect_right(times, now)
            unseen = frozenset(e.id for e in self._events[seen:known])
            seen = known
            view = View(self.target, self._window, self._events[:known], now, unseen)
            steps.append(self._step(view, active_since))
            active_since = (active_since or now) if steps[-1].verdict == "breach" else None
        return steps

    def _step(self, view: View, active_since: float | None) -> Step:
        at = view.moment
        visible = _is_visible(at)
        signal = self.rule.signal
        if isinstance(signal, ValueSignal) and signal.condition is None:
            values = {k: v for k, v in vector(signal.value, at).items() if not math.isnan(v)}
            if values:
                judged = values
                if signal.when is not None:
                    held = vector(signal.when, at)
                    judged = {key: value for key, value in values.items() if key in held}
                enough = signal.floor is None or bool(vector(signal.floor, at))
                pick = min if self.rule.comparison in ("<", "<=", "==") else max
                worst = pick(judged.values()) if judged else None
                return Step(view.now, pick(values.values()), worst, enough, None, visible)
        outcome = evaluate(self.rule, view, active_since)
        return Step(view.now, outcome.value, None, True, outcome.verdict, visible)

    def judge(self, threshold: float | None = None, hold_s: float | None = None) -> Backtest:
        """What the rule would have done, with another threshold or hold time (seconds) where given."""
        rule = self.rule
        if threshold is not None:
            if not self.can_compare:
                raise BacktestError(f"the rule {rule.id} compares no single number, so it has no threshold to move")
            rule = dataclasses.replace(rule, threshold=threshold)
        if hold_s is not None:
            rule = dataclasses.replace(rule, hold_s=hold_s)
        verdicts = [_verdict(rule, found) for found in self.steps]
        covered = sum(verdict != "no_data" for verdict in verdicts) * self.step_s
        firings = _firings(rule, self.steps, verdicts, self.step_s)
        breaches = _visible_spans(self.steps)
        missed = sum(not any(_overlaps(f, start, end) for f in firings) for start, end in breaches)
        return Backtest(
            rule,
            self.target.name,
            self.since,
            self.until,
            min(covered, self.until - self.since),
            tuple(_with_lead(f, breaches) for f in firings),
            len(breaches),
            missed,
        )


def _is_visible(at: Moment) -> bool:
    up = [value for series in at.window.series("up") if (value := at.newest(series, "up")) is not None]
    return (bool(up) and max(up) < 1) or any(vector(expr, at) for expr in _SLOW)


def _verdict(rule: Rule, found: Step) -> Verdict:
    if found.verdict is not None:
        return found.verdict
    if found.judged is None or not holds(rule.comparison, found.judged, rule.threshold):
        return "ok"
    return "breach" if found.enough else "below_floor"


def _firings(rule: Rule, steps: Sequence[Step], verdicts: Sequence[Verdict], step_s: float) -> list[Firing]:
    progress, firings, open_at = Progress(), list[Firing](), None
    worst: float | None = None
    pick = min if rule.comparison in ("<", "<=", "==") else max
    for found, verdict in zip(steps, verdicts, strict=True):
        before = progress
        progress, changes = step(rule, progress, verdict, found.ts, 2 * step_s)
        if progress.state == "inactive" and not changes:
            continue
        value = found.judged if found.judged is not None else found.value
        if verdict == "breach" and value is not None:
            worst = value if worst is None else pick(worst, value)
        for _, state in changes:
            if state == "firing":
                open_at = (progress.active_since or found.ts, found.ts)
            if state == "resolved" and open_at is not None:
                firings.append(Firing(*open_at, found.ts, worst, None))
                open_at = None
        if progress.state == "inactive" and before.state != "inactive":
            worst = None
    if open_at is not None:
        firings.append(Firing(*open_at, None, worst, None))
    return firings


def _visible_spans(steps: Sequence[Step]) -> list[tuple[float, float]]:
    """(from, to) of what users felt; spans less than five minutes apart are one."""
    spans: list[tuple[float, float]] = []
    for found in steps:
        if not found.visible:
            continue
        if spans and found.ts - spans[-1][1] < VISIBLE_WINDOW_S:
            spans[-1] = (spans[-1][0], found.ts)
        else:
            spans.append((found.ts, found.ts))
    return spans


def _overlaps(firing: Firing, start: float, end: float) -> bool:
    """Whether an alert was up in a breach, or had been within five minutes before it."""
    return firing.firing_at <= end and (firing.resolved_at is None or firing.resolved_at + VISIBLE_WINDOW_S >= start)


def _with_lead(firing: Firing, breaches: Sequence[tuple[float, float]]) -> Firing:
    met = [start for start, end in breaches if _overlaps(firing, start, end)]
    return dataclasses.replace(firing, lead_s=met[0] - firing.firing_at if met else None)
