"""Figures of one window of a target, read from the store's samples: increases, peaks, the eviction rate, traffic.

Increases survive counter resets (a restarted engine counts from 0 again). A figure without samples is None, not 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from probe.alerts.arithmetic import growth, quantile
from probe.alerts.window import Series
from probe.dialects import load_dialect
from probe.load.report import LoadReport, RequestRecord
from probe.store import Store


def window_metrics(store: Store, target: str, since: float, until: float | None = None) -> dict[str, float | None]:
    """What the target's counters and gauges did in the window.

    `eviction_rate` = increase of preemptions / (increase of finished requests + requests running at the end), the
    alert's own formula over exactly this window.
    """
    store.samples.flush()

    def frame(metric: str) -> pd.DataFrame:
        return store.samples.range(target, metric, since, until)

    preemptions, finished = increase(frame("preemptions_total")), increase(frame("requests_finished_total"))
    running = frame("requests_running")
    last_running = last(running)
    rate = None
    if preemptions is not None and finished is not None:
        served = finished + (last_running or 0)
        rate = round(preemptions / served, 4) if served else None
    return {
        "preemptions": preemptions,
        "finished": finished,
        "eviction_rate": rate,
        "requests_preempted": increase(frame("requests_preempted_total")),
        "kv_usage_peak": peak(frame("kv_usage_ratio")),
        "running_peak": peak(running),
        "waiting_peak": peak(frame("requests_waiting")),
    }


def _series(frame: pd.DataFrame) -> Iterable[pd.DataFrame]:
    labels = [column for column in frame.columns if column not in ("ts", "value")]
    if not labels:
        return [frame] if len(frame) else []
    return [group for _, group in frame.groupby(labels, dropna=False)]


def increase(frame: pd.DataFrame) -> float | None:
    """Sum over series of a counter's rise as it was seen: resets included, not extrapolated."""
    rises = []
    for series in _series(frame):
        points = zip(series["ts"].tolist(), series["value"].tolist(), strict=True)
        found = growth(Series({}, points), -math.inf, math.inf)
        if found is not None:
            rises.append(found.value)
    return sum(rises) if rises else None


def peak(frame: pd.DataFrame) -> float | None:
    """Largest value of a gauge (of its hottest series, never a sum)."""
    return float(frame["value"].max()) if len(frame) else None


def last(frame: pd.DataFrame) -> float | None:
    """Newest value, summed over series that were sampled at that time."""
    if not len(frame):
        return None
    newest = frame[frame["ts"] == frame["ts"].max()]
    return float(newest["value"].sum())


def peak_in_flight(records: Iterable[RequestRecord]) -> int:
    """Most requests that were open at the same time, as the client saw it."""
    edges: list[tuple[float, int]] = []
    for record in records:
        edges += [(record.started_s, 1), (record.started_s + (record.e2e_s or 0.0), -1)]
    now = most = 0
    for _, step in sorted(edges):
        now += step
        most = max(most, now)
    return most


def observed_traffic(store: Store, target: str, since: float, until: float | None = None) -> dict[str, Any]:
    """The facts of `runbooks.facts.TrafficFacts` from a target's samples alone; what was not sampled is left out.

    The longest request is not among them: histograms only bound it. Advice then counts with the context length.
    """
    store.samples.flush()

    def rise(metric: str) -> float | None:
        return increase(store.samples.range(target, metric, since, until))

    def mean(histogram: str) -> float | None:
        total, count = rise(f"{histogram}_sum"), rise(f"{histogram}_count")
        return total / count if total is not None and count else None

    running = peak(store.samples.range(target, "requests_running", since, until))
    waiting = peak(store.samples.range(target, "requests_waiting", since, until))
    facts = {
        "peak_running": None if running is None else int(running),
        "peak_waiting": None if waiting is None else int(waiting),
        "prompt_tokens_mean": mean("request_prompt_tokens"),
        "output_tokens_mean": mean("request_generation_tokens"),
        "queue_s_mean": mean("queue_seconds"),
        "prefill_s_mean": mean("prefill_seconds"),
        "kv_usage_peak": peak(store.samples.range(target, "kv_usage_ratio", since, until)),
        "preemptions": rise("preemptions_total"),
        **token_pace(store, target, since, until),
    }
    return {name: value for name, value in facts.items() if value is not None}


def token_pace(store: Store, target: str, since: float, until: float | None = None) -> dict[str, Any]:
    """Gaps between tokens in the window (99th percentile), the objective for them, and prompt tokens a second.

    What is not known is left out.
    """
    found = store.targets.get(target)
    frame = store.samples.range(target, "itl_seconds_bucket", since, until)
    bound = load_dialect(found.engine).slo.get("itl_seconds") if found is not None else None
    if bound is None or not len(frame):
        return {}
    grown = [(float(str(le)), increase(part.drop(columns="le")) or 0.0) for le, part in frame.groupby("le")]
    reading = quantile(0.99, sorted(grown))
    if reading is None:
        return {}
    prompts = store.samples.range(target, "prompt_tokens_total", since, until)
    span_s = float(prompts["ts"].max() - prompts["ts"].min()) if len(prompts) else 0.0
    rate = {"prompt_tokens_per_s": (increase(prompts) or 0.0) / span_s} if span_s else {}
    return {"itl_s_p99": reading.value, "itl_bound_s": bound, **rate}


def traffic(metrics: dict[str, float | None], load: LoadReport, longest_request_tokens: int) -> dict[str, Any]:
    """The facts of `runbooks.facts.TrafficFacts`, from the target's gauges and the client's records.

    The client's count of open requests covers what a scrape every half second misses.
    """
    open_peak = peak_in_flight(load.records)
    running = metrics.get("running_peak")
    running_peak = open_peak if running is None else int(running)
    done = [r for r in load.records if r.error is None]
    return {
        "peak_running": running_peak,
        "peak_waiting": max(0, open_peak - running_peak),
        "prompt_tokens_mean": sum(r.prompt_tokens for r in done) / len(done) if done else None,
        "output_tokens_mean": sum(r.output_tokens for r in done) / len(done) if done else None,
        "tokens_per_request_peak": longest_request_tokens,
        "kv_usage_peak": metrics.get("kv_usage_peak"),
        "preemptions": metrics.get("preemptions"),
    }
