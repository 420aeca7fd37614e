"""Tables of quality: one line a format, and a grid of format by task with items, intervals and invalid answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from app.ui import words
from app.ui.quality_data import ALL, Arm, Cell, full_precision_bytes, tasks_of, turns
from app.ui.tables import show_table

_VERDICTS = {"worse": "✖ worse", "no worse": "✔ no worse", "inconclusive": "▲ inconclusive"}


def percent(value: Any) -> str:
    """A share as a percentage; a dash when unknown."""
    return words.ratio(value) if isinstance(value, int | float) else words.DASH


def points_of(value: float) -> str:
    """A difference of shares in points: 0.147 -> `14.7`."""
    return f"{100 * value:.1f}"


def interval(cell: Cell) -> str:
    """`93.1% to 98.2%`."""
    return f"{percent(cell.get('low'))} to {percent(cell.get('high'))}" if cell.get("low") is not None else words.DASH


def invalid_share(cell: Cell) -> str:
    """Answers that are no answer to the question, as a share of the items."""
    invalid, items = cell.get("invalid"), cell.get("items")
    return words.ratio(invalid / items) if isinstance(invalid, int | float) and items else words.DASH


def verdict(arm: Arm) -> str:
    """`✔ no worse`, with the fall in points and its interval."""
    if arm.baseline:
        return "◆ baseline"
    against = arm.against
    if not against:
        return "not compared"
    word = _VERDICTS.get(str(against.get("verdict")), "")
    return f"{word} {fall(against)}".strip()


def fall(against: Cell) -> str:
    """How accuracy changed against the baseline: `-14.7 points (95%: -17.4 to -12.0)`."""
    change, low, high = (_signed(-float(against[key])) for key in ("drop", "high", "low"))
    return f"{change} points (95%: {low} to {high})"


def _signed(share: float) -> str:
    text = points_of(share)
    return "±0.0" if text in {"0.0", "-0.0"} else text.replace("-", "\u2212") if share < 0 else f"+{text}"


def share_of_bytes(arm: Arm, full: float | None) -> str:
    """`544 (53.1%)`: bytes per token and their share of full precision's."""
    if arm.bytes_per_token is None:
        return words.DASH
    text = words.count(arm.bytes_per_token)
    return f"{text} ({words.ratio(arm.bytes_per_token / full)})" if full else text


def show_arms(arms: Sequence[Arm]) -> None:
    """One line a format: bytes, accuracy, likelihood measures, verdict."""
    full = full_precision_bytes(arms)
    show_table([_row(arm, full) for arm in arms])
    for arm in arms:
        for reason in arm.result.get("left_out") or []:
            st.caption(f"{words.plain(arm.name)}: {words.plain(str(reason))}")
    if any(arm.likelihood.get("mean_kl") is not None for arm in arms):
        st.caption(
            "KL is the mean divergence per token from the baseline over its 20 likeliest tokens and the rest as one: "
            "a lower bound. Agreement is how often both find the same token likeliest."
        )


def _row(arm: Arm, full: float | None) -> dict[str, object]:
    known = arm.likelihood
    return {
        "format": arm.name if arm.status == "done" else f"{arm.name} ({arm.status})",
        "bytes/token": share_of_bytes(arm, full),
        "items": words.count(arm.overall.get("items")),
        "accuracy": percent(arm.overall.get("accuracy")),
        "95% interval": interval(arm.overall),
        "invalid": invalid_share(arm.overall),
        "perplexity": words.count(known.get("perplexity")),
        "KL": words.nats(known.get("mean_kl")),
        "agreement": percent(known.get("top1_agreement")),
        "against the baseline": verdict(arm),
    }


def show_tasks(arms: Sequence[Arm]) -> None:
    """Format by task: items, accuracy with its interval, invalid answers."""
    names = [task for task in tasks_of(arms) if task != ALL]
    cells = [(arm.name, task, (arm.result.get("tasks") or {}).get(task)) for arm in arms for task in names]
    show_table([
        {
            "format": name, "task": task, "items": words.count(cell.get("items")),
            "accuracy": percent(cell.get("accuracy")), "95% interval": interval(cell), "invalid": invalid_share(cell),
        }
        for name, task, cell in cells
        if cell
    ])  # fmt: skip


def show_turns(arms: Sequence[Arm], task: str) -> None:
    """The chart by turn in figures, for those who cannot see it: a line a turn, a column a format."""
    by_arm = {arm.name: {int(row["turn"]): row for row in turns(arm, task)} for arm in arms}
    numbers = sorted({turn for rows in by_arm.values() for turn in rows})
    show_table([
        {"turn": turn, **{name: _of_items(rows.get(turn)) for name, rows in by_arm.items()}} for turn in numbers
    ])  # fmt: skip


def _of_items(cell: Cell | None) -> str:
    return f"{cell['right']} of {cell['items']}" if cell else words.DASH
