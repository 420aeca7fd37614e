"""Flag changes: what a runbook proposes for one target, and what an engine would then be started with."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import streamlit as st

from app.ui.words import plain
from engine.config import apply_changes

RESTART = ":orange-badge[▲ needs a restart]"
NO_RESTART = ":green-badge[● no restart]"
_DETAILS: tuple[tuple[str, str, Callable[[str], str]], ...] = (
    ("why", "Why", plain),
    ("expected", "Expected", plain),
    ("cost", "Costs", plain),
    ("risk", "Risk", plain),
    ("verify", "Verify", lambda query: f"`{query}`"),
    ("rollback", "Roll back", plain),
)


def flag_value(value: Any) -> str:
    """A flag's value as it is typed; None means that the flag is not given."""
    if value is None:
        return "not set"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def show_changes(changes: Sequence[Mapping[str, Any]]) -> None:
    """One card a change: flag, now and to, then why, what to expect, what it costs, how to verify and undo."""
    for change in changes:
        with st.container(border=True):
            restart = RESTART if change.get("restart", True) else NO_RESTART
            now, to = flag_value(change.get("from")), flag_value(change.get("to"))
            st.markdown(f"`{change['flag']}` &nbsp; now `{now}` → **`{to}`** &nbsp; {restart}")
            lines = [f"- **{label}:** {write(str(change[key]))}" for key, label, write in _DETAILS if change.get(key)]
            st.markdown("\n".join(lines))


def changed_flags(flags: Sequence[str], changes: Sequence[Mapping[str, Any]]) -> list[str]:
    """`flags` with all `changes` applied; raises `ConfigError` when a flag is unknown."""
    return apply_changes(list(flags), {str(change["flag"]): change.get("to") for change in changes})


def show_command(flags: Sequence[str], changes: Sequence[Mapping[str, Any]]) -> None:
    """The command lines before and after, to copy."""
    before, after = shlex.join(flags), shlex.join(changed_flags(flags, changes))
    st.code(f"- kvoncall serve {before}\n+ kvoncall serve {after}", language="diff", wrap_lines=True)
