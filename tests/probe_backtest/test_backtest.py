"""A backtest fires when the live evaluator would have, and says what users felt."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from pathlib import Path

import pytest

from probe.alerts.backtest import BacktestError, History, needed_metrics
from probe.alerts.backtest_command import find_rule, run, span_s, text
from probe.alerts.evaluator import TargetEvaluator
from probe.alerts.rule import Rule
from probe.alerts.rules import EVICTION_STORM, KV_SATURATED, OOM, TTFT_SLO_BURN
from probe.store import Event, Sample, Store, Target

T0 = 1_800_000_000.0
INTERVAL = 10.0
TARGET = Target(1, "t", "http://h:1", "external", "vllm", [], {}, INTERVAL, 1.0, True, T0 - 9_000)
LENGTH = 3_600.0


def trace(storm: tuple[float, float] = (1_200.0, 1_500.0), slow: tuple[float, float] | None = None) -> list[Sample]:
    """An hour, one request finished a second; in the storm one preemption a second, when slow all wait 5 s."""
    samples, preempted, within = [], 0.0, 0.0
    for i in range(int(LENGTH / INTERVAL) + 1):
        at = i * INTERVAL
        if storm[0] < at <= storm[1]:
            preempted += INTERVAL
        if slow is None or not slow[0] < at <= slow[1]:
            within += INTERVAL
        rows = {
            "up": ({}, 1.0),
            "preemptions_total": ({"engine": "0"}, 500 + preempted),
            "requests_finished_total": ({"engine": "0"}, 900 + at),
            "requests_running": ({"engine": "0"}, 4.0),
            "ttft_seconds_count": ({"engine": "0"}, 900 + at),
        }
        samples += [Sample("t", metric, labels, T0 + at, value) for metric, (labels, value) in rows.items()]
        samples += [
            Sample("t", "ttft_seconds_bucket", {"engine": "0", "le": le}, T0 + at, value)
            for le, value in (("2.5", 900 + within), ("+Inf", 900 + at))
        ]
    return samples


def read(rule: Rule, samples: list[Sample], events: list[Event] | None = None, target: Target = TARGET) -> History:
    return History(rule, target, samples, events or [], T0, T0 + LENGTH)


def live(rule: Rule, samples: list[Sample]) -> list[tuple[float, str]]:
    """The changes of state that the monitor's own evaluator makes on the same samples."""
    evaluator = TargetEvaluator(TARGET, [rule])
    changes = []
    for i in range(int(LENGTH / INTERVAL) + 1):
        now = T0 + i * INTERVAL
        evaluator.add_samples([s for s in samples if s.ts == now])
        changes += [(now, to) for update in evaluator.evaluate(now) for _, to in update.transitions]
    return changes


@pytest.mark.parametrize("rule", [EVICTION_STORM, TTFT_SLO_BURN], ids=lambda rule: rule.id)
def test_fires_when_the_live_evaluator_does(rule: Rule) -> None:
    samples = trace(slow=(2_000.0, 2_600.0))
    result = read(rule, samples).judge()
    changes = live(rule, samples)
    assert [f.firing_at for f in result.firings] == [ts for ts, to in changes if to == "firing"]
    assert [f.resolved_at for f in result.firings if f.resolved_at] == [ts for ts, to in changes if to == "resolved"]
    assert len(result.firings) == 1


def test_threshold_and_hold_time_are_judged_without_reading_again() -> None:
    history = read(EVICTION_STORM, trace())
    own = history.judge()
    worst = own.firings[0].worst
    assert worst is not None
    assert worst > 0.5
    assert history.judge(threshold=worst + 0.01).firings == ()
    assert history.judge(threshold=worst - 0.01, hold_s=0.0).firings[0].worst == worst
    late = history.judge(hold_s=180.0).firings[0]
    assert late.firing_at == own.firings[0].firing_at + 120.0
    assert history.judge(hold_s=3_000.0).firings == ()
    assert own.pages_per_week is None, "an hour says nothing about weeks"
    day = dataclasses.replace(own, covered_s=86_400.0)
    assert day.pages_per_week == 7.0


