"""The active alerts of one rule, above the page about what the rule watches."""

from __future__ import annotations

import streamlit as st

from app.ui import words
from app.ui.links import link
from probe.store import Store


def show_alert(store: Store, rule: str) -> None:
    """One box an alert of `rule` that is firing or pending; nothing when there is none."""
    for alert in store.alerts.active():
        if alert.rule == rule:
            mark = words.alert_mark(alert.state).text
            st.error(f"**{mark}: {alert.rule}** on `{alert.target}`. {words.plain(alert.summary)}")
            with st.container(horizontal=True):
                link("alerts", f"Alert {alert.id}", ":material/notifications:", alert=alert.id)
                link("runbooks", "Runbook", ":material/menu_book:", runbook=alert.runbook, alert=alert.id)
