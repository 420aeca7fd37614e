"""The time range and the target of a page, chosen once and kept in the URL."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from probe.store import Target

RANGES = {"5 min": 300.0, "15 min": 900.0, "1 h": 3600.0, "6 h": 21600.0}
DEFAULT = "15 min"


def choose_range() -> float:
    """Seconds to look back."""
    chosen = st.segmented_control(
        "Range", list(RANGES), default=DEFAULT, required=True, key="range", bind="query-params"
    )
    return RANGES[chosen or DEFAULT]


def choose_target(targets: Sequence[Target]) -> Target:
    """The target whose figures are shown; the embedded engine unless the URL or the user says otherwise."""
    names = [target.name for target in targets]
    default = next((i for i, target in enumerate(targets) if target.kind == "embedded"), 0)
    chosen = st.selectbox("Target", names, index=default, key="shown", bind="query-params")
    return next((target for target in targets if target.name == chosen), targets[default])
