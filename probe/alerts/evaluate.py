"""What a rule reads on a target right now. Pure functions: samples and events in, an `Outcome` out.

Values are `probe.alerts.arithmetic`'s, so they are Prometheus'. Samples that are stale are no data, and no data is not
"ok". Rounds of a canary or a probe come hours apart and do not go stale; they count as far back as their rule says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from probe.alerts import isolation, quality, words
from probe.alerts.arithmetic import Moment, Vector, growth
from probe.alerts.arithmetic import evaluate as vector
from probe.alerts.expr import Expr, metric_of
from probe.alerts.quality import Round, is_worse, rounds
from probe.alerts.rule import (
    AbsenceSignal,
    BreachSignal,
    EventMatch,
    EventSignal,
    QualitySignal,
    Rule,
    ValueSignal,
)
from probe.alerts.window import Labels, Point, Window
from probe.store import Event, Target

Verdict = Literal["breach", "ok", "below_floor", "no_data"]

# Events that tell whether an engine is meant to run.
LIFECYCLE_KINDS = ("engine_start", "engine_restart", "engine_exit", "flags_changed")
# Events that tell that a round is in the store.
ROUND_KINDS = (quality.ROUND_EVENT, isolation.ROUND_EVENT)


@dataclass(frozen=True)
class Outcome:
    """One evaluation. `coverage` says what the value rests on; `summary` is the sentence of an alert."""

    verdict: Verdict
    value: float | None
    numerator: float | None
    denominator: float | None
    coverage: str
    summary: str


@dataclass(frozen=True)
class View:
    """What a rule may look at: one target, its samples, its lifecycle events (oldest first), and the time.

    `unseen`: ids of events that no evaluation has looked at yet.
    """

    target: Target
    window: Window
    events: Sequence[Event]
    now: float
    unseen: frozenset[int] = frozenset()

    @property
    def stale_after_s(self) -> float:
        """Samples older than this are no data."""
        return stale_after(self.target.scrape_interval_s)

    @cached_property
    def moment(self) -> Moment:
        """The samples as of now, each reading made once."""
        return Moment(self.window, self.now, self.stale_after_s)


def stale_after(scrape_interval_s: float) -> float:
    """Age in seconds past which a target's samples are stale: four scrapes, at least two seconds."""
    return max(4 * scrape_interval_s, 2.0)


def breaches(window: Window, signal: BreachSignal, start: float, end: float) -> dict[str, float]:
    """Isolation breaches an engine counted in [start, end], by kind.

    A label's series may begin with its first event. Where the target answered in [start, end] before it appeared, it
    has grown from 0.
    """
    counters = window.series(signal.counter)
    first_up = min((up for s in window.series("up") if (up := s.first_since(start)) is not None), default=None)
    hits: dict[str, float] = {}
    for series in counters:
        first_ts, first = series.oldest
        born = first if first_up is not None and first_up < first_ts <= end else 0.0
        rise = growth(series, start, end)
        kind = series.labels.get("kind", "")
        hits[kind] = hits.get(kind, 0.0) + born + (rise.value if rise is not None else 0.0)
    return hits


def longest_run_up(points: Sequence[Point], after: float, max_gap_s: float) -> float:
    """Seconds of the longest stretch of `up` = 1 after a time; a gap longer than `max_gap_s` ends a stretch."""
    longest, start, last = 0.0, None, 0.0
    for ts, value in points:
        if ts <= after:
            continue
        if value < 1:
            start = None
            continue
        if start is None or ts - last > max_gap_s:
            start = ts
        last = ts
        longest = max(longest, ts - start)
    return longest


def evaluate(rule: Rule, view: View, active_since: float | None = None) -> Outcome:
    """Read a rule (already scaled to the target). `active_since`: start of its active alert, if it has one."""
    signal = rule.signal
    if isinstance(signal, ValueSignal):
        return _value(rule, signal, view)
    if isinstance(signal, EventSignal):
        return _events(rule, signal, view, active_since)
    if isinstance(signal, QualitySignal):
        return _quality(rule, signal, view)
    if isinstance(signal, BreachSignal):
        return _isolation(rule, signal, view)
    return _absence(rule, signal, view)


