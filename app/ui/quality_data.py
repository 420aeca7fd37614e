"""What the quality page draws, read from quality runs or from a replay's result; no Streamlit here.

An arm is one cache format with what was measured of it. Arms belong together, as one measurement, when they were
asked the same questions on the same model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.measuring import CACHE_FLAGS
from app.ui import words
from probe.quality.canary import LABEL as CANARY
from probe.quality.candidates import on_front
from probe.store import QualityRun, Replay, Store
from runbooks.quality_candidates import HOLDS_DROP

ALL = "all"
RUNS_READ = 200
REPLAYS_READ = 3
Cell = Mapping[str, Any]


@dataclass(frozen=True)
class Arm:
    """One format. `result` has the keys of a quality run's summary; `baseline`: the others are compared with it."""

    name: str
    result: Mapping[str, Any]
    bytes_per_token: float | None
    flags: Mapping[str, Any]
    baseline: bool
    status: str = "done"

    @property
    def overall(self) -> Cell:
        """All questions of the run; empty when none was asked."""
        return self.result.get("overall") or {}

    @property
    def against(self) -> Cell:
        """The paired comparison with the baseline; empty for the baseline itself and without questions in common."""
        against: Cell = self.result.get("against") or {}
        return against if against.get("drop") is not None else {}

    @property
    def likelihood(self) -> Cell:
        """Perplexity, divergence and agreement; empty where the endpoint has no prompt logprobs."""
        return self.result.get("likelihood") or {}

    @property
    def holds(self) -> bool:
        """Whether its fall is within `HOLDS_DROP` and not clear of zero; the baseline holds."""
        against = self.against
        return self.baseline or bool(against and against["drop"] <= HOLDS_DROP and against["low"] <= 0)


@dataclass(frozen=True)
class Measurement:
    """Arms that answered the same questions.

    `model_flag`: the engine's --model, None when the server did not tell. `layers`: mean KL with only that layer
    quantized.
    """

    key: str
    title: str
    model: str
    arms: tuple[Arm, ...]
    model_flag: str | None = None
    layers: tuple[Cell, ...] = ()
    replay_id: str | None = None

    @property
    def baseline(self) -> str | None:
        """The name of the arm the others are compared with."""
        return next((arm.name for arm in self.arms if arm.baseline), None)


@dataclass(frozen=True)
class Point:
    """One format in the plane of bytes and accuracy."""

    name: str
    bytes_per_token: float
    accuracy: float
    low: float
    high: float
    items: int
    full_precision: bool = False
    running: bool = False


def measurements(runs: Sequence[QualityRun]) -> list[Measurement]:
    """Each baseline with the runs compared to it, newest first; of one label the newest run. Runs alone stay alone."""
    groups: dict[str, list[QualityRun]] = {}
    for run in sorted(runs, key=lambda run: run.started_at, reverse=True):
        if run.result is not None:
            groups.setdefault(run.baseline_id or run.id, []).append(run)
    return [_measurement(root, found) for root, found in groups.items()]


def _measurement(root: str, runs: Sequence[QualityRun]) -> Measurement:
    newest: dict[str, QualityRun] = {}
    for run in runs:
        if run.id != root:
            newest.setdefault(_name(run), run)
    arms = [_arm_of_run(name, run, False) for name, run in newest.items()]
    base = next((run for run in runs if run.id == root), None)
    if base is not None:
        name = f"{_name(base)} (baseline)" if _name(base) in newest else _name(base)
        arms.insert(0, _arm_of_run(name, base, bool(newest)))
    model, target, at = runs[0].model or "model unknown", runs[0].target, words.clock(runs[0].started_at)
    flags = runs[0].facts.get("flags") or {}
    title = f"{model} on {target}: {_asked(runs[0].suite)}, {len(arms)} formats, {at}"
    return Measurement(root, title, model, _sorted(_with_questions(arms)), model_flag=flags.get("--model"))


def _name(run: QualityRun) -> str:
    """The label; rounds of a canary, which all have the same, with their format."""
    return run.label if run.label != CANARY else f"{CANARY}, {run.facts.get('kv_cache_dtype', 'format unknown')}"


def _with_questions(arms: Sequence[Arm]) -> Sequence[Arm]:
    """Without the arms that were only read for likelihoods (layers one by one), unless all were."""
    return [arm for arm in arms if arm.overall.get("items")] or arms


def _asked(suite: Mapping[str, Any]) -> str:
    if not suite.get("tasks"):
        return "text only"
    return f"{suite.get('conversations')} conversations of {suite.get('turns')} turns"


