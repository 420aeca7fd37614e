"""Tables of plain text: `st.table` reads Markdown in its cells, so what comes from data is escaped here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import streamlit as st

from app.ui.words import plain


def show_table(rows: Sequence[Mapping[str, object]]) -> None:
    """A table that wraps long text; nothing when there are no rows."""
    if rows:
        frame = pd.DataFrame([{key: plain(str(value)) for key, value in row.items()} for row in rows])
        st.table(frame, hide_index=True, border="horizontal")
