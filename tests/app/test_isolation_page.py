"""The isolation page: rounds of the probe, what isolation costs, the prefix tree, and starting a round."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

import app.isolating as isolating_module
from app.isolating import Isolating
from app.runtime import AppError, Runtime
from app.ui.isolation_price import by_owner, by_scope, share
from app.ui.isolation_rounds import effect, p_value, verdict_mark
from probe.isolation.client import ProbeError
from probe.isolation.options import IsolationOptions, plan_budget
from probe.store import Store

Open = Callable[..., Any]
Use = Callable[..., Runtime]
TOLD: dict[str, Any] = json.loads(Path(__file__).with_name("isolation.json").read_text())
ROUND: dict[str, Any] = TOLD["round"]
WAIT_S = 60.0


@pytest.fixture
def watched(store: Store, debug_server: str) -> Store:
    """A store that watches an engine with a prefix cache."""
    store.targets.upsert("embedded", url=debug_server, kind="embedded", engine="kvoncall")
    return store


def test_without_a_target_the_page_says_what_to_do(store: Store, use: Use, open_page: Open) -> None:
    use(store)
    page = open_page("isolation")
    page.assert_calm()
    assert "start the embedded engine on the Engine page" in page.text


def test_a_target_nobody_probed_says_how(watched: Store, use: Use, open_page: Open) -> None:
    use(watched)
    page = open_page("isolation")
    page.assert_calm()
    assert "`embedded` was not probed yet" in page.text
    assert "kvoncall isolation --target embedded" in page.text


def test_a_round_shows_every_check_with_its_figures(watched: Store, use: Use, open_page: Open) -> None:
    watched.events.add("embedded", "isolation_round", "leak shown", data=ROUND)
    use(watched)
    page = open_page("isolation")
    page.assert_calm()
    table = next(t for t in page.tables if "verdict" in t.columns).set_index("check")
    assert "■ leak shown" in table.loc["side-channel-tokens", "verdict"]
    assert table.loc["side-channel-tokens", "effect"] == "1\u202f024 tokens"
    assert table.loc["side-channel-tokens", "p"] == "< 0.0001"
    assert "◇ no leak found" in table.loc["leak-canary", "verdict"]
    assert table.loc["leak-canary", "upper bound"] == "8.8%"
    assert table.loc["side-channel-ttft", "effect"] == "AUC 0.61 (0.48 to 0.74)"
    assert "◌ not run" in table.loc["cache-salt", "verdict"]
    [chart] = [c for c in page.at.get("vega_lite_chart") if "Time to the first token" in c.proto.alt]
    assert chart.proto.alt.endswith(
        "medians: new to the server 48 ms, warmed by another tenant 34 ms, its own repeat 31 ms."
    )
    assert "212 requests of at most 260 sent in 30 s, 1 failed" in page.text
    assert "Every id it sent starts with kvoncall-probe-1a2b3c4d" in page.text
    assert "safe" not in page.text.lower()


def test_an_earlier_round_is_opened_by_its_link(watched: Store, use: Use, open_page: Open) -> None:
    old = watched.events.add("embedded", "isolation_round", "old", data={**ROUND, "sentence": "the old one"}, ts=5.0)
    watched.events.add("embedded", "isolation_round", "new", data={**ROUND, "error": "two failures"})
    use(watched)
    newest = open_page("isolation")
    assert "The round stopped early: two failures." in newest.text
    assert newest.at.dataframe[-1].value["found"].tolist() == [ROUND["sentence"], "the old one"]
    page = open_page("isolation", round=str(old.id))
    page.assert_calm()
    assert ":red-badge[■ leak shown] the old one" in page.text
    assert "The round stopped early" not in page.text


def test_price_and_tree_come_from_the_engine(watched: Store, use: Use, open_page: Open) -> None:
    use(watched)
    page = open_page("isolation")
    page.assert_calm()
    tiles = {m.label: (m.value, m.delta) for m in page.at.metric}
    assert tiles["Prefix hit rate"] == ("40.0%", "4\u202f000 of 10\u202f000 tokens")
    assert tiles["Lost to isolation"] == ("12.5%", "1\u202f250 tokens")
    assert tiles["Isolation breaches"] == ("0", "refused: none")
    owners = next(t for t in page.tables if "owner" in t.columns)
    assert owners["owner"].tolist() == ["a1b2c3d4/00aa11bb", "9988aacc/77ee55dd", "unnamed", "other"]
    tree = next(t for t in page.tables if "prefix" in t.columns)
    assert [cell.strip("├└─\u00a0") for cell in tree["prefix"]] == ["7a44ee55", "8b55ff66", "9c660011"]
    assert "`--prefix-cache-scope session`" in page.text


def test_an_engine_that_does_not_answer_is_a_notice(store: Store, use: Use, open_page: Open) -> None:
    store.targets.upsert("embedded", url="http://127.0.0.1:1", kind="embedded", engine="kvoncall")
    use(store)
    page = open_page("isolation")
    page.assert_calm()
    assert not page.errors
    assert "Start it on the Engine page." in page.text


def test_another_engine_is_not_asked_for_what_it_does_not_tell(store: Store, use: Use, open_page: Open) -> None:
    store.targets.upsert("gpu-1", url="http://127.0.0.1:1", kind="external", engine="vllm")
    use(store)
    page = open_page("isolation")
    page.assert_calm()
    assert "Only the embedded engine tells whose blocks its hits were" in page.text


def test_the_budget_is_said_before_a_round_starts(watched: Store, use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.targets.upsert("gpu-1", url="http://127.0.0.1:1", kind="external", engine="vllm")
    runtime = use(watched)
    asked: list[Any] = []
    monkeypatch.setattr(runtime, "start_isolation", lambda *args: asked.append(args))
    script = (
        "from app.runtime import get_runtime\nfrom app.ui.isolation_run import confirm\n"
        "confirm(get_runtime().store.targets.get('gpu-1'))"
    )
    shown = AppTest.from_string(script, default_timeout=60).run()
    shown.multiselect(key="isolation-checks").set_value([]).run()
    assert [error.value for error in shown.error] == ["Choose at least one check."]
    assert not shown.button
    shown.multiselect(key="isolation-checks").set_value(["cache-salt"]).run()
    shown.number_input(key="isolation-probes").set_value(10).run()
    options = IsolationOptions(("cache-salt",), 10)
    budget = next(m.value for m in shown.markdown if m.value.startswith("**Budget:**"))
    assert plan_budget(options).sentence in budget.replace("\\", "")
    shown.text_input(key="isolation-key").input("GPU_1_KEY")
    shown.button(key="isolation-confirm").click().run()
    assert not shown.exception
    assert [(target.name, given, key) for target, given, key in asked] == [("gpu-1", options, "GPU_1_KEY")]


class FakeProbe:
    """Stands in for the probe; `go_on` lets the round end."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.asked: list[dict[str, Any]] = []
        self.recorded: list[tuple[str, Any]] = []
        self.error: Exception | None = None

    def run(self, base_url: str, options: IsolationOptions, **named: Any) -> Any:
        self.asked.append({"base_url": base_url, **named})
        named["progress"]("leak-canary: 1 of 2")
        assert self.go_on.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return type("Result", (), {"sentence": f"cancelled: {named['cancelled']()}"})()

    def record(self, store: Store, target: str, result: Any) -> None:
        self.recorded.append((target, result.sentence))


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> FakeProbe:
    fake = FakeProbe()
    monkeypatch.setattr(isolating_module, "run_isolation", fake.run)
    monkeypatch.setattr(isolating_module, "record", fake.record)
    return fake


