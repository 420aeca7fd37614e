"""The exercise of quality incidents: the same checkable questions before and after a change of the KV cache's format.

Full precision is measured first and is what every later run is compared with, item by item. Then the operator's
change is made, and the canary's rounds on the watched engine are what the alert sees. Candidates for the remedy are
measured in between, each on an engine of its own that nobody watches.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.config import apply_changes
from probe.quality.canary import Canary
from probe.quality.candidates import (
    DTYPE,
    LAYERS,
    Candidate,
    candidate,
    format_arms,
    layer_figures,
    mixed_arms,
    with_front,
)
from probe.quality.lab import Lab
from probe.quality.run import run_suite
from probe.quality.suite import SuiteSpec
from probe.replay.exercise import Bench, Exercise, settle
from probe.replay.observation import Observation
from probe.store import QualityRun

CONCURRENCY = 16  # conversations at once, as when candidates are measured
ROUNDS = 2  # worse ones in a row that the alert wants to see; a single good one ends it


@dataclass(frozen=True)
class QualityPlan:
    """What is asked, and between which formats. `full` and `incident` are values of --kv-cache-dtype."""

    spec: SuiteSpec
    full: str
    incident: str


class QualityExercise(Exercise):
    """Switches a watched engine from `full` to `incident` and measures what becomes of its answers."""

    def __init__(self, bench: Bench, plan: QualityPlan) -> None:
        self._bench = bench
        self._plan = plan
        self._runs: dict[str, QualityRun] = {}
        self._candidates: list[Candidate] = []
        self._layers: list[dict[str, Any]] = []

    @property
    def description(self) -> str:
        """The suite in a line."""
        spec = self._plan.spec
        return f"{spec.conversations} conversations of {spec.turns} turns ({', '.join(spec.tasks)})"

    def incident(self) -> Observation:
        """Full precision, then the operator's change and the canary's rounds."""
        bench, plan = self._bench, self._plan
        bench.note(f"full precision ({plan.full}): {self.description}")
        baseline = run_suite(
            bench.store, bench.drill.base_url, plan.spec, target=bench.drill.name, label=f"full precision, {plan.full}"
        )
        self._runs["before"] = baseline
        bench.note(_run_sentence(baseline), {"run_id": baseline.id, "result": baseline.result})
        flags = apply_changes(bench.drill.flags, {DTYPE: plan.incident})
        started_at = time.time()
        bench.note(f"the operator sets {DTYPE} {plan.incident}", {"flags": flags})
        bench.restart(flags)
        return self._measured("incident", ROUNDS, started_at)

    def again(self) -> Observation:
        """The same questions on the engine as it runs now."""
        return self._measured("after", 1, time.time())

    def facts(self) -> dict[str, Any]:
        """Measures the layers one by one, then every candidate, on engines of their own."""
        bench, plan = self._bench, self._plan
        baseline, incident = self._runs["before"], self._runs["incident"]
        base_flags = apply_changes(bench.drill.flags, {DTYPE: plan.full, LAYERS: None})
        now = {DTYPE: plan.incident, LAYERS: None}
        found = [
            candidate(plan.full, {DTYPE: plan.full, LAYERS: None}, baseline, full_precision=True),
            candidate(plan.incident, now, incident),
        ]
        with Lab(bench.store, base_flags, log_dir=bench.log_dir) as lab:
            num_layers = bench.facts["dims"]["num_layers"]
            bench.note(f"which layers suffer: each of {num_layers} alone in {plan.incident}, by mean KL")
            judged = replace(plan.spec, tasks=())  # likelihoods only
            self._layers = layer_figures(lab, judged, baseline, plan.incident, plan.full, num_layers)
            bench.note(_layer_sentence(self._layers), {"layers": self._layers})
            arms = [*format_arms(), *mixed_arms(plan.incident, plan.full, self._layers)]
            for arm, run in zip(arms, lab.measure_all(arms, plan.spec, baseline=baseline), strict=True):
                found.append(candidate(arm.name, arm.flags, run))
                bench.note(_candidate_sentence(found[-1]), {"candidate": found[-1].to_dict()})
        self._candidates = with_front(found)
        return {"quality_candidates": [c.to_dict() for c in self._candidates]}

    def result(self) -> dict[str, Any]:
        """What was measured: runs, candidates and layers."""
        return {
            "quality": {
                name: {"run_id": run.id, "facts": run.facts, **(run.result or {})} for name, run in self._runs.items()
            },
            "candidates": [c.to_dict() for c in self._candidates],
            "layers": self._layers,
        }

    def _measured(self, name: str, rounds: int, started_at: float) -> Observation:
        """The canary's rounds on the engine as it runs; the first one is the phase's figure."""
        bench = self._bench
        canary = Canary(
            bench.store, bench.drill.name, bench.drill.base_url, self._plan.spec, self._runs["before"],
            concurrency=CONCURRENCY,
        )  # fmt: skip
        for number in range(1, rounds + 1):
            run = canary.round()
            if number == 1:
                self._runs[name] = run
            note = f"canary round {number} of {rounds}: {_run_sentence(run)}"
            bench.note(note, {"run_id": run.id, "result": run.result})
        ended_at = settle(bench)
        return Observation(started_at, ended_at, quality=self._quality(name))

    def _quality(self, name: str) -> Mapping[str, Any]:
        """The figures of one phase, beside those of full precision."""
        run, full = self._runs[name], self._runs["before"]
        return {
            **(run.result or {}),
            "kv_bytes_per_token": run.facts.get("kv_bytes_per_token"),
            "full_precision": {**(full.result or {}), "kv_bytes_per_token": full.facts.get("kv_bytes_per_token")},
        }


def _run_sentence(run: QualityRun) -> str:
    result = run.result or {}
    overall, against = result["overall"], result.get("against")
    text = (
        f"{overall['right']} of {overall['items']} answers right ({overall['accuracy']:.1%}), "
        f"{overall['invalid']} invalid"
    )
    if against:
        text += f"; {fall(against)} below full precision"
    return text


def _candidate_sentence(found: Candidate) -> str:
    kl = "" if found.mean_kl is None else f", mean KL {found.mean_kl:.4f}"
    return (
        f"{found.name}: {found.accuracy:.1%} right, {points(found.drop)} below full precision{kl}, "
        f"{found.kv_bytes_per_token} bytes a token"
    )


def _layer_sentence(layers: list[dict[str, Any]]) -> str:
    ranked = sorted(layers, key=lambda layer: -layer["mean_kl"])
    return "mean KL of one quantized layer: " + ", ".join(f"{la['layer']}: {la['mean_kl']:.4f}" for la in ranked)


def fall(against: Mapping[str, Any]) -> str:
    """A paired difference with its interval."""
    return f"{points(against['drop'])} [{against['low'] * 100:.1f}, {against['high'] * 100:.1f}]"


def points(share: float) -> str:
    """0.153 -> "15.3 points"."""
    return f"{share * 100:.1f} points"
