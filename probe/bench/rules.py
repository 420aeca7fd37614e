"""Cost of evaluating every rule on many targets, with all the samples rules look back at in memory.

Each target has the series of one vLLM engine and one GPU, sampled every five seconds for as long as any rule looks
back: a day for the baseline of the prefix cache, six hours for a burn rate. One target is filled sample by sample, as
a monitor does; the others are copies of it, as memory is concerned. Medians of the
thread's CPU time are reported, which other processes disturb less than wall time.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from typing import Any

from probe.alerts.evaluate import View, evaluate
from probe.alerts.evaluator import TargetEvaluator
from probe.alerts.rules import DEFAULT_RULES
from probe.bench import Report
from probe.store import Sample, Target

START = 1_790_000_000.0
INTERVAL_S = 5.0
LEVELS = {"kv_usage_ratio": 0.6, "requests_running": 8.0, "requests_waiting": 1.0}
BOUNDS = {"ttft_seconds": (0.1, 0.5, 1.0, 2.5, 5.0, 10.0), "itl_seconds": (0.01, 0.025, 0.05, 0.1, 0.5, 1.0)}


def bench_rules(*, report: Report, targets: int = 100, engines: int = 1, rounds: int = 7) -> dict[str, Any]:
    """Milliseconds for one evaluation of all rules on all targets, and bytes of samples held for one target."""
    report(f"all rules on {targets} targets, windows full")
    first, now = _filled(engines)
    watched = [first, *(copy.deepcopy(first) for _ in range(targets - 1))]
    times = []
    for turn in range(rounds + 1):
        for evaluator in watched:
            evaluator.add_samples(_scrape(now + INTERVAL_S * (turn + 1), engines, {}, random.Random(turn)))
        start = time.thread_time()
        for evaluator in watched:
            evaluator.evaluate(now + INTERVAL_S * (turn + 1) + 0.1)
        if turn:  # the first round warms up
            times.append(time.thread_time() - start)
    points, held = _size(first)
    return {
        "targets": targets,
        "engines_per_target": engines,
        "rules": len(first.rules),
        "evaluation_ms": round(statistics.median(times) * 1e3, 1),
        "slowest_ms": round(max(times) * 1e3, 1),
        "points_per_target": points,
        "kib_per_target": round(held / 1024),
        "ms_by_rule": _by_rule(first, now + INTERVAL_S * (rounds + 1)),
    }


def _filled(engines: int) -> tuple[TargetEvaluator, float]:
    """One target whose windows are full, and the time of its newest sample."""
    target = Target(1, "bench", "http://127.0.0.1", "external", "vllm", [], {}, INTERVAL_S, 1.0, True, START)
    evaluator = TargetEvaluator(target, DEFAULT_RULES)
    reach, rng = max(evaluator.window.horizons_s.values()), random.Random(0)
    counts: dict[str, float] = {}
    end = START + reach + 600
    for scrape in range(int((end - START) / INTERVAL_S) + 1):
        now = START + scrape * INTERVAL_S
        wanted = {metric for metric, span in evaluator.window.horizons_s.items() if now >= end - span - 600}
        evaluator.add_samples(s for s in _scrape(now, engines, counts, rng) if s.metric in wanted)
    return evaluator, now


def _scrape(at: float, engines: int, counts: dict[str, float], rng: random.Random) -> list[Sample]:
    """What a scrape of a busy target brings to its rules. `counts`: the counters, which go on."""
    found = [Sample("bench", "up", {}, at, 1.0), Sample("bench", "required_metrics_missing", {}, at, 0.0)]
    driver = {"gpu": "0"}
    found.append(Sample("bench", "device_memory_used_bytes", driver, at, 60e9 + rng.randrange(1_000_000)))
    found.append(Sample("bench", "device_memory_total_bytes", driver, at, 80e9))
    for number in range(engines):
        labels = {"engine": str(number), "model_name": "m"}
        found += [Sample("bench", name, labels, at, level * rng.random()) for name, level in LEVELS.items()]
        for name, step in _COUNTERS.items():
            key = f"{name} {number}"
            counts[key] = counts.get(key, at if not counts else 0.0) + rng.randrange(step)
            found.append(Sample("bench", name, labels, at, counts[key]))
        for name, bounds in BOUNDS.items():
            grown = rng.randrange(20)
            for bound in (*bounds, "+Inf"):
                key = f"{name} {number} {bound}"
                counts[key] = counts.get(key, 0.0) + grown
                found.append(Sample("bench", f"{name}_bucket", labels | {"le": str(bound)}, at, counts[key]))
            found.append(Sample("bench", f"{name}_count", labels, at, counts[key]))
    return found


_COUNTERS = {
    "generation_tokens_total": 2000,
    "isolation_breaches_total": 1,
    "kv_block_evictions_total": 20,
    "kv_evicted_before_reuse_total": 2,
    "preemptions_total": 2,
    "prefix_hits_total": 5000,
    "prefix_queries_total": 8000,
    "prompt_tokens_total": 8000,
    "requests_finished_total": 12,
}


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
