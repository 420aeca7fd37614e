"""The scenarios whose incident is a load: their flags and loads as data, and repairs that are not the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from probe.load.endpoint import Endpoint
from probe.load.generator import LoadOptions
from probe.load.report import LoadReport
from probe.load.traces import synthetic
from probe.replay.exercise import Bench, LoadExercise, Repair
from probe.replay.observation import LoadPlan, Observation
from probe.replay.runner import ReplayRunner
from probe.replay.scenario import SCENARIOS
from probe.replay.scenarios.load_scenario import LoadScenario
from probe.replay.scenarios.prefix_hit_collapse import PrefixHitCollapse
from probe.replay.scenarios.target_missing import FrozenProcess, TargetMissing
from probe.store import Store

ENDPOINT = Endpoint("testbed", 2048, 1046)
LOADS = {name: scenario for name, scenario in SCENARIOS.items() if isinstance(scenario, LoadScenario)}


@pytest.mark.parametrize("name", LOADS)
def test_a_scenario_fits_its_engine(name: str) -> None:
    scenario = LOADS[name]
    config = EngineConfig.from_args(scenario.flags())
    plan = scenario.load(ENDPOINT)
    assert plan.longest_request_tokens <= 2048
    for request in plan.requests:
        assert isinstance(request.prompt, tuple)
        assert len(request.prompt) == request.prompt_tokens
        assert max(request.prompt) < 1046
    assert len({r.request_id for r in plan.requests}) == len(plan.requests)
    if config.num_gpu_blocks_override:
        assert plan.longest_request_tokens <= (config.num_gpu_blocks_override - 1) * config.block_size


def test_changing_prompts_share_only_what_stands_in_front() -> None:
    scenario = PrefixHitCollapse()
    bad = [r.prompt for r in scenario.load(ENDPOINT).requests]
    good = [r.prompt for r in scenario._load(ENDPOINT, 3, in_front=False).requests]
    assert len({prompt[:16] for prompt in bad}) == len(bad)
    assert len({prompt[:480] for prompt in good}) == 1
    assert len({prompt[480:496] for prompt in good}) == 3


@dataclass
class StubDrill:
    """An engine that is only told to freeze."""

    frozen: int = 0
    name = "d"
    base_url = ""

    def freeze(self) -> None:
        self.frozen += 1

    def exits_since(self, ts: float) -> list[Any]:
        return []


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """First ids of what was sent, in place of sending it; nobody sleeps."""
    log: list[str] = []

    def send(self: LoadExercise, requests: Any, options: LoadOptions) -> LoadReport:
        log.append(f"{len(requests)} {requests[0].prompt[:2]}")
        return LoadReport(0.0, 1.0, len(requests), ())

    monkeypatch.setattr(LoadExercise, "_send", send)
    monkeypatch.setattr("time.sleep", lambda _: None)
    return log


def bench(store: Store, tmp_path: Path) -> Bench:
    store.targets.upsert("d", url="http://127.0.0.1:1", kind="drill")
    return Bench(store, StubDrill(), ENDPOINT, 0.0, tmp_path, lambda *_: None)  # type: ignore[arg-type]


def test_prompts_are_good_then_bad_and_good_again_once_mended(store: Store, tmp_path: Path, sent: list[str]) -> None:
    exercise = PrefixHitCollapse(good=3, bad=4).exercise(bench(store, tmp_path))
    exercise.incident()
    exercise.again()
    good, bad, again = sent
    assert good.startswith("3 ")
    assert again == bad
    assert exercise.repair() is not None
    exercise.again()
    assert sent[-1] == f"4 {good[2:]}"


def test_a_process_is_stopped_until_that_is_mended(store: Store, tmp_path: Path, sent: list[str]) -> None:
    at = bench(store, tmp_path)
    exercise = FrozenProcess(at, TargetMissing())
    exercise.incident()
    exercise.again()
    assert at.drill.frozen == 2  # type: ignore[attr-defined]
    exercise.repair()
    exercise.again()
    assert at.drill.frozen == 2  # type: ignore[attr-defined]
    assert len(sent) == 3


@pytest.mark.parametrize("remedy", [True, False])
def test_a_repair_is_applied_and_reported_with_the_remedy_only(
    fakes: Any, server: Any, store: Store, tmp_path: Path, remedy: bool
) -> None:
    fakes.FakeDrill.url, fakes.FakeDrill.script, fakes.FakeDrill.exits = server.url, {}, []

    class Mended(fakes.FakeScenario):  # type: ignore[misc]
        runbook = "kv-block-leak"  # computes no flag

        def exercise(self, bench: Bench) -> LoadExercise:
            return LoadExercise(bench, self.load, repair=Repair("mended by hand", {"--max-num-seqs": 7}))

    made = ReplayRunner(
        store, Mended(), drill=fakes.FakeDrill, monitor=fakes.FakeMonitor, log_dir=tmp_path, interactive=False,
        remedy=remedy, alert_timeout_s=0.5,
    )  # fmt: skip
    result = made.run()
    assert result["changes"] == []
    assert (result["repair"], result["applied"], result["verified"]) == (
        ("mended by hand", True, True) if remedy else (None, False, False)
    )
    assert ("7" in fakes.FakeDrill.last.flags) is remedy


def test_quiet_follows_the_load(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: list[str]) -> None:
    naps: list[float] = []
    monkeypatch.setattr("time.sleep", naps.append)
    requests = tuple(synthetic(1, prompt_tokens=4, max_tokens=1, vocab_size=50, name="q"))
    plan = LoadPlan(requests, LoadOptions(concurrency=1), "one", quiet_s=3.0)
    seen = LoadExercise(bench(store, tmp_path), lambda _: plan).incident()
    assert isinstance(seen, Observation)
    assert isinstance(seen.metrics, Mapping)
    assert 3.0 in naps
