"""The isolation alert with a real store and a running monitor: the counter is scraped, rounds come by the store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from probe.alerts.isolation import ROUND_EVENT
from probe.monitor import Monitor
from probe.store import Sample, Store

RULE = "prefix-isolation-breach"


def write_round(store: Store, leaks: int, at: float | None = None, announce: bool = True) -> None:
    """What a probe writes: its samples with one time, and then the event that says so."""
    ts = time.time() if at is None else at
    counts = {"isolation_probes": 40.0, "isolation_leaks": float(leaks)}
    store.samples.write(Sample("t", name, {"check": "leak-canary"}, ts, value) for name, value in counts.items())
    store.samples.flush()
    if announce:
        store.events.add("t", ROUND_EVENT, "a round", data={"verdict": "leak shown" if leaks else "no leak"})


def reading(store: Store) -> Any:
    return next((r for r in store.alerts.readings("t") if r.rule == RULE), None)


def firing(store: Store) -> set[str]:
    return {a.rule for a in store.alerts.active("t") if a.state == "firing"}


def test_a_leaking_round_fires_the_alert_and_a_clean_one_ends_it(
    store: Store, engine: Any, wait_until: Callable[..., None]
) -> None:
    store.targets.upsert("t", url=engine.url, kind="external", scrape_interval_s=0.1)
    write_round(store, 2, at=time.time() - 7_200, announce=False)  # a new leader finds it, two hours old
    monitor = Monitor(store, tick_s=0.05, lease_ttl_s=30.0)
    monitor.start()
    try:
        wait_until(lambda: firing(store) == {RULE}, "the alert of the round found in the store")
        (alert,) = store.alerts.active("t")
        assert (alert.severity, alert.runbook) == ("critical", RULE)
        write_round(store, 0)
        wait_until(lambda: not store.alerts.active("t"), "its end")
        write_round(store, 1)
        wait_until(lambda: firing(store) == {RULE}, "the next one")
        assert "1 answer with another session's text in 40 probes" in reading(store).summary
    finally:
        monitor.stop()


def test_a_counter_that_grows_fires_at_once_and_a_drill_soon_forgets_it(
    store: Store, engine: Any, wait_until: Callable[..., None]
) -> None:
    engine.values["kvoncall:isolation_breaches_total"] = 5.0  # an old one
    store.targets.upsert("t", url=engine.url, kind="drill", engine="kvoncall", scrape_interval_s=0.1, time_scale=0.01)
    monitor = Monitor(store, tick_s=0.05, lease_ttl_s=30.0)
    monitor.start()
    try:
        wait_until(lambda: reading(store) is not None and reading(store).verdict == "ok", "a clean reading")
        engine.values["kvoncall:isolation_breaches_total"] = 7.0
        wait_until(lambda: firing(store) == {RULE}, "the alert")
        wait_until(lambda: not store.alerts.active("t"), "its end, when the window has passed")
    finally:
        monitor.stop()
    (alert,) = store.alerts.history()
    assert (alert.rule, alert.value) == (RULE, 2.0)
    assert "2 blocks of another identity served" in alert.summary
