"""kvoncall's own /metrics: read by the official parser, and by the rules that we export."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from probe.collect.collector import CollectorStats
from probe.collect.leadership import WatchStats
from probe.export.alerts import Options, select
from probe.export.own_metrics import exposition
from probe.monitor import Monitor, MonitorStatus
from probe.store import AlertUpdate, Reading, Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "data") as opened:
        opened.targets.upsert("chat", url="http://127.0.0.1:1", kind="external", engine="vllm")
        yield opened


def reading(rule: str, verdict: str, value: float | None, *, age_s: float = 0.0, state: str = "inactive") -> Reading:
    return Reading(rule, "chat", verdict, state, value, 1.0, None, None, 60.0, "", "", time.time() - age_s)


def save(store: Store, *readings: Reading, transitions: tuple[tuple[str, str], ...] = ()) -> None:
    store.alerts.save(AlertUpdate(r, "warning", 0.0, r.rule, 0.0, transitions) for r in readings)


def scrape(store: Store, watch: object = None) -> dict[tuple[str, ...], float]:
    """(sample name, label values in the order of their names) -> value."""
    body, content_type = exposition(store, watch)  # type: ignore[arg-type]
    assert content_type.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            found[(sample.name, *(sample.labels[key] for key in sorted(sample.labels)))] = sample.value
    return found


def test_what_rules_say(store: Store) -> None:
    save(
        store,
        reading("kv-quality-drop", "breach", 0.2),
        reading("eviction-storm", "below_floor", 0.5),
        reading("cache-thrash", "no_data", None),
        reading("target-missing", "ok", 1.0),
    )
    found = scrape(store)
    assert found["kvoncall_rule_breach", "kv-quality-drop", "chat"] == 1
    assert found["kvoncall_rule_breach", "eviction-storm", "chat"] == 0, "shown, not alerted"
    assert ("kvoncall_rule_breach", "cache-thrash", "chat") not in found, "no data is not ok"
    assert found["kvoncall_rule_value", "eviction-storm", "chat"] == 0.5
    assert found["kvoncall_target_up", "vllm", "chat"] == 1
    assert found["kvoncall_targets", "vllm"] == 1
    assert found[("kvoncall_store_bytes",)] > 0
    assert ("kvoncall_leader",) not in found


def test_old_readings_and_targets_that_are_gone_are_left_out(store: Store) -> None:
    save(store, reading("kv-quality-drop", "breach", 0.2, age_s=3600), reading("eviction-storm", "breach", 0.5))
    assert ("kvoncall_rule_breach", "kv-quality-drop", "chat") not in scrape(store)
    store.targets.deactivate("chat")
    assert not [key for key in scrape(store) if key[0] == "kvoncall_rule_breach"]


def test_alerts_by_state(store: Store) -> None:
    firing = reading("kv-quality-drop", "breach", 0.2, state="firing")
    save(store, firing, transitions=(("inactive", "pending"), ("pending", "firing")))
    assert scrape(store)["kvoncall_alerts", "kv-quality-drop", "warning", "firing"] == 1


def test_how_the_watch_keeps_up(store: Store) -> None:
    class Watch:
        def status(self) -> MonitorStatus:
            return MonitorStatus(True, True, "me", time.time(), 1, None)

        def stats(self) -> WatchStats:
            scraped = CollectorStats(scrapes=7, failures=2, samples=100, seconds=0.5)
            return WatchStats(scraped, evaluations=5, evaluation_s=0.25, lag_s=0.01)

    found = scrape(store, Watch())
    assert found[("kvoncall_leader",)] == 1
    assert found[("kvoncall_watch_problem",)] == 0
    assert found[("kvoncall_scrapes_total",)] == 7
    assert found[("kvoncall_scrape_failures_total",)] == 2
    assert found[("kvoncall_evaluation_seconds_total",)] == 0.25
    assert found[("kvoncall_evaluation_lag_seconds",)] == 0.01


def test_a_monitor_that_stands_by_can_be_read(store: Store) -> None:
    found = scrape(store, Monitor(store))
    assert found[("kvoncall_leader",)] == 0
    assert found[("kvoncall_scrapes_total",)] == 0


def test_openmetrics_is_given_to_whoever_asks(store: Store) -> None:
    save(store, reading("kv-quality-drop", "breach", 0.2))
    body, content_type = exposition(store, None, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert "kvoncall_rule_breach" in {family.name for family in openmetrics_families(body.decode())}


def test_exported_rules_ask_for_what_is_exposed(store: Store) -> None:
    save(store, reading("kv-quality-drop", "breach", 0.2), reading("prefix-isolation-breach", "ok", 0.0))
    found = scrape(store)
    own = [alert for alert in select(Options()).alerts if "kvoncall_rule_breach" in alert.expr]
    assert len(own) == 2
    for alert in own:
        assert f'kvoncall_rule_breach{{rule="{alert.rule_id}"}}' in alert.expr
        assert ("kvoncall_rule_breach", alert.rule_id, "chat") in found
