"""The arithmetic of rules against values computed by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest

from probe.alerts.arithmetic import evaluate as vector
from probe.alerts.arithmetic import growth
from probe.alerts.evaluate import Outcome, View, evaluate, longest_run_up
from probe.alerts.expr import OverTime, with_times
from probe.alerts.rule import ValueSignal, scaled
from probe.alerts.rules import DEFAULT_RULES, EVICTION_STORM, KV_SATURATED, OOM, TARGET_MISSING
from probe.alerts.window import Series, Window
from probe.store import Event, Sample, Target

T0 = 1_800_000_000.0
TARGET = Target(1, "t", "http://h:1", "external", "vllm", [], {}, 10.0, 1.0, True, T0 - 9_000)


def view(samples: Iterable[tuple[str, str, float, float]], now: float, events: Iterable[Event] = ()) -> View:
    """Samples are (metric, engine, seconds after T0, value)."""
    window = Window({m: 10_000 for rule in DEFAULT_RULES for m in rule.metrics})
    for metric, engine, at, value in sorted(samples, key=lambda s: s[2]):
        labels = {} if metric == "up" else {"engine": engine, "model_name": "m"}
        window.add([Sample("t", metric, labels, T0 + at, value)])
    return View(TARGET, window, list(events), T0 + now)


def series(points: Iterable[tuple[float, float]]) -> Series:
    """Points are (seconds after T0, value)."""
    return Series({}, [(T0 + at, value) for at, value in points])


def event(kind: str, at: float, **data: object) -> Event:
    return Event(int(at * 10), "t", T0 + at, kind, "info", f"{kind} message", data)


def storm(
    preempted: list[float], finished: list[float], running: float, engine: str = "0"
) -> list[tuple[str, str, float, float]]:
    """Counters sampled every 100 s up to T0 + 300, and the running requests now."""
    rows = [("preemptions_total", engine, 100.0 * i, v) for i, v in enumerate(preempted)]
    rows += [("requests_finished_total", engine, 100.0 * i, v) for i, v in enumerate(finished)]
    return [*rows, ("requests_running", engine, 300.0, running)]


@pytest.mark.parametrize(
    ("values", "expected", "resets"),
    [
        ([10, 14, 14, 20], 10, 0),
        ([10, 14, 3, 5], 4 + 3 + 2, 1),
        ([100, 0, 0, 7], 7, 1),
        ([5, 2, 1, 4], 2 + 1 + 3, 2),
        ([7, 7], 0, 0),
    ],
)
def test_growth_by_hand(values: list[float], expected: float, resets: int) -> None:
    rise = growth(series((10.0 * i, v) for i, v in enumerate(values)), T0, T0 + 1_000)
    assert rise is not None
    assert (rise.value, rise.resets) == (expected, resets)
    assert (rise.first_ts, rise.last_ts) == (T0, T0 + 10 * (len(values) - 1))


def test_growth_counts_only_the_window() -> None:
    counter = series([(0, 0.0), (10, 50.0), (20, 53.0), (30, 57.0)])
    rise = growth(counter, T0 + 10, T0 + 20)
    assert rise is not None
    assert rise.value == 3.0
    assert growth(counter, T0 + 25, T0 + 40) is None
    assert growth(series([]), T0, T0 + 40) is None


def test_mean() -> None:
    samples = [
        ("kv_usage_ratio", "0", 0.0, 100.0),
        ("kv_usage_ratio", "0", 5.0, 1.0),
        ("kv_usage_ratio", "0", 9.0, 3.0),
    ]
    read = OverTime("avg", "kv_usage_ratio", 5.0)
    assert list(vector(read, view(samples, 10).moment).values()) == [2.0]
    assert vector(read, view(samples, 15).moment) == {}
    # Nine tenths nine times over are nine tenths: the threshold is not passed by rounding.
    full = [("kv_usage_ratio", "0", float(at), 0.9) for at in range(9)]
    assert list(vector(OverTime("avg", "kv_usage_ratio", 60.0), view(full, 10).moment).values()) == [0.9]


def test_longest_run_up() -> None:
    points = [(0.0, 1.0), (10.0, 1.0), (20.0, 0.0), (30.0, 1.0), (40.0, 1.0), (50.0, 1.0), (200.0, 1.0), (210.0, 1.0)]
    assert longest_run_up(points, -1.0, 40.0) == 20.0
    assert longest_run_up(points, 35.0, 40.0) == 10.0
    assert longest_run_up(points, 205.0, 40.0) == 0.0
    assert longest_run_up([], 0.0, 40.0) == 0.0


def test_eviction_rate_by_hand() -> None:
    # (5 - 1) + after the reset 2 + (3 - 2) = 7 preemptions; 90 finished, 10 running.
    rows = storm([1, 5, 2, 3], [0, 30, 60, 90], 10)
    outcome = evaluate(EVICTION_STORM, view(rows, 300))
    assert (outcome.numerator, outcome.denominator, outcome.value) == (7.0, 100.0, 0.07)
    assert outcome.verdict == "breach"
    assert "1 counter reset counted from 0" in outcome.coverage
    assert "300 of 300 s" in outcome.coverage
    assert outcome.summary == "Eviction rate above 5%: 7.0% (7 preemptions / 100 requests in service in 5 min)"


def test_eviction_rate_is_a_ratio_of_sums_over_engines() -> None:
    # Engine 0: 10 / 20 = 50%, engine 1: 0 / 380 = 0%. Their mean is 25%; together they are 10 / 400.
    rows = storm([0, 0, 5, 10], [0, 5, 10, 15], 5) + storm([0, 0, 0, 0], [0, 100, 200, 360], 20, engine="1")
    outcome = evaluate(EVICTION_STORM, view(rows, 300))
    assert (outcome.numerator, outcome.denominator, outcome.value) == (10.0, 400.0, 0.025)
    assert outcome.verdict == "ok"
    assert "2 of 2 engines" in outcome.coverage


def test_eviction_rate_at_the_threshold_is_not_above_it() -> None:
    assert evaluate(EVICTION_STORM, view(storm([0, 2, 4, 5], [0, 30, 60, 90], 10), 300)).verdict == "ok"


@pytest.mark.parametrize(
    ("preempted", "finished", "verdict"),
    [(2, 18, "below_floor"), (3, 10, "breach"), (2, 19, "breach"), (0, 3, "ok")],
)
def test_traffic_floor(preempted: float, finished: float, verdict: str) -> None:
    """Fewer than 20 requests in the window: a breach is shown, not alerted, unless 3 or more were preempted."""
    outcome = evaluate(EVICTION_STORM, view(storm([0, 0, 0, preempted], [0, 0, 0, finished], 1), 300))
    assert outcome.verdict == verdict
    assert outcome.denominator == finished + 1
    assert outcome.value == preempted / (finished + 1)
    assert ("shown, not alerted" in outcome.coverage) == (verdict == "below_floor")


def test_preempting_while_nothing_finishes_or_runs() -> None:
    outcome = evaluate(EVICTION_STORM, view(storm([0, 4, 8, 12], [5, 5, 5, 5], 0), 300))
    assert (outcome.verdict, outcome.value, outcome.denominator) == ("breach", 12.0, 1.0)


def test_old_preemptions_are_not_current() -> None:
    outcome = evaluate(EVICTION_STORM, view(storm([1000, 1000, 1000, 1000], [0, 50, 100, 150], 5), 300))
    assert (outcome.verdict, outcome.value) == ("ok", 0.0)


def test_no_data_is_not_ok() -> None:
    rows = storm([0, 50, 100, 150], [0, 5, 10, 15], 5)
    stale = evaluate(EVICTION_STORM, view(rows, 300 + 41))
    assert (stale.verdict, stale.value) == ("no_data", None)
    assert stale.coverage == "no data for 41 s: requests_running"
    never = evaluate(EVICTION_STORM, view([], 300))
    assert (never.verdict, never.coverage) == ("no_data", "no data: preemptions_total was never read")
    single = evaluate(EVICTION_STORM, view([("preemptions_total", "0", 300, 7)], 300))
    assert single.verdict == "no_data"
    assert single.coverage == "too few samples of preemptions_total in its window"


def test_a_dead_engines_running_requests_do_not_count() -> None:
    rows = [*storm([0, 0, 10, 20], [0, 30, 60, 90], 10), ("requests_running", "1", 100, 500.0)]
    assert evaluate(EVICTION_STORM, view(rows, 300)).denominator == 100.0


def gauges(usage: float, waiting: float, engine: str) -> list[tuple[str, str, float, float]]:
    return [
        (m, engine, at, v)
        for at in (250, 270, 290)
        for m, v in (("kv_usage_ratio", usage), ("requests_waiting", waiting))
    ]


def test_saturation_takes_the_hottest_engine_with_a_queue() -> None:
    rows = gauges(0.97, 3.0, "0") + gauges(0.2, 0.0, "1")
    outcome = evaluate(KV_SATURATED, view(rows, 300))
    assert outcome.verdict == "breach"
    assert outcome.value == 0.97
    assert outcome.coverage.startswith("2 of 2 engines")
    assert "97.0% of the KV blocks in use while requests wait on engine 0" in outcome.summary


@pytest.mark.parametrize(
    "rows",
    [
        gauges(0.99, 0.0, "0"),  # full and nobody waits: good use, not an incident
        gauges(0.5, 9.0, "0"),  # a queue with free blocks: not the cache
        gauges(0.99, 0.0, "0") + gauges(0.3, 9.0, "1"),  # full here, queue there
    ],
)
def test_saturation_needs_both_on_one_engine(rows: list[tuple[str, str, float, float]]) -> None:
    assert evaluate(KV_SATURATED, view(rows, 300)).verdict == "ok"


def test_saturation_without_fresh_data() -> None:
    assert evaluate(KV_SATURATED, view(gauges(0.99, 9.0, "0"), 400)).verdict == "no_data"


def test_saturation_with_a_window_shorter_than_the_staleness_limit() -> None:
    signal = KV_SATURATED.signal
    assert isinstance(signal, ValueSignal)
    signal = dataclasses.replace(signal, value=with_times(signal.value, lambda seconds: 5.0))
    rule = dataclasses.replace(KV_SATURATED, signal=signal, window_s=5.0)
    assert evaluate(rule, view(gauges(0.99, 9.0, "0"), 300)).verdict == "no_data"


def ups(*spans: tuple[float, float, float]) -> list[tuple[str, str, float, float]]:
    """(from, to, value) every 10 s."""
    rows = []
    for start, end, value in spans:
        at = start
        while at <= end:
            rows.append(("up", "", at, value))
            at += 10
    return rows


def oom(rows: list[tuple[str, str, float, float]], now: float, *events: Event, since: float | None = None) -> Outcome:
    return evaluate(OOM, view(rows, now, events), None if since is None else T0 + since)


def test_oom_fires_and_ends_after_the_engine_was_up_again() -> None:
    died = event("engine_exit", 100, reason="oom")
    down = ups((0, 100, 1), (110, 140, 0))
    assert oom(down, 105, died).verdict == "breach"
    outcome = oom(down, 140, died)
    assert (outcome.verdict, outcome.value) == ("breach", 1.0)
    assert outcome.summary.endswith("engine_exit message")
    assert oom(down + ups((150, 200, 1)), 200, died).verdict == "breach"
    assert "up again for 50 of 60 s" in oom(down + ups((150, 200, 1)), 200, died).coverage
    assert oom(down + ups((150, 210, 1)), 210, died).verdict == "ok"
    # Going down later does not bring the old event back.
    assert oom(down + ups((150, 210, 1), (220, 300, 0)), 300, died).verdict == "ok"


def test_oom_starts_over_with_each_death() -> None:
    rows = ups((0, 100, 1), (110, 140, 0), (150, 190, 1), (200, 220, 0), (230, 270, 1))
    outcome = oom(rows, 270, event("engine_exit", 100, reason="oom"), event("engine_exit", 195, reason="oom"))
    assert (outcome.verdict, outcome.value) == ("breach", 2.0)


def test_oom_of_an_engine_that_stays_down_outlives_the_window() -> None:
    died = event("engine_exit", 100, reason="oom")
    rows = ups((0, 100, 1), (110, 2_000, 0))
    assert oom(rows, 2_000, died).verdict == "ok"  # an alert that never started
    assert oom(rows, 2_000, died, since=100).verdict == "breach"


@pytest.mark.parametrize(
    ("quiet", "found"),
    [
        (True, event("engine_exit", 100, reason="stopped")),
        (True, event("engine_exit", 100, reason="config")),
        (True, event("engine_restart", 100, flags=[])),  # announced by whoever restarted it
        (True, event("engine_start", 100)),
        (False, event("engine_exit", 100, reason="killed")),
        (False, event("engine_restart", 100, unexpected=True)),
    ],
)
def test_which_events_are_an_oom_or_unexpected(quiet: bool, found: Event) -> None:
    assert oom(ups((0, 110, 1)), 110, found).verdict == ("ok" if quiet else "breach")


def missing(rows: list[tuple[str, str, float, float]], now: float, *events: Event, created: float = -9_000) -> Outcome:
    shown = view(rows, now, events)
    target = dataclasses.replace(TARGET, created_at=T0 + created)
    return evaluate(TARGET_MISSING, dataclasses.replace(shown, target=target))


def test_target_down_or_not_scraped() -> None:
    assert missing(ups((0, 300, 1)), 305).verdict == "ok"
    down = missing(ups((0, 200, 1), (210, 300, 0)), 305)
    assert (down.verdict, down.value) == ("breach", 0.0)
    assert down.coverage == "last answer 105 s ago"
    silent = missing(ups((0, 200, 1)), 300)
    assert silent.verdict == "breach"
    assert silent.coverage == "not scraped for 100 s"
    assert missing([], 300).verdict == "breach"  # never seen at all: silence is not health


def test_target_stopped_on_purpose_is_not_missing() -> None:
    stopped = event("engine_exit", 205, reason="stopped")
    rows = ups((0, 200, 1), (210, 300, 0))
    assert missing(rows, 300, stopped).coverage == "stopped on purpose"
    assert missing(rows, 300, stopped).verdict == "ok"
    # Started again and then down: no excuse left.
    again = rows + ups((310, 400, 1), (410, 500, 0))
    assert missing(again, 500, stopped, event("engine_start", 305)).verdict == "breach"
    assert missing(again, 500, stopped).verdict == "breach"


def test_target_that_starts_has_time_to() -> None:
    assert missing(ups((0, 40, 0)), 40, created=0).verdict == "ok"
    assert missing(ups((0, 70, 0)), 70, created=0).verdict == "breach"
    # A restart that was announced: the engine loads its model.
    rows = ups((0, 200, 1), (210, 240, 0))
    assert missing(rows, 240, event("flags_changed", 205)).verdict == "ok"
    assert missing(rows + ups((250, 270, 0)), 270, event("flags_changed", 205)).verdict == "breach"
    # A new target whose engine died at once is not starting either.
    assert missing(ups((0, 40, 0)), 40, event("engine_exit", 5, reason="config"), created=0).verdict == "breach"
    # One that died is not starting.
    assert missing(rows, 240, event("engine_exit", 205, reason="error")).verdict == "breach"


def test_scaled_rules_keep_sensible_minimums() -> None:
    drill = dataclasses.replace(TARGET, time_scale=0.05, scrape_interval_s=0.5)
    storm_rule = scaled(EVICTION_STORM, drill)
    assert (storm_rule.window_s, storm_rule.hold_s, storm_rule.keep_firing_s) == (15.0, 3.0, 3.0)
    assert storm_rule.threshold == EVICTION_STORM.threshold
    assert scaled(TARGET_MISSING, drill).hold_s == 30.0  # a restart takes its time at any scale
    assert scaled(OOM, drill).hold_s == 0.0
    slow = dataclasses.replace(TARGET, time_scale=0.001, scrape_interval_s=2.0)
    assert (scaled(EVICTION_STORM, slow).window_s, scaled(EVICTION_STORM, slow).hold_s) == (12.0, 4.0)
    plain = dataclasses.replace(TARGET, scrape_interval_s=2.0)
    assert scaled(EVICTION_STORM, plain) == EVICTION_STORM
