"""Alerts: what is active, what was, and for one alert how its state moved and what its value was made of."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from app.runtime import get_runtime
from app.ui import charts, signals, words
from app.ui.alert_actions import show_actions, show_silences
from app.ui.guard import guarded, live, page
from app.ui.imported_view import show_imported
from app.ui.links import link, param
from app.ui.receivers_view import show_receivers
from app.ui.tables import show_choices, show_table
from probe.notify.dispatcher import mutings
from probe.store import Alert, Store

HISTORY = 200
TABS = ["Alerts", "Silences", "Receivers", "From Alertmanager"]


@page
def render() -> None:
    """The page."""
    st.title("Alerts")
    store = get_runtime().store
    chosen = param("alert")
    if chosen is not None:
        alert = store.alerts.get(int(chosen)) if chosen.isdigit() else None
        if alert is None:
            st.warning(f"There is no alert `{chosen}`; choose one from the history below.")
        else:
            show_alert(alert.id)
            # Outside of what redraws itself: a dialog opened from there would close with the next redraw.
            if alert.state in ("pending", "firing"):
                show_actions(alert)
    # With a key and in the URL: the tab stays open when what is above it changes.
    alerts, silences, receivers, imported = st.tabs(TABS, key="view", on_change="rerun", bind="query-params")
    with alerts:
        st.subheader("Active")
        show_active()
        show_history(store.alerts.history(limit=HISTORY))
    with silences, guarded():
        show_silences()
    with receivers, guarded():
        show_receivers()
    with imported:
        show_imported()


@live(2.0)
def show_active() -> None:
    """Firing and pending alerts, and what the evaluator reads for the quiet rules."""
    store = get_runtime().store
    now = time.time()
    alerts = sorted(store.alerts.active(), key=lambda a: (a.state != "firing", a.pending_at))
    muted = mutings(store, alerts)
    for alert in sorted(alerts, key=lambda a: a.id in muted):
        show_card(alert, now, muted.get(alert.id))
    if not alerts:
        st.success("✔ No alert is firing or pending.")
    readings = store.alerts.readings()
    with st.expander(f"What every rule reads now ({len(readings)})"):
        rows = [
            {
                "rule": r.rule,
                "target": r.target,
                "verdict": r.verdict.replace("_", " "),
                "value": _number(r.value),
                "threshold": _number(r.threshold),
                "evaluated": words.ago(r.updated_at, now),
                "rests on": r.coverage,
            }
            for r in readings
        ]
        st.dataframe(pd.DataFrame(rows), hide_index=True, height="content")


def show_card(alert: Alert, now: float, muted: str | None) -> None:
    """One active alert; `muted` says why nobody is told of it."""
    with st.container(border=True):
        since = alert.firing_at if alert.state == "firing" and alert.firing_at else alert.pending_at
        st.markdown(
            f"{words.alert_mark(alert.state).badge} **{alert.rule}** on `{alert.target}` for "
            f"{words.span(now - since)}, evaluated {words.ago(alert.updated_at, now)}"
        )
        st.markdown(f"{words.plain(alert.summary)}  \n{value_line(alert)}")
        if muted:
            st.markdown(f":gray-badge[◌ nobody is told] {words.plain(muted)}")
        show_links(alert)
        link("alerts", "Open to acknowledge or silence", ":material/link:", alert=alert.id)


def value_line(alert: Alert) -> str:
    """Value against threshold, with what the value is made of and the window."""
    parts = [f"value **{_number(alert.value)}** against threshold **{_number(alert.threshold)}**"]
    if alert.numerator is not None and alert.denominator is not None:
        parts.append(f"{words.count(alert.numerator)} / {words.count(alert.denominator)}")
    if alert.window_s:
        parts.append(f"window {words.span(alert.window_s)}")
    if alert.hold_s:
        parts.append(f"hold {words.span(alert.hold_s)}")
    return ", ".join(parts)


def show_links(alert: Alert) -> None:
    """Where to go from an alert."""
    with st.container(horizontal=True):
        link(
            "runbooks", f"Open runbook {alert.runbook}", ":material/menu_book:",
            runbook=alert.runbook, alert=alert.id, replay=alert.replay_id,
        )  # fmt: skip
        if alert.replay_id:
            link("incidents", "Open its replay", ":material/science:", replay=alert.replay_id)


@live(2.0)
def show_alert(alert_id: int) -> None:
    """One alert: state, value, timeline, line of its signal."""
    store = get_runtime().store
    alert = store.alerts.get(alert_id)
    if alert is None:
        return
    mark = words.alert_mark(alert.state)
    st.subheader(f"Alert {alert.id}: {alert.rule}")
    st.markdown(f"{mark.badge} severity **{alert.severity}** on `{alert.target}`. {words.plain(alert.summary)}")
    st.markdown(f"{value_line(alert)}  \nrests on: {words.plain(alert.coverage or 'nothing recorded')}")
    if muted := mutings(store, [alert]).get(alert.id):
        st.markdown(f":gray-badge[◌ nobody is told] {words.plain(muted)}")
    show_links(alert)
    show_timeline(store, alert)
    show_told(store, alert)
    if alert.rule == signals.EVICTION_RULE:
        show_signal(store, alert)
    st.caption(f"Evaluated {words.ago(alert.updated_at)}; redrawn every 2 s.")


def show_timeline(store: Store, alert: Alert) -> None:
    """Every change of state with its time, how long the state lasted and the value at the change."""
    transitions = store.alerts.transitions(alert.id)
    ends = [t[0] for t in transitions[1:]] + [alert.resolved_at or time.time()]
    rows = [
        {
            "time": words.clock(ts),
            "from": words.alert_mark(before or "inactive").text,
            "to": words.alert_mark(after).text,
            "lasted": words.span(end - ts) if after != "resolved" else words.DASH,
            "value": _number(value),
        }
        for (ts, before, after, value), end in zip(transitions, ends, strict=True)
    ]
    st.markdown("**States**")
    show_table(rows)


def show_told(store: Store, alert: Alert) -> None:
    """Who acknowledged it and why, and what was sent to whom."""
    rows = [
        {"when": ack.at, "what": f"acknowledged ({ack.kind})", "who": ack.author, "how": ack.reason}
        for ack in store.alerts.acknowledgements(alert.id)
    ]
    rows += [
        {
            "when": sent.done_at or sent.created_at,
            "what": f"message: {sent.transition}",
            "who": sent.receiver,
            "how": f"{sent.state}: {sent.error}" if sent.error else sent.state,
        }
        for sent in store.notifications.list(alert_id=alert.id)
    ]
    if rows:
        st.markdown("**Told and taken on**")
        rows.sort(key=lambda row: float(str(row["when"])))
        show_table([{**row, "when": words.clock(float(str(row["when"])))} for row in rows])


def show_signal(store: Store, alert: Alert) -> None:
    """The eviction rate around the alert, with its threshold."""
    target = store.targets.get(alert.target)
    if target is None:
        return
    margin = max(60.0 * target.time_scale, 4 * alert.window_s)
    until = min(time.time(), (alert.resolved_at or time.time()) + margin)
    reader = signals.Reader(get_runtime().history, target, alert.pending_at - margin, until)
    line = signals.eviction_line(reader, alert.window_s)
    charts.lines(
        reader.at, {"eviction rate": line}, title="Eviction rate around the alert", y_format=".1%",
        threshold=charts.Threshold(alert.threshold, f"alert above {alert.threshold:.0%}"),
    )  # fmt: skip


def show_history(alerts: Sequence[Alert]) -> None:
    """All alerts, newest first."""
    st.subheader("History")
    if not alerts:
        st.caption("No alert was ever raised in this store.")
        return
    rows = [
        {
            "alert": a.id,
            "state": words.alert_mark(a.state).text,
            "rule": a.rule,
            "target": a.target,
            "value": _number(a.value),
            "threshold": _number(a.threshold),
            "pending": words.clock(a.pending_at),
            "firing": words.clock(a.firing_at),
            "resolved": words.clock(a.resolved_at),
        }
        for a in alerts
    ]
    show_choices(rows, [a.id for a in alerts], "alert")


def _number(value: float | None) -> str:
    return words.DASH if value is None else f"{value:,.4g}"
