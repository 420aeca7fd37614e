"""The incidents page: scenarios, running one, a replay that waits, one that is done, one that was interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import app.runtime as runtime_module
from app.runtime import AppError, Runtime
from probe.replay.scenario import SCENARIOS
from probe.store import Store

Open = Callable[..., Any]
Use = Callable[..., Runtime]


def finished(store: Store, verified: bool) -> str:
    """A replay with a result in the shape of the runner's report."""
    replay = store.replays.create("oom", "drill-1")
    store.replays.append(replay.id, "hypothesis", "the pool is too large")
    store.replays.append(replay.id, "verify", "verified")
    store.replays.set_step(replay.id, "done")
    result = {
        "verified": verified,
        "load": "5 documents of 2000 tokens at once",
        "before": {"failed": 5, "completed": 0, "engine_exit": "engine died: out of memory", "ttft_s": None},
        "after": {"failed": 0, "completed": 5, "engine_exit": None, "ttft_s": {"p95": 0.25}},
        "checks": {
            "verified": [{"name": "no failed requests", "ok": verified, "measured": "0 failed", "expected": "0"}]
        },
    }
    store.replays.finish(replay.id, "done", result)
    return replay.id


def test_scenarios_show_hypothesis_and_published_case(store: Store, use: Use, open_page: Open) -> None:
    use(store)
    page = open_page("incidents")
    page.assert_calm()
    hypotheses = [m.value for m in page.at.markdown if m.value.startswith("**Hypothesis:**")]
    scenarios = set(SCENARIOS)
    assert scenarios >= {"oom", "eviction-storm", "int4-degradation"}
    assert len(hypotheses) == len(scenarios)
    assert {b.key for b in page.at.button} == {f"run-{scenario}" for scenario in scenarios}
    assert "327,680" in page.text or "327680" in page.text.replace("\u202f", "")  # KV bytes a token of the 70B case
    assert "No replay was run against this store yet." in page.text


def test_run_starts_the_replay_and_opens_it(
    store: Store, use: Use, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    class Runner:
        def __init__(self, store: Store, scenario: Any, *, interactive: bool, log_dir: Any) -> None:
            assert interactive
            self.replay_id = store.replays.create(scenario.id, "drill-x").id
            store.replays.append(self.replay_id, "hypothesis", scenario.hypothesis)
            store.replays.set_step(self.replay_id, "hypothesis")

        def run(self) -> None:
            assert release.wait(60)

    monkeypatch.setattr(runtime_module, "ReplayRunner", Runner)
    runtime = use(store)
    page = open_page("incidents")
    page.at.button(key="run-oom").click().run()
    try:
        page.assert_calm()
        replay = store.replays.list()[0]
        assert page.at.query_params["replay"] == replay.id
        assert f"Replay {replay.id}" in page.text
        assert "◔ running" in page.text
        assert page.at.button(key="run-oom").disabled  # one at a time
        with pytest.raises(AppError, match="running already"):
            runtime.start_replay("eviction-storm")
    finally:
        release.set()
    for thread in runtime.replay_threads:
        thread.join(10)
    assert not runtime.replay_running()


def test_done_replay_shows_verdict_figures_and_conditions(store: Store, use: Use, open_page: Open) -> None:
    use(store)
    page = open_page("incidents", replay=finished(store, verified=True))
    page.assert_calm()
    assert ":green-badge[✔ verified]" in page.text
    table = next(t for t in page.tables if "before" in t.columns).set_index("figure")
    assert table.loc["requests failed"].tolist() == ["5", "0"]
    assert table.loc["engine died"].tolist() == ["engine died: out of memory", "—"]
    assert table.loc["TTFT p95"].tolist() == ["—", "250 ms"]
    checks = next(t for t in page.tables if "condition" in t.columns)
    assert checks["met"].tolist() == ["✔ yes"]


def test_replay_that_failed_to_verify_is_not_called_verified(store: Store, use: Use, open_page: Open) -> None:
    use(store)
    page = open_page("incidents", replay=finished(store, verified=False))
    assert ":red-badge[✖ not verified]" in page.text
    assert "✔ verified" not in page.text


def test_interrupted_replay_shows_how_far_it_came(store: Store, use: Use, open_page: Open) -> None:
    replay = store.replays.create("oom", "drill-2")
    store.replays.append(replay.id, "hypothesis", "the pool is too large")
    store.replays.append(replay.id, "inject", "drill engine runs")
    store.replays.set_step(replay.id, "inject")
    store.replays.set_status(replay.id, "interrupted")
    use(store)
    page = open_page("incidents", replay=replay.id)
    page.assert_calm()
    assert "interrupted at step “inject”" in page.at.warning[0].value
    assert "drill engine runs" in page.text
    history = page.at.dataframe[-1].value
    assert history["status"].tolist() == ["◌ interrupted"]
    assert history["came to step"].tolist() == ["inject"]


def test_replay_that_waits_links_alert_and_runbook(seeded: Store, use: Use, open_page: Open) -> None:
    replay = seeded.replays.create("eviction-storm", "embedded")
    seeded.replays.set_step(replay.id, "apply")
    seeded.replays.set_status(replay.id, "waiting_apply")
    use(seeded)
    alert = seeded.alerts.active()[0]
    page = open_page("incidents", replay=replay.id)
    page.assert_calm()
    assert "▲ waiting for your change" in page.text
    assert f"alerts?alert={alert.id}" in page.text
    assert f"runbooks?runbook=eviction-storm&alert={alert.id}&replay={replay.id}" in page.text


def test_unknown_replay_is_a_notice(store: Store, use: Use, open_page: Open) -> None:
    use(store)
    page = open_page("incidents", replay="nope")
    page.assert_calm()
    assert "There is no replay `nope`" in page.at.warning[0].value


def test_failed_replay_says_why(store: Store, use: Use, open_page: Open) -> None:
    replay = store.replays.create("oom", "drill-3")
    store.replays.finish(replay.id, "failed", {"verified": False, "error": "inject: the port is taken"})
    use(store)
    page = open_page("incidents", replay=replay.id)
    page.assert_calm()
    assert page.errors == ["inject: the port is taken"]
