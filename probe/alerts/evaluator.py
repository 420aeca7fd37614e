"""All rules of one target: its samples in memory, its events, and where each alert stands.

Holds no database. `evaluate` returns what the leading monitor writes to the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from probe.alerts.arithmetic import matches
from probe.alerts.evaluate import LIFECYCLE_KINDS, Outcome, View, evaluate, stale_after
from probe.alerts.expr import Match, Quantile, leaves, metric_of
from probe.alerts.fit import applied_to
from probe.alerts.rule import Rule, ValueSignal
from probe.alerts.state import Progress, Transition, restore, step
from probe.alerts.window import Window
from probe.store import Alert, AlertUpdate, Event, Reading, Sample, Target

LEAST_HORIZON_S = 30.0


class TargetEvaluator:
    """Feed it samples and events, then `evaluate`. `rules` are unscaled."""

    def __init__(self, target: Target, rules: Sequence[Rule]) -> None:
        self.target = target
        applied = [applied_to(target, rule) for rule in rules]
        self.rules = [rule for rule, _ in applied]
        self._unfit = {rule.id: why for rule, why in applied if why is not None}
        self.horizon_s = horizon_s(self.rules)
        least_s = max(LEAST_HORIZON_S, stale_after(target.scrape_interval_s))
        self.window = Window(horizons_s(self.rules, least_s), _keeps(self.rules))
        self._events: dict[int, Event] = {}
        self._unseen: frozenset[int] = frozenset()
        self._progress = {rule.id: Progress() for rule in self.rules}
        self._reverted = (self._progress, self._unseen)

    def restore(self, alerts: Iterable[Alert], events: Iterable[Event]) -> None:
        """Take over the active alerts and the lifecycle events found in the store."""
        self.add_events(events)
        self._unseen = frozenset()
        for alert in alerts:
            if alert.rule in self._progress:
                self._progress[alert.rule] = restore(alert)

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """Samples of this target, `up` included, each series in time order."""
        self.window.add(samples)

    def add_events(self, events: Iterable[Event]) -> bool:
        """Lifecycle events of this target, in any order, seen before or not; whether any was new."""
        new = {e.id: e for e in events if e.kind in LIFECYCLE_KINDS and e.id not in self._events}
        self._events.update(new)
        self._unseen |= new.keys()
        return bool(new)

    def evaluate(self, now: float) -> list[AlertUpdate]:
        """One evaluation of every rule, as updates for the store; `revert` it if they cannot be written."""
        self._reverted = (dict(self._progress), self._unseen)
        self._forget_events(now)
        events = sorted(self._events.values(), key=lambda e: (e.ts, e.id))
        view = View(self.target, self.window, events, now, self._unseen)
        self._unseen = frozenset()
        updates = []
        for rule in self.rules:
            before = self._progress[rule.id]
            outcome = self._read(rule, view, before)
            after, transitions = step(rule, before, outcome.verdict, now, view.stale_after_s)
            self._progress[rule.id] = after
            updates.append(_update(rule, self.target, outcome, after, transitions, now))
        return updates

    def revert(self) -> None:
        """Forget the last evaluation, so that the next one reports its changes of state again."""
        progress, unseen = self._reverted
        self._progress, self._unseen = dict(progress), self._unseen | unseen

    def _read(self, rule: Rule, view: View, before: Progress) -> Outcome:
        if why := self._unfit.get(rule.id):
            return Outcome("no_data", None, None, None, why, "")
        return evaluate(rule, view, before.active_since)

    def _forget_events(self, now: float) -> None:
        """Keep what rules can still count, and the last event whatever its age (is the engine meant to run?)."""
        if not self._events:
            return
        begun = [p.active_since for p in self._progress.values() if p.active_since is not None]
        oldest = min([now, *begun]) - self.horizon_s
        last = max(self._events.values(), key=lambda e: (e.ts, e.id))
        self._events = {i: e for i, e in self._events.items() if e.ts >= oldest or e is last}


def horizon_s(rules: Iterable[Rule]) -> float:
    """How far back the (scaled) rules look at events, in seconds."""
    spans = (rule.look_back_s.get("up", 0.0) for rule in rules)
    return max(LEAST_HORIZON_S, *spans)


def horizons_s(rules: Sequence[Rule], least_s: float = LEAST_HORIZON_S) -> dict[str, float]:
    """How far back the (scaled) rules look at each metric: rounds farther than what is scraped, `least_s` at least."""
    reach: dict[str, float] = {}
    for rule in rules:
        spans = {**rule.look_back_s, **dict.fromkeys(rule.round_metrics, rule.rounds_s)}
        for metric, span in spans.items():
            reach[metric] = max(reach.get(metric, least_s), span)
    return reach


def _keeps(rules: Sequence[Rule]) -> Callable[[str, Mapping[str, str]], bool]:
    """Whether some rule reads a series: of a histogram's buckets only those whose bound is asked for."""
    wanted: dict[str, list[Match]] = {}
    for rule in rules:
        parts = rule.signal.parts if isinstance(rule.signal, ValueSignal) else ()
        for leaf in (leaf for part in parts for leaf in leaves(part)):
            wanted.setdefault(metric_of(leaf), []).append(() if isinstance(leaf, Quantile) else leaf.match)

    def keeps(metric: str, labels: Mapping[str, str]) -> bool:
        return metric not in wanted or any(matches(labels, match) for match in wanted[metric])

    return keeps


def resolved_by_hand(alert: Alert, why: str, now: float) -> AlertUpdate:
    """The update that ends an active alert of a target nobody watches any more."""
    state = "resolved" if alert.state == "firing" else "inactive"
    reading = Reading(
        rule=alert.rule,
        target=alert.target,
        verdict="ok",
        state=state,
        value=None,
        threshold=alert.threshold,
        numerator=None,
        denominator=None,
        window_s=alert.window_s,
        summary=why,
        coverage=why,
        updated_at=now,
    )
    return AlertUpdate(reading, alert.severity, alert.hold_s, alert.runbook, 0.0, ((alert.state, state),))


def _update(
    rule: Rule,
    target: Target,
    outcome: Outcome,
    after: Progress,
    transitions: tuple[Transition, ...],
    now: float,
) -> AlertUpdate:
    state: str = after.state
    if transitions and transitions[-1][1] == "resolved":
        state = "resolved"
    reading = Reading(
        rule=rule.id,
        target=target.name,
        verdict=outcome.verdict,
        state=state,
        value=outcome.value,
        threshold=rule.threshold,
        numerator=outcome.numerator,
        denominator=outcome.denominator,
        window_s=rule.window_s,
        summary=outcome.summary,
        coverage=outcome.coverage,
        updated_at=now,
    )
    return AlertUpdate(reading, rule.severity, rule.hold_s, rule.runbook, after.progress_s, transitions)
