"""kvoncall's own /metrics: what it watches, what its rules say, how well it keeps up, and what it told whom.

Everything is read from the store at the scrape, so any process that has it open can answer; counters of the watch are
those of this process. Readings that nobody renewed for five minutes are left out, as Prometheus would do.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Protocol

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from probe.collect.leadership import WatchStats
from probe.export.naming import RULE_BREACH
from probe.monitor import MonitorStatus
from probe.store import Store

STALE_S = 300.0

Rows = Sequence[tuple[tuple[str, ...], float]]
"""Label values and the value they have."""


class Watch(Protocol):
    """What is read of `probe.monitor.Monitor`."""

    def status(self) -> MonitorStatus:
        """What it is doing."""

    def stats(self) -> WatchStats:
        """What it did since it took the lead."""


class OwnMetrics(Collector):
    """Register it once; each `collect` takes a few queries. Raises `StoreError` when the store cannot be read."""

    def __init__(self, store: Store, watch: Watch | None = None) -> None:
        self._store = store
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield _gauge("kvoncall_build_info", "The running version.", ("version",), [((version("kvoncall"),), 1.0)])
        yield from self._targets_and_rules()
        yield from self._alerts()
        yield _plain("kvoncall_store_bytes", "Size of the store.", float(self._store.used_bytes()))
        if self._watch is not None:
            yield from _watching(self._watch.status(), self._watch.stats())

    def _targets_and_rules(self) -> Iterator[Metric]:
        targets = {target.name: target for target in self._store.targets.list()}
        since = time.time() - STALE_S
        readings = [r for r in self._store.alerts.readings() if r.updated_at >= since and r.target in targets]
        engines = Counter(target.engine for target in targets.values())
        rows: Rows = [((engine,), float(number)) for engine, number in sorted(engines.items())]
        yield _gauge("kvoncall_targets", "Watched targets.", ("engine",), rows)
        yield _gauge(
            "kvoncall_target_up",
            "Whether a target answers its scrapes.",
            ("target", "engine"),
            [((r.target, targets[r.target].engine), r.value or 0.0) for r in readings if r.rule == "target-missing"],
        )
        yield _gauge(
            "kvoncall_rule_value",
            "What a rule compares with its threshold.",
            ("rule", "target"),
            [((r.rule, r.target), r.value) for r in readings if r.value is not None],
        )
        yield _gauge(
            RULE_BREACH,
            "Whether a rule's condition holds now, before its hold time; none without data.",
            ("rule", "target"),
            [((r.rule, r.target), float(r.verdict == "breach")) for r in readings if r.verdict != "no_data"],
        )

    def _alerts(self) -> Iterator[Metric]:
        active = Counter((alert.rule, alert.severity, alert.state) for alert in self._store.alerts.active())
        rows: Rows = [(key, float(number)) for key, number in sorted(active.items())]
        yield _gauge("kvoncall_alerts", "Pending and firing alerts.", ("rule", "severity", "state"), rows)
        yield _plain("kvoncall_silences", "Silences in force or to come.", float(len(self._store.silences.list())))
        sent = self._store.notifications.counts()
        yield _gauge(
            "kvoncall_notifications",
            "Notifications by how they stand, as far back as they are kept.",
            ("receiver", "state"),
            [((name, state), float(n)) for name, states in sorted(sent.items()) for state, n in sorted(states.items())],
        )


def _watching(status: MonitorStatus, stats: WatchStats) -> Iterator[Metric]:
    yield _plain("kvoncall_leader", "Whether this process collects and evaluates.", float(status.leader))
    yield _plain("kvoncall_watch_problem", "Whether something keeps it from watching.", float(bool(status.problem)))
    scraped = stats.scraped
    for name, text, value in (
        ("kvoncall_scrapes", "Scrapes that were begun.", scraped.scrapes),
        ("kvoncall_scrape_failures", "Scrapes that failed.", scraped.failures),
        ("kvoncall_scrape_seconds", "Time spent in scrapes.", scraped.seconds),
        ("kvoncall_scrapes_late", "Scrapes that began more than half a second late.", scraped.late),
        ("kvoncall_scrapes_missed", "Scrapes left out because the one before was not over.", scraped.missed),
        ("kvoncall_samples", "Samples taken in.", scraped.samples),
        ("kvoncall_samples_refused", "Samples of scrapes that were left out.", scraped.refused),
        ("kvoncall_evaluations", "Evaluations of all rules of a target.", stats.evaluations),
        ("kvoncall_evaluation_seconds", "Time spent in evaluations, writing included.", stats.evaluation_s),
    ):
        yield CounterMetricFamily(name, text, value=float(value))
    yield _plain("kvoncall_evaluation_lag_seconds", "From a scrape's arrival to its verdicts, the newest.", stats.lag_s)


def exposition(store: Store, watch: Watch | None = None, accept: str = "") -> tuple[bytes, str]:
    """(body, content type) of a scrape, in the format that `accept` asks for. Raises `StoreError`."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(OwnMetrics(store, watch))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _plain(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family
