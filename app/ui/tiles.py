"""Tiles: a figure with its sparkline, its source in a word and its formula behind the question mark."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from app.ui import series, words
from app.ui.signals import Signal


def tile(signal: Signal, write: Callable[[float | None], str], note: str | None = None) -> None:
    """One `st.metric`; `note` stands under the value (numerator and denominator of a ratio, or the window)."""
    line = series.sparkline(signal.line)
    st.metric(
        signal.label,
        write(signal.value) if signal.value is not None else "no data",
        delta=note or signal.source,
        delta_color="off",
        delta_arrow="off",
        help=f"**{signal.source}** — {signal.formula}",
        border=True,
        chart_data=line if len(line) > 1 else None,
        chart_type="area",
        width=TILE_WIDTH,
        height="stretch",
    )


TILE_WIDTH = 230


def fraction_note(signal: Signal, unit: str) -> str:
    """`3 preempted / 41 in service, 60 s`: what a ratio is made of."""
    if signal.numerator is None or signal.denominator is None:
        return f"{signal.source}, {words.span(signal.window_s or 0)}"
    top, bottom = unit.split("/")
    return (
        f"{words.count(signal.numerator)} {top.strip()} / {words.count(signal.denominator)} {bottom.strip()}, "
        f"{words.span(signal.window_s or 0)}"
    )
