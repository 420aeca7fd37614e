"""Forms that change something take a typed reason, which is kept with the change."""

from __future__ import annotations

import streamlit as st


def given(reason: str) -> bool:
    """Whether a reason was typed; says so when not."""
    if not reason.strip():
        st.error("Give a reason: it is kept with the event.")
    return bool(reason.strip())
