"""The window that is judged: samples of one target, events in it, and what it tells of itself.

From scrapes taken now, from what a watch stored, or from a Prometheus server. At least two scrapes make a window; a
counter's value since the start of its process is never looked at.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from probe.alerts.evaluate import LIFECYCLE_KINDS
from probe.alerts.rules import DEFAULT_RULES
from probe.alerts.window import to_ms
from probe.collect.access import AccessError, access_from
from probe.collect.changes import ChangeDetector, Finding, Observation
from probe.collect.exposition import ExpositionReader
from probe.collect.facts import read_facts
from probe.collect.prometheus import PrometheusError, PrometheusServer
from probe.collect.prometheus_target import LOOKBACK_S, PrometheusTarget
from probe.collect.scrape import ScrapeError, dialect_of, read_scrape, scrape
from probe.dialects import canonical_names, load_dialect
from probe.dialects.model import HISTOGRAM_SUFFIXES
from probe.fleet import look_around
from probe.store import Alert, Event, Sample, Store, Target
from probe.targets import TargetError, look_at, measured_facts

SCRAPES = 7
LEAST_INTERVAL_S = 0.5
TIMEOUT_S = 10.0
DEFAULT_S, STORED_S = 15.0, 300.0
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Observed:
    """`since` and `until` are the first and the last answer in the window; `history_from` where samples begin.

    `attempts` were made, `answers` succeeded; `errors` are why others did not. `source` says where it is all from.
    """

    target: Target
    samples: Sequence[Sample]
    events: Sequence[Event]
    since: float
    until: float
    history_from: float
    attempts: int
    answers: int
    errors: tuple[str, ...]
    source: str
    firing: tuple[Alert, ...] = ()  # alerts of a watch

    def __post_init__(self) -> None:
        """Times are on the milliseconds that series are kept in, so that a window holds its own first sample."""
        for name in ("since", "until", "history_from"):
            object.__setattr__(self, name, to_ms(getattr(self, name)) / 1000)

    @property
    def window_s(self) -> float:
        """Seconds from the first to the last answer."""
        return self.until - self.since

    @property
    def version(self) -> str | None:
        """The engine's version, where it is known."""
        found = self.target.facts.get("version")
        return found if isinstance(found, str) else None


def watch(url: str, seconds: float, report: Progress, options: Mapping[str, Any] | None = None) -> Observed:
    """Scrapes an address for so long; raises `TargetError` when it does not answer at first."""
    look = look_at(url, dict(options or {}))
    interval = max(seconds / (SCRAPES - 1), LEAST_INTERVAL_S)
    target = Target(
        0, _name(url), look.url, "external", look.detection.engine, [], look.facts, interval, 1.0, True, 0.0,
        "metrics", dict(options or {}),
    )  # fmt: skip
    report(f"{look.detection.engine} {look.version or '(version unknown)'} at {url}: watching it for {seconds:g} s")
    try:
        seen, facts = asyncio.run(_scrapes(target, seconds))
    except AccessError as error:
        raise TargetError(f"cannot read {url}: {error}") from None
    target = dataclasses.replace(target, facts={**target.facts, **facts})
    return of_observations(target, seen, f"{len(seen)} scrapes of {url}")


async def _scrapes(target: Target, seconds: float) -> tuple[list[Observation], dict[str, Any]]:
    access = access_from(target.options, target.url)
    reader, dialect = ExpositionReader(), dialect_of(target)
    seen: list[Observation] = []
    facts: dict[str, Any] = {}
    async with httpx.AsyncClient(trust_env=False, verify=access.ssl_context()) as client:
        begun = time.monotonic()
        for turn in range(round(seconds / target.scrape_interval_s) + 1):
            await asyncio.sleep(begun + turn * target.scrape_interval_s - time.monotonic())
            ts, at = time.time(), time.monotonic()
            try:
                found = await scrape(
                    client, target.url, dialect, target.name, ts=ts, timeout_s=TIMEOUT_S, headers=access.headers,
                    reader=reader,
                )  # fmt: skip
                seen.append(Observation(target, ts, found, None, time.monotonic() - at))
                if not facts:
                    facts = await read_facts(client, target, found.info, timeout_s=TIMEOUT_S, headers=access.headers)
            except ScrapeError as error:
                seen.append(Observation(target, ts, None, str(error), time.monotonic() - at))
    return seen, facts


def of_pages(
    engine: str, pages: Iterable[tuple[float, str | None]], facts: Mapping[str, Any] | None = None
) -> Observed:
    """A window from pages of metrics that were kept: (Unix time, text; None where the scrape failed)."""
    pages = list(pages)
    version = (facts or {}).get("version")
    dialect = load_dialect(engine, version if isinstance(version, str) else None)
    interval = (pages[-1][0] - pages[0][0]) / max(len(pages) - 1, 1) or 1.0
    target = Target(0, "kept", "", "external", engine, [], dict(facts or {}), interval, 1.0, True, 0.0)
    seen = []
    for ts, text in pages:
        if text is None:
            seen.append(Observation(target, ts, None, "the scrape failed"))
            continue
        read = ExpositionReader().read(text.encode(), "text/plain", "", ts)
        found = read_scrape(read.families, dialect, target.name, ts)
        seen.append(Observation(target, ts, found))
        if found.info and "cache_config_info" not in target.facts:
            target = dataclasses.replace(target, facts={**target.facts, "cache_config_info": found.info})
    return of_observations(target, seen, f"{len(pages)} pages")