def _value(rule: Rule, signal: ValueSignal, view: View) -> Outcome:
    at = view.moment
    values = {key: value for key, value in vector(signal.value, at).items() if not math.isnan(value)}
    if not values and (missing := _why_no_data(signal, view, at)):
        return Outcome("no_data", None, None, None, missing, "")
    assert rule.compared is not None
    breach = vector(rule.compared, at)
    floored = bool(breach) and signal.floor is not None and not vector(signal.floor, at)
    if signal.when is not None:
        when = vector(signal.when, at)
        breach = {key: value for key, value in breach.items() if key in when}
    verdict: Verdict = "ok" if not breach else "below_floor" if floored else "breach"
    key, value = _worst(rule, {key: values[key] for key in breach if key in values} or values)
    numerator, denominator = (_single(part, at) for part in (signal.numerator, signal.denominator))
    coverage = words.coverage(rule, signal, at)
    if floored:
        coverage += f", fewer than {signal.floor_unit}: shown, not alerted"
    summary = ""  # of an alert; none is told of what is well
    if verdict != "ok":
        summary = f"{rule.title}: {words.sentence(rule, signal, value, numerator, denominator, key)}"
    return Outcome(verdict, value, numerator, denominator, coverage, summary)


def _worst(rule: Rule, values: Vector) -> tuple[Labels, float | None]:
    """The value that speaks for the target: the greatest, or the least where less is worse."""
    if not values:
        return (), None
    pick = min if rule.comparison in ("<", "<=", "==") else max
    key = pick(values, key=lambda labels: values[labels])
    return key, values[key]


def _single(part: Expr | None, at: Moment) -> float | None:
    return next(iter(vector(part, at).values()), None) if part is not None else None


def _why_no_data(signal: ValueSignal, view: View, at: Moment) -> str | None:
    """Why a value is not there, or None when everything it is made of is."""
    for leaf in signal.readings:
        metric = metric_of(leaf)
        found = view.window.series(metric)
        if not found:
            return f"no data: {metric} was never read"
        if not vector(leaf, at):
            if not at.fresh(metric):
                return f"no data for {view.now - max(s.newest_ms for s in found) / 1000:.0f} s: {metric}"
            return f"too few samples of {metric} in its window"
    return None


def _events(rule: Rule, signal: EventSignal, view: View, active_since: float | None) -> Outcome:
    since = view.now - rule.window_s
    if active_since is not None:
        since = min(since, active_since - rule.window_s)
    hits = [e for e in view.events if e.ts >= since and any(_matches(e, m) for m in signal.matches)]
    if not hits:
        return Outcome("ok", 0.0, 0.0, None, f"no such event in {rule.window_s:.0f} s", "")
    last = hits[-1]
    points = [p for s in view.window.series("up") for p in s.points]
    up_for = longest_run_up(points, last.ts, view.stale_after_s)
    seen = f"{len(hits)} event{'s' if len(hits) > 1 else ''}, the last {max(0.0, view.now - last.ts):.0f} s ago"
    coverage = f"{seen}, up again for {min(up_for, signal.recover_s):.0f} of {signal.recover_s:.0f} s"
    # An engine that is back before anybody looked still makes one alert.
    if up_for >= signal.recover_s and last.id not in view.unseen:
        return Outcome("ok", 0.0, 0.0, None, coverage, "")
    summary = f"{rule.title}: {last.message}"
    return Outcome("breach", float(len(hits)), float(len(hits)), None, coverage, summary)


def _matches(event: Event, match: EventMatch) -> bool:
    return event.kind == match.kind and all(event.data.get(k) in allowed for k, allowed in match.data.items())


def _absence(rule: Rule, signal: AbsenceSignal, view: View) -> Outcome:
    tries = view.window.series("up")
    newest = tries[-1].newest if tries else None
    if newest and newest[1] >= 1 and view.now - newest[0] <= view.stale_after_s:
        return Outcome("ok", 1.0, None, None, f"answered {max(0.0, view.now - newest[0]):.1f} s ago", "")
    points = [p for s in tries for p in s.points]
    last_up = max((ts for ts, value in points if value >= 1), default=None)
    if excuse := _not_expected_up(signal, view, last_up):
        return Outcome("ok", 0.0, None, None, excuse, "")
    if newest is None:
        coverage = "never scraped"
    elif view.now - newest[0] > view.stale_after_s:
        coverage = f"not scraped for {view.now - newest[0]:.0f} s"
    elif last_up is None:
        coverage = f"no answer in the last {newest[0] - points[0][0]:.0f} s watched"
    else:
        coverage = f"last answer {view.now - last_up:.0f} s ago"
    return Outcome("breach", 0.0, None, None, coverage, f"{rule.title}: {view.target.url}, {coverage}")


