"""Alerts of the operator's own Alertmanager, as its webhook told them, with our runbook beside them."""

from __future__ import annotations

import streamlit as st

from app.runtime import get_runtime
from app.ui import words
from app.ui.guard import live
from app.ui.links import link
from probe.store import ImportedAlert

PATH = "/api/alertmanager"
SHOWN_RESOLVED = 20


@live(5.0)
def show_imported() -> None:
    """Firing ones, then the newest resolved."""
    store = get_runtime().store
    found = store.imported.list()
    if not found:
        st.caption(
            f"Nothing was received yet. Point a webhook receiver of your Alertmanager at `{PATH}` of this app; "
            "`kvoncall rules export --to alertmanager` writes such a configuration."
        )
        return
    firing = [alert for alert in found if alert.status == "firing"]
    resolved = [alert for alert in found if alert.status != "firing"]
    for alert in firing + resolved[:SHOWN_RESOLVED]:
        show_one(alert)


def show_one(alert: ImportedAlert) -> None:
    """One alert: its name, labels, words and where to go."""
    mark = words.alert_mark(alert.status)
    with st.container(border=True):
        since = f"since {words.clock(alert.starts_at)}"
        if alert.ends_at is not None and alert.status != "firing":
            since += f" until {words.clock(alert.ends_at)}"
        st.markdown(f"{mark.badge} **{words.plain(alert.name or 'unnamed alert')}** {since}")
        text = alert.annotations.get("summary") or alert.annotations.get("description")
        if text:
            st.markdown(words.plain(text))
        labels = ", ".join(f"{key}={value}" for key, value in alert.labels.items() if key != "alertname")
        st.caption(words.plain(labels))
        with st.container(horizontal=True):
            if alert.runbook:
                link("runbooks", f"Open runbook {alert.runbook}", ":material/menu_book:", runbook=alert.runbook)
            else:
                st.caption("None of our runbooks fits.")
            if alert.generator_url:
                st.link_button("Query", alert.generator_url, icon=":material/open_in_new:")
