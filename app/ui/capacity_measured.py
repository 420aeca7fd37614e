"""The pool that a target measured beside the one computed for it."""

from __future__ import annotations

import streamlit as st

from app.ui import words
from app.ui.tables import show_table
from engine.memory.capacity import CapacityPlan
from probe.plan.live import Live, measured_data

SIZES = ("KV bytes of a block", "weights")


def show_measured(plan: CapacityPlan, live: Live) -> None:
    """Figures that the target tells of itself, the plan's, and how far apart they are."""
    st.markdown(f"**Measured on {words.plain(live.name)}, and computed**")
    rows = measured_data(live, plan)
    if not rows:
        st.caption("The target does not tell the size of its pool.")
    show_table([
        {
            "": row["what"],
            "measured": _written(row["what"], row["measured"]),
            "computed": _written(row["what"], row["computed"]),
            "computed is": apart(row["apart"]),
        }
        for row in rows
    ])  # fmt: skip


def _written(what: str, value: float | None) -> str:
    return words.size(value) if what in SIZES else words.count(value)


def apart(share: float | None) -> str:
    """`2.10% more`."""
    if share is None:
        return words.DASH
    return "the same" if abs(share) < 5e-5 else f"{words.ratio(abs(share), 2)} {'more' if share > 0 else 'less'}"
