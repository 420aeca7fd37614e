"""Tiles: a figure with its sparkline, its source in a word and its formula behind the question mark."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from app.ui import series, words
from app.ui.signals import Signal


def tile(signal: Signal, write: Callable[[float | None], str], note: str) -> None:
    """One `st.metric`; `note` stands under the value: measured, or the window and parts of what was computed."""
    line = series.sparkline(signal.line[:-1])
    st.metric(
        signal.label,
        write(signal.value) if signal.value is not None else "no data",
        delta=note,
        delta_color="off",
        delta_arrow="off",
        help=f"**{signal.source}**: {signal.formula}",
        border=True,
        chart_data=line if len(line) > 1 else None,
        chart_type="area",
        height="stretch",
    )


def fraction_note(signal: Signal) -> str:
    """`computed 3 / 41 in 5 min`: numerator, denominator and window of a ratio; its units are in the formula."""
    window = words.span(signal.window_s or 0)
    if signal.numerator is None or signal.denominator is None:
        return f"computed, over {window}"
    return f"computed {words.count(signal.numerator)} / {words.count(signal.denominator)} in {window}"