def _sorted(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    return tuple(sorted(arms, key=lambda arm: (not arm.baseline, -(arm.bytes_per_token or 0.0), arm.name)))


def _arm_of_run(name: str, run: QualityRun, baseline: bool) -> Arm:
    flags = run.facts.get("flags") or {}
    cache = {flag: flags[flag] or None for flag in CACHE_FLAGS if flag in flags}
    return Arm(name, run.result or {}, _number(run.facts.get("kv_bytes_per_token")), cache, baseline, run.status)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def replay_run_ids(replay: Replay) -> list[str]:
    """The quality runs behind a replay's candidates."""
    return [str(c["run_id"]) for c in (replay.result or {}).get("candidates") or [] if c.get("run_id")]


def replay_runs(store: Store, replay: Replay) -> dict[str, QualityRun]:
    """Those runs by id, as far as they are still kept."""
    found = {run_id: store.quality.get(run_id) for run_id in replay_run_ids(replay)}
    return {run_id: run for run_id, run in found.items() if run is not None}


def of_replay(replay: Replay, runs: Mapping[str, QualityRun]) -> Measurement | None:
    """The candidates a replay measured, with their `runs` by id; None when it has none."""
    result = replay.result or {}
    candidates = result.get("candidates") or []
    arms = [_arm_of_candidate(candidate, runs.get(candidate.get("run_id") or "")) for candidate in candidates]
    if not arms:
        return None
    known = next((runs[c["run_id"]] for c in candidates if c.get("run_id") in runs), None)
    model = known.model if known is not None else "the drill's model"
    flag = (known.facts.get("flags") or {}).get("--model") if known is not None else None
    title = f"{model} in replay {replay.id[:8]} ({replay.scenario}), {words.clock(replay.started_at)}"
    layers = tuple(result.get("layers") or [])
    return Measurement(f"replay/{replay.id}", title, model, _sorted(arms), flag, layers, replay.id)


def _arm_of_candidate(candidate: Mapping[str, Any], run: QualityRun | None) -> Arm:
    full = bool(candidate.get("full_precision"))
    against = {key: candidate[key] for key in ("drop", "low", "high", "verdict") if key in candidate}
    measured = (run.result if run is not None else None) or {
        "overall": {
            "items": candidate["items"], "accuracy": candidate["accuracy"],
            "low": candidate.get("accuracy_low"), "high": candidate.get("accuracy_high"),
        },
        "likelihood": {key: candidate.get(key) for key in ("mean_kl", "top1_agreement")},
    }  # fmt: skip
    result = {**measured, "against": None if full else {**(measured.get("against") or {}), **against}}
    return Arm(str(candidate["name"]), result, _number(candidate["kv_bytes_per_token"]), candidate["flags"], full)


def all_measurements(store: Store) -> list[Measurement]:
    """What replays and comparisons of runs measured, newest first; runs compared with nothing only without those."""
    runs = store.quality.list(limit=RUNS_READ)
    replays = [r for r in store.replays.list(50) if (r.result or {}).get("candidates")][:REPLAYS_READ]
    found = [(replay.started_at, of_replay(replay, replay_runs(store, replay))) for replay in replays]
    told = {run_id for replay in replays for run_id in replay_run_ids(replay)}
    by_id = {run.id: run for run in runs}
    for measurement in measurements(runs):
        if measurement.baseline is not None and measurement.key not in told:
            at = by_id[measurement.key].started_at if measurement.key in by_id else 0.0
            found.append((at, measurement))
    found.sort(key=lambda pair: -pair[0])
    return [measurement for _, measurement in found if measurement is not None] or measurements(runs)


def candidates_for(store: Store, model_flag: str) -> list[dict[str, Any]]:
    """The newest comparison of formats on an engine's --model, as `runbooks` read candidates; rounds of a canary are
    no comparison of formats."""
    for measurement in all_measurements(store):
        arms = [arm for arm in measurement.arms if not arm.name.startswith(CANARY)]
        if measurement.model_flag == model_flag and measurement.baseline is not None and len(arms) > 1:
            return [_candidate(arm) for arm in arms if arm.flags]
    return []


def _candidate(arm: Arm) -> dict[str, Any]:
    figures = {key: arm.overall.get(key) for key in ("items", "accuracy")}
    fall = {key: arm.against.get(key) for key in ("drop", "low", "high")}
    size = None if arm.bytes_per_token is None else round(arm.bytes_per_token)
    return {
        "name": arm.name, "flags": dict(arm.flags), "kv_bytes_per_token": size, **figures, **fall,
        "mean_kl": arm.likelihood.get("mean_kl"), "full_precision": arm.baseline,
    }  # fmt: skip


def tasks_of(arms: Sequence[Arm]) -> list[str]:
    """`all`, then every task that any arm was asked."""
    return [ALL, *{task: None for arm in arms for task in (arm.result.get("tasks") or {})}]


def turns(arm: Arm, task: str) -> list[Cell]:
    """The cells by turn of one task ("all": over tasks), turns ascending."""
    rows = [row for row in arm.result.get("turns") or [] if (row.get("task") or ALL) == task and row.get("items")]
    return sorted(rows, key=lambda row: int(row["turn"]))


def points(arms: Sequence[Arm], running: str | None) -> list[Point]:
    """Arms with known bytes and accuracy; `running` is the format the embedded engine has now."""
    found = []
    for arm in arms:
        overall = arm.overall
        if arm.bytes_per_token and overall.get("items"):
            accuracy = float(overall["accuracy"])
            low, high = _number(overall.get("low")), _number(overall.get("high"))
            found.append(Point(
                arm.name, arm.bytes_per_token, accuracy, accuracy if low is None else low,
                accuracy if high is None else high, int(overall["items"]), arm.baseline, arm.name == running,
            ))  # fmt: skip
    return found


def front(found: Sequence[Point]) -> list[Point]:
    """The Pareto front, bytes ascending."""
    marks = on_front([(point.bytes_per_token, point.accuracy) for point in found])
    kept = [point for point, mark in zip(found, marks, strict=True) if mark]
    return sorted(kept, key=lambda point: (point.bytes_per_token, point.name))


def recommended(arms: Sequence[Arm]) -> Arm | None:
    """Of the arms that hold quality the one with the fewest bytes."""
    held = [arm for arm in arms if arm.holds and arm.bytes_per_token]
    return min(held, key=lambda arm: (arm.bytes_per_token or 0.0, arm.name), default=None)


def full_precision_bytes(arms: Sequence[Arm]) -> float | None:
    """Bytes per token of the arm the others are compared with."""
    return next((arm.bytes_per_token for arm in arms if arm.baseline), None)
