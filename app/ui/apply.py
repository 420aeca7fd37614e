"""Applying flag changes to the embedded engine: the proposal, and the dialog that asks for a reason first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import streamlit as st

from app.runtime import get_runtime
from app.ui import changes as change_view
from app.ui.forms import given
from app.ui.guard import guarded


@dataclass(frozen=True)
class Proposal:
    """What to change on the target; `changes` have the keys of `FlagChange.to_dict()`, `steps` are no flags.

    `alternatives` are single changes in their place; `missing` is what would have allowed more advice.
    """

    changes: Sequence[Mapping[str, Any]]
    refused: Sequence[Mapping[str, Any]]
    summary: str
    steps: Sequence[str] = ()
    alternatives: Sequence[Mapping[str, Any]] = ()
    missing: Sequence[str] = ()


@st.dialog("Apply change to the embedded engine")
def confirm_embedded(proposal: Proposal) -> None:
    """Asks once more, takes the reason, restarts the embedded engine with the changed flags."""
    with guarded():
        st.markdown(
            "The embedded engine restarts: requests in flight fail and its prefix cache is lost. The flags hold until "
            "the app is restarted; set KVONCALL_ENGINE_FLAGS to keep them."
        )
        show_summary_of(proposal)
        reason = st.text_input("Reason", key="apply-reason", placeholder="kept with the event")
        if st.button("Apply", type="primary", key="apply-confirm") and given(reason):
            engine = get_runtime().engine
            if engine is not None:
                engine.restart(reason, change_view.changed_flags(engine.snapshot().status.flags, proposal.changes))
            st.rerun()


def show_summary_of(proposal: Proposal) -> None:
    """One line a change."""
    for change in proposal.changes:
        now, to = change_view.flag_value(change.get("from")), change_view.flag_value(change.get("to"))
        st.markdown(f"- `{change['flag']}`: `{now}` → `{to}`")
