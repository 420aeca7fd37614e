"""Replays for real: engines that storm, die or break, the monitor's own alerts, the runbook's change, the proof."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import MIB
from probe.quality.candidates import format_arms
from probe.replay import quality
from probe.replay.runner import ReplayRunner
from probe.replay.scenario import Scenario, get_scenario
from probe.replay.scenarios.int4_degradation import Int4Degradation
from probe.store import Store

pytestmark = pytest.mark.xdist_group("replay_e2e")  # one at a time: each needs the processor

KEYS = {
    "scenario", "target", "reproduced", "alerts", "runbook", "changes", "verified", "before", "after", "article_case",
    "engine_exit", "replay_id", "time_scale", "windows",
}  # fmt: skip
BURNS = {"ttft-slo-burn", "itl-slo-burn"}  # their bounds are seconds: a slow machine is seen too
STEPS = ["hypothesis", "inject", "observe", "recommend", "apply", "verify", "done"]


def replay(store: Store, scenario: Scenario, tmp_path: Path) -> dict[str, Any]:
    """Runs one; what every report must hold is asserted here."""
    result = ReplayRunner(store, scenario, interactive=False, log_dir=tmp_path / "logs").run()
    assert set(result) >= KEYS
    assert json.loads(json.dumps(result)) == result
    why = [c for phase in result["checks"].values() for c in phase if not c["ok"]]
    assert (result["reproduced"], result["verified"]) == (True, True), why
    alert = result["alerts"][0]
    assert (alert["rule"], alert["state"]) == (scenario.rule, "resolved")
    assert alert["value"] > alert["threshold"]
    assert result["changes"] or result["repair"]
    stored = store.replays.get(result["replay_id"])
    assert stored is not None
    assert (stored.status, stored.result) == ("done", result)
    steps = [e.step for e in store.replays.journal(result["replay_id"])]
    assert list(dict.fromkeys(steps)) == STEPS
    assert store.targets.list() == []
    alerts = [a for a in store.alerts.history(target=result["target"]) if a.rule == scenario.rule]
    assert all(a.replay_id == result["replay_id"] for a in alerts)
    assert "target-missing" not in {a["rule"] for a in result["alerts"]}
    return result


def changes(result: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {c["flag"]: (c["from"], c["to"]) for c in result["changes"]}


def test_oom(store: Store, tmp_path: Path) -> None:
    result = replay(store, get_scenario("oom"), tmp_path)
    exit_ = result["engine_exit"]
    assert (exit_["code"], exit_["reason"]) == (12, "oom")
    assert exit_["allocation_bytes"] > 0
    before, after = result["before"], result["after"]
    assert before["completed"] == 0
    assert (after["failed"], after["not_sent"]) == (0, 0)
    assert after["completed"] == before["failed"] > 10
    assert after["engine_exit"] is None
    assert changes(result)["--kv-cache-memory-bytes"][1] is None
    total = after["weights_bytes"] + after["activation_peak_bytes"] + after["kv_cache_bytes"]
    assert total <= 0.8 * after["device_memory_bytes"] == 0.8 * 160 * MIB
    overcommitted = before["weights_bytes"] + before["activation_peak_bytes"] + before["kv_cache_bytes"]
    assert overcommitted > before["device_memory_bytes"]
    assert result["article_case"]["true_gb_per_request"] == 42.95
    assert result["article_case"]["true_gib_per_request"] == 40
    exits = store.events.recent(target=result["target"], kinds=["engine_exit"])
    assert [e.data["reason"] for e in reversed(exits)] == ["oom", "stopped"]
    assert {a["rule"] for a in result["alerts"]} - BURNS == {"oom"}


def test_eviction_storm(store: Store, tmp_path: Path) -> None:
    result = replay(store, get_scenario("eviction-storm"), tmp_path)
    before, after = result["before"], result["after"]
    assert before["eviction_rate"] > 0.05
    assert before["preemptions"] >= 3
    assert after["eviction_rate"] < 0.05
    assert after["finished"] == after["completed"] == 50
    low, high = changes(result)["--gpu-memory-utilization"]
    assert low < high <= 0.92
    assert after["kv_cache_size_tokens"] > before["kv_cache_size_tokens"]
    assert result["engine_exit"] is None
    assert "Azure" in result["article_case"]["trace"]["source"]


def test_int4_degradation(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [arm for arm in format_arms() if arm.name in ("int8k_int4v", "int4_symmetric")]
    monkeypatch.setattr(quality, "format_arms", lambda: chosen)  # each arm is an engine of its own
    result = replay(store, Int4Degradation(conversations=4), tmp_path)
    before, after, full = result["before"], result["after"], result["quality"]["before"]
    assert full["overall"]["accuracy"] >= 0.95
    assert before["quality_drop"] > 0.05
    assert before["quality_drop_low"] > 0
    assert after["accuracy"] >= full["overall"]["accuracy"] - 0.01
    assert before["kv_cache_dtype"] == "int4_symmetric"
    assert after["kv_bytes_per_token"] <= 0.6 * full["facts"]["kv_bytes_per_token"]
    by_name = {c["name"]: c for c in result["candidates"]}
    assert by_name["float16"]["full_precision"]
    assert not by_name["int4_symmetric"]["on_front"] or by_name["int4_symmetric"]["accuracy"] < 0.95
    assert by_name["int8k_int4v"]["drop"] <= 0.01
    assert len([name for name in by_name if name.startswith("int4_symmetric, float16 in layer")]) == 2
    assert sorted(layer["layer"] for layer in result["layers"]) == [0, 1, 2, 3]
    assert result["changes"][0]["flag"] == "--kv-cache-dtype"
    assert len(result["refused"]) == len(by_name) - 1
    assert {run.target for run in store.quality.list(100)} == {"lab", result["target"]}
    assert {a["rule"] for a in result["alerts"]} - BURNS == {"kv-quality-drop"}


def test_kv_block_leak(store: Store, tmp_path: Path) -> None:
    result = replay(store, get_scenario("kv-block-leak"), tmp_path)
    assert result["before"]["completed"] == result["after"]["completed"] == 40
    assert result["alerts"][0]["value"] == pytest.approx(40 / 512)
    assert (result["changes"], result["applied"]) == ([], True)
