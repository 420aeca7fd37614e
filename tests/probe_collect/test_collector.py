"""The loop over targets: rhythm, independence, GPUs, and a Prometheus target watched end to end."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from probe.collect.changes import Observation
from probe.collect.collector import Collector, _phase_s
from probe.collect.nvml import GpuReader
from probe.monitor import Monitor
from probe.store import Sample, Store, Target

PAGE = b'vllm:num_requests_running{engine="0"} 1\n'


class Run:
    """Runs a collector until a condition on what it saw holds."""

    def __init__(self, targets: list[Target], **options: Any) -> None:
        self.targets, self.options = targets, options
        self.seen: list[Observation] = []
        self.collector: Collector | None = None

    async def _saw(self, observation: Observation) -> None:
        self.seen.append(observation)

    async def _facts(self, target: Target, facts: dict[str, Any]) -> None:
        pass

    def until(self, condition: Callable[[], object]) -> list[Observation]:
        async def go() -> None:
            self.collector = Collector(self._saw, self._facts, **self.options)
            deadline = time.monotonic() + 120
            try:
                while not condition():
                    await self.collector.sync(self.targets)
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.02)
            finally:
                await self.collector.close()

        asyncio.run(go())
        return self.seen

    def of(self, name: str) -> list[Observation]:
        return [o for o in self.seen if o.target.name == name]


def test_targets_have_their_turns_all_over_the_interval(target: Callable[..., Target]) -> None:
    phases = [_phase_s(target(f"vllm-{i}", scrape_interval_s=5.0)) for i in range(100)]
    assert all(0 <= phase < 5.0 for phase in phases)
    in_each_second = [sum(i <= phase < i + 1 for phase in phases) for i in range(5)]
    assert min(in_each_second) >= 10
    assert phases[7] == _phase_s(target("vllm-7", scrape_interval_s=5.0))


def test_many_targets_and_one_that_hangs(servers: Callable[[], Any], reply: Any, target: Callable[..., Target]) -> None:
    hold = threading.Event()
    quick, slow = servers(), servers()
    quick.replies.update({f"/{i}/metrics": reply(PAGE) for i in range(30)})
    slow.replies["/metrics"] = reply(PAGE, wait=hold)
    targets = [target(f"t{i}", url=f"{quick.url}/{i}", scrape_interval_s=0.2) for i in range(30)]
    run = Run([*targets, target("slow", url=slow.url, scrape_interval_s=0.2)])
    run.until(lambda: all(len(run.of(t.name)) >= 3 for t in targets))
    hold.set()
    assert all(seen.scrape is None for seen in run.of("slow"))
    times = sorted(run.of(f"t{i}")[0].ts for i in range(30))
    assert len(set(times)) > 1  # each sample has the time of its own scrape
    for seen in run.seen:
        assert {s.ts for s in seen.samples} == {seen.ts}
    assert run.collector is not None
    stats = run.collector.stats()
    assert stats.scrapes == len(run.seen)
    assert stats.failures == len(run.of("slow"))
    assert stats.samples == sum(len(o.samples) for o in run.seen)


def test_turns_that_passed_meanwhile_are_missed_not_made_up_for(
    server: Any, reply: Any, target: Callable[..., Target]
) -> None:
    server.replies["/metrics"] = reply(PAGE, pause_s=0.3)
    run = Run([target(url=server.url, scrape_interval_s=0.1)])
    begun = time.monotonic()
    run.until(lambda: len(run.seen) >= 3)
    assert run.collector is not None
    turns = (time.monotonic() - begun) / 0.1
    assert 4 <= run.collector.stats().missed <= turns


def test_every_failed_attempt_is_a_sample_of_its_own(server: Any, reply: Any, target: Callable[..., Target]) -> None:
    server.replies["/metrics"] = reply(status=503)
    run = Run([target(url=server.url, scrape_interval_s=0.05)])
    run.until(lambda: len(run.seen) >= 4)
    ups = [(s.ts, s.value) for o in run.seen for s in o.samples if s.metric == "up"]
    assert [value for _, value in ups] == [0.0] * len(run.seen)
    assert len({ts for ts, _ in ups}) == len(ups)
    assert run.collector is not None
    assert run.collector.stats().failures == len(run.seen)


def test_a_secret_that_is_missing_is_said_and_nothing_is_asked(server: Any, target: Callable[..., Target]) -> None:
    run = Run([target(url=server.url, options={"bearer_env": "TEST_NO_SUCH_VARIABLE"})])
    run.until(lambda: run.seen)
    assert "TEST_NO_SUCH_VARIABLE is empty" in (run.seen[0].error or "")
    assert server.requests == []


class Gpus(GpuReader):
    """One GPU, or none, or one that hangs."""

    def __init__(self, absent: str | None = None, hold: threading.Event | None = None) -> None:
        super().__init__()
        self.absent, self._hold, self.reads = absent, hold, 0

    def read(self, target: str, ts: float) -> list[Sample]:
        self.reads += 1
        if self._hold is not None:
            self._hold.wait(20)
        return [] if self.absent else [Sample(target, "device_power_watts", {"gpu": "0"}, ts, 300.0)]

    def new_xids(self) -> list[tuple[str, int]]:
        return [("0", 79)] if self.reads == 1 else []


def test_gpus_belong_to_the_targets_that_ask_for_them(server: Any, reply: Any, target: Callable[..., Target]) -> None:
    server.replies["/metrics"] = reply(PAGE)
    with_gpu = target("gpu", url=server.url, scrape_interval_s=0.05, options={"nvml": True})
    run = Run([with_gpu, target("plain", url=server.url, scrape_interval_s=0.05)], gpus=Gpus())
    run.until(lambda: len(run.of("gpu")) >= 3 and len(run.of("plain")) >= 3)
    for seen in run.of("gpu"):
        assert [s.ts for s in seen.samples if s.metric == "device_power_watts"] == [seen.ts]
    assert not any(s.metric == "device_power_watts" for o in run.of("plain") for s in o.samples)
    assert [f.message for o in run.seen for f in o.found] == ["GPU 0 reported XID 79."]


def test_a_machine_without_gpus_is_said_once_to_who_asked(
    server: Any, reply: Any, target: Callable[..., Target]
) -> None:
    server.replies["/metrics"] = reply(PAGE)
    asked = target("asked", url=server.url, scrape_interval_s=0.05, options={"nvml": True})
    own = target("own", url=server.url, scrape_interval_s=0.05, kind="embedded")

    class Absent(Gpus):
        def new_xids(self) -> list[tuple[str, int]]:
            return []

    run = Run([asked, own], gpus=Absent("No driver."))
    run.until(lambda: len(run.of("asked")) >= 3 and len(run.of("own")) >= 3)
    assert [(o.target.name, f.kind) for o in run.seen for f in o.found] == [("asked", "gpu_absent")]
    assert all(o.scrape is not None for o in run.seen)


def test_a_driver_that_hangs_holds_up_no_scrape(
    server: Any, reply: Any, target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probe.collect.collector.GPU_TIMEOUT_S", 0.05)
    server.replies["/metrics"] = reply(PAGE)
    hold = threading.Event()
    gpus = Gpus(hold=hold)
    run = Run([target(url=server.url, scrape_interval_s=0.05, options={"nvml": True})], gpus=gpus)
    run.until(lambda: len(run.seen) >= 5)
    hold.set()
    assert all(o.scrape is not None for o in run.seen)
    assert gpus.reads == 1


def test_a_prometheus_target_is_watched_as_any_other(tmp_path: Path, server: Any, reply: Any) -> None:
    """From its history in Prometheus to samples, an outage told by Prometheus, and an outage of Prometheus."""
    start, state = time.time(), {"up": "1"}

    def answer(form: str) -> Any:
        now = time.time()
        labels = {"job": "llm", "instance": "h:1"}
        names = {"up": state["up"], "vllm:num_requests_running": "4", "vllm:kv_cache_usage_perc": "0.5"}
        result = [{"metric": {"__name__": n, **labels}, "values": [[now, v]]} for n, v in names.items()]
        return reply(json.dumps({"status": "success", "data": {"result": result}}).encode())

    server.replies["/api/v1/query"] = answer
    options = {"matchers": {"job": "llm", "instance": "h:1"}}
    with Store.open(tmp_path) as store:
        store.targets.upsert(
            "p", url=server.url, kind="external", source="prometheus", options=options, scrape_interval_s=0.1
        )
        monitor = Monitor(store, tick_s=0.05)
        monitor.start()
        try:
            _until(lambda: len(store.samples.range("p", "requests_running", start)) >= 3)
            state["up"] = "0"
            _until(lambda: 0.0 in set(store.samples.range("p", "up", start)["value"]))
            server.replies["/api/v1/query"] = reply(status=503)
            _until(lambda: any("HTTP 503" in e.message for e in store.events.recent(kinds=["scrape_error"])))
            scrapes = monitor.stats().scraped.scrapes
            store.flush()
            ups = len(store.samples.range("p", "up", start))
            _until(lambda: monitor.stats().scraped.scrapes > scrapes + 5)
        finally:
            monitor.stop()
        assert len(store.samples.range("p", "up", start)) <= ups + 2  # unknown is not down
        assert set(store.samples.range("p", "requests_running", start)["value"]) == {4.0}
        assert "Prometheus could not scrape h:1." in {e.message for e in store.events.recent(kinds=["scrape_error"])}


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
