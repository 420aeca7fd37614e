"""Cost of evaluating every rule on many targets, with all the samples rules look back at in memory.

Each target has the series of its engines and one GPU, sampled every five seconds for as long as any rule looks back:
a day for the baseline of the prefix cache, six hours for a burn rate. One target is filled sample by sample, as
a monitor does; the others are copies of it, as memory is concerned. Medians of the
thread's CPU time are reported, which other processes disturb less than wall time.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Set
from typing import Any

from probe.alerts.evaluate import View, evaluate
from probe.alerts.evaluator import TargetEvaluator
from probe.alerts.rules import DEFAULT_RULES
from probe.bench import Report
from probe.dialects import load_dialect
from probe.store import Sample, Target

START = 1_790_000_000.0
INTERVAL_S = 5.0
SPARE_S = 600.0  # filled beyond what is looked back at, so that something is dropped too
LEVELS = {"kv_usage_ratio": 0.6, "requests_running": 8.0, "requests_waiting": 1.0}
BOUNDS = {metric: f"{bound:g}" for metric, bound in load_dialect("kvoncall").slo.items()}
COUNTERS = {
    "generation_tokens_total": 2000,
    "isolation_breaches_total": 1,
    "kv_block_evictions_total": 20,
    "kv_evicted_before_reuse_total": 2,
    "preemptions_total": 2,
    "prefix_hits_total": 5000,
    "prompt_tokens_total": 8000,
    "requests_finished_total": 12,
}


def bench_rules(*, report: Report, targets: int = 100, engines: int = 1, rounds: int = 7) -> dict[str, Any]:
    """Milliseconds for one evaluation of all rules on all targets, and the size of the samples held for one of them."""
    report(f"all rules on {targets} targets with full windows")
    first, now = _filled(engines)
    watched = [first, *(copy.deepcopy(first) for _ in range(targets - 1))]
    times: list[float] = []
    for turn in range(rounds + 1):
        now += INTERVAL_S
        scrape = _scrape(now, engines, {}, random.Random(turn), None)
        for evaluator in watched:
            evaluator.add_samples(scrape)
        start = time.thread_time()
        for evaluator in watched:
            updates = evaluator.evaluate(now + 0.1)
        if turn:  # the first round warms up
            times.append(time.thread_time() - start)
    points, held = _size(first)
    return {
        "targets": targets,
        "engines_per_target": engines,
        "rules": len(first.rules),
        "rules_with_data": sum(update.reading.verdict != "no_data" for update in updates),
        "evaluation_ms": round(statistics.median(times) * 1e3, 1),
        "evaluation_ms_min_max": [round(min(times) * 1e3, 1), round(max(times) * 1e3, 1)],
        "points_per_target": points,
        "kib_per_target": round(held / 1024),
        "ms_by_rule": _by_rule(first, now),
    }


def _filled(engines: int) -> tuple[TargetEvaluator, float]:
    """One target whose windows are full, and the time of its newest sample."""
    target = Target(1, "bench", "http://127.0.0.1", "external", "kvoncall", [], {}, INTERVAL_S, 1.0, True, START)
    evaluator = TargetEvaluator(target, DEFAULT_RULES)
    horizons = evaluator.window.horizons_s
    rng, counts = random.Random(0), dict[str, float]()
    end = now = START + max(horizons.values()) + SPARE_S
    for step in range(int((end - START) / INTERVAL_S), -1, -1):
        now = end - step * INTERVAL_S
        wanted = {metric for metric, span in horizons.items() if now >= end - span - SPARE_S}
        evaluator.add_samples(_scrape(now, engines, counts, rng, wanted))
    return evaluator, now


def _scrape(
    at: float, engines: int, counts: dict[str, float], rng: random.Random, wanted: Set[str] | None
) -> list[Sample]:
    """What a scrape of a busy target brings to its rules. `counts`: its counters, which go on."""
    found: list[Sample] = []

    def bring(metric: str, labels: dict[str, str], value: float) -> None:
        if wanted is None or metric in wanted:
            found.append(Sample("bench", metric, labels, at, value))

    def count(metric: str, labels: dict[str, str], step: int) -> None:
        key = f"{metric} {labels}"
        counts[key] = counts.get(key, 0.0) + rng.randrange(step)
        bring(metric, labels, counts[key])

    bring("up", {}, 1.0)
    bring("required_metrics_missing", {}, 0.0)
    bring("device_memory_used_bytes", {"gpu": "0"}, 60e9 + rng.randrange(1_000_000))
    bring("device_memory_total_bytes", {"gpu": "0"}, 80e9)
    for number in range(engines):
        labels = {"engine": str(number), "model_name": "m"}
        for name, level in LEVELS.items():
            bring(name, labels, level * rng.random())
        for name, step in COUNTERS.items():
            count(name, labels, step)
        for name, bound in BOUNDS.items():  # other buckets no rule reads
            count(f"{name}_bucket", labels | {"le": bound}, 20)
            count(f"{name}_count", labels, 20)
    return found


def _size(evaluator: TargetEvaluator) -> tuple[int, int]:
    """Points and bytes of the samples one target holds."""
    points = held = 0
    for metric in evaluator.window.horizons_s:
        for series in evaluator.window.series(metric):
            points += len(series.times)
            held += series.times.buffer_info()[1] * series.times.itemsize * 2
    return points, held


def _by_rule(evaluator: TargetEvaluator, now: float, rounds: int = 20) -> dict[str, float]:
    """Milliseconds each rule takes on one target, read by itself."""
    found = {}
    for rule in evaluator.rules:
        start = time.thread_time()
        for _ in range(rounds):
            evaluate(rule, View(evaluator.target, evaluator.window, [], now))
        found[rule.id] = round((time.thread_time() - start) / rounds * 1e3, 3)
    return found
