"""The memory of one GPU as a stacked bar: a part keeps its colour in every plan, and its size stands in the legend."""

from __future__ import annotations

from collections.abc import Mapping

import altair as alt
import pandas as pd
import streamlit as st

from app.ui import words
from engine.memory.capacity import GIB, CapacityPlan

# Readable on white and on near-black; neighbours in the bar differ in lightness too.
COLORS = {
    "weights": "#2f7ed8",
    "draft": "#7fb2ea",
    "LoRA": "#1f5a9e",
    "activation peak": "#e0812b",
    "logits and sampler": "#f0b27a",
    "CUDA graphs": "#a06cd5",
    "non-torch": "#c9a7ec",
    "KV cache": "#2a9d76",
    "other processes": "#d6453d",
    "reserve": "#9aa7b4",
}
UNKNOWN = "#7a8794"
LIMIT = "#d6453d"
BAR = 46
SMALL = 1 << 20  # parts below this are in the table only


def show_bars(plans: Mapping[str, CapacityPlan], *, title: str) -> None:
    """One bar a plan, by its name; nothing where no plan knows its GPU. A dashed line is the GPU's memory."""
    rows = [row for name, plan in plans.items() for row in _rows(name, plan)]
    if not rows:
        return
    frame = pd.DataFrame(rows)
    parts = list(dict.fromkeys(frame["part"]))
    sizes = {name: _legend(name, plans) for name in parts}
    frame["label"] = frame["part"].map(sizes)
    gpus = {name: sum(part.bytes for part in plan.parts) / GIB for name, plan in plans.items() if plan.parts}
    top = max([*(frame["end"]), *gpus.values()])
    x = alt.X(
        "start:Q",
        title="GiB of one GPU",
        scale=alt.Scale(domain=[0, top * 1.01], nice=False),
        axis=alt.Axis(tickCount=6),
    )
    y = alt.Y("plan:N", title=None, sort=list(plans), axis=alt.Axis(labels=len(plans) > 1, ticks=False, domain=False))
    legend = alt.Legend(orient="bottom", title=None, columns=2, labelLimit=190, symbolType="square")
    domain, colors = [sizes[name] for name in parts], [COLORS.get(name, UNKNOWN) for name in parts]
    color = alt.Color("label:N", scale=alt.Scale(domain=domain, range=colors), legend=legend)
    tooltip = [
        alt.Tooltip("part:N"), alt.Tooltip("size:N"), alt.Tooltip("share:Q", title="of the GPU", format=".1%"),
        alt.Tooltip("how:N"),
    ]  # fmt: skip
    bars = alt.Chart(frame).mark_bar(height=BAR - 14)
    limits = pd.DataFrame([{"plan": name, "at": size} for name, size in gpus.items()])
    ends = alt.Chart(limits).mark_tick(color=LIMIT, thickness=2, size=BAR, strokeDash=[5, 3])
    chart = alt.layer(
        bars.encode(x=x, x2="end:Q", y=y, color=color, tooltip=tooltip, order=alt.Order("start:Q")),
        ends.encode(x="at:Q", y=y, tooltip=alt.Tooltip("at:Q", title="the GPU's memory, GiB", format=".1f")),
    )
    st.markdown(f"**{words.plain(title)}**")
    st.altair_chart(chart.properties(height=alt.Step(BAR)), alt=alt_text(title, plans))


def _rows(name: str, plan: CapacityPlan) -> list[dict[str, object]]:
    """The parts that take memory, side by side. A KV cache that is short is no part: the others then pass the limit."""
    total = sum(part.bytes for part in plan.parts)
    rows: list[dict[str, object]] = []
    start = 0.0
    for part in plan.parts:
        if part.bytes < SMALL:
            continue
        end = start + part.bytes / GIB
        row = {"plan": name, "part": part.name, "start": start, "end": end, "size": words.size(part.bytes)}
        rows.append({**row, "share": part.bytes / total if total else None, "how": part.how})
        start = end
    return rows


def _legend(part: str, plans: Mapping[str, CapacityPlan]) -> str:
    """`weights 32.9 GiB`; the name alone where several plans have it."""
    sizes = [words.size(plan.part(part)) for plan in plans.values()]
    return f"{part} {sizes[0]}" if len(sizes) == 1 else part


def alt_text(title: str, plans: Mapping[str, CapacityPlan]) -> str:
    """The chart in words."""
    told = []
    for name, plan in plans.items():
        parts = ", ".join(f"{part.name} {words.size(part.bytes)}" for part in plan.parts)
        told.append(f"{name}: {parts}" if len(plans) > 1 else parts)
    return f"{title}: stacked bar; {'; '.join(told)}."