def test_lead_time_before_users_feel_it() -> None:
    early = read(EVICTION_STORM, trace(storm=(1_200.0, 2_000.0), slow=(1_800.0, 2_200.0))).judge()
    assert early.visible_breaches == 1
    assert early.missed_breaches == 0
    lead = early.firings[0].lead_s
    assert lead is not None
    assert 400 < lead < 600
    unseen = read(EVICTION_STORM, trace(storm=(-1.0, -1.0), slow=(1_800.0, 2_200.0))).judge()
    assert (unseen.firings, unseen.visible_breaches, unseen.missed_breaches) == ((), 1, 1)


def test_time_without_data_is_not_covered() -> None:
    samples = [s for s in trace() if not T0 + 600 < s.ts < T0 + 1_000]
    result = read(EVICTION_STORM, samples).judge()
    # Four scrapes long the last sample still counts.
    assert LENGTH - 400 < result.covered_s < LENGTH - 300


def test_an_event_rule_is_tested_on_stored_events() -> None:
    exit_ = Event(7, "t", T0 + 1_000.5, "engine_exit", "critical", "died", {"reason": "oom"})
    result = read(OOM, trace(), [exit_]).judge()
    assert [f.firing_at for f in result.firings] == [T0 + 1_010.0]
    assert result.firings[0].resolved_at is not None


def test_a_rule_of_several_windows_has_no_threshold_to_move() -> None:
    history = read(TTFT_SLO_BURN, trace())
    assert not history.can_compare
    with pytest.raises(BacktestError, match="no threshold to move"):
        history.judge(threshold=1.0)


def test_it_reads_what_the_rule_and_users_need() -> None:
    reach = needed_metrics(KV_SATURATED)
    assert reach["kv_usage_ratio"] == 60.0
    assert reach["ttft_seconds_bucket"] == 300.0
    assert "up" in reach


@pytest.mark.parametrize(("written", "seconds"), [("90m", 5_400.0), ("7d", 604_800.0), ("0s", 0.0), ("1.5h", 5_400.0)])
def test_spans(written: str, seconds: float) -> None:
    assert span_s(written) == seconds


@pytest.mark.parametrize("wrong", ["", "7", "-1d", "soon", "7 days"])
def test_wrong_spans_say_how_to_write_one(wrong: str) -> None:
    with pytest.raises(BacktestError, match="such as 7d"):
        span_s(wrong)


def test_command_on_a_store(tmp_path: Path) -> None:
    shift = time.time() - LENGTH - 1 - T0
    with Store.open(tmp_path) as store:
        store.targets.upsert("t", url="http://h:1", kind="external", scrape_interval_s=INTERVAL)
        store.samples.write([Sample(s.target, s.metric, s.labels, s.ts + shift, s.value) for s in trace()])
        store.samples.flush()
        options = argparse.Namespace(
            rule="eviction-storm", since="2h", target=None, threshold=None, hold="2m", step=None
        )
        (result,) = run(options, store)
        assert len(result.firings) == 1
        assert result.rule.hold_s == 120.0
        assert math.isclose(result.covered_s, LENGTH, rel_tol=0.02)
        assert "eviction-storm on t: > 0.05, hold 2 min" in text(result)
        assert "1 time, " in text(result)
        options.target = "nobody"
        with pytest.raises(BacktestError, match="no target 'nobody'"):
            run(options, store)
        store.targets.upsert("empty", url="http://h:2", kind="external")
        options.target = "empty"
        with pytest.raises(BacktestError, match="nothing is stored of empty"):
            run(options, store)
    with pytest.raises(BacktestError, match="there is no rule 'no-such'; there are: oom"):
        find_rule("no-such")
