"""The quality alert with a real store and a running monitor: rounds come by the store, not by a scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from probe.monitor import Monitor
from probe.store import Sample, Store

Wait = Callable[..., None]
RULE = "kv-quality-drop"


@contextmanager
def watching(store: Store) -> Iterator[Monitor]:
    monitor = Monitor(store, tick_s=0.05, lease_ttl_s=30.0)
    monitor.start()
    try:
        yield monitor
    finally:
        monitor.stop()


def write_round(store: Store, lost: int, at: float | None = None, announce: bool = True) -> None:
    """What a canary writes: its samples with one time, and then the event that says so."""
    ts = time.time() if at is None else at
    counts = {"items": 120, "lost": lost, "gained": 1, "invalid": 0}
    store.samples.write(
        Sample("t", f"quality_{k}", {"dtype": "int4_symmetric"}, ts, float(v)) for k, v in counts.items()
    )
    store.samples.flush()
    if announce:
        store.events.add("t", "quality_round", "a round", data={"run_id": "r", **counts})


def reading(store: Store) -> Any:
    return next((r for r in store.alerts.readings("t") if r.rule == RULE), None)


def firing(store: Store) -> set[str]:
    return {a.rule for a in store.alerts.active("t") if a.state == "firing"}


def test_rounds_fire_the_alert_and_a_good_one_ends_it(store: Store, engine: Any, wait_until: Wait) -> None:
    store.targets.upsert("t", url=engine.url, kind="external", scrape_interval_s=0.1)
    with watching(store):
        wait_until(lambda: reading(store) is not None, "a reading")
        assert reading(store).coverage.startswith("no quality canary ran")
        write_round(store, 1)
        wait_until(lambda: reading(store).verdict == "ok", "a good round")
        write_round(store, 60)
        wait_until(lambda: reading(store).verdict == "below_floor", "one bad round")
        assert firing(store) == set()
        write_round(store, 60)
        wait_until(lambda: firing(store) == {RULE}, "the alert")
        alert = store.alerts.active("t")[0]
        assert alert.runbook == RULE
        write_round(store, 2)
        wait_until(lambda: not store.alerts.active("t"), "its end")
    assert [(a.rule, a.state) for a in store.alerts.history()] == [(RULE, "resolved")]


def test_a_new_leader_finds_the_rounds_of_the_last_hour(store: Store, engine: Any, wait_until: Wait) -> None:
    """They are older than any scrape it needs, and the events that told of them are long past."""
    store.targets.upsert("t", url=engine.url, kind="external", scrape_interval_s=0.1)
    now = time.time()
    write_round(store, 60, at=now - 3_000, announce=False)
    write_round(store, 60, at=now - 2_000, announce=False)
    with watching(store):
        wait_until(lambda: firing(store) == {RULE}, "the alert")
    assert "2 worse in a row" in reading(store).coverage


def test_a_restart_with_other_flags_does_not_end_it(store: Store, engine: Any, wait_until: Wait) -> None:
    store.targets.upsert("t", url=engine.url, kind="embedded", scrape_interval_s=0.1, time_scale=0.01)
    with watching(store):
        write_round(store, 60)
        write_round(store, 60)
        wait_until(lambda: firing(store) == {RULE}, "the alert")
        store.events.add("t", "flags_changed", "restarted with other flags")
        engine.restart()
        count = engine.scrapes
        wait_until(lambda: engine.scrapes > count + 20, "scrapes of the new process")
        assert firing(store) == {RULE}
        write_round(store, 1)
        wait_until(lambda: not store.alerts.active("t"), "a round against the new flags")


def test_a_round_of_a_target_nobody_watches_is_left_alone(store: Store, engine: Any, wait_until: Wait) -> None:
    store.targets.upsert("t", url=engine.url, kind="external", scrape_interval_s=0.1)
    with watching(store) as monitor:
        store.events.add("gone", "quality_round", "a round")
        write_round(store, 1)
        wait_until(lambda: reading(store) is not None and reading(store).verdict == "ok", "the round")
        assert monitor.status().problem is None
