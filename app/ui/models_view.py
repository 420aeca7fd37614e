"""Models over all their targets: what no single target's page shows, each row with the stamp of what it rests on."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from app.history import History
from app.runtime import get_runtime
from app.ui import words
from app.ui.guard import live
from probe.alerts.aggregate import METRICS, ModelFigures, by_model
from probe.alerts.arithmetic import Moment
from probe.alerts.evaluate import stale_after
from probe.alerts.window import Window
from probe.store import Sample, Target

WINDOW_S = 300.0
REFRESH_S = 5.0


@live(REFRESH_S)
def show_models() -> None:
    """A row for each model, where several engines serve: with one there is nothing to add up."""
    runtime = get_runtime()
    figures = read_models(runtime.history, runtime.store.targets.list(), time.time())
    if sum(one.engines_known for one in figures) < 2:
        return
    st.subheader("Models")
    st.dataframe(pd.DataFrame([_row(one) for one in figures]), hide_index=True, height="content")
    st.caption(
        f"Sums over all engines, ratios of sums over {words.span(WINDOW_S)}, the quantile from merged buckets, KV "
        "usage of the hottest engine. An engine that does not answer is missing from the sums, as the last column says."
    )


def read_models(history: History, targets: Sequence[Target], now: float) -> list[ModelFigures]:
    """Figures by model, from the samples of the last minutes."""
    moments = {}
    for target in targets:
        window = Window(dict.fromkeys(METRICS, WINDOW_S))
        for metric in METRICS:
            for line in history.lines(target.name, metric, now - WINDOW_S):
                points = zip(line.ts.tolist(), line.values.tolist(), strict=True)
                labels = {name: value for name, value in line.labels.items() if value}
                window.add([Sample(target.name, metric, labels, ts, value) for ts, value in points])
        moments[target.name] = Moment(window, now, stale_after(target.scrape_interval_s))
    return by_model(moments, WINDOW_S)


def _row(one: ModelFigures) -> dict[str, str]:
    usage = words.DASH
    if one.hottest is not None:
        value, target, engine = one.hottest
        usage = f"{words.ratio(value)} ({target}{f' engine {engine}' if engine else ''})"
    ttft = words.DASH
    if one.ttft_p95 is not None:
        above = "above " if one.ttft_p95.above_last else ""
        ttft = f"{above}{words.seconds(one.ttft_p95.value)}"
    eviction = words.DASH
    if one.eviction is not None:
        preempted, in_service = one.eviction
        eviction = f"{words.ratio(one.eviction_rate)} ({words.count(preempted)} / {words.count(in_service)})"
    return {
        "model": one.model or "unnamed",
        "targets": str(len(one.targets)),
        "running": words.count(one.running),
        "waiting": words.count(one.waiting),
        "KV usage (hottest)": usage,
        "eviction rate": eviction,
        "TTFT p95": ttft,
        "tokens/s": words.count(one.tokens_per_s),
        "prefix hit rate": words.ratio(one.hit_rate),
        "rests on": one.stamp,
    }
