"""Tables of plain text: `st.table` reads Markdown in its cells, so what comes from data is escaped here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import streamlit as st

from app.ui.words import Mark, plain


def show_table(rows: Sequence[Mapping[str, object]]) -> None:
    """A table that wraps long text, marks as badges; nothing when there are no rows."""
    if rows:
        frame = pd.DataFrame([{key: _cell(value) for key, value in row.items()} for row in rows])
        st.table(frame, hide_index=True, border="horizontal")


def _cell(value: object) -> str:
    return value.badge if isinstance(value, Mark) else plain(str(value))


def show_choices(rows: Sequence[Mapping[str, object]], ids: Sequence[object], param: str) -> None:
    """A history whose rows open: selecting row i puts `ids[i]` into the query parameter `param`."""

    def open_selected() -> None:
        selected = st.session_state["history"]["selection"]["rows"]
        if selected and selected[0] < len(ids):
            st.query_params[param] = str(ids[selected[0]])

    st.caption("Select a row to open it.")
    st.dataframe(
        pd.DataFrame(rows), hide_index=True, height="content", key="history",
        selection_mode="single-row", on_select=open_selected,
    )  # fmt: skip
