"""Backtest: would a rule have fired on what is stored, how often, and how long before users felt it?

The history is read once; moving the threshold or the hold time judges it anew without reading.
"""

from __future__ import annotations

import math
import time

import numpy as np
import streamlit as st

from app.runtime import get_runtime
from app.ui import charts, words
from app.ui.guard import guarded, page
from app.ui.ranges import choose_target
from app.ui.tables import show_table
from probe.alerts.backtest import VISIBLE_SHARE, Backtest, History
from probe.alerts.backtest_command import history
from probe.alerts.rule import Rule, ValueSignal
from probe.alerts.rules import DEFAULT_RULES
from probe.store import Target

SPANS = {"1 h": 3600.0, "6 h": 21_600.0, "1 d": 86_400.0, "7 d": 604_800.0}
POINTS = 400
KEPT = "backtest-history"


@page
def render() -> None:
    """The page."""
    st.title("Backtest")
    st.caption("A rule evaluated again on stored samples, with its own hold and resolve times.")
    targets = get_runtime().store.targets.list()
    if not targets:
        st.info("No target is watched yet, so there is no history: attach one on the Targets page.")
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        rule = choose_rule()
        target = choose_target(targets)
        span = st.segmented_control("Back", list(SPANS), default="1 d", required=True, key="back", bind="query-params")
        read = st.button("Test", type="primary", icon=":material/history:")
    wanted = (rule.id, target.name, span)
    if read:
        st.session_state[KEPT] = None
        with guarded(), st.spinner("Reading and evaluating…"):
            st.session_state[KEPT] = (wanted, read_history(rule, target, SPANS[span or "1 d"]))
    kept = st.session_state.get(KEPT)
    if kept is None or kept[0] != wanted:
        st.info("Press Test to read the history of this target.")
        return
    show(rule, kept[1])


def choose_rule() -> Rule:
    """The rule; the first alert of the project unless the URL says otherwise."""
    ids = [rule.id for rule in DEFAULT_RULES]
    chosen = st.selectbox("Rule", ids, index=ids.index("eviction-storm"), key="rule", bind="query-params")
    return next(rule for rule in DEFAULT_RULES if rule.id == chosen)


def read_history(rule: Rule, target: Target, span: float) -> History:
    """What is stored, evaluated; raises `BacktestError` with a sentence."""
    now = time.time()
    return history(get_runtime().store, rule, target, now - span, now, None)


@st.fragment
def show(rule: Rule, tested: History) -> None:
    """The sliders, and what the rule would have done with their values."""
    with guarded():
        left, right = st.columns(2)
        threshold = None
        with left:
            if tested.can_compare:
                threshold = choose_threshold(rule, tested)
            else:
                st.caption("This rule compares no single number with a threshold, so only its hold time can be moved.")
        with right:
            hold_s = st.slider(
                "Hold time, seconds", 0, 900, round(tested.rule.hold_s), step=5, key=f"hold-{rule.id}",
                help="How long the condition must hold before the alert fires.",
            )  # fmt: skip
        result = tested.judge(threshold, float(hold_s))
        show_figures(result)
        show_chart(rule, tested, result)
        show_firings(rule, result)


def choose_threshold(rule: Rule, tested: History) -> float:
    """The threshold, from 0 to a little above what was seen."""
    signal = rule.signal
    assert isinstance(signal, ValueSignal)
    scale, unit = (100.0, ", %") if signal.unit == "percent" else (1.0, "")
    seen = [found.value for found in tested.steps if found.value is not None and math.isfinite(found.value)]
    top = max([2 * rule.threshold, *seen, 0.01]) * scale
    return st.slider(
        f"Threshold{unit} (the rule's own: {rule.comparison} {rule.threshold * scale:g})",
        0.0, float(math.ceil(top)), min(rule.threshold * scale, float(math.ceil(top))),
        step=0.5 if scale > 1 else max(math.ceil(top) / 200, 0.01), key=f"threshold-{rule.id}",
    ) / scale  # fmt: skip


def show_figures(result: Backtest) -> None:
    """Pages a week, and what users would have felt."""
    per_week = result.pages_per_week
    up = sum((f.resolved_at or result.until) - f.firing_at for f in result.firings)
    leads = [f.lead_s for f in result.firings if f.lead_s is not None]
    columns = st.columns(4)
    columns[0].metric("Pages a week", words.DASH if per_week is None else f"{per_week:.1f}",
                      help="Firings, by the time that has data; none below six hours of it.")  # fmt: skip
    columns[1].metric(
        "Fired",
        f"{len(result.firings)} {'time' if len(result.firings) == 1 else 'times'}",
        help="Each counts once, however long it lasted.",
    )
    columns[2].metric("Firing for", words.span(up))
    columns[3].metric(
        "Lead time", f"{'−' if max(leads) < 0 else ''}{words.span(abs(max(leads)))}" if leads else words.DASH,
        help=f"From firing to the first moment users felt it: no answer, or more than {VISIBLE_SHARE:.0%} of the "
        "requests of five minutes slower than the latency objective. The longest of all firings; below 0, users felt "
        "it first.",
    )  # fmt: skip
    st.caption(
        f"`{result.target}`: {words.span(result.covered_s)} with data of {words.span(result.until - result.since)}. "
        f"Breaches that users felt: {result.visible_breaches}, without this alert: {result.missed_breaches}."
    )


def show_chart(rule: Rule, tested: History, result: Backtest) -> None:
    """The value, thinned to its worst in each stretch, with the threshold tried."""
    steps = tested.steps
    worst = np.nanmin if rule.comparison in ("<", "<=", "==") else np.nanmax
    values = np.array([math.nan if s.value is None or math.isinf(s.value) else s.value for s in steps])
    times = np.array([s.ts for s in steps])
    if np.isnan(values).all():
        st.caption("The rule had no value in this time.")
        return
    parts = np.array_split(np.arange(len(steps)), min(POINTS, len(steps)))
    at = np.array([times[part[-1]] for part in parts])
    line = np.array([worst(values[part]) if not np.isnan(values[part]).all() else math.nan for part in parts])
    percent = isinstance(rule.signal, ValueSignal) and rule.signal.unit == "percent"
    limit = result.rule.threshold
    charts.lines(
        np.append(at, result.until), {rule.id: np.append(line, math.nan)}, title=rule.title,
        y_format=".1%" if percent else ",.3~g",
        threshold=charts.Threshold(limit, f"{rule.comparison} {limit:.1%}" if percent else f"{limit:g}")
        if tested.can_compare else None,
    )  # fmt: skip


def show_firings(rule: Rule, result: Backtest) -> None:
    """Each time it would have fired."""
    if not result.firings:
        st.success("✔ With these values the alert would not have fired.")
        return
    percent = isinstance(rule.signal, ValueSignal) and rule.signal.unit == "percent"
    show_table(
        [
            {
                "pending": words.clock(f.pending_at),
                "firing": words.clock(f.firing_at),
                "resolved": words.clock(f.resolved_at) if f.resolved_at else "still firing",
                "lasted": words.span((f.resolved_at or result.until) - f.firing_at),
                "worst value": words.ratio(f.worst) if percent else words.count(f.worst),
                "users felt it": _lead(f.lead_s) if f.lead_s is not None else "no",
            }
            for f in result.firings
        ]
    )


def _lead(lead_s: float) -> str:
    return f"{words.span(lead_s)} later" if lead_s >= 0 else f"{words.span(-lead_s)} before"