def _quality(rule: Rule, signal: QualitySignal, view: View) -> Outcome:
    seen = rounds(view.window, signal, view.now - rule.window_s)
    span = f"{rule.window_s / 60:.0f} min"
    if not seen:
        return Outcome("no_data", None, None, None, f"no quality canary ran in the last {span}", "")
    worse = [is_worse(r, rule.threshold, signal.invalid_threshold) for r in seen]
    in_a_row = next((i for i, bad in enumerate(reversed(worse)) if not bad), len(worse))
    newest = seen[-1]
    coverage = f"{len(seen)} round{'s' if len(seen) > 1 else ''} in {span}, the last {view.now - newest.ts:.0f} s ago"
    if in_a_row == 0:
        verdict: Verdict = "ok"
    elif in_a_row >= signal.min_rounds:
        verdict = "breach"
        coverage += f", {in_a_row} worse in a row"
    else:
        # One bad round is shown, not alerted. Where no other round is in the window, nothing speaks against it.
        verdict = "no_data" if len(seen) < signal.min_rounds else "below_floor"
        coverage += f", worse, {in_a_row} of {signal.min_rounds} rounds in a row that an alert takes"
    summary = f"{rule.title}: {_fall(newest)}"
    return Outcome(verdict, newest.drop, newest.lost - newest.gained, newest.items, coverage, summary)


def _fall(seen: Round) -> str:
    low, high = seen.interval
    fell = f"accuracy {-100 * seen.drop:+.1f} points (95% interval {-100 * high:+.1f} to {-100 * low:+.1f})"
    dtype = f", KV cache dtype {seen.dtype}" if seen.dtype else ""
    return f"{fell} on {seen.items} questions, {seen.invalid_rate:.1%} invalid answers{dtype}"


def _isolation(rule: Rule, signal: BreachSignal, view: View) -> Outcome:
    at = view.moment
    missing = words.why_stale(signal.counter, at, view.now)
    hits = breaches(view.window, signal, view.now - rule.window_s, view.now)
    seen = isolation.newest(view.window, signal, view.now - rule.rounds_s)
    counted = missing or f"{words.engines(signal.counter, at)} counting breaches, {rule.window_s:.0f} s"
    coverage = f"{counted}; {isolation.coverage(seen, view.now, rule.rounds_s)}"
    value = sum(hits.values()) + sum(reading.leaks for reading in seen)
    # An increase that was seen stays one, though the engine that counted it is gone.
    if value <= rule.threshold and missing and not seen:
        return Outcome("no_data", None, None, None, coverage, "")
    probes = sum(reading.probes for reading in seen) if seen else None
    summary = f"{rule.title}: {isolation.what_was_seen(hits, seen)}"
    return Outcome("breach" if value > rule.threshold else "ok", value, value, probes, coverage, summary)


def _planned_absence(last: Event | None, last_up: float | None, now: float, grace_s: float) -> str | None:
    """Why an engine's owner means it to be down now, or None.

    `last` is its newest lifecycle event, `last_up` when it last answered. Once it has answered since the event,
    the event excuses nothing.
    """
    if last is None or (last_up is not None and last_up > last.ts):
        return None
    if last.kind == "engine_exit":
        return "stopped on purpose" if last.data.get("reason") == "stopped" else None
    if last.data.get("unexpected") or not 0 <= now - last.ts < grace_s:
        return None
    return f"starting for {now - last.ts:.0f} s, may take {grace_s:.0f} s"


def _not_expected_up(signal: AbsenceSignal, view: View, last_up: float | None) -> str | None:
    """Why a target that does not answer is no incident, or None."""
    last = view.events[-1] if view.events else None
    if excuse := _planned_absence(last, last_up, view.now, signal.grace_s):
        return excuse
    created = view.target.created_at
    died = last is not None and last.kind == "engine_exit"
    if died or (last_up is not None and last_up >= created) or not 0 <= view.now - created < signal.grace_s:
        return None
    return f"new for {view.now - created:.0f} s, may take {signal.grace_s:.0f} s to start"
