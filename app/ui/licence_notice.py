"""The licence notice of the served model, on the pages an operator opens first, until it is accepted."""

from __future__ import annotations

import streamlit as st

from app.runtime import Runtime
from app.ui import words


def show_notice(runtime: Runtime) -> None:
    """The notice with its button; nothing when the model has none or it was accepted in this store."""
    engine = runtime.engine
    text = engine.pending_notice() if engine is not None else None
    if engine is None or text is None:
        return
    st.warning(f"**Licence of the served model.** {words.plain(text)}. The background traffic waits until you accept.")
    if st.button("Accept the licence", icon=":material/gavel:"):
        engine.accept_notice()
        st.rerun()
