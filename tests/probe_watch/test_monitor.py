"""The monitor on real HTTP and real processes: one leader, takeover, restarts, alerts end to end."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from probe.alerts.evaluator import TargetEvaluator
from probe.alerts.rules import DEFAULT_RULES
from probe.monitor import Monitor, watch
from probe.store import AlertUpdate, Sample, Store, Target
from probe.store.database import FILE_NAME

Wait = Callable[..., None]
Child = Callable[..., subprocess.Popen[str]]


@contextmanager
def watching(store: Store, **options: Any) -> Iterator[Monitor]:
    monitor = Monitor(store, **{"tick_s": 0.05, "lease_ttl_s": 30.0, **options})
    monitor.start()
    try:
        yield monitor
    finally:
        monitor.stop()


def register(store: Store, fake: Any, kind: str = "external", engine: str = "vllm") -> Target:
    """A target scraped ten times a second, on a scale where the storm's window is 3 s and its hold 0.6 s."""
    return store.targets.upsert("t", url=fake.url, kind=kind, engine=engine, scrape_interval_s=0.1, time_scale=0.01)


def is_up(store: Store) -> float | None:
    """The newest `up` on disk."""
    return next((s.value for s in store.samples.latest("t").get("up", [])), None)


def kinds(store: Store) -> list[str]:
    return [e.kind for e in reversed(store.events.recent(limit=None, target="t"))]


def state(store: Store, rule: str) -> str | None:
    return next((r.state for r in store.alerts.readings("t") if r.rule == rule), None)


def verdict(store: Store, rule: str) -> str | None:
    return next((r.verdict for r in store.alerts.readings("t") if r.rule == rule), None)


def others_quiet(store: Store, rule: str) -> bool:
    """No rule ever made an alert fire but this one and those it explains (which nobody is told of)."""
    explained = {other.id for other in DEFAULT_RULES if rule in other.inhibited_by}
    return {a.rule for a in store.alerts.history() if a.firing_at is not None} <= {rule} | explained


def test_scrapes_become_samples_facts_and_readings(store: Store, engine: Any, wait_until: Wait) -> None:
    register(store, engine)
    with watching(store) as monitor:
        wait_until(lambda: engine.scrapes >= 5, "five scrapes")
        wait_until(lambda: "cache_config_info" in store.targets.list()[0].facts, "the facts")
        wait_until(lambda: len(store.alerts.readings("t")) == len(DEFAULT_RULES), "a reading of every rule")
        status = monitor.status()
        assert (status.leader, status.targets, status.problem) == (True, 1, None)
        assert status.last_tick is not None
    assert not monitor.status().running
    latest = store.samples.latest("t")
    assert latest["up"][0].value == 1.0
    assert latest["kv_usage_ratio"][0].labels == {"engine": "0", "model_name": "m"}
    frame = store.samples.range("t", "up", 0)
    assert len(frame) >= 4
    assert frame["ts"].is_monotonic_increasing
    assert store.targets.list()[0].facts["cache_config_info"]["num_gpu_blocks"] == "64"


def test_facts_survive_the_engines_death(store: Store, engine: Any, wait_until: Wait) -> None:
    store.targets.upsert("t", url=engine.url, kind="external", scrape_interval_s=0.1, facts={"note": "by hand"})
    with watching(store):
        wait_until(lambda: "cache_config_info" in store.targets.list()[0].facts, "the facts")
        engine.status = 500
        wait_until(lambda: is_up(store) == 0.0, "down")
    facts = store.targets.list()[0].facts
    assert facts["note"] == "by hand"
    assert facts["cache_config_info"]["block_size"] == "16"


