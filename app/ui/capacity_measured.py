"""The pool that a target measured beside the one computed for it."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from app.ui import words
from app.ui.tables import show_table
from engine.memory.capacity import CapacityPlan
from probe.store import Target
from runbooks.facts import TargetFacts


def show_measured(plan: CapacityPlan, target: Target, facts: TargetFacts) -> None:
    """Figures that the target tells of itself, the plan's, and how far apart they are."""
    write: dict[str, Callable[[float | None], str]] = {
        "KV cache of one GPU": words.size,
        "weights of one GPU": words.size,
    }
    pairs: list[tuple[str, float | None, float | None]] = [
        ("KV tokens", facts.kv_cache_size_tokens, plan.kv_tokens),
        ("KV blocks", facts.num_gpu_blocks, plan.kv_blocks),
        ("KV cache of one GPU", facts.kv_cache_bytes, plan.kv_cache_bytes),
        ("weights of one GPU", facts.weights_bytes, plan.part("weights") or None),
    ]
    st.markdown(f"**Measured on {words.plain(target.name)} and computed**")
    rows = [
        {
            "": name,
            "measured": write.get(name, words.count)(measured),
            "computed": write.get(name, words.count)(computed),
            "computed is": apart(measured, computed),
        }
        for name, measured, computed in pairs
        if measured is not None
    ]
    show_table(rows)
    if not rows:
        st.caption("The target does not tell the size of its pool.")


def apart(measured: float | None, computed: float | None) -> str:
    """`2.1% more`."""
    if not measured or computed is None:
        return words.DASH
    share = computed / measured - 1
    return "the same" if abs(share) < 5e-5 else f"{words.ratio(abs(share), 2)} {'more' if share > 0 else 'less'}"
