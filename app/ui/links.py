"""Links between pages carry their state in the URL, so that they work in another tab or a chat message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from app.ui.words import plain
from engine.errors import ConfigError

PAGES = {
    "overview": "app_pages/overview.py",
    "engine": "app_pages/engine.py",
    "incidents": "app_pages/incidents.py",
    "quality": "app_pages/quality.py",
    "isolation": "app_pages/isolation.py",
    "targets": "app_pages/targets.py",
    "alerts": "app_pages/alerts.py",
    "backtest": "app_pages/backtest.py",
    "capacity": "app_pages/capacity.py",
    "runbooks": "app_pages/runbooks.py",
}


def link(page: str, label: str, icon: str | None = None, **query: Any) -> None:
    """A link to another page; `query` values that are None are left out."""
    params = {key: str(value) for key, value in query.items() if value is not None}
    st.page_link(PAGES[page], label=label, icon=icon, query_params=params)


def param(name: str) -> str | None:
    """A query parameter of this page's URL; None when absent or empty."""
    return st.query_params.get(name) or None


def take_asked(key: str, find: Callable[[str], str]) -> None:
    """Before a field that is bound to the URL: what the URL asks for, in the field's own spelling.

    `find` gives that, or raises `ConfigError`; then the page says so, and shows the field's first choice.
    """
    asked = param(key)
    if asked is None or key in st.session_state:
        return
    try:
        st.session_state[key] = find(asked)
    except ConfigError as error:
        st.warning(plain(f"{error}."))
