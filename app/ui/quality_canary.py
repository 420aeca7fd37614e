"""The canary's part of the quality page: its rounds over time, the newest ones in figures, start and stop."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from app.embedded import NAME
from app.history import Line
from app.runtime import Runtime, get_runtime
from app.ui import quality_charts as charts
from app.ui import quality_tables as tables
from app.ui import words
from app.ui.guard import guarded, live
from app.ui.quality_data import ALL
from app.ui.ranges import choose_target
from app.ui.tables import show_table
from probe.alerts.quality import ROUND_EVENT
from probe.store import Event

LOOK_BACK_S = 24 * 3600.0
ROUNDS_SHOWN = 8
EVERY_S = {"1 min": 60.0, "5 min": 300.0, "15 min": 900.0, "1 h": 3600.0}


def show_canary(runtime: Runtime) -> None:
    """Controls of the embedded engine's canary, then the rounds of the chosen target."""
    targets = runtime.store.targets.list()
    if not targets:
        st.info("No target is watched yet, so there is nothing to ask; start the embedded engine on the Engine page.")
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.subheader("Canary")
        target = choose_target(targets)
        if target.name == NAME and runtime.engine is not None:
            show_controls(runtime)
    show_rounds(target.name)


def show_controls(runtime: Runtime) -> None:
    """Start or stop."""
    status = runtime.canary.status()
    st.session_state["drawn_canary"] = status.running
    if not status.running and st.button("Start canary", icon=":material/play_arrow:"):
        confirm_start()
    if status.running and st.button("Stop canary", icon=":material/stop:"):
        runtime.canary.stop(timeout_s=2.0)
        st.rerun()


@st.dialog("Start the canary")
def confirm_start() -> None:
    """How often, and against which baseline."""
    with guarded():
        st.markdown(
            "Every round asks the embedded engine the same 120 questions, two at a time, and compares the answers with "
            "the baseline's one by one. Two rounds in a row that are clearly worse raise the alert `kv-quality-drop`."
        )
        every = st.selectbox("A round every", list(EVERY_S), index=1, key="canary-every")
        fresh = st.checkbox(
            "Take a new baseline", key="canary-fresh",
            help="The first round becomes the baseline. Without it the last baseline of this target stays, if any.",
        )  # fmt: skip
        if st.button("Start", type="primary", key="canary-confirm"):
            get_runtime().canary.start(EVERY_S[every], new_baseline=fresh)
            st.rerun()


@live(2.0)
def show_rounds(target: str) -> None:
    """Accuracy of the last day's rounds and the newest ones in figures."""
    runtime = get_runtime()
    if target == NAME and runtime.engine is not None:
        show_state(runtime)
    lines = runtime.history.lines(target, "quality_score", time.time() - LOOK_BACK_S)
    events = runtime.store.events.recent(limit=ROUNDS_SHOWN, target=target, kinds=[ROUND_EVENT])
    frame = scores(lines)
    if frame.empty and not events:
        command = f"`kvoncall quality --target {target} --canary --every 300` starts one"
        how = "Start it above" if target == NAME else command
        st.caption(f"No canary asked this target in the last day, so nobody watches its answers. {how}.")
        return
    if not frame.empty:
        charts.rounds(frame, title="Accuracy of the canary's rounds, last 24 h")
    show_table([round_row(event) for event in events])


def show_state(runtime: Runtime) -> None:
    """One line about the canary of the embedded engine; the page is drawn again when it starts or ends."""
    status = runtime.canary.status()
    if status.running != st.session_state.get("drawn_canary"):
        st.rerun(scope="app")
    if status.running:
        doing = "asking now" if status.asking else "the next round is timed"
        if status.waiting:
            doing = f"waiting: {status.waiting}"
        st.markdown(
            f":green-badge[● canary runs] every {words.span(status.every_s)} · {status.rounds} rounds since it was "
            f"started · {doing}"
        )
    if status.problem:
        st.error(words.plain(status.problem))


def scores(lines: Sequence[Line]) -> pd.DataFrame:
    """Rounds over all tasks and turns as columns time, format, accuracy."""
    rows = [
        {"time": pd.Timestamp(ts, unit="s", tz="UTC"), "format": line.labels.get("dtype", "unknown"), "accuracy": value}
        for line in lines
        if line.labels.get("turn") == ALL and line.labels.get("task") == ALL
        for ts, value in zip(line.ts, line.values, strict=True)
    ]
    return pd.DataFrame(rows, columns=["time", "format", "accuracy"])


def round_row(event: Event) -> dict[str, object]:
    """A round's figures against its baseline."""
    data, baseline = event.data, str(event.data["baseline_id"])
    items, lost, gained = (int(data.get(key) or 0) for key in ("items", "lost", "gained"))
    fall = tables.points_of((lost - gained) / items) if items else words.DASH
    return {
        "round": words.clock(event.ts), "format": data.get("dtype") or words.DASH, "items": words.count(items),
        "lost": words.count(lost), "gained": words.count(gained), "fall in points": fall,
        "invalid": words.ratio(int(data.get("invalid") or 0) / items) if items else words.DASH,
        "compared with": "itself: the baseline" if data["run_id"] == baseline else f"run {baseline[:8]}",
    }  # fmt: skip
