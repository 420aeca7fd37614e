"""The language of what is written in two: kept in the session, and in the URL as `lang` so that a link carries it."""

from __future__ import annotations

import streamlit as st

from app.ui.links import param

LANGUAGES = {"en": "English", "zh": "中文"}
_KEPT, _WIDGET = "language", "language-choice"


def choose_language() -> str:
    """The small choice on top of a page; "en" or "zh"."""
    if _WIDGET not in st.session_state:
        asked = param("lang")
        st.session_state[_WIDGET] = asked if asked in LANGUAGES else st.session_state.get(_KEPT, "en")
    chosen = st.segmented_control(
        "Language", list(LANGUAGES), required=True, key=_WIDGET, format_func=LANGUAGES.__getitem__,
        label_visibility="collapsed",
    )  # fmt: skip
    language = str(chosen or "en")
    st.session_state[_KEPT] = language
    if language != "en":
        st.query_params["lang"] = language
    elif "lang" in st.query_params:
        del st.query_params["lang"]
    return language
