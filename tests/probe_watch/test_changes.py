"""What a scrape tells besides its values: each finding once."""

from __future__ import annotations

from probe.collect.changes import ChangeDetector, Finding, Observation
from probe.collect.scrape import Scrape
from probe.dialects import load_dialect
from probe.store import Sample, Target

TARGET = Target(1, "t", "http://h", "external", "vllm", [], {}, 1.0, 1.0, True, 0.0)


def good(ts: float, started: float, missing: tuple[str, ...] = (), **counters: float) -> Observation:
    samples = [Sample("t", "process_start_time_seconds", {}, ts, started)]
    samples += [Sample("t", name, {"engine": "0"}, ts, value) for name, value in counters.items()]
    return Observation(TARGET, ts, Scrape(samples, missing=missing))


def bad(ts: float, error: str) -> Observation:
    return Observation(TARGET, ts, None, error)


def detector() -> ChangeDetector:
    return ChangeDetector(load_dialect("vllm").counters)


def kinds(findings: list[Finding]) -> list[str]:
    return [f.kind for f in findings]


def test_up_is_a_sample_of_every_attempt() -> None:
    found = {s.metric: s.value for s in bad(1.0, "gone").samples}
    assert found == {"up": 0.0, "scrape_duration_seconds": 0.0, "scrape_samples": 0.0}
    assert [(s.metric, s.value) for s in good(1.0, 5.0).samples][-1] == ("up", 1.0)


def test_nothing_is_said_of_a_target_whose_prometheus_does_not_answer() -> None:
    assert Observation(TARGET, 1.0, None, "no answer", known=False).samples == []


def test_an_error_is_said_once_until_the_target_answers_again() -> None:
    d = detector()
    assert kinds(d.observe(bad(1, "refused"))) == ["scrape_error"]
    assert kinds(d.observe(bad(2, "refused"))) == []
    assert kinds(d.observe(bad(3, "timed out"))) == ["scrape_error"]
    assert kinds(d.observe(bad(4, "refused"))) == []
    assert kinds(d.observe(good(5, 100.0))) == ["scrape_recovered"]
    assert kinds(d.observe(good(6, 100.0))) == []
    assert kinds(d.observe(bad(7, "refused"))) == ["scrape_error"]


def test_restart_with_counters_from_zero() -> None:
    d = detector()
    d.observe(good(1, 100.0, preemptions_total=40, generation_tokens_total=900, requests_running=7))
    findings = d.observe(good(2, 160.0, preemptions_total=2, generation_tokens_total=30, requests_running=1))
    assert kinds(findings) == ["engine_restart", "counter_reset"]
    assert findings[0].data == {"unexpected": True, "started_before": 100.0, "started_now": 160.0}
    assert findings[1].data["metrics"] == {
        "preemptions_total": {"from": 40, "to": 2},
        "generation_tokens_total": {"from": 900, "to": 30},
    }
    assert "preemptions_total 40 to 2" in findings[1].message
    assert kinds(d.observe(good(3, 160.0, preemptions_total=3, generation_tokens_total=31))) == []


def test_restart_of_an_idle_engine_resets_nothing() -> None:
    d = detector()
    d.observe(good(1, 100.0, preemptions_total=0))
    assert kinds(d.observe(good(2, 160.0, preemptions_total=0))) == ["engine_restart"]


def test_start_time_rounded_differently_is_no_restart() -> None:
    d = detector()
    d.observe(good(1, 100.0))
    assert kinds(d.observe(good(2, 100.4))) == []


def test_a_falling_gauge_is_no_reset() -> None:
    d = detector()
    d.observe(good(1, 100.0, requests_running=9))
    assert kinds(d.observe(good(2, 100.0, requests_running=1))) == []


def test_restart_while_nobody_watched() -> None:
    d = detector()
    d.seed(good(1, 100.0, preemptions_total=40).samples)
    assert d.last_good == 1
    assert kinds(d.observe(good(500, 300.0, preemptions_total=1))) == ["engine_restart", "counter_reset"]


def test_missing_metrics_are_said_once() -> None:
    d = detector()
    findings = d.observe(good(1, 100.0, missing=("kv_usage_ratio",)))
    assert kinds(findings) == ["metrics_missing"]
    assert "kv_usage_ratio" in findings[0].message
    assert kinds(d.observe(good(2, 100.0, missing=("kv_usage_ratio",)))) == []
    assert kinds(d.observe(good(3, 100.0))) == []
