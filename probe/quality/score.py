"""From items to figures: accuracy with intervals, and the paired difference to a baseline with its verdict.

The paired difference looks only at items both runs answered. Its 95 % interval is Newcombe's (1998, Statistics in
Medicine 17, 2635-2650, method 10): square-and-add of the two Wilson intervals with their correlation, which unlike
the normal interval is not of width 0 when the runs agree on every item.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.testbed.tasks import KINDS
from kernels.bench.interval import wilson
from probe.quality.likelihood import likelihood
from probe.store import QualityItem

MARGIN = 0.05
"""A fall of accuracy (a share) that matters."""


def cell(items: Sequence[QualityItem]) -> dict[str, Any]:
    """{"items", "right", "invalid", "accuracy", "low", "high"}; shares are None without items."""
    right = sum(item.right is True for item in items)
    counts = {"items": len(items), "right": right, "invalid": sum(item.valid is False for item in items)}
    if not items:
        return {**counts, "accuracy": None, "low": None, "high": None}
    share = wilson(right, len(items))
    return {**counts, "accuracy": share.accuracy, "low": share.low, "high": share.high}


def paired(pairs: Iterable[tuple[bool, bool]]) -> dict[str, Any]:
    """Of (baseline right, run right) pairs: items, lost, gained, drop (a share) with its interval, verdict.

    "worse": the interval lies above 0 and the drop exceeds MARGIN. "no worse": the interval lies below MARGIN.
    Else "inconclusive": too few items to decide.
    """
    table = [[0, 0], [0, 0]]
    for before, after in pairs:
        table[before][after] += 1
    both, lost, gained, neither = table[1][1], table[1][0], table[0][1], table[0][0]
    count = both + lost + gained + neither
    counts = {"items": count, "lost": lost, "gained": gained}
    if not count:
        return {**counts, "drop": None, "low": None, "high": None, "verdict": "inconclusive"}
    drop = (lost - gained) / count
    low, high = _newcombe(both, lost, gained, neither)
    verdict = "inconclusive"
    if low > 0 and drop > MARGIN:
        verdict = "worse"
    elif high < MARGIN:
        verdict = "no worse"
    return {**counts, "drop": drop, "low": low, "high": high, "verdict": verdict}


def _newcombe(both: int, lost: int, gained: int, neither: int) -> tuple[float, float]:
    """Interval of (share right in the baseline) - (share right now), from the paired 2x2 table."""
    count = both + lost + gained + neither
    before, after = wilson(both + lost, count), wilson(both + gained, count)
    margins = (both + lost) * (gained + neither) * (both + gained) * (lost + neither)
    cross = both * neither - lost * gained
    cross_corrected = max(cross - count / 2, 0.0) if cross > 0 else float(cross)
    phi = cross_corrected / math.sqrt(margins) if margins else 0.0
    drop = before.accuracy - after.accuracy

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    low = drop - reach(before.accuracy - before.low, after.high - after.accuracy)
    high = drop + reach(before.high - before.accuracy, after.accuracy - after.low)
    return max(-1.0, low), min(1.0, high)


def against(
    items: Iterable[QualityItem], baseline_items: Iterable[QualityItem], baseline_id: str | None = None
) -> dict[str, Any]:
    """The paired comparison over all tasks and by task."""
    before = {item.key: item.right for item in baseline_items if item.right is not None}
    pairs = [(i.task, before[i.key] is True, i.right) for i in items if i.right is not None and i.key in before]
    tasks = [kind for kind in KINDS if any(task == kind for task, _, _ in pairs)]
    return {
        "baseline_id": baseline_id,
        **paired((b, a) for _, b, a in pairs),
        "tasks": {task: paired((b, a) for t, b, a in pairs if t == task) for task in tasks},
    }


def summarize(
    items: Sequence[QualityItem],
    baseline_items: Sequence[QualityItem] | None = None,
    *,
    baseline_id: str | None = None,
    left_out: Sequence[str] = (),
) -> dict[str, Any]:
    """The result of a run: overall, by task, by turn, likelihoods, and the comparison with the baseline.

    `left_out`: one sentence for each measure that could not be taken.
    """
    asked = [item for item in items if item.right is not None]
    by_task: Mapping[str, list[QualityItem]] = _grouped((item.task, item) for item in asked)
    turns = []
    for turn, of_turn in sorted(_grouped((i.turn, i) for i in asked if i.turn is not None).items()):
        turns.append({"turn": turn, "task": "all", **cell(of_turn)})
        for task, of_task in _grouped((i.task, i) for i in of_turn).items():
            turns.append({"turn": turn, "task": task, **cell(of_task)})
    return {
        "overall": cell(asked),
        "tasks": {task: cell(of_task) for task, of_task in by_task.items()},
        "turns": turns,
        "likelihood": likelihood(items, baseline_items),
        "left_out": list(left_out),
        "against": None if baseline_items is None else against(items, baseline_items, baseline_id),
    }


def _grouped(pairs: Iterable[tuple[Any, QualityItem]]) -> dict[Any, list[QualityItem]]:
    """Items by key; tasks in the order they are listed everywhere."""
    groups: dict[Any, list[QualityItem]] = {kind: [] for kind in KINDS}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return {key: items for key, items in groups.items() if items}
