"""The quality page: nothing measured yet, formats compared, a replay's candidates, applying, the canary, measuring."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app.runtime import Runtime
from probe.quality.suite import SuiteSpec
from probe.store import QualityRun, Sample, Store

Open = Callable[..., Any]
Use = Callable[..., Runtime]
Measured = Callable[..., list[QualityRun]]


def with_candidates(store: Store, runs: list[QualityRun]) -> str:
    """A replay that measured these runs as candidates."""
    candidates = []
    for run in runs:
        result, full = run.result or {}, run.baseline_id is None
        fall = result["against"] or {"drop": 0.0, "low": 0.0, "high": 0.0}
        candidates.append({
            "name": run.label, "flags": {"--kv-cache-dtype": run.label, "--kv-cache-dtype-layers": None},
            "kv_bytes_per_token": run.facts["kv_bytes_per_token"], "items": 120,
            "accuracy": result["overall"]["accuracy"], "drop": fall["drop"], "low": fall["low"], "high": fall["high"],
            "mean_kl": None, "full_precision": full, "run_id": run.id,
        })  # fmt: skip
    replay = store.replays.create("int4-degradation", "drill-1")
    layers = [{"layer": n, "mean_kl": 0.1 * n, "top1_agreement": 0.9} for n in range(4)]
    store.replays.set_step(replay.id, "done")
    store.replays.finish(replay.id, "done", {"verified": True, "candidates": candidates, "layers": layers})
    return replay.id


def charts(page: Any) -> list[str]:
    """Alternative texts of the charts."""
    return [chart.proto.alt for chart in page.at.get("vega_lite_chart")]


def test_empty_page_says_what_to_do(seeded: Store, use: Use, open_page: Open, fake_engine: Open) -> None:
    use(seeded, fake_engine("running"))
    page = open_page("quality")
    page.assert_calm()
    assert "No cache format was measured here yet" in page.at.info[0].value
    assert "No canary asked this target in the last day" in page.text
    assert {"Start canary", "Measure formats"} <= {b.label for b in page.at.button}
    assert charts(page) == []


def test_page_without_any_target(store: Store, use: Use, open_page: Open) -> None:
    use(store)
    page = open_page("quality")
    page.assert_calm()
    assert "No target is watched yet" in page.at.info[0].value


def test_formats_are_charted_and_judged(
    seeded: Store, use: Use, open_page: Open, fake_engine: Open, measured: Measured
) -> None:
    measured(seeded)
    use(seeded, fake_engine("running"))
    page = open_page("quality")
    page.assert_calm()
    by_turn, pareto = charts(page)
    assert "float16 (baseline) 100.0% at turn 1, 100.0% at turn 20" in by_turn
    assert "int4_symmetric 100.0% at turn 1, 50.0% at turn 20" in by_turn
    assert "on the front: int4_kivi 320 bytes, 100.0%." in pareto
    table = next(t for t in page.tables if "against the baseline" in t.columns).set_index("format")
    assert table.loc["float16"].tolist() == [
        "1\u202f024 (100.0%)", "120", "100.0%", "96.9% to 100.0%", "0.0%", "—", "—", "—", "◆ baseline",
    ]  # fmt: skip
    assert table.loc["int4_symmetric", "against the baseline"].startswith("✖ worse −40.0 points")
    assert table.loc["int4_symmetric", "invalid"] == "15.0%"
    tasks = next(t for t in page.tables if "task" in t.columns)
    assert set(tasks["task"]) == {"recall", "add", "brackets"}
    turn = next(t for t in page.tables if "turn" in t.columns).set_index("turn")
    assert turn.loc["20", "int4_symmetric"] == "3 of 6"
    assert "Of the formats that hold quality, **int4_kivi** has the fewest bytes" in page.text
    page.at.segmented_control(key="quality-task").select("recall").run()
    assert "Accuracy by turn, recall" in charts(page)[0]


def test_candidate_of_the_same_model_is_applied_through_the_engine(
    seeded: Store, use: Use, open_page: Open, fake_engine: Open, measured: Measured
) -> None:
    measured(seeded)
    use(seeded, fake_engine("running"))
    page = open_page("quality")
    assert page.at.selectbox(key="candidate").value == "int4_kivi"
    assert page.at.code[0].value.splitlines() == [
        "- kvoncall serve --max-num-seqs 48 --num-gpu-blocks-override 200",
        "+ kvoncall serve --max-num-seqs 48 --num-gpu-blocks-override 200 --kv-cache-dtype int4_kivi",
    ]
    assert page.button("Apply change")
    page.at.selectbox(key="candidate").select("int8_per_token_head").run()
    assert "--kv-cache-dtype int8_per_token_head" in page.at.code[0].value
    assert "measured: accuracy 100.0% over 120 questions" in page.text


def test_applying_takes_a_reason_and_restarts(seeded: Store, use: Use, fake_engine: Open) -> None:
    engine = fake_engine("running")
    use(seeded, engine)
    change = {"flag": "--kv-cache-dtype", "from": "auto", "to": "int4_kivi"}
    script = f"from app.ui.apply import Proposal, confirm_embedded\nconfirm_embedded(Proposal([{change!r}], [], ''))"
    shown = AppTest.from_string(script, default_timeout=60).run()
    shown.button(key="apply-confirm").click().run()
    assert "Give a reason" in shown.error[0].value
    assert engine.calls == []
    shown.text_input(key="apply-reason").input("measured to hold")
    shown.button(key="apply-confirm").click().run()
    flags = ["--max-num-seqs", "48", "--num-gpu-blocks-override", "200", "--kv-cache-dtype", "int4_kivi"]
    assert engine.calls == [("restart", "measured to hold", flags)]


def test_other_model_is_named_and_not_applied(
    seeded: Store, use: Use, open_page: Open, fake_engine: Open, measured: Measured
) -> None:
    measured(seeded, model="testbed-outliers")
    use(seeded, fake_engine("running"))
    page = open_page("quality")
    page.assert_calm()
    assert "This model was altered on purpose" in page.text
    assert "Both variants are measured" in page.text
    assert "Measured on testbed-outliers, but the embedded engine serves the testbed model" in page.text
    assert "Apply change" not in [b.label for b in page.at.button]


def test_replay_candidates_are_shown_on_both_pages(
    seeded: Store, use: Use, open_page: Open, measured: Measured
) -> None:
    replay = with_candidates(seeded, measured(seeded))
    use(seeded)
    page = open_page("quality")
    page.assert_calm()
    assert len(page.at.selectbox(key="chosen-measurement").options) == 1  # its runs are not listed once more
    assert any("bar chart of 4 layers; the most sensitive is layer 3" in text for text in charts(page))
    assert f"Open the replay -> incidents?replay={replay}" in page.text
    page = open_page("incidents", replay=replay)
    page.assert_calm()
    assert [text.split(":")[0] for text in charts(page)][:2] == [
        "Accuracy by turn, all tasks (band", "Bytes per token against accuracy, all tasks (dashed",
    ]  # fmt: skip
    assert "int4_kivi" in page.text


def test_canary_rounds_of_a_target(seeded: Store, use: Use, open_page: Open, fake_engine: Open) -> None:
    now = time.time()
    for age, dtype, lost, accuracy in ((600, "float16", 0, 1.0), (60, "int4_symmetric", 48, 0.6)):
        for turn in ("all", "1"):
            labels = {"task": "all", "dtype": dtype, "turn": turn}
            seeded.samples.write([Sample("embedded", "quality_score", labels, now - age, accuracy)])
        data = {"run_id": f"r{age}", "baseline_id": "r600", "items": 120, "lost": lost, "gained": 0, "invalid": 6,
                "dtype": dtype}  # fmt: skip
        seeded.events.add("embedded", "quality_round", "a round", ts=now - age, data=data)
    seeded.samples.flush()
    use(seeded, fake_engine("running"))
    page = open_page("quality")
    page.assert_calm()
    assert "newest rounds: float16 100.0%, int4_symmetric 60.0%" in charts(page)[0]
    table = next(t for t in page.tables if "round" in t.columns)
    assert table["fall in points"].tolist() == ["40.0", "0.0"]
    assert table["compared with"].tolist() == ["run r600", "itself: the baseline"]


def test_alert_about_quality_leads_to_its_runbook(seeded: Store, use: Use, open_page: Open, fire: Open) -> None:
    fire(seeded, "embedded", time.time(), rule="kv-quality-drop")
    use(seeded)
    page = open_page("quality")
    assert "■ firing: kv-quality-drop" in page.errors[0]
    assert "Runbook -> runbooks?runbook=kv-quality-drop" in page.text


def test_runbook_of_a_live_alert_chooses_among_the_measured_formats(
    seeded: Store, use: Use, open_page: Open, fake_engine: Open, fire: Open, measured: Measured
) -> None:
    measured(seeded, model="testbed-outliers")
    use(seeded, fake_engine("running"))
    fire(seeded, "embedded", time.time(), rule="kv-quality-drop")
    alert = next(alert for alert in seeded.alerts.active() if alert.rule == "kv-quality-drop")
    page = open_page("runbooks", runbook="kv-quality-drop", alert=str(alert.id))
    page.assert_calm()
    assert "120 questions" not in page.text  # measured on another model than this target's
    measured(seeded)
    page = open_page("runbooks", runbook="kv-quality-drop", alert=str(alert.id))
    page.assert_calm()
    assert "**`int4_kivi`**" in page.text
    assert "120 questions" in page.text
    assert page.button("Apply change")


def test_measuring_is_started_with_the_chosen_formats(
    seeded: Store, use: Use, fake_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = use(seeded, fake_engine("running"))
    asked: list[tuple[list[str], SuiteSpec]] = []
    monkeypatch.setattr(Runtime, "start_measuring", lambda self, formats, spec: asked.append((formats, spec)))
    script = "from app.ui.quality_page import choose_formats\nchoose_formats()"
    shown = AppTest.from_string(script, default_timeout=60).run()
    shown.multiselect(key="measure-formats").set_value(["int4_kivi"]).run()
    shown.number_input(key="measure-conversations").set_value(2).run()
    shown.button(key="measure-confirm").click().run()
    assert not shown.exception
    assert asked == [(["auto", "int4_kivi"], SuiteSpec(conversations=2, turns=20))]
    assert not runtime.busy()
