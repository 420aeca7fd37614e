"""Charts of quality: accuracy by turn with its band, bytes against accuracy with the front, layers, canary rounds.

A format keeps its colour and its shape in every chart of a page, so that neither alone has to be told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd
import streamlit as st

from app.ui import words
from app.ui.quality_data import Point, front

# Readable on white and on near-black; neighbours differ in lightness too.
COLORS = (
    "#2f7ed8", "#e0812b", "#2a9d76", "#a06cd5", "#d6453d", "#8d8a1f", "#d65da0", "#4aa5b8", "#8c6d5a", "#7a8794",
)  # fmt: skip
SHAPES = (
    "circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left",
    "wedge", "arrow",
)  # fmt: skip
GREY = "#8a94a0"
PERCENT = ".0%"
HEIGHT = 300  # of a chart without its legend
LEGEND_COLUMNS, LEGEND_ROW = 2, 24


def encodings(names: Sequence[str]) -> tuple[alt.Color, alt.Shape]:
    """Colour and shape of each name, by its place in `names`."""
    wheel = [COLORS[i % len(COLORS)] for i in range(len(names))]
    shapes = [SHAPES[i % len(SHAPES)] for i in range(len(names))]
    key = alt.Legend(
        orient="bottom", title=None, columns=LEGEND_COLUMNS, labelLimit=240, symbolSize=90, symbolOpacity=1
    )  # fmt: skip
    return (
        alt.Color("format:N", scale=alt.Scale(domain=list(names), range=wheel), legend=key),
        alt.Shape("format:N", scale=alt.Scale(domain=list(names), range=shapes), legend=key),
    )


def with_legend(height: int, count: int) -> int:
    """The height of a chart whose legend below it has `count` names."""
    return height + LEGEND_ROW * -(-count // LEGEND_COLUMNS)


def by_turn(rows: Mapping[str, Sequence[Mapping[str, Any]]], *, baseline: str | None, title: str) -> None:
    """One line a format over the turns with the 95% band of each; the baseline is drawn thick and dashed."""
    frame = pd.DataFrame([
        {
            "format": name, "turn": int(row["turn"]), "accuracy": row["accuracy"], "low": row["low"],
            "high": row["high"], "right": f"{row['right']} of {row['items']}",
        }
        for name, cells in rows.items()
        for row in cells
    ])  # fmt: skip
    if frame.empty:
        return
    color, shape = encodings(list(rows))
    last = int(frame["turn"].max())
    x = alt.X("turn:Q", title="turn", scale=alt.Scale(domain=[1, max(2, last)]), axis=alt.Axis(format="d"))
    y = alt.Y("accuracy:Q", title=None, scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=PERCENT, tickCount=5))
    base = alt.Chart(frame)
    band = base.mark_area(opacity=0.08, line=False).encode(x=x, y=alt.Y("low:Q", title=None), y2="high:Q", color=color)
    others, marked = alt.datum["format"] != baseline, alt.datum["format"] == baseline
    line = base.transform_filter(others).mark_line(strokeWidth=2).encode(x=x, y=y, color=color)
    thick = base.transform_filter(marked).mark_line(strokeWidth=4, strokeDash=[7, 4])
    tooltip = [
        alt.Tooltip("format:N"), alt.Tooltip("turn:Q"), alt.Tooltip("accuracy:Q", format=".1%"),
        alt.Tooltip("low:Q", title="95% from", format=".1%"), alt.Tooltip("high:Q", title="95% to", format=".1%"),
        alt.Tooltip("right:N"),
    ]  # fmt: skip
    dots = base.mark_point(filled=True, size=42, opacity=1).encode(x=x, y=y, color=color, shape=shape, tooltip=tooltip)
    st.markdown(f"**{words.plain(title)}**")
    chart = alt.layer(band, line, thick.encode(x=x, y=y, color=color), dots)
    st.altair_chart(chart.properties(height=with_legend(HEIGHT, len(rows))), alt=_turn_text(title, rows, baseline))


def _turn_text(title: str, rows: Mapping[str, Sequence[Mapping[str, Any]]], baseline: str | None) -> str:
    parts = [
        f"{name}{' (baseline)' if name == baseline else ''} {words.ratio(cells[0]['accuracy'])} at turn "
        f"{cells[0]['turn']}, {words.ratio(cells[-1]['accuracy'])} at turn {cells[-1]['turn']}"
        for name, cells in rows.items()
        if cells
    ]
    return f"{title}: line chart; {'; '.join(parts)}."


def pareto(found: Sequence[Point], *, names: Sequence[str], title: str) -> None:
    """Bytes per token against accuracy with the front; full precision and the running format are ringed and named."""
    if not found:
        return
    on_front = front(found)
    frame = pd.DataFrame([_point_row(point, point in on_front) for point in found])
    lowest, highest = float(frame["low"].min()), float(frame["high"].max())
    x = alt.X("bytes:Q", title="KV bytes per token", scale=alt.Scale(domain=[0, float(frame["bytes"].max()) * 1.12]))
    domain = [max(0.0, lowest - 0.05), min(1.0, highest) + 0.06]
    ticks = [tenth / 10 for tenth in range(11) if tenth / 10 >= domain[0]]
    y = alt.Y("accuracy:Q", title=None, scale=alt.Scale(domain=domain), axis=alt.Axis(format=PERCENT, values=ticks))
    color, shape = encodings(names)
    base = alt.Chart(frame)
    line = (
        base.transform_filter(alt.datum.front)
        .mark_line(interpolate="step-after", strokeDash=[5, 4], color=GREY, strokeWidth=1.5)
        .encode(x=x, y=y)
    )
    low = alt.Y("low:Q", title=None)
    spread = base.mark_rule(strokeWidth=1.5, opacity=0.7).encode(x=x, y=low, y2="high:Q", color=color)
    tooltip = [
        alt.Tooltip("format:N"), alt.Tooltip("bytes:Q", title="bytes per token", format=",d"),
        alt.Tooltip("accuracy:Q", format=".1%"), alt.Tooltip("low:Q", title="95% from", format=".1%"),
        alt.Tooltip("high:Q", title="95% to", format=".1%"), alt.Tooltip("items:Q"), alt.Tooltip("place:N"),
    ]  # fmt: skip
    dots = base.mark_point(filled=True, size=110, opacity=1).encode(x=x, y=y, color=color, shape=shape, tooltip=tooltip)
    marked = base.transform_filter(alt.datum.mark != "")
    rings = marked.mark_point(shape="circle", size=420, strokeWidth=2, filled=False, color=GREY).encode(x=x, y=y)
    labels = marked.mark_text(dy=-17, fontSize=12, fontWeight="bold", color=GREY).encode(x=x, y=y, text="mark:N")
    st.markdown(f"**{words.plain(title)}**")
    chart = alt.layer(line, spread, rings, dots, labels).properties(height=with_legend(HEIGHT, len(names)))
    st.altair_chart(chart, alt=_front_text(title, on_front))


def _point_row(point: Point, on_front: bool) -> dict[str, Any]:
    marks = [word for word, on in (("full precision", point.full_precision), ("running", point.running)) if on]
    return {
        "format": point.name, "bytes": point.bytes_per_token, "accuracy": point.accuracy, "low": point.low,
        "high": point.high, "items": point.items, "front": on_front, "mark": ", ".join(marks),
        "place": "on the front" if on_front else "beaten by another format",
    }  # fmt: skip


def _front_text(title: str, on_front: Sequence[Point]) -> str:
    parts = [f"{p.name} {words.count(p.bytes_per_token)} bytes, {words.ratio(p.accuracy)}" for p in on_front]
    return f"{title}: scatter chart; on the front: {'; '.join(parts)}."


def layers(rows: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """A bar a layer: mean KL divergence when only this layer's cache is quantized."""
    frame = pd.DataFrame([
        {"layer": str(row["layer"]), "KL": row["mean_kl"], "agreement": row.get("top1_agreement")} for row in rows
    ])  # fmt: skip
    if frame.empty:
        return
    order = list(frame["layer"])
    tooltip = [
        alt.Tooltip("layer:N"), alt.Tooltip("KL:Q", title="mean KL (nats)", format=".4f"),
        alt.Tooltip("agreement:Q", title="top-1 agreement", format=".1%"),
    ]  # fmt: skip
    bars = (
        alt.Chart(frame)
        .mark_bar(color=COLORS[0])
        .encode(
            x=alt.X("layer:N", title="layer", sort=order, scale=alt.Scale(padding=0.4), axis=alt.Axis(labelAngle=0)),
            y=alt.Y("KL:Q", title="mean KL (nats)", scale=alt.Scale(domainMin=0)),
            tooltip=tooltip,
        )
    )
    worst = max(rows, key=lambda row: float(row["mean_kl"]))
    text = f"{title}: bar chart of {len(order)} layers; the most sensitive is layer {worst['layer']}."
    st.markdown(f"**{words.plain(title)}**")
    st.altair_chart(bars.properties(height=220), alt=text)


