"""What a token takes with each kind of attention, in true bytes, for the dimensions of the model at hand."""

from __future__ import annotations

import streamlit as st

from app.ui import words
from app.ui.tables import show_table
from app.ui.wording import in_language
from engine.errors import ConfigError
from engine.memory.capacity import CapacityPlan
from runbooks.knowledge.attention import attention_table

OWN = words.Mark("◆", "this model", "blue")


def show_attentions(plan: CapacityPlan, language: str) -> None:
    """MHA, GQA, MQA and MLA; the model's own kind is exact, the others are what it would take."""
    try:
        rows = attention_table(plan.deployment.shape)
    except ConfigError as error:
        st.caption(words.plain(str(error)))
        return
    length = plan.max_model_len
    everywhere = not any(group.window for group in plan.deployment.shape.layers)  # else a request is no multiple
    show_table([
        {
            "attention": _name(row.kind, row.kv_heads),
            "": OWN if row.own else "",
            "a token and layer, 16 bits": _bytes(row.bytes_16),
            "8 bits": _bytes(row.bytes_8),
            "4 bits": _bytes(row.bytes_4),
            "a token, all layers, 16 bits": _bytes(row.all_16),
            **({f"{words.count(length)} tokens": words.size(row.all_16 * length)} if everywhere else {}),
            "of MHA": words.ratio(row.share_of_mha),
            "what it is": in_language(row.meaning, language),
        }
        for row in rows
    ])  # fmt: skip
    with st.expander("How these bytes come about", key="attention-how"):
        st.code("\n".join(f"{row.kind}: {row.how}" for row in rows), language=None, wrap_lines=True)


def _name(kind: str, heads: int) -> str:
    return f"{kind}, {heads} KV {'head' if heads == 1 else 'heads'}" if heads else kind


def _bytes(value: int) -> str:
    return f"{words.count(value)} B"