def test_storm_fires_and_resolves_and_the_rest_stays_quiet(store: Store, engine: Any, wait_until: Wait) -> None:
    register(store, engine)
    engine.values["vllm:kv_cache_usage_perc"] = 0.99
    engine.values["vllm:num_requests_waiting"] = 5.0
    engine.values["vllm:num_requests_running"] = 8.0
    with watching(store):

        def storm() -> bool:
            engine.values["vllm:num_preemptions_total"] += 1
            engine.values["vllm:generation_tokens_total"] += 20
            engine.finished += 2
            return state(store, "eviction-storm") == "firing"

        wait_until(storm, "the storm to fire")
        (alert,) = [a for a in store.alerts.active() if a.state == "firing"]
        assert alert.value is not None
        assert alert.numerator is not None
        assert alert.denominator is not None
        assert alert.value == alert.numerator / alert.denominator > 0.05
        engine.values["vllm:num_requests_waiting"] = 0.0
        wait_until(lambda: state(store, "eviction-storm") == "inactive", "the storm to resolve")
    (done,) = [a for a in store.alerts.history() if a.rule == "eviction-storm"]
    assert done.state == "resolved"
    assert others_quiet(store, "eviction-storm")


def test_oom_fires_from_the_exit_event_and_resolves_after_recovery(store: Store, engine: Any, wait_until: Wait) -> None:
    register(store, engine, kind="drill")
    with watching(store):
        wait_until(lambda: is_up(store) == 1.0, "a healthy target")
        engine.status = 500
        store.events.add("t", "engine_exit", "out of memory: tried 9 bytes", data={"reason": "oom"})
        wait_until(lambda: state(store, "oom") == "firing", "oom to fire")
        (alert,) = [a for a in store.alerts.active() if a.rule == "oom"]
        assert (alert.severity, alert.value) == ("critical", 1.0)
        assert "out of memory: tried 9 bytes" in alert.summary
        wait_until(lambda: verdict(store, "target-missing") == "breach", "the outage to be seen")
        engine.restart()
        engine.status = 200
        store.events.add("t", "engine_start", "started")
        wait_until(lambda: state(store, "oom") == "inactive", "oom to resolve")
    assert [a.state for a in store.alerts.history() if a.rule == "oom"] == ["resolved"]
    assert others_quiet(store, "oom")


def test_unannounced_restart_is_an_event_and_an_alert(store: Store, engine: Any, wait_until: Wait) -> None:
    register(store, engine)
    engine.values["vllm:generation_tokens_total"] = 500.0
    with watching(store):
        wait_until(lambda: is_up(store) == 1.0, "a scrape of the first process")
        engine.restart()
        # On this scale it is over after 0.6 s, which a slow machine may not see.
        wait_until(lambda: any(a.rule == "oom" and a.firing_at for a in store.alerts.history()), "the alert")
    assert kinds(store) == ["counter_reset", "engine_restart"] or kinds(store) == ["engine_restart", "counter_reset"]
    reset = store.events.recent(target="t", kinds=["counter_reset"])[0]
    assert reset.data["metrics"]["generation_tokens_total"] == {"from": 500.0, "to": 0.0}


def test_restart_while_no_monitor_ran_is_seen(store: Store, engine: Any, wait_until: Wait) -> None:
    register(store, engine)
    with watching(store):
        wait_until(lambda: "process_start_time_seconds" in store.samples.latest("t"), "the start time")
    engine.restart()
    with watching(store):
        wait_until(lambda: "engine_restart" in kinds(store), "the restart")


def test_announced_restart_is_no_incident(store: Store, engine: Any, wait_until: Wait) -> None:
    register(store, engine)
    engine.values["vllm:generation_tokens_total"] = 500.0
    with watching(store):
        wait_until(lambda: is_up(store) == 1.0, "a healthy target")
        store.events.add("t", "flags_changed", "--max-num-seqs 8", data={"reason": "operator"})
        engine.restart()
        wait_until(lambda: "counter_reset" in kinds(store), "the reset")
        wait_until(lambda n=engine.scrapes: engine.scrapes > n + 5, "some more scrapes")
        assert state(store, "oom") == "inactive"
    assert "engine_restart" not in kinds(store)


