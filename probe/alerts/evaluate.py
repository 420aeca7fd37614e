"""What a rule reads on a target right now. Pure functions: samples and events in, an `Outcome` out.

Arithmetic, once for all: an increase is the sum of the rises between neighbouring samples inside the window,
not extrapolated to its edges; after a counter reset the new value counts from 0. A ratio is the ratio of
sums over engines, never a mean of ratios. A gauge of several engines counts by its hottest one. Samples
older than the staleness limit are no data, and no data is not "ok". Rounds of a canary or a probe come hours apart
and do not go stale; they count as far back as their rule says.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from probe.alerts import isolation, quality
from probe.alerts.quality import Round, is_worse, rounds
from probe.alerts.rules import (
    AbsenceSignal,
    BreachSignal,
    EventMatch,
    EventSignal,
    QualitySignal,
    RatioSignal,
    Rule,
    SaturationSignal,
)
from probe.alerts.window import Point, Series, Window
from probe.store import Event, Target

Verdict = Literal["breach", "ok", "below_floor", "no_data", "inhibited"]

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


@dataclass(frozen=True)
class Increase:
    """Growth of a counter: its value, resets seen, and the times of the first and last sample used."""

    value: float
    resets: int
    first_ts: float
    last_ts: float


def stale_after(scrape_interval_s: float) -> float:
    """Age in seconds past which a target's samples are stale: four scrapes, at least two seconds."""
    return max(4 * scrape_interval_s, 2.0)


def increase(points: Sequence[Point] | Series, start: float, end: float) -> Increase | None:
    """Growth of a counter from its first to its last sample in [start, end]; None with fewer than two samples.

    A sample below its predecessor is a reset: the counter started again from 0, so it grew by the new value.
    """
    inside = [p for p in _points(points) if start <= p[0] <= end]
    if len(inside) < 2:
        return None
    total, resets = 0.0, 0
    for (_, before), (_, after) in itertools.pairwise(inside):
        if after < before:
            resets += 1
            total += after
        else:
            total += after - before
    return Increase(total, resets, inside[0][0], inside[-1][0])


def breaches(window: Window, signal: BreachSignal, start: float, end: float) -> dict[str, float]:
    """Isolation breaches an engine counted in [start, end], by kind.

    A label's series may begin with its first event. Where the target answered before it appeared it has grown from 0.
    """
    first_up = min((ts for s in window.series("up") for ts, value in s.points if value >= 1), default=None)
    hits: dict[str, float] = {}
    for series in window.series(signal.counter):
        first_ts, first = series.points[0]
        born = first if first_up is not None and first_up < first_ts and start <= first_ts <= end else 0.0
        rise = increase(series, start, end)
        kind = series.labels.get("kind", "")
        hits[kind] = hits.get(kind, 0.0) + born + (rise.value if rise is not None else 0.0)
    return hits


def mean(points: Sequence[Point] | Series, start: float, end: float) -> float | None:
    """Mean of a gauge's samples in [start, end]; None without samples."""
    values = [value for ts, value in _points(points) if start <= ts <= end]
    return sum(values) / len(values) if values else None


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
    if isinstance(signal, RatioSignal):
        return _ratio(rule, signal, view)
    if isinstance(signal, SaturationSignal):
        return _saturation(rule, signal, view)
    if isinstance(signal, EventSignal):
        return _events(rule, signal, view, active_since)
    if isinstance(signal, QualitySignal):
        return _quality(rule, signal, view)
    if isinstance(signal, BreachSignal):
        return _isolation(rule, signal, view)
    return _absence(rule, signal, view)