def rounds(frame: pd.DataFrame, *, title: str) -> None:
    """Canary rounds over time: columns time (UTC), series, accuracy; a point a round."""
    names = sorted(frame["format"].unique())
    color, shape = encodings(names)
    lowest = float(frame["accuracy"].min())
    x = alt.X("time:T", title=None, scale=alt.Scale(type="utc"), axis=alt.Axis(format="%H:%M", labelOverlap=True))
    y = alt.Y(
        "accuracy:Q", title=None, scale=alt.Scale(domain=[max(0.0, min(0.9, lowest - 0.05)), 1]),
        axis=alt.Axis(format=PERCENT, tickCount=5),
    )  # fmt: skip
    tooltip = [
        alt.Tooltip("time:T", title="UTC", format="%Y-%m-%d %H:%M:%S"), alt.Tooltip("format:N", title="series"),
        alt.Tooltip("accuracy:Q", format=".1%"),
    ]  # fmt: skip
    base = alt.Chart(frame)
    line = base.mark_line(strokeWidth=1.5).encode(x=x, y=y, color=color)
    dots = base.mark_point(filled=True, size=60, opacity=1).encode(x=x, y=y, color=color, shape=shape, tooltip=tooltip)
    newest = frame.sort_values("time").groupby("format")["accuracy"].last()
    text = ", ".join(f"{name} {words.ratio(float(value))}" for name, value in newest.items())
    st.markdown(f"**{words.plain(title)}**")
    chart = alt.layer(line, dots).properties(height=with_legend(180, len(names)))
    st.altair_chart(chart, alt=f"{title}: newest rounds: {text}.")