def test_malformed_metrics_are_one_event_and_nothing_else_suffers(store: Store, engine: Any, wait_until: Wait) -> None:
    register(store, engine)
    with watching(store) as monitor:
        wait_until(lambda: is_up(store) == 1.0, "the first scrape")
        engine.body = b"<html>proxy error</html>"
        wait_until(lambda: is_up(store) == 0.0, "up to be 0")
        wait_until(lambda n=engine.scrapes: engine.scrapes > n + 5, "some more scrapes")
        wait_until(lambda: verdict(store, "kv-saturated") == "no_data", "no data")
        assert verdict(store, "target-missing") == "breach"
        engine.body = None
        wait_until(lambda: "scrape_recovered" in kinds(store), "recovery")
        assert monitor.status().problem is None
    assert kinds(store) == ["scrape_error", "scrape_recovered"]
    (error,) = store.events.recent(kinds=["scrape_error"])
    assert "is not in the Prometheus text format" in error.message


def test_a_hanging_target_delays_no_other(
    store: Store, engine: Any, engines: Callable[[], Any], wait_until: Wait
) -> None:
    register(store, engine)
    slow = engines()
    slow.pause = threading.Event()
    store.targets.upsert("slow", url=slow.url, kind="external", scrape_interval_s=0.1)
    with watching(store):
        wait_until(lambda: engine.scrapes >= 20, "twenty scrapes of the healthy one")
        assert slow.scrapes == 0
    slow.pause.set()


def test_unknown_engine_is_said_and_harmless(store: Store, engine: Any, wait_until: Wait) -> None:
    register(store, engine, engine="abacus")
    with watching(store):
        wait_until(lambda: kinds(store), "the event")
        wait_until(lambda: verdict(store, "target-missing"), "a reading")
    assert "'abacus' are not known" in store.events.recent()[0].message


def test_stopped_on_purpose_is_quiet(store: Store, engine: Any, wait_until: Wait) -> None:
    register(store, engine, kind="embedded")
    with watching(store):
        wait_until(lambda: is_up(store) == 1.0, "a healthy target")
        store.events.add("t", "engine_exit", "stopped", data={"reason": "stopped"}, ts=time.time() + 0.5)
        engine.status = 500
        wait_until(lambda: is_up(store) == 0.0, "up to be 0")
        wait_until(lambda: any(r.coverage == "stopped on purpose" for r in store.alerts.readings("t")), "the excuse")
    assert store.alerts.history() == []
    assert "scrape_error" not in kinds(store)


def test_a_planned_restart_leaves_no_scrape_errors(store: Store, engine: Any, wait_until: Wait) -> None:
    """Its owner announces it when it is done; a scrape meets the closed port before."""
    register(store, engine, kind="drill")
    with watching(store):
        wait_until(lambda: is_up(store) == 1.0, "a healthy target")
        engine.status = 500
        wait_until(lambda: is_up(store) == 0.0, "up to be 0")
        engine.restart()
        engine.status = 200
        store.events.add("t", "engine_restart", "restarted by the operator", data={"flags": []})
        wait_until(lambda: is_up(store) == 1.0, "up to be 1")
    assert kinds(store) == ["engine_restart"]
    assert [e.message for e in store.events.recent()] == ["restarted by the operator"]


def test_stopping_ends_the_alerts_of_targets_that_are_gone(store: Store, engine: Any, wait_until: Wait) -> None:
    """A replay deactivates its drill and stops the watch right after: no tick is left to notice."""
    register(store, engine)
    store.events.add("t", "engine_exit", "gone", data={"reason": "oom"})
    engine.status = 500
    with watching(store):
        wait_until(lambda: state(store, "oom") == "firing", "the alert")
    with watching(store, tick_s=3_600.0) as monitor:
        wait_until(lambda: monitor.status().last_tick, "the only tick")
        store.targets.deactivate("t")
    assert [(a.state, a.rule) for a in store.alerts.history()] == [("resolved", "oom")]


def test_deactivation_ends_alerts_and_scrapes(store: Store, engine: Any, wait_until: Wait) -> None:
    register(store, engine)
    with watching(store):
        wait_until(lambda: engine.scrapes, "a scrape")
        engine.status = 500
        store.events.add("t", "engine_exit", "gone", data={"reason": "oom"})
        wait_until(lambda: state(store, "oom") == "firing", "an alert")
        store.targets.deactivate("t")
        wait_until(lambda: not store.alerts.active(), "the alert to end")
        (alert,) = store.alerts.history()
        assert (alert.state, alert.coverage) == ("resolved", "the target is no longer watched")
        count = engine.scrapes
        register(store, engine)
        wait_until(lambda: engine.scrapes > count, "scrapes to begin again")


