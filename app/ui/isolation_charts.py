"""The side channel drawn: each probe's time to the first token, by what the asker's prefix was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt
import pandas as pd
import streamlit as st

from app.ui import words
from app.ui.charts import PALETTE

# Keys of a "side-channel-ttft" check's data, and what they are to the asker.
PREFIXES = {"unwarmed_s": "new to the server", "warmed_s": "warmed by another tenant", "own_s": "its own repeat"}


def times(data: Mapping[str, Any]) -> pd.DataFrame:
    """Columns prefix and seconds, a row a probe; empty when no times were kept."""
    rows = [(name, float(value)) for key, name in PREFIXES.items() for value in data.get(key) or [] if value > 0]
    return pd.DataFrame(rows, columns=["prefix", "seconds"])


def show_times(check: Mapping[str, Any], title: str = "Time to the first token, a tick a probe") -> None:
    """A strip of ticks for each kind of prefix, the median as a diamond; nothing when no times were kept."""
    frame = times(check.get("data") or {})
    if frame.empty:
        return
    names = [name for name in PREFIXES.values() if (frame["prefix"] == name).any()]
    medians = frame.groupby("prefix", sort=False)["seconds"].median().reset_index()
    x = alt.X("seconds:Q", title="seconds, logarithmic", scale=alt.Scale(type="log", nice=False, padding=12))
    y = alt.Y("prefix:N", title=None, sort=names, axis=alt.Axis(labelLimit=180))
    color = alt.Color("prefix:N", scale=alt.Scale(domain=names, range=list(PALETTE[: len(names)])), legend=None)
    tooltip = [alt.Tooltip("prefix:N"), alt.Tooltip("seconds:Q", format=".3f")]
    ticks = alt.Chart(frame).mark_tick(thickness=2, size=18, opacity=0.7).encode(x=x, y=y, color=color, tooltip=tooltip)
    middle = alt.Chart(medians).mark_point(shape="diamond", size=110, filled=True, opacity=1).encode(
        x=x, y=y, color=color, tooltip=tooltip
    )  # fmt: skip
    told = dict(zip(medians["prefix"].tolist(), medians["seconds"].tolist(), strict=True))
    said = ", ".join(f"{name} {words.seconds(told[name])}" for name in names)
    st.markdown(f"**{title}**")
    st.altair_chart(alt.layer(ticks, middle).properties(height=36 * len(names) + 50), alt=f"{title}: medians: {said}.")
