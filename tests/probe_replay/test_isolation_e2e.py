"""Every variant of prefix-collision on a real engine: it leaks, leaks again without the remedy, and with it no more."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engine.config import apply_changes
from probe.replay.attacks import timing
from probe.replay.drill import DrillEngine
from probe.replay.exercise import Bench
from probe.replay.scenarios.prefix_collision import ATTACKS, PrefixCollision
from probe.store import Store
from runbooks.recommend import from_facts, recommend

MARKED = {"collision", "image"}  # variants in which a secret comes out word for word


@pytest.mark.parametrize("variant", sorted(ATTACKS))
def test_variant(variant: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVONCALL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(timing, "TIMED", 8)  # the counts are exact; what the clock tells has tests of its own
    scenario = dataclasses.replace(PrefixCollision(variant), before=12, after=40)
    notes: list[str] = []

    def note(message: str, data: dict[str, Any] | None = None) -> None:
        notes.append(message)

    drill = DrillEngine(
        store, "drill", scenario.flags(), log_dir=tmp_path / "logs", time_scale=1.0, scrape_interval_s=0.05
    )
    try:
        bench = Bench(store, drill, drill.start(), 0.05, tmp_path / "logs", note, drill.facts())
        exercise = scenario.exercise(bench)
        before = exercise.incident().isolation
        assert before is not None
        assert before["breaches"] > 0, notes
        example = before["examples"][0]
        assert len(example["sessions"]) == 2
        assert example["cold_answer"]
        if variant in MARKED:
            assert example["leaked"] in example["sessions"][0]["messages"][0]["text"]
        assert before["tree"]["nodes"]

        if variant == "collision":  # the remedy is left out: same flags
            left_out = exercise.again()
            assert not all(check.ok for check in scenario.verified(left_out) if "alert" not in check.name)

        advice = recommend(scenario.runbook, from_facts({**bench.facts, **exercise.facts()}))
        assert advice.changes
        bench.restart(apply_changes(drill.flags, advice.flag_values()))
        after = exercise.again()
        assert [c for c in scenario.verified(after) if not c.ok and "alert" not in c.name] == [], notes
        rounds = store.events.recent(target="drill", kinds=["isolation_round"])
        assert len(rounds) == (3 if variant == "collision" else 2)
    finally:
        drill.close()
