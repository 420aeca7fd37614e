"""Keeps a round in the store: samples first, then the event, so whoever sees the event finds the samples.

Samples, all of one time: isolation_probes{check} and isolation_leaks{check}, for each check that came to a verdict: an
inconclusive one says nothing and clears no alert. Of a check that judges all its probes together (times), leaks is 1
or 0. The event's data is the whole result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probe.alerts.isolation import ROUND_EVENT
from probe.isolation.result import IsolationResult
from probe.store import Sample, Store

Counts = Mapping[str, tuple[int, int]]
"""(probes, leaks) of each check."""

_TELLING = ("leak shown", "no leak")


def record(store: Store, target: str, result: IsolationResult) -> None:
    """Writes a round of `target`; samples only where the target is registered, since nobody watches another."""
    counts: Counts = {check.check: (check.probes, check.leaks) for check in result.checks if check.verdict in _TELLING}
    record_counts(store, target, counts, result.sentence, result.to_dict(), result.ended_at)


def record_counts(store: Store, target: str, counts: Counts, sentence: str, data: dict[str, Any], at: float) -> None:
    """The same for a round that was carried out elsewhere; `at` is Unix time, `data` the event's."""
    if store.targets.get(target) is not None:
        store.samples.write(
            Sample(target, metric, {"check": check}, at, float(value))
            for check, (probes, leaks) in counts.items()
            for metric, value in (("isolation_probes", probes), ("isolation_leaks", leaks))
        )
        store.samples.flush()
    leaked = any(leaks for _, leaks in counts.values())
    store.events.add(target, ROUND_EVENT, sentence, severity="warning" if leaked else "info", data=data, ts=at)
