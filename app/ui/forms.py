"""Forms that change something take a typed reason, which is kept with the change."""

from __future__ import annotations

import streamlit as st

AUTHOR = "author"


def author_field() -> str:
    """The operator's name, kept for this browser session; callbacks read it as `st.session_state[AUTHOR]`."""
    if not st.session_state.get(AUTHOR):  # what a dialog before left there is its first value, not the last one typed
        st.session_state[AUTHOR] = st.session_state.get("operator", "")
    name = st.text_input("Your name", key=AUTHOR)
    st.session_state["operator"] = name
    return name


def given(reason: str) -> bool:
    """Whether a reason was typed; says so when not."""
    if not reason.strip():
        st.error("Give a reason: it is kept with the event.")
    return bool(reason.strip())
