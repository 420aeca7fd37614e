"""What an operator does to an alert: take it on with a reason, or silence it for a time. Both are kept with a name."""

from __future__ import annotations

import time

import streamlit as st

from app.runtime import get_runtime
from app.ui import words
from app.ui.forms import author_field, given
from app.ui.guard import guarded
from probe.notify.matchers import Matcher
from probe.store import ACK_KINDS, Alert

DURATIONS = {"30 min": 1_800.0, "1 h": 3_600.0, "4 h": 14_400.0, "12 h": 43_200.0, "1 d": 86_400.0, "7 d": 604_800.0}


def show_actions(alert: Alert) -> None:
    """Buttons of an active alert."""
    with st.container(horizontal=True):
        if alert.acknowledgement is None:
            if st.button("Acknowledge", icon=":material/back_hand:", key=f"ack-{alert.id}"):
                acknowledge(alert)
        elif st.button("Take back", icon=":material/undo:", key=f"unack-{alert.id}"):
            take_back(alert)
        if st.button("Silence", icon=":material/notifications_off:", key=f"silence-{alert.id}"):
            silence(matchers_of(alert))


def matchers_of(alert: Alert) -> str:
    """What silences this alert and no other."""
    return f"{Matcher('rule', '=', alert.rule)}, {Matcher('target', '=', alert.target)}"


@st.dialog("Acknowledge")
def acknowledge(alert: Alert) -> None:
    """Asks who and why; the alert is not repeated until it resolves."""
    with guarded():
        st.markdown(f"**{alert.rule}** on `{alert.target}`. It stays as it is; nobody is told again until it resolves.")
        author = author_field()
        kind = st.selectbox("What it is", ACK_KINDS, key="ack-kind")
        reason = st.text_input("Reason", key="ack-reason")
        if st.button("Acknowledge", type="primary", key="ack-confirm") and given(reason):
            get_runtime().store.alerts.acknowledge(alert.id, author=author, kind=kind, reason=reason)
            st.rerun()


@st.dialog("Take the acknowledgement back")
def take_back(alert: Alert) -> None:
    """What the acknowledgement held is notified again."""
    with guarded():
        author = author_field()
        if st.button("Take back", type="primary", key="unack-confirm"):
            get_runtime().store.alerts.unacknowledge(alert.id, author=author)
            st.rerun()


@st.dialog("Silence")
def silence(matchers: str) -> None:
    """Asks what, for how long, who and why."""
    with guarded():
        text = st.text_input(
            "Matchers", matchers, key="silence-matchers",
            help='Alertmanager\'s: rule="oom", target=~"prod-.*", severity!="critical"; labels rule, target, severity, '
            "model, engine.",
        )  # fmt: skip
        span = st.segmented_control("For", list(DURATIONS), default="1 h", required=True, key="silence-span")
        author = author_field()
        reason = st.text_input("Reason", key="silence-reason")
        if st.button("Silence", type="primary", key="silence-confirm") and given(reason):
            ends_at = time.time() + DURATIONS[span or "1 h"]
            get_runtime().store.silences.add(text, ends_at=ends_at, author=author, reason=reason)
            st.rerun()


def show_silences() -> None:
    """Silences in force and to come, each with a button that ends it, and those that ended."""
    store = get_runtime().store
    now = time.time()
    if st.button("New silence", icon=":material/notifications_off:", key="new-silence"):
        silence('rule=""')
    found = store.silences.list(expired=True)
    live = [s for s in found if s.state(now) != "expired"]
    if not live:
        st.caption("Nothing is silenced.")
    for one in live:
        with st.container(border=True):
            matchers = ", ".join(map(str, one.matchers))
            begun = "" if one.state(now) == "active" else f" from {words.clock(one.starts_at)}"
            st.markdown(
                f":blue-badge[◌ silenced] {words.plain(matchers)}{begun} until {words.clock(one.ends_at)} "
                f"({words.span(one.ends_at - now)} left)  \n{words.plain(one.author)}: {words.plain(one.reason)}"
            )
            if st.button("End it", icon=":material/notifications_active:", key=f"expire-{one.id}"):
                end_silence(one.id)
    ended = [s for s in found if s.state(now) == "expired"][:20]
    if ended:
        with st.expander(f"{len(ended)} ended"):
            st.dataframe(
                [
                    {
                        "matchers": ", ".join(map(str, s.matchers)),
                        "by": s.author,
                        "reason": s.reason,
                        "ended": words.clock(s.ends_at),
                        "ended by": s.expired_by or "time",
                    }
                    for s in ended
                ],
                hide_index=True,
            )


@st.dialog("End the silence")
def end_silence(silence_id: int) -> None:
    """Alerts it held that still fire are notified."""
    with guarded():
        author = author_field()
        if st.button("End it", type="primary", key="expire-confirm"):
            get_runtime().store.silences.expire(silence_id, author=author)
            st.rerun()
