"""What a runbook is told of a target: its own account of itself, and the traffic that the store measured."""

from __future__ import annotations

import time
from typing import Any

from probe.replay.evidence import increase, window_metrics
from probe.store import Alert, Store, Target

LOOK_BACK_S = 900.0


def measured_facts(store: Store, target: Target, alert: Alert | None) -> dict[str, Any]:
    """`target.facts` with `traffic` of the alert's time (or of the last 15 minutes) and the failed allocation.

    A figure that was not measured is left out; the runbook then says what is missing.
    """
    until = alert.resolved_at if alert is not None and alert.resolved_at else time.time()
    since = alert.pending_at - alert.window_s if alert is not None else until - LOOK_BACK_S
    facts = {**target.facts, "engine": target.engine, "traffic": _traffic(store, target.name, since, until)}
    exits = store.events.recent(limit=1, target=target.name, kinds=["engine_exit"], since=since)
    allocation = exits[0].data.get("allocation_bytes") if exits else None
    if allocation is not None:
        facts["oom_allocation_bytes"] = allocation
    return facts


def _traffic(store: Store, target: str, since: float, until: float) -> dict[str, Any]:
    metrics = window_metrics(store, target, since, until)
    finished = metrics["finished"]
    traffic: dict[str, Any] = {
        "peak_running": _whole(metrics["running_peak"]),
        "peak_waiting": _whole(metrics["waiting_peak"]),
    }
    for name, metric in (
        ("prompt_tokens_mean", "prompt_tokens_total"),
        ("output_tokens_mean", "generation_tokens_total"),
    ):
        tokens = increase(store.samples.range(target, metric, since, until))
        if tokens is not None and finished:
            traffic[name] = tokens / finished
    return {key: value for key, value in traffic.items() if value is not None}


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
