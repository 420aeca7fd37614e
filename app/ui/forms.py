"""Forms that change something take a typed reason, which is kept with the change."""

from __future__ import annotations

import streamlit as st


def author_field() -> str:
    """The operator's name, kept for this browser session."""
    name = st.text_input("Your name", str(st.session_state.get("operator", "")), key="author")
    st.session_state["operator"] = name
    return name


def given(reason: str) -> bool:
    """Whether a reason was typed; says so when not."""
    if not reason.strip():
        st.error("Give a reason: it is kept with the event.")
    return bool(reason.strip())
