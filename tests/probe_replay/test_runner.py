"""The runner's logic with fakes: journal, verdicts, the wait for the operator, and that nothing outlives it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.supervisor import EngineExit, EngineStartError
from probe.replay.report import summary
from probe.replay.runner import ReplayRunner
from probe.replay.scenario import SCENARIOS, ReplayError, get_scenario, list_scenarios
from probe.store import Store

STEPS = ["hypothesis", "inject", "observe", "recommend", "apply", "verify", "done"]


@pytest.fixture
def drill(fakes: Any, server: Any) -> Iterator[Any]:
    fakes.FakeDrill.url, fakes.FakeDrill.script, fakes.FakeDrill.exits = server.url, {}, []
    fakes.FakeMonitor.started = fakes.FakeMonitor.stopped = 0
    yield fakes.FakeDrill
    fakes.FakeDrill.script = {}


def runner(fakes: Any, store: Store, tmp_path: Path, **more: Any) -> ReplayRunner:
    options = {"interactive": False, "alert_timeout_s": 0.5, **more}
    return ReplayRunner(
        store, fakes.FakeScenario(), drill=fakes.FakeDrill, monitor=fakes.FakeMonitor, log_dir=tmp_path, **options
    )


def steps_of(store: Store, replay_id: str) -> list[str]:
    seen: list[str] = []
    for entry in store.replays.journal(replay_id):
        if not seen or seen[-1] != entry.step:
            seen.append(entry.step)
    return seen


def test_the_whole_loop(fakes: Any, drill: Any, store: Store, tmp_path: Path) -> None:
    lines: list[str] = []
    made = runner(fakes, store, tmp_path, progress=lines.append)
    result = made.run()
    assert result["verified"]
    assert result["reproduced"]
    assert result["applied"]
    assert steps_of(store, made.replay_id) == STEPS
    replay = store.replays.get(made.replay_id)
    assert replay is not None
    assert (replay.status, replay.step, replay.result) == ("done", "done", result)
    assert result["target"] == f"drill-{made.replay_id[:8]}" == replay.target
    assert {c["flag"] for c in result["changes"]} == {"--gpu-memory-utilization", "--max-num-seqs"}
    for change in result["changes"]:
        assert {"flag", "from", "to", "why"} <= set(change)
    (alert,) = result["alerts"]
    assert (alert["rule"], alert["value"], alert["threshold"], alert["state"]) == (
        "eviction-storm",
        0.4,
        0.05,
        "resolved",
    )
    assert result["before"]["gpu_memory_utilization"] == 0.15
    assert result["after"]["gpu_memory_utilization"] > 0.15
    assert result["after"]["kv_cache_size_tokens"] > result["before"]["kv_cache_size_tokens"]
    assert result["after"]["completed"] == 6
    assert drill.last.closed
    assert store.targets.list() == []
    assert (fakes.FakeMonitor.started, fakes.FakeMonitor.stopped) == (1, 1)
    assert any(line.startswith("verify: ") for line in lines)
    assert "verified    yes" in summary(result)


def test_each_step_is_journaled_before_it_acts(fakes: Any, drill: Any, store: Store, tmp_path: Path) -> None:
    made = runner(fakes, store, tmp_path)
    at: dict[str, list[tuple[str, str]]] = {}

    def note(name: str) -> Any:
        return lambda: at.setdefault(name, [(e.step, e.message) for e in store.replays.journal(made.replay_id)])

    drill.script = {name: note(name) for name in ("start", "load_over", "restart")}
    made.run()
    assert at["start"][-1] == ("inject", "starting a drill engine")
    assert any("the incident's load" in message for _, message in at["load_over"])
    assert at["restart"][-1] == ("apply", "restart")
    assert [s for s, _ in at["restart"]].count("recommend") == 2


def test_without_the_remedy_it_is_not_verified(fakes: Any, drill: Any, store: Store, tmp_path: Path) -> None:
    result = runner(fakes, store, tmp_path, remedy=False).run()
    assert result["reproduced"]
    assert not result["verified"]
    assert not result["applied"]
    assert result["changes"]  # what would have been done is still told
    assert drill.last.flags == drill.last.first_flags
    (alert,) = result["alerts"]
    assert alert["state"] == "firing"
    assert "verified    no" in summary(result)


def test_failed_requests_in_the_second_run_are_not_verified(
    fakes: Any, drill: Any, server: Any, store: Store, tmp_path: Path
) -> None:
    server.fault = lambda n: "error_event" if n == 12 else ""  # 7 requests a run: the sixth of the second
    result = runner(fakes, store, tmp_path).run()
    assert result["reproduced"]
    assert not result["verified"]
    assert result["after"]["failed"] == 1


def test_an_incident_that_did_not_happen_cannot_be_verified(
    fakes: Any, drill: Any, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fakes, "set_alert", lambda *args: None)
    result = runner(fakes, store, tmp_path).run()
    assert not result["reproduced"]
    assert not result["verified"]
    assert result["alerts"] == []


def test_an_alert_that_fires_again_is_not_verified(
    fakes: Any, drill: Any, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fakes.set_alert

    def relapse(where: Store, target: str, state: str) -> None:
        real(where, target, state)
        if state == "resolved":
            real(where, target, "firing")

    monkeypatch.setattr(fakes, "set_alert", relapse)
    result = runner(fakes, store, tmp_path).run()
    assert result["reproduced"]
    assert not result["verified"]
    assert [c["measured"] for c in result["checks"]["verified"] if "alert" in c["name"]] == ["fired again"]


def test_interactive_waits_for_the_operator(fakes: Any, drill: Any, store: Store, tmp_path: Path) -> None:
    made = runner(fakes, store, tmp_path, interactive=True)
    box: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: box.update(made.run()))
    thread.start()
    end = time.monotonic() + 30
    while (store.replays.get(made.replay_id) or pytest.fail("gone")).status != "waiting_apply":
        assert time.monotonic() < end
        time.sleep(0.02)
    assert drill.last.flags == drill.last.first_flags
    assert not drill.last.closed
    store.replays.request_apply(made.replay_id)
    thread.join(30)
    assert box["verified"]
    assert (store.replays.get(made.replay_id) or pytest.fail("gone")).status == "done"


def test_nobody_applies(fakes: Any, drill: Any, store: Store, tmp_path: Path) -> None:
    result = runner(fakes, store, tmp_path, interactive=True, apply_timeout_s=0.3).run()
    assert not result["verified"]
    assert not result["applied"]
    assert result["after"] is None
    assert drill.last.closed


def test_an_engine_that_does_not_start_is_one_sentence(fakes: Any, drill: Any, store: Store, tmp_path: Path) -> None:
    def refuse() -> None:
        raise EngineStartError(EngineExit(2, "config", "no such model", (), time.time(), 0.1))

    drill.script = {"start": refuse}
    made = runner(fakes, store, tmp_path)
    with pytest.raises(ReplayError, match="stopped at step inject: no such model"):
        made.run()
    replay = store.replays.get(made.replay_id)
    assert replay is not None
    assert replay.status == "failed"
    assert replay.result is not None
    assert replay.result["error"] == "inject: no such model"
    assert drill.last.closed
    assert fakes.FakeMonitor.stopped == 1


def test_ctrl_c_stops_the_engine_and_says_so(fakes: Any, drill: Any, store: Store, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    drill.script = {"restart": interrupt}
    made = runner(fakes, store, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        made.run()
    replay = store.replays.get(made.replay_id)
    assert replay is not None
    assert (replay.status, replay.step) == ("interrupted", "apply")
    assert drill.last.closed
    assert store.replays.journal(made.replay_id)[-1].message == "interrupted by the operator"


@pytest.mark.parametrize(("method", "step"), [("start", "inject"), ("load_over", "inject"), ("restart", "apply")])
def test_a_crash_in_the_middle_loses_nothing(
    fakes: Any, drill: Any, server: Any, tmp_path: Path, method: str, step: str
) -> None:
    data = tmp_path / "data"
    code = (
        f"import sys; sys.path.insert(0, {str(Path(fakes.__file__).parent)!r}); "
        "from pathlib import Path; import fakes; "
        f"fakes.crash_at({method!r}, Path({str(data)!r}), {server.url!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert done.returncode == 9
    with sqlite3.connect(data / "kvoncall.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with Store.open(data) as store:
        (replay,) = store.replays.list()
        assert (replay.status, replay.step) == ("running", step)
        journal = store.replays.journal(replay.id)
        assert [e.seq for e in journal] == list(range(1, len(journal) + 1))
        assert journal[0].message == "fakes preempt each other"
        if method == "restart":
            assert journal[-1].message == "restart"
            assert any(e.step == "recommend" and e.data and e.data.get("changes") for e in journal)
        result = runner(fakes, store, tmp_path).run()  # the next replay works, and tidies up after the dead one
        old = store.replays.get(replay.id)
        assert old is not None
        assert old.status == "interrupted"
        assert store.replays.journal(replay.id)[-1].message.startswith("interrupted")
        assert store.targets.list() == []
        assert result["verified"]


def test_the_registry() -> None:
    assert [s.id for s in list_scenarios()] == sorted(SCENARIOS)
    assert get_scenario("oom") is SCENARIOS["oom"]
    with pytest.raises(ReplayError, match=r"there are: .*eviction-storm, .*prefix-collision"):
        get_scenario("nope")


def test_variants_are_forms_of_one_incident() -> None:
    assert get_scenario("int4-degradation", "outliers") == get_scenario("int4-degradation")
    assert "testbed-outliers" in get_scenario("int4-degradation").flags()
    assert "--model" not in get_scenario("int4-degradation", "plain").flags()
    with pytest.raises(ReplayError, match="no variant 'bent'; there are: outliers, plain"):
        get_scenario("int4-degradation", "bent")
    with pytest.raises(ReplayError, match="oom has no variant 'bent'; it has none"):
        get_scenario("oom", "bent")