def test_an_alert_survives_a_restart_of_the_monitor(store: Store, engine: Any, wait_until: Wait) -> None:
    register(store, engine, kind="drill")
    with watching(store):
        wait_until(lambda: engine.scrapes, "a scrape")
        engine.status = 500
        store.events.add("t", "engine_exit", "died", data={"reason": "oom"})
        wait_until(lambda: state(store, "oom") == "firing", "the alert")
    (before,) = [a for a in store.alerts.active() if a.rule == "oom"]
    with watching(store):
        wait_until(lambda: store.alerts.active()[0].updated_at > before.updated_at, "an evaluation")
        (after,) = [a for a in store.alerts.active() if a.rule == "oom"]
        assert (after.id, after.state, after.firing_at) == (before.id, "firing", before.firing_at)
        engine.status = 200
        wait_until(lambda: state(store, "oom") == "inactive", "the end")
    assert len(store.alerts.transitions(before.id)) == 3


def test_a_locked_database_loses_no_samples(tmp_path: Path, engine: Any, wait_until: Wait) -> None:
    with Store.open(tmp_path, busy_timeout_s=0.05) as store:
        register(store, engine)
        with watching(store, lease_ttl_s=2.0) as monitor:
            wait_until(lambda: engine.scrapes >= 3, "some scrapes")
            other = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            wait_until(lambda: "locked" in (monitor.status().problem or ""), "the problem to show")
            start = engine.scrapes
            wait_until(lambda: engine.scrapes >= start + 25, "scrapes past the end of the lease")
            other.execute("ROLLBACK")
            other.close()
            wait_until(lambda: monitor.status().problem is None, "the problem to be over")
            total = engine.scrapes
            wait_until(lambda: engine.scrapes > total, "one more")
        store.flush()
        frame = store.samples.range("t", "up", 0)
        assert len(frame) >= total
        assert "store_error" in {e.kind for e in store.events.recent()}


def test_an_event_that_is_written_late_is_not_overlooked(store: Store, engine: Any, wait_until: Wait) -> None:
    """Events are followed by id: their writer's clock may be behind."""
    store.targets.upsert("t", url=engine.url, kind="external", scrape_interval_s=0.1)
    with watching(store):
        wait_until(lambda: verdict(store, "oom") == "ok", "a reading")
        store.events.add("t", "engine_exit", "gone", data={"reason": "oom"}, ts=time.time() - 300)
        wait_until(lambda: state(store, "oom") == "firing", "the alert")


