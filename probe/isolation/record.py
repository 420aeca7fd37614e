"""Keeps a round in the store: samples first, then the event, so whoever sees the event finds the samples.

Samples, all of one time: isolation_probes{check} and isolation_leaks{check}, for each check that came to a verdict: an
inconclusive one says nothing and clears no alert. Of a check that judges all its probes together (times), leaks is 1
or 0. The event's data is the whole result.
"""

from __future__ import annotations

from probe.alerts.isolation import ROUND_EVENT
from probe.isolation.result import IsolationResult
from probe.store import Sample, Store

_TELLING = ("leak shown", "no leak")


def record(store: Store, target: str, result: IsolationResult) -> None:
    """Writes a round of `target`; samples only where the target is registered, since nobody watches another."""
    if store.targets.get(target) is not None:
        store.samples.write(
            Sample(target, metric, {"check": check.check}, result.ended_at, float(value))
            for check in result.checks
            if check.verdict in _TELLING
            for metric, value in (("isolation_probes", check.probes), ("isolation_leaks", check.leaks))
        )
        store.samples.flush()
    severity = "warning" if result.verdict == "leak shown" else "info"
    store.events.add(target, ROUND_EVENT, result.sentence, severity=severity, data=result.to_dict())
