"""What the leading monitor does: scrape, detect changes, evaluate rules, write, have receivers notified.

Built anew each time a process takes the lead: windows, counters and alert states come from the store, so that
neither a restart nor a change of hands resets an alert or hides a counter reset. Rounds of a quality canary or an
isolation probe are not scraped: whoever measured them has written them to the store and said so by an event.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from probe.alerts.evaluate import LIFECYCLE_KINDS, ROUND_KINDS
from probe.alerts.evaluator import TargetEvaluator, resolved_by_hand
from probe.alerts.rule import Rule
from probe.collect.changes import ChangeDetector, Finding, Observation
from probe.collect.clock import JUMP_S, SteadyClock
from probe.collect.collector import Collector, CollectorStats
from probe.dialects import DialectError, load_dialect
from probe.notify.dispatcher import Dispatcher
from probe.store import AlertUpdate, Event, Lease, Sample, Store, StoreError, Target

# Findings that the owner of a supervisor explains by a lifecycle event. It announces a stop when the engine has
# stopped, and a start when the engine is healthy: maybe after a scrape met it.
EXPLAINABLE = ("scrape_error", "scrape_recovered", "engine_restart")
ANNOUNCE_S = 5.0
EVENT_OVERLAP = 100  # ids: transactions that end in another order than they began are not overlooked
MAX_AHEAD_S = 86_400.0  # a stored sample later than that tells nothing about time
MAX_HELD = 10_000  # scrapes kept while the lease is in doubt
# Evaluate at least this often: absence makes no scrape. (Failed attempts do: only a standstill makes none.)
MAX_IDLE_S, MAX_IDLE_INTERVALS = 2.0, 1.5


@dataclass(frozen=True)
class _Doubt:
    """A finding to write at `decide_at` (monotonic), unless a lifecycle event since `since` explains it."""

    finding: Finding
    ts: float
    decide_at: float
    since: float


@dataclass
class _Watched:
    """One target as the leader knows it."""

    target: Target
    evaluator: TargetEvaluator
    detector: ChangeDetector
    news: int = 1  # counts observations and events that came in
    evaluated: int = 0  # `news` at the last evaluation
    evaluated_at: float = float("-inf")  # monotonic
    waiting_since: float | None = None  # monotonic: the oldest arrival that was not evaluated
    doubts: deque[_Doubt] = field(default_factory=deque)

    def is_due(self, at: float) -> bool:
        """Whether to evaluate at `at` (monotonic)."""
        idle_s = max(MAX_IDLE_S, MAX_IDLE_INTERVALS * self.target.scrape_interval_s)
        return self.news > self.evaluated or at - self.evaluated_at >= idle_s


@dataclass(frozen=True)
class WatchStats:
    """What the leader did since it took the lead.

    `evaluations` counts evaluated targets (every rule each), `evaluation_s` the time that took, writing included.
    `lag_s`: from the arrival of a scrape to the end of its evaluation, the newest; `max_lag_s` the longest.
    """

    scraped: CollectorStats = field(default_factory=CollectorStats)
    evaluations: int = 0
    evaluation_s: float = 0.0
    lag_s: float = 0.0
    max_lag_s: float = 0.0


class Leadership:
    """Call `hold` with each renewed lease, `tick` often, `close` in the end."""

    def __init__(self, store: Store, rules: Sequence[Rule]) -> None:
        self._store = store
        self._rules = tuple(rules)
        self._clock = SteadyClock()
        self._stats = WatchStats()
        self._dispatcher = Dispatcher(store, self._rules)
        self._collector = Collector(self._on_observation, self._on_facts, self._clock)
        self._watched: dict[str, _Watched] = {}
        self._lease: Lease | None = None
        self._valid_until = 0.0
        self._last_event: int | None = None  # id
        self._rounds: frozenset[int] = frozenset()  # ids of round events taken in, as far back as events are read
        self._held: deque[Observation] = deque(maxlen=MAX_HELD)
        self._findings: deque[tuple[str | None, Finding, float]] = deque()

    @property
    def target_count(self) -> int:
        """Targets being watched."""
        return len(self._watched)

    def stats(self) -> WatchStats:
        """What was done since this process took the lead; safe from any thread."""
        return replace(self._stats, scraped=self._collector.stats())

    def hold(self, lease: Lease, valid_until: float) -> None:
        """The lease in force, and until when (monotonic clock) this process may rely on it."""
        self._lease, self._valid_until = lease, valid_until
        while self._held:
            self._take(self._held.popleft())

    async def tick(self) -> None:
        """Follow the list of targets, write and read events, evaluate and notify what is due; raises `StoreError`."""
        await self._follow_targets()
        await self._collector.sync([w.target for w in self._watched.values()])
        await self._decide_doubts(time.monotonic())
        self._note_jump()
        await self._write_findings()
        await self._read_events()
        now, at = self._clock.now(), time.monotonic()
        due = [w for w in self._watched.values() if w.is_due(at)]
        news = [w.news for w in due]
        waiting = [w.waiting_since for w in due]
        for watched in due:
            watched.waiting_since = None
        updates, failure = _evaluated(due, now)
        try:
            await self._save(updates)
        except StoreError:
            for watched in due:
                watched.evaluator.revert()
            raise
        for watched, taken_in in zip(due, news, strict=True):
            watched.evaluated, watched.evaluated_at = taken_in, at
        self._count(len(due), time.monotonic() - at, [time.monotonic() - w for w in waiting if w is not None])
        await self._dispatcher.tick(now, self._lease)
        if failure is not None:
            raise failure

    def _count(self, evaluations: int, seconds: float, lags: list[float]) -> None:
        stats = self._stats
        self._stats = replace(
            stats,
            evaluations=stats.evaluations + evaluations,
            evaluation_s=stats.evaluation_s + seconds,
            lag_s=max(lags, default=stats.lag_s),
            max_lag_s=max([stats.max_lag_s, *lags]),
        )

    async def settle(self) -> None:
        """Before a clean stop: write what was found, end alerts of targets that are gone; raises `StoreError`."""
        await self._decide_doubts(float("inf"))
        await self._write_findings()
        await self._follow_targets()

    async def close(self) -> None:
        """Stop scraping and notifying."""
        await self._collector.close()
        await self._dispatcher.close()

    async def _save(self, updates: list[AlertUpdate]) -> None:
        if updates:
            await asyncio.to_thread(self._store.alerts.save, updates, self._lease)

    async def _follow_targets(self) -> None:
        targets = {t.name: t for t in await asyncio.to_thread(self._store.targets.list)}
        for name in [n for n in self._watched if n not in targets]:
            del self._watched[name]
        for name, target in targets.items():
            known = self._watched.get(name)
            if known is None or _rules_change(known.target, target):
                self._watched[name] = await asyncio.to_thread(self._load, target)
            else:
                known.target = known.evaluator.target = target
        orphans = [a for a in await asyncio.to_thread(self._store.alerts.active) if a.target not in targets]
        now = self._clock.now()
        await self._save([resolved_by_hand(a, "the target is no longer watched", now) for a in orphans])

    def _load(self, target: Target) -> _Watched:
        """A target's window, counters, events and alerts from the store."""
        store = self._store
        latest = [s for found in store.samples.latest(target.name).values() for s in found]
        now = self._begin_after(target, latest)
        evaluator = TargetEvaluator(target, self._rules)
        active = store.alerts.active(target.name)
        horizons = evaluator.window.horizons_s
        for horizon in set(horizons.values()):
            metrics = [m for m, h in horizons.items() if h == horizon]
            found = store.samples.recent(target.name, metrics, now - horizon)
            evaluator.add_samples(s for s in found if s.ts <= now)
        since = min([now, *(a.pending_at for a in active)]) - evaluator.horizon_s
        # The last one, however old, tells whether the engine is meant to run.
        last = store.events.recent(1, target.name, LIFECYCLE_KINDS)
        evaluator.restore(active, [*store.events.recent(None, target.name, LIFECYCLE_KINDS, since), *last])
        detector = ChangeDetector(_counters(target.engine))
        detector.seed(s for s in latest if s.ts <= now)
        return _Watched(target, evaluator, detector)

    def _begin_after(self, target: Target, latest: Sequence[Sample]) -> float:
        """Now, moved on to the newest stored sample of a target that this machine's clock stamped."""
        now = self._clock.now()
        newest = max((s.ts for s in latest), default=now)
        if target.source != "metrics" or newest <= now or newest - now > MAX_AHEAD_S:
            return now
        ahead = self._clock.not_before(newest)
        if ahead > JUMP_S:
            self._tell_jump(f"The newest stored sample is {ahead:.0f} s later than this machine's clock", -ahead)
        return self._clock.now()

    def _note_jump(self) -> None:
        jump = self._clock.jumped()
        if jump is not None:
            way = "forward" if jump > 0 else "back"
            self._tell_jump(f"This machine's clock was set {way} by {abs(jump):.0f} s", jump)

    def _tell_jump(self, what: str, jump: float) -> None:
        then = "samples go on from the new time"
        if jump < 0:
            then = "samples go on from where they were until it has caught up"
        finding = Finding("clock_jump", f"{what}: {then}.", "warning", {"seconds": round(jump, 3)})
        self._findings.append((None, finding, self._clock.now()))

    async def _read_events(self) -> None:
        """Take in new events of any time: they are followed by id, whatever the clocks of their writers say."""
        kinds, recent = (*LIFECYCLE_KINDS, *ROUND_KINDS), self._store.events.recent
        if self._last_event is None:
            newest = await asyncio.to_thread(recent, 1)
            self._last_event = newest[0].id if newest else 0
        after = self._last_event - EVENT_OVERLAP
        events = await asyncio.to_thread(recent, None, None, kinds, None, after)
        await self._read_rounds([e for e in events if e.kind in ROUND_KINDS])
        by_target: dict[str, list[Event]] = {}
        for event in events:
            by_target.setdefault(event.target or "", []).append(event)
        for name, found in by_target.items():
            watched = self._watched.get(name)
            if watched is not None and watched.evaluator.add_events(found):
                watched.news += 1
        self._last_event = max([self._last_event, *(e.id for e in events)])

    async def _read_rounds(self, events: Sequence[Event]) -> None:
        """Take in the samples of targets on which a round was finished."""
        for name in {e.target for e in events if e.id not in self._rounds}:
            watched = self._watched.get(name or "")
            if watched is not None:
                watched.evaluator.add_samples(await asyncio.to_thread(self._rounds_of, watched))
                watched.news += 1
        self._rounds = frozenset(e.id for e in events)

    def _rounds_of(self, watched: _Watched) -> list[Sample]:
        with_rounds = [rule for rule in watched.evaluator.rules if rule.round_metrics]
        recent, now, name = self._store.samples.recent, self._clock.now(), watched.target.name
        return [s for rule in with_rounds for s in recent(name, rule.round_metrics, now - rule.rounds_s)]

    async def _on_observation(self, seen: Observation) -> None:
        """Take in one scrape; if the lease may have run out by now, only once it was renewed."""
        if time.monotonic() < self._valid_until:
            self._take(seen)
        else:
            self._held.append(seen)

    def _take(self, seen: Observation) -> None:
        watched = self._watched.get(seen.target.name)
        if watched is None:
            return
        self._store.samples.write_scrape(seen.samples)
        watched.evaluator.add_samples(seen.samples)
        watched.news += 1
        watched.waiting_since = watched.waiting_since or time.monotonic()
        wait = 0.0 if seen.target.kind == "external" else ANNOUNCE_S
        since = (watched.detector.last_good or seen.ts) - ANNOUNCE_S
        for finding in watched.detector.observe(seen):
            if finding.kind in EXPLAINABLE:
                watched.doubts.append(_Doubt(finding, seen.ts, time.monotonic() + wait, since))
            else:
                self._findings.append((seen.target.name, finding, seen.ts))

    async def _decide_doubts(self, until: float) -> None:
        """Keep what nobody explained of the doubts due by `until` (monotonic)."""
        for name, watched in self._watched.items():
            while watched.doubts and watched.doubts[0].decide_at <= until:
                doubt = watched.doubts[0]
                explained = await asyncio.to_thread(self._store.events.recent, 1, name, LIFECYCLE_KINDS, doubt.since)
                watched.doubts.popleft()
                if not explained:
                    self._findings.append((name, doubt.finding, doubt.ts))

    async def _write_findings(self) -> None:
        """Write events in order; one that cannot be written stays first in the queue."""
        while self._findings:
            target, finding, ts = self._findings[0]

            def add(target: str | None = target, finding: Finding = finding, ts: float = ts) -> None:
                self._store.events.add(
                    target, finding.kind, finding.message, severity=finding.severity, data=finding.data, ts=ts
                )

            await asyncio.to_thread(add)
            self._findings.popleft()

    async def _on_facts(self, target: Target, facts: dict[str, Any]) -> None:
        watched = self._watched.get(target.name)
        if watched is None or time.monotonic() >= self._valid_until:
            return
        known = watched.target.facts
        if any(known.get(key) != value for key, value in facts.items()):
            try:
                await asyncio.to_thread(self._store.targets.set_facts, target.name, facts)
            except StoreError:
                return  # read again in a minute


def _evaluated(due: Sequence[_Watched], now: float) -> tuple[list[AlertUpdate], Exception | None]:
    """Updates of all targets; what fails on one is handed back after the others had their turn."""
    updates: list[AlertUpdate] = []
    failure: Exception | None = None
    for watched in due:
        try:
            updates += watched.evaluator.evaluate(now)
        except Exception as error:
            error.add_note(f"while evaluating the rules of {watched.target.name}")
            failure = failure or error
    return updates, failure


def _counters(engine: str) -> frozenset[str]:
    try:
        return load_dialect(engine).counters
    except DialectError:
        return frozenset()  # nothing of it can be read, as every scrape says


def _rules_change(before: Target, after: Target) -> bool:
    """Whether windows have to be built anew for a changed target."""
    return _how_read(before) != _how_read(after)


def _how_read(target: Target) -> tuple[object, ...]:
    return target.time_scale, target.scrape_interval_s, target.engine, target.source
