"""Navigation only: which pages there are. Each page is one file in `app_pages`."""

from __future__ import annotations

import streamlit as st

st.set_page_config(page_title="kvoncall", page_icon="■", layout="wide")

# Streamlit leaves 6 rem above a page; an incident's first line belongs on the first screen. On a phone a runbook's
# wide tables scroll by themselves, not the page.
st.html(
    "<style>.stMainBlockContainer{padding-top:4.2rem;padding-bottom:2rem}"
    "[data-testid=stMarkdownContainer] table{display:block;max-width:100%;overflow-x:auto}"
    "[data-testid=stMarkdownContainer] :is(code,a){overflow-wrap:anywhere}</style>"
)

st.navigation(
    [
        st.Page("app_pages/overview.py", title="Overview", icon=":material/monitor_heart:", default=True),
        st.Page("app_pages/targets.py", title="Targets", icon=":material/dns:"),
        st.Page("app_pages/engine.py", title="Engine", icon=":material/memory:"),
        st.Page("app_pages/incidents.py", title="Incidents", icon=":material/science:"),
        st.Page("app_pages/isolation.py", title="Isolation", icon=":material/lock_person:"),
        st.Page("app_pages/quality.py", title="Quality", icon=":material/fact_check:"),
        st.Page("app_pages/alerts.py", title="Alerts", icon=":material/notifications:"),
        st.Page("app_pages/backtest.py", title="Backtest", icon=":material/history:"),
        st.Page("app_pages/capacity.py", title="Capacity", icon=":material/data_usage:"),
        st.Page("app_pages/runbooks.py", title="Runbooks", icon=":material/menu_book:"),
    ],
    position="top",
).run()
