"""The canary of the embedded engine and the measurement of formats: what they wait for, keep and refuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import app.canary as canary_module
import app.measuring as measuring_module
from app.canary import CanaryWatch
from app.embedded import NAME
from app.measuring import Measuring
from app.runtime import AppError, Runtime
from probe.quality.suite import QualityError, SuiteSpec
from probe.store import QualityRun, Store

Use = Callable[..., Runtime]
SPEC = SuiteSpec(conversations=2)
WAIT_S = 60.0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class FakeLab:
    """A lab whose engines are only names; `answer` decides what a measurement does."""

    answer: Callable[[str], Any]

    def __init__(self, store: Store, base_flags: Any, *, log_dir: Path, progress: Callable[..., None]) -> None:
        FakeLab.flags = list(base_flags)
        self.progress = progress

    def __enter__(self) -> FakeLab:
        return self

    def __exit__(self, *_: object) -> None:
        FakeLab.left = True

    def measure(self, arm: Any, spec: SuiteSpec, *, baseline: Any = None) -> Any:
        self.progress(f"{arm.name}: 1 of 2 items")
        FakeLab.compared.append((arm.name, baseline))
        return FakeLab.answer(arm.name)

    def measure_all(self, arms: Any, spec: SuiteSpec, *, baseline: Any) -> Iterator[Any]:
        return (self.measure(arm, spec, baseline=baseline) for arm in arms)

    flags: list[str]
    left = False
    compared: list[tuple[str, Any]]


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> type[FakeLab]:
    FakeLab.answer = staticmethod(lambda name: f"run of {name}")
    FakeLab.compared, FakeLab.left, FakeLab.flags = [], False, []
    monkeypatch.setattr(measuring_module, "Lab", FakeLab)
    return FakeLab


@contextmanager
def silence() -> Iterator[None]:
    yield


def test_formats_are_compared_with_the_first_on_engines_with_the_other_flags(
    store: Store, tmp_path: Path, lab: type[FakeLab]
) -> None:
    measuring = Measuring(store, tmp_path, silence)
    flags = ["--max-num-seqs", "8", "--kv-cache-dtype", "int4_symmetric", "--kv-cache-dtype-skip-layers", "0"]
    measuring.run(flags, ["auto", "int4_kivi", "int8_per_token_head"], SPEC)
    base = "run of auto"
    assert lab.compared == [("auto", None), ("int4_kivi", base), ("int8_per_token_head", base)]
    assert lab.flags == ["--max-num-seqs", "8"]  # the cache is at its defaults, so that an arm is one format only
    status = measuring.status()
    assert (status.done, status.running, status.problem) == (3, False, None)
    assert status.lines[0][1] == "auto: 1 of 2 items"


def test_failure_keeps_the_sentence_and_leaves_the_lab(store: Store, tmp_path: Path, lab: type[FakeLab]) -> None:
    def fail(name: str) -> Any:
        raise QualityError("the engine is gone; 3 of 40 items are kept, resume with run x")

    lab.answer = staticmethod(fail)
    quiet: list[str] = []

    @contextmanager
    def noted() -> Iterator[None]:
        quiet.append("held")
        try:
            yield
        finally:
            quiet.append("released")

    measuring = Measuring(store, tmp_path, noted)
    measuring.run([], ["auto"], SPEC)
    assert measuring.status().problem == "the engine is gone; 3 of 40 items are kept, resume with run x"
    assert lab.left
    assert quiet == ["held", "released"]


def test_stop_ends_after_the_format_under_way(store: Store, tmp_path: Path, lab: type[FakeLab]) -> None:
    measuring = Measuring(store, tmp_path, silence)
    inside, go_on = threading.Event(), threading.Event()

    def answer(name: str) -> str:
        if name == "fp8_e4m3":
            inside.set()
            assert go_on.wait(WAIT_S)
        return name

    lab.answer = staticmethod(answer)
    thread = measuring.start([], ["auto", "fp8_e4m3", "int4_kivi"], SPEC)
    assert inside.wait(WAIT_S)
    measuring.stop()
    assert measuring.status().stopping
    go_on.set()
    thread.join(WAIT_S)
    status = measuring.status()
    assert not status.running
    assert [name for name, _ in lab.compared] == ["auto", "fp8_e4m3"]
    assert "what was measured is kept" in status.lines[-1][1]


def test_one_heavy_thing_at_a_time(
    seeded: Store, use: Use, fake_engine: Callable[..., Any], lab: type[FakeLab]
) -> None:
    engine = fake_engine("running")
    runtime = use(seeded, engine)
    go_on = threading.Event()
    lab.answer = staticmethod(lambda name: go_on.wait(WAIT_S))
    runtime.start_measuring(["auto", "int4_kivi"], SPEC)
    try:
        with pytest.raises(AppError, match="measurement of formats is running"):
            runtime.start_measuring(["auto"], SPEC)
        with pytest.raises(AppError, match="measurement of formats is running"):
            runtime.start_replay("oom")
        assert runtime.busy()
    finally:
        go_on.set()
    wait_for(lambda: not runtime.busy())
    assert [call[0] for call in engine.calls] == ["hold_load", "release_load"]
    assert lab.flags == ["--max-num-seqs", "48", "--num-gpu-blocks-override", "200"]


def test_a_model_with_a_licence_is_not_measured_before_it_is_accepted(
    seeded: Store, use: Use, fake_engine: Callable[..., Any], lab: type[FakeLab]
) -> None:
    engine = fake_engine("running")
    engine.notice = "terms"
    runtime = use(seeded, engine)
    with pytest.raises(AppError, match="Accept the licence"):
        runtime.start_measuring(["auto"], SPEC)
    assert runtime._engine_url() is None  # nor asked by the canary
    engine.notice = None
    assert runtime._engine_url() == "http://127.0.0.1:1"


class FakeCanary:
    """Rounds without questions; `fail` makes one fail."""

    rounds: list[tuple[str, QualityRun | None]]
    fail: str | None

    def __init__(self, store: Store, target: str, url: str, spec: SuiteSpec, baseline: QualityRun | None) -> None:
        self.store, self.url, self.spec, self.baseline = store, url, spec, baseline

    def round(self) -> QualityRun:
        FakeCanary.rounds.append((self.url, self.baseline))
        if FakeCanary.fail is not None:
            raise QualityError(FakeCanary.fail)
        spec = self.spec.fitted("testbed", 2048)
        base = self.baseline.id if self.baseline is not None else None
        run = self.store.quality.start(NAME, "canary", "testbed", spec.to_dict(), spec.key, {}, base)
        self.baseline = self.baseline or run
        data = {"run_id": run.id, "baseline_id": self.baseline.id}
        self.store.events.add(NAME, "quality_round", "a round", data=data)
        return run


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, QualityRun | None]]:
    FakeCanary.rounds, FakeCanary.fail = [], None
    monkeypatch.setattr(canary_module, "Canary", FakeCanary)
    monkeypatch.setattr(canary_module, "LOOK_S", 0.01)
    return FakeCanary.rounds


def test_canary_waits_for_engine_and_processor(seeded: Store, rounds: list[Any]) -> None:
    url: list[str | None] = [None]
    busy = [True]
    watch = CanaryWatch(seeded, lambda: url[0], lambda: busy[0])
    watch.start(0.02)
    wait_for(lambda: "the engine is away" in (watch.status().waiting or ""))
    url[0] = "http://127.0.0.1:5"
    wait_for(lambda: watch.status().waiting == "a drill or a measurement has the processor")
    assert rounds == []
    busy[0] = False
    wait_for(lambda: len(rounds) >= 3)
    watch.stop(timeout_s=WAIT_S)
    assert not watch.status().running
    assert rounds[0] == ("http://127.0.0.1:5", None)
    first = seeded.events.recent(limit=None, kinds=["quality_round"])[-1].data["run_id"]
    assert [baseline.id for _, baseline in rounds[1:3]] == [first, first]


def test_canary_keeps_its_baseline_until_a_new_one_is_wanted(seeded: Store, rounds: list[Any]) -> None:
    def one_round(new_baseline: bool) -> None:
        watch = CanaryWatch(seeded, lambda: "http://127.0.0.1:5", lambda: False)
        watch.start(WAIT_S, new_baseline=new_baseline)
        wait_for(lambda: watch.status().rounds == 1)
        watch.stop(timeout_s=WAIT_S)

    for new_baseline in (False, False, True):
        one_round(new_baseline)
    assert rounds[0][1] is None
    assert rounds[1][1] is not None
    assert rounds[2][1] is None


def test_canary_round_that_fails_is_told_and_the_next_one_comes(seeded: Store, rounds: list[Any]) -> None:
    FakeCanary.fail = "the baseline was asked other questions"
    watch = CanaryWatch(seeded, lambda: "http://127.0.0.1:5", lambda: False)
    watch.start(0.02)
    wait_for(lambda: watch.status().problem == "the baseline was asked other questions")
    FakeCanary.fail = None
    wait_for(lambda: watch.status().rounds >= 2)
    watch.stop(timeout_s=WAIT_S)
    assert watch.status().problem is None