def _ratio(rule: Rule, signal: RatioSignal, view: View) -> Outcome:
    start = view.now - rule.window_s
    top = view.window.series(signal.numerator)
    missing = _why_no_data(signal.numerator, top, view)
    rises = [rise for s in top if (rise := increase(s, start, view.now))]
    if missing or not rises:
        return Outcome("no_data", None, None, None, missing or f"fewer than two samples in {rule.window_s:g} s", "")
    below = [increase(s, start, view.now) for name in signal.increases for s in view.window.series(name)]
    numerator = sum(rise.value for rise in rises)
    denominator = sum(rise.value for rise in below if rise)
    for name in signal.gauges:
        denominator += sum(s.points[-1][1] for s in _fresh(view.window.series(name), view))
    # Nothing finished and nothing runs while requests are thrown out: one request at least is in service.
    denominator = max(denominator, 1.0) if numerator > 0 else denominator
    value = numerator / denominator if denominator > 0 else 0.0
    breach = value > rule.threshold if rule.comparison == ">" else value < rule.threshold
    floored = denominator < signal.floor and numerator < signal.unless_numerator
    span = max(r.last_ts for r in rises) - min(r.first_ts for r in rises)
    resets = sum(rise.resets for rise in rises)
    coverage = f"{_engines(top, view)}, {span:.0f} of {rule.window_s:.0f} s"
    coverage += f", {resets} counter reset{'s' if resets > 1 else ''} counted from 0" if resets else ""
    if floored:
        coverage += f", fewer than {signal.floor:g} {signal.denominator_unit}: shown, not alerted"
    summary = (
        f"{rule.title}: {value:.1%} ({numerator:g} {signal.numerator_unit} / "
        f"{denominator:g} {signal.denominator_unit} in {rule.window_s:g} s)"
    )
    verdict: Verdict = "below_floor" if floored else "breach" if breach else "ok"
    return Outcome(verdict, value, numerator, denominator, coverage, summary)


def _saturation(rule: Rule, signal: SaturationSignal, view: View) -> Outcome:
    start = view.now - rule.window_s
    engines = view.window.series(signal.metric)
    if missing := _why_no_data(signal.metric, engines, view):
        return Outcome("no_data", None, None, None, missing, "")
    queues = {_engine_key(s): mean(s, start, view.now) for s in view.window.series(signal.queue)}
    readings = [
        (usage, queues.get(_engine_key(s)) or 0.0, s.labels.get("engine", ""))
        for s in _fresh(engines, view)
        if (usage := mean(s, start, view.now)) is not None
    ]
    if not readings:
        return Outcome("no_data", None, None, None, f"no data in the last {rule.window_s:g} s", "")
    queued = [r for r in readings if r[1] >= signal.min_queue]
    usage, waiting, engine = max(queued or readings)
    breach = bool(queued) and usage > rule.threshold
    coverage = f"{_engines(engines, view)}, mean of {rule.window_s:.0f} s, hottest engine {engine or 'unnamed'}"
    coverage += f" with {waiting:.1f} waiting" if queued else ", nobody waits"
    summary = (
        f"{rule.title}: {usage:.0%} of the KV blocks in use and {waiting:.1f} requests waiting "
        f"on engine {engine or 'unnamed'} (means of {rule.window_s:g} s)"
    )
    return Outcome("breach" if breach else "ok", usage, None, None, coverage, summary)


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
    points = [p for s in view.window.series("up") for p in s.points]
    newest = points[-1] if points else None
    if newest and newest[1] >= 1 and view.now - newest[0] <= view.stale_after_s:
        return Outcome("ok", 1.0, None, None, f"answered {max(0.0, view.now - newest[0]):.1f} s ago", "")
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
    engines = view.window.series(signal.counter)
    missing = _why_no_data(signal.counter, engines, view)
    hits = breaches(view.window, signal, view.now - rule.window_s, view.now)
    seen = isolation.newest(view.window, signal, view.now - rule.rounds_s)
    counted = missing or f"{_engines(engines, view)} counting breaches, {rule.window_s:.0f} s"
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


def _points(points: Sequence[Point] | Series) -> Sequence[Point]:
    return list(points.points) if isinstance(points, Series) else points


def _fresh(series: Sequence[Series], view: View) -> list[Series]:
    """Series whose newest sample is not stale: a dead engine's last value is not a value of now."""
    return [s for s in series if s.points and view.now - s.points[-1][0] <= view.stale_after_s]


def _why_no_data(metric: str, series: Sequence[Series], view: View) -> str | None:
    """Why a metric has no value now, or None if it has."""
    if _fresh(series, view):
        return None
    newest = max((s.points[-1][0] for s in series if s.points), default=None)
    if newest is None:
        return f"no data: {metric} was never read"
    return f"no data for {view.now - newest:.0f} s: state frozen"


def _engine_key(series: Series) -> tuple[str, str]:
    return series.labels.get("model_name", ""), series.labels.get("engine", "")


def _engines(series: Sequence[Series], view: View) -> str:
    known = {_engine_key(s) for s in series}
    fresh = {_engine_key(s) for s in _fresh(series, view)}
    return f"{len(fresh)} of {len(known)} engine{'s' if len(known) > 1 else ''}"