def wait_for_end(isolating: Isolating) -> None:
    assert isolating._thread is not None
    isolating._thread.join(WAIT_S)
    assert not isolating.status().running


def test_one_round_at_a_time_without_background_traffic(
    watched: Store, use: Use, fake_engine: Callable[..., Any], probe: FakeProbe
) -> None:
    engine = fake_engine("running")
    runtime = use(watched, engine)
    target = watched.targets.get("embedded")
    assert target is not None
    runtime.start_isolation(target, IsolationOptions())
    try:
        for start in (lambda: runtime.start_isolation(target, IsolationOptions()), lambda: runtime.start_replay("oom")):
            with pytest.raises(AppError, match="probe of isolation is running"):
                start()
        runtime.isolating.stop()
        assert runtime.isolating.status().stopping
    finally:
        probe.go_on.set()
    wait_for_end(runtime.isolating)
    assert [call[0] for call in engine.calls] == ["hold_load", "release_load"]
    assert probe.recorded == [("embedded", "cancelled: True")]
    assert [line for _, line in runtime.isolating.status().lines] == ["leak-canary: 1 of 2", "cancelled: True"]


def test_a_probe_that_cannot_be_carried_out_says_why(watched: Store, use: Use, probe: FakeProbe) -> None:
    runtime = use(watched)
    target = watched.targets.upsert("gpu-1", url="http://127.0.0.1:1", kind="external", engine="vllm")
    probe.error = ProbeError("http://127.0.0.1:1 did not answer")
    probe.go_on.set()
    runtime.start_isolation(target, IsolationOptions())
    wait_for_end(runtime.isolating)
    assert runtime.isolating.status().problem == "http://127.0.0.1:1 did not answer"
    assert probe.recorded == []


def test_an_api_key_is_read_from_the_environment(
    watched: Store, use: Use, probe: FakeProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = use(watched)
    target = watched.targets.upsert("gpu-1", url="http://127.0.0.1:1", kind="external", engine="vllm")
    monkeypatch.delenv("GPU_1_KEY", raising=False)
    with pytest.raises(AppError, match="GPU_1_KEY is not set"):
        runtime.start_isolation(target, IsolationOptions(), "GPU_1_KEY")
    monkeypatch.setenv("GPU_1_KEY", "k")
    probe.go_on.set()
    runtime.start_isolation(target, IsolationOptions(), "GPU_1_KEY")
    wait_for_end(runtime.isolating)
    assert [asked["api_key"] for asked in probe.asked] == ["k"]


def test_an_embedded_engine_that_is_away_is_not_probed(
    watched: Store, use: Use, fake_engine: Callable[..., Any], probe: FakeProbe
) -> None:
    runtime = use(watched, fake_engine("crashed"))
    target = watched.targets.get("embedded")
    assert target is not None
    with pytest.raises(AppError, match="engine is away"):
        runtime.start_isolation(target, IsolationOptions())
    assert probe.asked == []


def test_what_was_not_counted_is_not_a_zero() -> None:
    assert share(0, 0) == "no data"
    assert by_scope({"prefix_hits_by_scope": {"own": 3}, "prefix_queries_total": 0})[0]["of all looked up"] == "no data"
    assert by_owner({}) == []
    rows = by_owner({"cached_blocks_by_owner": {**{str(i): 100 - i for i in range(12)}, "other": 500}})
    assert rows[-1] == {"owner": "all others", "blocks": "862", "share": "52.8%"}
    assert len(rows) == 9
    assert effect({"check": "leak-canary"}) == "—"
    assert p_value(None) == "—"
    assert p_value(0.25) == "0.2500"


@pytest.mark.parametrize("verdict", ["leak shown", "no leak", "no leak in 40 probes", "inconclusive", "not run", "?"])
def test_no_verdict_is_green(verdict: str) -> None:
    assert verdict_mark(verdict).color != "green"
