"""Sample time under a clock that is set forward, back, or stands on a store from the future."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from probe.alerts.rules import DEFAULT_RULES
from probe.collect import clock, leadership
from probe.collect.clock import SteadyClock
from probe.collect.leadership import Leadership
from probe.monitor import Monitor
from probe.store import Sample, Store


class Times:
    """A wall clock and a monotonic one that the test moves."""

    def __init__(self) -> None:
        self.wall, self.monotonic = 1000.0, 50.0

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds

    def clock(self) -> SteadyClock:
        return SteadyClock(lambda: self.wall, lambda: self.monotonic)


def test_it_is_the_wall_clock_while_that_runs_evenly() -> None:
    times = Times()
    steady = times.clock()
    for _ in range(5):
        times.passes(7.0)
        assert steady.now() == times.wall
    assert steady.jumped() is None
    assert steady.ahead_s == 0.0


def test_a_step_back_is_not_followed_and_heals_slowly() -> None:
    times = Times()
    steady = times.clock()
    before = steady.now()
    times.passes(10.0)
    times.wall -= 100.0
    assert steady.now() == pytest.approx(before + 10 * 0.99)
    assert steady.jumped() == pytest.approx(-100.0)
    assert steady.jumped() is None
    seen = [steady.now()]
    for _ in range(12_000):
        times.passes(1.0)
        seen.append(steady.now())
    assert all(a < b for a, b in itertools.pairwise(seen))
    assert seen[-1] == times.wall  # 100 s at 1%


def test_a_step_forward_is_followed() -> None:
    times = Times()
    steady = times.clock()
    times.passes(1.0)
    times.wall += 3600.0
    assert steady.now() == times.wall
    assert steady.jumped() == pytest.approx(3600.0)


def test_small_steps_are_nobodys_business() -> None:
    times = Times()
    steady = times.clock()
    times.wall -= 0.2
    now = steady.now()
    times.passes(1.0)
    assert now < steady.now()
    assert steady.jumped() is None


def test_it_goes_on_from_the_newest_stored_sample() -> None:
    times = Times()
    steady = times.clock()
    assert steady.not_before(1030.0) == 30.0
    assert steady.now() == 1030.0
    assert steady.not_before(5.0) == 0.0
    times.passes(10.0)
    assert steady.now() == pytest.approx(1039.9)


def test_the_watch_goes_on_when_the_clock_is_set_back_and_forward(
    tmp_path: Path, server: Any, reply: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither frozen nor doubled: samples and readings keep coming, each later than the one before."""
    server.replies["/metrics"] = reply(b'vllm:num_requests_running{engine="0"} 1\n')
    step = [0.0]
    original = clock.SteadyClock

    def stepped() -> SteadyClock:
        return original(lambda: time.time() + step[0], time.monotonic)

    monkeypatch.setattr(leadership, "SteadyClock", stepped)
    with Store.open(tmp_path) as store:
        store.targets.upsert("t", url=server.url, kind="external", scrape_interval_s=0.05)
        monitor = Monitor(store, tick_s=0.05)
        monitor.start()
        try:
            for seconds, way in ((-5000.0, "back by 5000 s"), (10_000.0, "forward by 10000 s")):
                _more(monitor)
                step[0] += seconds
                _wait(lambda way=way: any(way in e.message for e in store.events.recent(kinds=["clock_jump"])))
            _more(monitor)
        finally:
            monitor.stop()
        frame = store.samples.range("t", "up", 0)
        assert frame["ts"].is_monotonic_increasing
        assert frame["ts"].is_unique
        assert len(frame) >= 11
        jumps = store.events.recent(kinds=["clock_jump"])
        assert [e.data["seconds"] < 0 for e in jumps] == [False, True]
        assert {r.rule for r in store.alerts.readings("t")} == {r.id for r in DEFAULT_RULES}


def test_a_store_from_the_future_moves_the_time_of_samples(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.targets.upsert("t", url="http://127.0.0.1:1", kind="external")
        for far, expected in ((500.0, 500.0), (10 * 86_400.0, 500.0)):
            store.samples.write([Sample("t", "up", {}, time.time() + far, 1.0)])
            store.flush()
            lead = Leadership(store, DEFAULT_RULES)
            lead._load(store.targets.list()[0])
            ahead = lead._clock.now() - time.time()
            assert ahead == pytest.approx(expected if far == 500.0 else 0.0, abs=60.0)


def _wait(condition: Callable[..., object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _more(monitor: Monitor) -> None:
    """Returns after some more scrapes and evaluations."""
    before = monitor.stats()
    _wait(lambda: monitor.stats().scraped.scrapes > before.scraped.scrapes + 5)
    _wait(lambda: monitor.stats().evaluations > before.evaluations + 5)