def of_observations(target: Target, seen: Sequence[Observation], source: str) -> Observed:
    """A window from attempts to read a target, oldest first."""
    changes = ChangeDetector(load_dialect(target.engine, _version(target)).counters)
    samples: list[Sample] = []
    events: list[Event] = []
    for one in seen:
        samples += one.samples
        for finding in changes.observe(one):
            events.append(_event(len(events) + 1, target, one.ts, finding))
    good = [one.ts for one in seen if one.scrape is not None]
    first, last = (good[0], good[-1]) if good else (seen[0].ts, seen[0].ts)
    errors = tuple(dict.fromkeys(one.error for one in seen if one.error))
    return Observed(target, samples, events, first, last, first, len(seen), len(good), errors, source)


def from_store(store: Store, target: Target, seconds: float, now: float | None = None) -> Observed | None:
    """What a watch stored of a target that it still watches; None where nothing of it is fresh."""
    now = time.time() if now is None else now
    metrics = _series_names()
    reach = max(span for rule in DEFAULT_RULES for span in rule.look_back_s.values())
    store.samples.flush()
    samples = [s for s in store.samples.recent(target.name, metrics, now - max(reach, seconds)) if s.ts <= now]
    answers = [s.ts for s in samples if s.metric == "up" and s.value >= 1 and s.ts >= now - seconds]
    attempts = [s.ts for s in samples if s.metric == "up" and s.ts >= now - seconds]
    if len(answers) < 2 or now - max(attempts) > 4 * target.scrape_interval_s + 2.0:
        return None
    stored = store.events.recent(None, target.name, LIFECYCLE_KINDS, now - reach)
    events = sorted((event for event in stored if event.ts <= now), key=lambda event: (event.ts, event.id))
    oldest = min(sample.ts for sample in samples)
    target = dataclasses.replace(target, facts=measured_facts(store, target, None))
    samples.sort(key=lambda sample: sample.ts)
    return Observed(
        target, samples, events, min(answers), max(answers), oldest, len(attempts), len(answers), (),
        f"what is stored of {target.name}",
    )  # fmt: skip


def of_stored(store: Store, name: str, seconds: float | None, report: Progress) -> Observed:
    """A stored target: what is stored of it while it is watched, else scrapes of its address. A server that does
    not answer is an answer; raises `TargetError` where nothing of that name is stored."""
    target = store.targets.get(name)
    if target is None:
        known = ", ".join(one.name for one in store.targets.list(active=None)) or "none is stored"
        raise TargetError(f"there is no target {name!r} ({known}); give http://host:port or a stored target's name")
    firing = tuple(alert for alert in store.alerts.active(name) if alert.state == "firing")
    found = from_store(store, target, seconds or max(STORED_S * target.time_scale, DEFAULT_S))
    if found is not None:
        return dataclasses.replace(found, firing=firing)
    if target.source == "prometheus":
        raise TargetError(f"nothing fresh is stored of {name}: run `kvoncall watch`, or give --prometheus {target.url}")
    try:
        found = watch(target.url, seconds or DEFAULT_S, report, target.options)
    except TargetError as error:  # a server that is gone is what was asked about
        now = time.time()
        found = Observed(target, [], [], now, now, now, 1, 0, (str(error),), f"{target.url}, which does not answer")
    return dataclasses.replace(found, firing=firing)


def from_prometheus(url: str, where: str, seconds: float, options: dict[str, Any], report: Progress) -> Observed:
    """What a Prometheus server scraped of one engine in the last minutes; raises `TargetError`."""
    found = look_around(url, options)
    chosen = [c for c in found.candidates if where in (c.name, c.matchers.get("instance")) or _host(where) == c.name]
    if not chosen:
        known = ", ".join(one.name for one in found.candidates) or "none that is known here"
        raise TargetError(f"Prometheus at {url} scrapes no engine {where!r} now; it scrapes: {known}")
    one = chosen[0]
    if seconds > LOOKBACK_S:
        report(f"reading the last {LOOKBACK_S:g} s: a longer window is read of what `kvoncall watch` stored")
    facts = {"version": one.versions[-1]} if one.versions else {}
    target = Target(
        0, one.name, url, "external", one.engine, [], facts, one.scrape_interval_s or 15.0, 1.0, True, 0.0,
        "prometheus", {**options, "matchers": one.matchers},
    )  # fmt: skip
    now = time.time()
    try:
        server = PrometheusServer(url, access_from(options, url))
        try:
            seen = PrometheusTarget(server).read(target, now)
        finally:
            server.close()
    except (AccessError, PrometheusError) as error:
        raise TargetError(f"cannot ask Prometheus at {url}: {error}") from None
    seen = [o for o in seen if o.ts >= now - seconds - (one.scrape_interval_s or 15.0)]
    if not seen:
        raise TargetError(f"Prometheus at {url} has no scrape of {one.name} in the last {seconds:g} s")
    info = next((o.scrape.info for o in reversed(seen) if o.scrape is not None and o.scrape.info), None)
    if info:
        target = dataclasses.replace(target, facts={**target.facts, "cache_config_info": info})
    return of_observations(target, seen, f"{len(seen)} scrapes of Prometheus at {url}")


def _event(number: int, target: Target, ts: float, finding: Finding) -> Event:
    return Event(number, target.name, ts, finding.kind, finding.severity, finding.message, finding.data)


def _series_names() -> list[str]:
    names = {"up", "required_metrics_missing"}
    for metric in canonical_names().values():
        names |= {metric.name + s for s in HISTOGRAM_SUFFIXES} if metric.type == "histogram" else {metric.name}
    for rule in DEFAULT_RULES:
        names |= rule.metrics
    return sorted(names)


def _version(target: Target) -> str | None:
    found = target.facts.get("version")
    return found if isinstance(found, str) else None


def _name(url: str) -> str:
    return url.split("://", 1)[-1].split("/", 1)[0]


def _host(where: str) -> str:
    return _name(where)