def test_rules_that_fail_on_one_target_fail_on_no_other(
    store: Store, engine: Any, wait_until: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(store, engine)
    store.targets.upsert("broken", url=engine.url, kind="external", scrape_interval_s=0.1)
    evaluate = TargetEvaluator.evaluate

    def fail_on_one(self: TargetEvaluator, now: float) -> list[AlertUpdate]:
        if self.target.name == "broken":
            raise ZeroDivisionError("a rule is wrong")
        return evaluate(self, now)

    monkeypatch.setattr(TargetEvaluator, "evaluate", fail_on_one)
    with watching(store) as monitor:
        wait_until(lambda: len(store.alerts.readings("t")) == len(DEFAULT_RULES), "readings of the other")
        wait_until(lambda: "a rule is wrong" in (monitor.status().problem or ""), "the problem to show")
        newest = max(r.updated_at for r in store.alerts.readings("t"))
        wait_until(lambda: max(r.updated_at for r in store.alerts.readings("t")) > newest, "newer readings")
    assert store.alerts.readings("broken") == []


def test_one_leader_and_a_clean_handover(store: Store, engine: Any, wait_until: Wait) -> None:
    register(store, engine)
    with watching(store, lease_ttl_s=3_600.0) as first:
        wait_until(lambda: first.status().leader, "the first to lead")
        with watching(store) as second:
            wait_until(lambda: second.status().leader_owner, "the second to see who leads")
            assert not second.status().leader
            assert second.status().leader_owner == first.status().leader_owner
            first.stop()
            # The lease would last an hour more: it was given back.
            wait_until(lambda: second.status().leader, "the second to lead")
            count = engine.scrapes
            wait_until(lambda: engine.scrapes > count, "scrapes by the second")


def test_standby_takes_over_after_kill_9(tmp_path: Path, engine: Any, child: Child, wait_until: Wait) -> None:
    with Store.open(tmp_path) as store:
        register(store, engine)
        leader = child("monitor", tmp_path, "1.5")
        assert leader.stdout is not None
        assert leader.stdout.readline() == "leader\n"
        with watching(store, lease_ttl_s=1.5) as standby:
            wait_until(lambda: standby.status().leader_owner, "the standby to see the leader")
            assert not standby.status().leader
            first = store.leases.get("monitor")
            leader.kill()
            wait_until(lambda: standby.status().leader, "the standby to lead")
            second = store.leases.get("monitor")
            assert first is not None
            assert second is not None
            assert second.token == first.token + 1
            count = engine.scrapes
            wait_until(lambda: engine.scrapes > count + 2, "scrapes by the standby")
    file = sqlite3.connect(tmp_path / FILE_NAME)
    assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    file.close()


def test_a_leader_that_was_stopped_for_a_while_writes_nothing_when_it_wakes(
    tmp_path: Path, engine: Any, child: Child, wait_until: Wait
) -> None:
    with Store.open(tmp_path) as store:
        register(store, engine)
        sleeper = child("monitor", tmp_path, "1.0")
        assert sleeper.stdout is not None
        assert sleeper.stdout.readline() == "leader\n"
        sleeper.send_signal(signal.SIGSTOP)
        with watching(store, lease_ttl_s=30.0) as standby:
            wait_until(lambda: standby.status().leader, "the standby to lead")
            sleeper.send_signal(signal.SIGCONT)
            count = engine.scrapes
            wait_until(lambda: engine.scrapes > count + 10, "scrapes")
            assert standby.status().leader
            # Each scrape by the leader is one `up`; two collectors would give about twice as many.
            since = time.time()
            count = engine.scrapes
            wait_until(lambda: engine.scrapes >= count + 10, "ten scrapes")
            store.flush()
            assert len(store.samples.range("t", "up", since)) >= engine.scrapes - count - 2


def test_stop_before_and_without_start(store: Store) -> None:
    monitor = Monitor(store)
    monitor.stop()
    assert not monitor.status().running
    with watching(store) as running:
        running.stop()
        running.stop()


def test_preload_lets_a_rule_see_what_was_scraped_before(store: Store, engine: Any, wait_until: Wait) -> None:
    """The storm is in the store; the new leader has it in its window with the first evaluation."""
    store.targets.upsert("t", url=engine.url, kind="external", scrape_interval_s=0.1)
    now = time.time()
    labels = {"engine": "0", "model_name": "m"}
    store.samples.write(
        Sample("t", metric, labels, now - 200 + i, value * i)
        for i in range(200)
        for metric, value in (("preemptions_total", 1.0), ("requests_finished_total", 2.0))
    )
    store.flush()
    engine.values["vllm:num_preemptions_total"] = 200.0
    engine.finished = 400.0
    with watching(store):
        wait_until(lambda: state(store, "eviction-storm") == "pending", "the storm")
    reading = next(r for r in store.alerts.readings("t") if r.rule == "eviction-storm")
    assert reading.numerator is not None
    assert reading.numerator >= 199.0


def test_watch_reports_what_changes_and_ends(store: Store, engine: Any) -> None:
    register(store, engine)
    store.events.add("t", "engine_exit", "out of memory", data={"reason": "oom"})
    engine.status = 500
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        if line.startswith("firing: oom on t: "):
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    assert watch(store, seconds=60.0, report=report) == 0
    assert signal.getsignal(signal.SIGTERM) is before
    assert "watching 1 target" in lines
    assert any(line.startswith("firing: oom on t: ") for line in lines[-3:])
    lease = store.leases.get("monitor")
    assert lease is not None
    assert lease.expires_at < time.time()
