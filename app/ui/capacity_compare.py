"""Two plans side by side: one that was kept, and the one on the page."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from app.ui import words
from app.ui.capacity_chart import show_bars
from app.ui.tables import show_table
from engine.memory.capacity import CapacityPlan
from engine.memory.deployment import Deployment

_KEPT = "capacity-kept"
_FIELDS: tuple[tuple[str, Callable[[Deployment], object]], ...] = (
    ("model", lambda d: d.shape.name),
    ("engine", lambda d: f"{d.engine} {d.version or '(newest)'}"),
    ("GPU", lambda d: f"{d.num_gpus} × {d.gpu.name if d.gpu is not None else 'unknown'}"),
    ("TP × PP × DP", lambda d: f"{d.tp} × {d.pp} × {d.dp}"),
    ("share of the GPU", lambda d: d.gpu_memory_utilization),
    ("max_model_len", lambda d: words.count(d.max_model_len)),
    ("max_num_seqs", lambda d: words.count(d.max_num_seqs)),
    ("max_num_batched_tokens", lambda d: words.count(d.max_num_batched_tokens)),
    ("KV format", lambda d: d.kv_cache_dtype),
    ("CUDA graphs", lambda d: "no" if d.enforce_eager else "yes"),
    ("draft model", lambda d: d.draft.name if d.draft is not None else "none"),
)
_RESULTS: tuple[tuple[str, Callable[[CapacityPlan], object]], ...] = (
    ("verdict", lambda p: p.verdict.replace("_", " ")),
    ("weights of one GPU", lambda p: words.size(p.part("weights"))),
    ("KV cache of one GPU", lambda p: words.size(p.kv_cache_bytes)),
    ("KV of a token on one GPU", lambda p: words.size(p.kv_bytes_per_token)),
    ("KV tokens", lambda p: words.count(p.kv_tokens)),
    ("requests of max_model_len at once", lambda p: f"{p.max_concurrency:.2f}"),
    ("typical requests at once", lambda p: f"{p.articles.exact_concurrency:.2f}"),
    ("longest that fits", lambda p: words.count(p.largest_model_len)),
)


def show_comparison(plan: CapacityPlan) -> None:
    """Keep this plan as A; every later one is B beside it."""
    kept: CapacityPlan | None = st.session_state.get(_KEPT)
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button("Keep as plan A", icon=":material/push_pin:", key="keep"):
            st.session_state[_KEPT] = plan
            st.rerun()
        if kept is not None and st.button("Forget plan A", key="forget"):
            del st.session_state[_KEPT]
            st.rerun()
        if kept is None:
            st.caption("Keep this plan, then change something: both stand side by side here.")
    if kept is not None:
        show_bars({"A": kept, "B": plan}, title="Memory of one GPU, plan A and plan B")
        show_table(difference(kept, plan))


def difference(a: CapacityPlan, b: CapacityPlan) -> list[dict[str, object]]:
    """What differs between the plans, the inputs first; results are always told."""
    rows: list[tuple[str, object, object]] = [
        (name, read(a.deployment), read(b.deployment))
        for name, read in _FIELDS
        if read(a.deployment) != read(b.deployment)
    ]
    rows += [(name, read(a), read(b)) for name, read in _RESULTS]
    return [{"": name, "A": left, "B": right, "changed": "≠" if left != right else ""} for name, left, right in rows]
