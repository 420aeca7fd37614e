"""Overview: what burns first, then every target's state, then the figures of one target with their lines."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from app.runtime import Runtime, get_runtime
from app.ui import charts, signals, words
from app.ui.guard import live, page
from app.ui.links import link
from app.ui.ranges import choose_range, choose_target
from app.ui.tiles import fraction_note, tile
from probe.store import Alert, Reading, Store, Target

REFRESH_S = 2.0


@page
def render() -> None:
    """The page."""
    runtime = get_runtime()
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.title("Overview")
        targets = runtime.store.targets.list() if runtime.problem is None or runtime.is_open else []
        target = choose_target(targets) if targets else None
        range_s = choose_range()
    show_problem(runtime)
    show_now(target.name if target else None, range_s)


def show_problem(runtime: Runtime) -> None:
    """What went wrong at the start, as long as the app still runs."""
    if runtime.problem:
        st.error(runtime.problem)


@live(REFRESH_S)
def show_now(name: str | None, range_s: float) -> None:
    """Everything below the title, drawn together so that it is all of one moment."""
    store = get_runtime().store
    now = time.time()
    show_active(store, now)
    targets = store.targets.list()
    if not targets:
        st.info(
            "No target is watched yet: start the embedded engine on the Engine page, "
            "or attach a server with `kvoncall watch --target URL`."
        )
    else:
        show_targets(store, targets, now)
    if name is not None:
        show_figures(store, name, range_s, now)
    show_events(store, now)


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
    text = f"**{mark.text}: {alert.rule}** on `{alert.target}` for {words.span(now - since)}. {alert.summary}"
    with st.container(horizontal=True, vertical_alignment="center"):
        (st.error if alert.state == "firing" else st.warning)(text)
        link("alerts", "Alert", ":material/notifications:", alert=alert.id)
        link("runbooks", "Runbook", ":material/menu_book:", runbook=alert.runbook, alert=alert.id)


def show_targets(store: Store, targets: Sequence[Target], now: float) -> None:
    """State of every target in a word and a shape, with the age of its data."""
    rows = [
        {
            "target": target.name,
            "state": words.target_mark(signals.target_state(store, target, now)).text,
            "kind": target.kind,
            "engine": target.engine,
            "data": words.ago(signals.data_time(store, target), now),
            "url": target.url,
        }
        for target in targets
    ]
    st.dataframe(pd.DataFrame(rows), hide_index=True, height="content")


def show_figures(store: Store, name: str, range_s: float, now: float) -> None:
    """Tiles and charts of one target."""
    target = store.targets.get(name)
    if target is None:
        st.info(f"Target `{name}` is gone.")
        return
    reader = signals.Reader(store, target, now - range_s, now)
    newest = signals.data_time(store, target)
    st.caption(f"{name}: data of {words.clock(newest)}, {words.ago(newest, now)}; redrawn every {REFRESH_S:g} s.")
    reading = eviction_reading(store, name)
    rate = signals.eviction_rate(reader, reading)
    usage = signals.kv_usage(reader)
    running, waiting = signals.requests(reader)
    with st.container(horizontal=True):
        tile(usage, words.ratio, "measured, newest scrape")
        tile(running, words.count, "measured, newest scrape")
        tile(waiting, words.count, "measured, newest scrape")
        tile(rate, words.ratio, fraction_note(rate, "preempted / in service"))
        ttft = signals.ttft_p95(reader)
        tile(ttft, words.seconds, f"computed, {words.span(ttft.window_s or 0)}")
        tokens = signals.tokens_per_second(reader)
        tile(tokens, words.count, f"computed, {words.span(tokens.window_s or 0)}")
        hits = signals.prefix_hit_rate(reader)
        tile(hits, words.ratio, fraction_note(hits, "hit / asked tokens"))
    if reading is not None and reading.verdict == "below_floor":
        st.caption("Eviction rate: too little traffic in the window to alert on; shown, not judged.")
    left, right = st.columns(2)
    with left:
        limit = reading.threshold if reading is not None else 0.05
        threshold = charts.Threshold(limit, f"alert above {limit:.0%}")
        charts.lines(
            reader.at, {"eviction rate": rate.line}, title="Eviction rate (preemptions / requests in service)",
            y_format=".1%", threshold=threshold,
        )  # fmt: skip
    with right:
        charts.lines(
            reader.at, {"running": running.line, "waiting": waiting.line}, title="Requests running and waiting"
        )


def eviction_reading(store: Store, target: str) -> Reading | None:
    """The evaluator's newest reading of the eviction rule on `target`."""
    readings = store.alerts.readings(target)
    return next((reading for reading in readings if reading.rule == signals.EVICTION_RULE), None)


def show_events(store: Store, now: float) -> None:
    """The newest events of all targets."""
    st.subheader("Events")
    events = store.events.recent(limit=12)
    if not events:
        st.caption("No event yet.")
        return
    rows = [
        {"time": words.clock(e.ts), "age": words.ago(e.ts, now), "target": e.target or "watch", "event": e.kind,
         "what happened": e.message}
        for e in events
    ]  # fmt: skip
    st.dataframe(pd.DataFrame(rows), hide_index=True, height="content")
