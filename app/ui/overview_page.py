"""Overview: what burns first, then every target's state, then the figures of one target with their lines."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from app.runtime import get_runtime
from app.ui import charts, signals, words
from app.ui.guard import live, page
from app.ui.licence_notice import show_notice
from app.ui.links import link
from app.ui.models_view import show_models
from app.ui.ranges import choose_range, choose_target
from app.ui.tables import show_table
from app.ui.tiles import fraction_note, tile
from probe.store import Alert, Reading, Store, Target

REFRESH_S = 2.0
FIGURES_REFRESH_S = 5.0
TILES_A_ROW = 4


@page
def render() -> None:
    """The page."""
    runtime = get_runtime()
    targets = runtime.store.targets.list() if runtime.is_open else []
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.title("Overview")
        target = choose_target(targets) if targets else None
        range_s = choose_range()
    if runtime.problem:
        st.error(words.plain(runtime.problem))
    if runtime.is_open:
        show_notice(runtime)
        show_now()
        show_models()
        if target is not None:
            show_figures(target.name, range_s)
        show_events()


@live(REFRESH_S)
def show_now() -> None:
    """What is wrong now, and how every target is."""
    store = get_runtime().store
    now = time.time()
    show_active(store, now)
    targets = store.targets.list()
    if not targets:
        st.info(
            "No target is watched yet: start the embedded engine on the Engine page, "
            "or attach a server on the Targets page."
        )
    else:
        show_targets(targets, now)


def show_active(store: Store, now: float) -> None:
    """Active alerts, firing before pending."""
    alerts = sorted(store.alerts.active(), key=lambda alert: (alert.state != "firing", alert.pending_at))
    if not alerts:
        st.success("✔ No alert is firing or pending.")
    for alert in alerts:
        alert_banner(alert, now)


def alert_banner(alert: Alert, now: float) -> None:
    """One active alert in a box: state, rule, target, value against threshold, and where to go."""
    since = alert.firing_at if alert.state == "firing" and alert.firing_at else alert.pending_at
    mark = words.alert_mark(alert.state)
    text = (
        f"**{mark.text}: {alert.rule}** on `{alert.target}` for {words.span(now - since)}. {words.plain(alert.summary)}"
    )
    with st.container(border=True):
        (st.error if alert.state == "firing" else st.warning)(text)
        with st.container(horizontal=True):
            link("alerts", "Alert", ":material/notifications:", alert=alert.id)
            link("runbooks", "Runbook", ":material/menu_book:", runbook=alert.runbook, alert=alert.id)


def show_targets(targets: Sequence[Target], now: float) -> None:
    """State of every target in a word and a shape, with the age of its data."""
    history = get_runtime().history
    rows = []
    for target in targets:
        fresh = signals.freshness(history, target, now)
        state, age = words.target_mark(fresh.state).text, words.ago(fresh.answered_at, now)
        row = {"target": target.name, "state": state, "data": age, "kind": target.kind, "engine": target.engine}
        rows.append({**row, "url": target.url})
    st.dataframe(pd.DataFrame(rows), hide_index=True, height="content")


@live(FIGURES_REFRESH_S)
def show_figures(name: str, range_s: float) -> None:
    """Tiles and charts of one target, all of one moment."""
    store = get_runtime().store
    now = time.time()
    target = store.targets.get(name)
    if target is None:
        st.info(f"Target `{name}` is gone.")
        return
    reader = signals.Reader(get_runtime().history, target, now - range_s, now)
    newest = signals.freshness(get_runtime().history, target, now).answered_at
    st.caption(
        f"`{name}`: data of {words.clock(newest)}, {words.ago(newest, now)}; redrawn every {FIGURES_REFRESH_S:g} s."
    )
    reading = eviction_reading(store, name)
    rate = signals.eviction_rate(reader, reading)
    running, waiting = signals.requests(reader)
    show_tiles(reader, rate, running, waiting)
    if reading is not None and reading.verdict == "below_floor":
        st.caption("Eviction rate: too little traffic in the window to alert on; shown, not judged.")
    left, right = st.columns(2)
    with left:
        limit = reading.threshold if reading is not None else signals.EVICTION_THRESHOLD
        charts.lines(
            reader.at, {"eviction rate": rate.line}, title="Eviction rate (preemptions / requests in service)",
            y_format=".1%", threshold=charts.Threshold(limit, f"alert above {limit:.0%}"),
        )  # fmt: skip
    with right:
        lines = {"running": running.line, "waiting": waiting.line}
        charts.lines(reader.at, lines, title="Requests running and waiting")


def show_tiles(reader: signals.Reader, rate: signals.Signal, running: signals.Signal, waiting: signals.Signal) -> None:
    """The figures, `TILES_A_ROW` beside each other (below each other on a phone)."""
    ttft, tokens, hits = signals.ttft_p95(reader), signals.tokens_per_second(reader), signals.prefix_hit_rate(reader)
    share = signals.preempted_share(reader, rate.window_s or reader.window_s)
    window = "computed, over {}"
    tiles = [
        (signals.kv_usage(reader), words.ratio, "measured"),
        (running, words.count, "measured"),
        (waiting, words.count, "measured"),
        (rate, words.ratio, fraction_note(rate)),
        (share, words.ratio, fraction_note(share)),
        (ttft, words.seconds, window.format(words.span(ttft.window_s or 0))),
        (tokens, words.count, window.format(words.span(tokens.window_s or 0))),
        (hits, words.ratio, fraction_note(hits)),
    ]
    for start in range(0, len(tiles), TILES_A_ROW):
        for column, shown in zip(st.columns(TILES_A_ROW), tiles[start : start + TILES_A_ROW], strict=False):
            with column:
                tile(*shown)


def eviction_reading(store: Store, target: str) -> Reading | None:
    """The evaluator's newest reading of the eviction rule on `target`."""
    readings = store.alerts.readings(target)
    return next((reading for reading in readings if reading.rule == signals.EVICTION_RULE), None)


@live(FIGURES_REFRESH_S)
def show_events() -> None:
    """The newest events of all targets."""
    now = time.time()
    st.subheader("Events")
    events = get_runtime().store.events.recent(limit=12)
    if not events:
        st.caption("No event yet.")
        return
    show_table(
        [
            {
                "when": f"{words.clock(event.ts)}, {words.ago(event.ts, now)}",
                "target": event.target or "watch",
                "event": event.kind.replace("_", " "),
                "what happened": event.message,
            }
            for event in events
        ]
    )
