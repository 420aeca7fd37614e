"""Charts: few points, UTC time axis, gaps left open, a threshold as a labelled dashed line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import altair as alt
import numpy as np
import pandas as pd
import streamlit as st
from numpy.typing import NDArray

# Two orders of colours readable on white and on near-black, also with the common colour blindnesses.
PALETTE = ("#2f7ed8", "#e0812b", "#2a9d76", "#a06cd5")
THRESHOLD = "#d6453d"


@dataclass(frozen=True)
class Threshold:
    """A limit drawn across a chart."""

    value: float
    label: str


def lines(
    at: NDArray[np.float64],
    series: Mapping[str, NDArray[np.float64]],
    *,
    title: str,
    y_format: str = ",.0f",
    threshold: Threshold | None = None,
    height: int = 200,
    y_max: float | None = None,
) -> None:
    """Draws lines over a reader's grid (its last moment, "now", is left to the figures).

    The alternative text says in words what the newest values are.
    """
    at, series = at[:-1], {name: values[:-1] for name, values in series.items()}
    wide = pd.DataFrame({"time": pd.to_datetime(at, unit="s", utc=True), **series})
    frame = wide.melt("time", var_name="series", value_name="value")
    top = _top(frame["value"], threshold, y_max)
    x = alt.X(
        "time:T",
        title=None,
        scale=alt.Scale(type="utc"),
        axis=alt.Axis(format="%H:%M:%S", labelOverlap=True, tickCount=6),
    )
    y = alt.Y("value:Q", title=None, scale=alt.Scale(domain=[0, top]), axis=alt.Axis(format=y_format, tickCount=4))
    names = list(series)
    color = alt.Color(
        "series:N",
        scale=alt.Scale(domain=names, range=list(PALETTE[: len(names)])),
        legend=alt.Legend(orient="top", title=None) if len(names) > 1 else None,
    )
    tooltip = [
        alt.Tooltip("time:T", title="UTC", format="%H:%M:%S"),
        alt.Tooltip("series:N", title="series"),
        alt.Tooltip("value:Q", title="value", format=y_format),
    ]
    marks = alt.Chart(frame).mark_line(interpolate="step-after", strokeWidth=2).encode(x=x, y=y, color=color)
    points = alt.Chart(frame).mark_point(opacity=0, size=80).encode(x=x, y=y, tooltip=tooltip)
    layers: list[alt.Chart] = [marks, points]
    if threshold is not None:
        layers += _threshold(threshold)
    st.markdown(f"**{title}**")
    st.altair_chart(alt.layer(*layers).properties(height=height), alt=_alt_text(title, series))


def _top(values: pd.Series[float], threshold: Threshold | None, y_max: float | None) -> float:
    if y_max is not None:
        return y_max
    limits = [float(values.max()) if values.notna().any() else 0.0, threshold.value * 1.5 if threshold else 0.0]
    return max(limits) * 1.08 or 1.0


def _threshold(threshold: Threshold) -> list[alt.Chart]:
    frame = pd.DataFrame({"value": [threshold.value], "label": [threshold.label]})
    rule = alt.Chart(frame).mark_rule(color=THRESHOLD, strokeDash=[5, 4], strokeWidth=1.5).encode(y="value:Q")
    text = (
        alt.Chart(frame)
        .mark_text(align="left", baseline="bottom", dx=4, dy=-2, color=THRESHOLD, fontSize=11)
        .encode(y="value:Q", x=alt.value(0), text="label:N")
    )
    return [rule, text]


def _alt_text(title: str, series: Mapping[str, NDArray[np.float64]]) -> str:
    newest = [f"{name} {_newest(values)}" for name, values in series.items()]
    return f"{title}: line chart over time, newest values: {', '.join(newest)}."


def _newest(values: Sequence[float] | NDArray[np.float64]) -> str:
    known = [float(value) for value in values if np.isfinite(value)]
    return f"{known[-1]:.3g}" if known else "unknown"
