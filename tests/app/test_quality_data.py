"""What the quality page draws: which runs belong together, the front, which format is favoured, flags to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from app.ui.quality_apply import changes_to, running_arm
from app.ui.quality_data import Point, front, measurements, of_replay, points, recommended, replay_runs, turns
from app.ui.quality_tables import verdict
from probe.quality.suite import SuiteSpec
from probe.store import QualityRun, Store
from runbooks.facts import TargetFacts

Measured = Callable[..., list[QualityRun]]


def candidate(name: str, size: int, drop: float, low: float, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "flags": {"--kv-cache-dtype": name, "--kv-cache-dtype-layers": None}, "kv_bytes_per_token": size,
        "items": 240, "accuracy": 0.99 - drop, "accuracy_low": 0.9, "accuracy_high": 1.0, "drop": drop, "low": low,
        "high": drop + 0.02, "mean_kl": 0.1, "top1_agreement": 0.9, "full_precision": False, "run_id": "gone", **more,
    }  # fmt: skip


def test_runs_are_grouped_by_what_they_are_compared_with(store: Store, measured: Measured) -> None:
    first, second = measured(store), measured(store, model="testbed-outliers")
    found = measurements(store.quality.list(limit=50))
    assert [m.key for m in found] == [second[0].id, first[0].id]
    assert [m.model_flag for m in found] == ["testbed-outliers", ""]
    assert [arm.name for arm in found[0].arms] == ["float16", "int8_per_token_head", "int4_kivi", "int4_symmetric"]
    assert found[0].baseline == "float16"
    assert "6 conversations of 20 turns, 4 formats" in found[0].title


def test_of_one_label_the_newest_run_is_shown_and_unfinished_ones_are_not(store: Store, measured: Measured) -> None:
    runs = measured(store)
    spec = SuiteSpec(kind="testbed", conversations=6, context=2048)
    store.quality.start("lab", "fp8_e4m3", "testbed", spec.to_dict(), spec.key, {}, runs[0].id)
    again = store.quality.start("lab", "int4_kivi", "testbed", spec.to_dict(), spec.key, {}, runs[0].id)
    store.quality.finish(again.id, "incomplete", runs[2].result)
    (found,) = measurements(store.quality.list(limit=50))
    arms = {arm.name: arm for arm in found.arms}
    assert set(arms) == {"float16", "int8_per_token_head", "int4_symmetric", "int4_kivi"}
    assert arms["int4_kivi"].status == "incomplete"
    assert arms["int4_kivi"].bytes_per_token is None  # the newest run did not learn it


def test_canary_rounds_are_told_apart_by_their_format(store: Store, measured: Measured) -> None:
    (base, *_) = measured(store)
    spec = SuiteSpec(kind="testbed", conversations=6, context=2048)
    for dtype in ("float16", "int4_symmetric"):
        facts = {"kv_cache_dtype": dtype}
        run = store.quality.start("embedded", "canary", "testbed", spec.to_dict(), spec.key, facts, base.id)
        store.quality.finish(run.id, "done", base.result)
    (found,) = measurements(store.quality.list(limit=50))
    assert {"canary, float16", "canary, int4_symmetric"} <= {arm.name for arm in found.arms}


def test_turns_rise_and_belong_to_one_task(store: Store, measured: Measured) -> None:
    measured(store)
    (found,) = measurements(store.quality.list(limit=50))
    int4 = next(arm for arm in found.arms if arm.name == "int4_symmetric")
    cells = turns(int4, "all")
    assert [cell["turn"] for cell in cells] == list(range(1, 21))
    assert cells[0]["accuracy"] == 1.0
    assert cells[-1]["accuracy"] == 0.5
    assert sum(cell["items"] for cell in turns(int4, "recall")) == int4.result["tasks"]["recall"]["items"]


def test_front_has_no_point_that_another_beats() -> None:
    def point(name: str, size: float, accuracy: float) -> Point:
        return Point(name, size, accuracy, accuracy, accuracy, 100)

    found = [point("full", 1024, 0.99), point("int8", 576, 0.99), point("kivi", 320, 0.98), point("int4", 320, 0.4),
             point("fp8", 512, 0.97), point("twin", 320, 0.98)]  # fmt: skip
    assert [p.name for p in front(found)] == ["kivi", "twin", "int8"]


def test_favoured_is_the_smallest_that_holds(store: Store, measured: Measured) -> None:
    measured(store)
    (found,) = measurements(store.quality.list(limit=50))
    best = recommended(found.arms)
    assert best is not None
    assert best.name == "int4_kivi"
    assert verdict(best).startswith("✔ no worse ±0.0 points")
    int4 = next(arm for arm in found.arms if arm.name == "int4_symmetric")
    assert not int4.holds
    assert verdict(int4).startswith("✖ worse −40.0 points (95%: −")


@pytest.mark.parametrize(("drop", "low", "holds"), [(0.01, -0.01, True), (0.011, -0.01, False), (0.008, 0.001, False)])
def test_candidates_of_a_replay_hold_by_their_own_fall(store: Store, drop: float, low: float, holds: bool) -> None:
    replay = store.replays.create("int4-degradation", "drill-1")
    full = candidate("float16", 1024, 0.0, 0.0, full_precision=True)
    store.replays.finish(replay.id, "done", {"candidates": [candidate("int8", 576, drop, low), full]})
    ended = store.replays.get(replay.id)
    assert ended is not None
    found = of_replay(ended, replay_runs(store, ended))
    assert found is not None
    assert [arm.name for arm in found.arms] == ["float16", "int8"]
    assert found.arms[1].holds is holds
    best = recommended(found.arms)
    assert best is not None
    assert best.name == ("int8" if holds else "float16")
    assert [(p.name, p.low, p.high) for p in points(found.arms, None)] == [("float16", 0.9, 1.0), ("int8", 0.9, 1.0)]


def test_replay_without_candidates_has_no_measurement(store: Store) -> None:
    replay = store.replays.create("oom", "drill-1")
    store.replays.finish(replay.id, "done", {"verified": True})
    ended = store.replays.get(replay.id)
    assert ended is not None
    assert of_replay(ended, {}) is None


def test_changes_bring_the_measured_format_and_unset_what_it_was_measured_without(
    store: Store, measured: Measured
) -> None:
    measured(store)
    (found,) = measurements(store.quality.list(limit=50))
    arms = {arm.name: arm for arm in found.arms}
    flags = ["--kv-cache-dtype", "int4_symmetric", "--kv-cache-dtype-skip-layers", "0", "3"]
    facts = TargetFacts("kvoncall", kv_bytes_per_token=320, kv_cache_size_tokens=1000)
    changes = {c["flag"]: c for c in changes_to(arms["int8_per_token_head"], flags, 1024.0, facts)}
    assert set(changes) == {"--kv-cache-dtype", "--kv-cache-dtype-skip-layers"}
    dtype, skipped = changes["--kv-cache-dtype"], changes["--kv-cache-dtype-skip-layers"]
    assert (dtype["from"], dtype["to"]) == ("int4_symmetric", "int8_per_token_head")
    assert (skipped["from"], skipped["to"]) == ("0 3", None)
    assert "accuracy 100.0% over 120 questions" in dtype["why"]
    assert "576 (56.2%) bytes per token" in dtype["why"]
    assert "576 bytes per token in place of 320; the pool holds 555 tokens in place of 1000" in dtype["cost"]
    assert running_arm(found.arms, flags) is None
    assert running_arm(found.arms, ["--kv-cache-dtype", "int4_symmetric"]) == "int4_symmetric"
    assert changes_to(arms["int4_symmetric"], ["--kv-cache-dtype", "int4_symmetric"], 1024.0, facts) == []
