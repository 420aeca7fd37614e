"""A replay on a page: its steps, its journal, its alerts, its verdict and the table before/after."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app.ui import words
from app.ui.links import link
from probe.store import Alert, JournalEntry, Replay, Store

STEPS = ("hypothesis", "inject", "observe", "recommend", "apply", "verify", "done")
ENDED = frozenset({"done", "failed", "interrupted"})


def step_line(replay: Replay) -> str:
    """The six steps with a shape each: done, under way, still to come."""
    here = STEPS.index(replay.step) if replay.step in STEPS else 0
    parts = []
    for index, step in enumerate(STEPS[:-1]):
        if replay.status == "done" or index < here:
            parts.append(f":green[✔ {step}]")
        elif index == here:
            parts.append(f":red[✖ **{step}**]" if replay.status in ENDED else f":blue[◔ **{step}**]")
        else:
            parts.append(f":gray[○ {step}]")
    return " → ".join(parts)


def verdict(replay: Replay) -> bool | None:
    """The replay's `verified`, None before its end."""
    value = (replay.result or {}).get("verified")
    return value if isinstance(value, bool) else None


def show_head(replay: Replay) -> None:
    """Status, verdict, steps and how long it has been going."""
    end = replay.ended_at or time.time()
    badges = [words.replay_mark(replay.status).badge]
    if replay.status in ENDED:
        badges.append(words.verified_mark(verdict(replay)).badge)
    took = words.span(end - replay.started_at)
    st.markdown(f"**{replay.scenario}** on `{replay.target}` &nbsp; {' '.join(badges)} &nbsp; {took}")
    st.markdown(step_line(replay))
    if replay.status == "interrupted":
        st.warning(
            f"This replay was interrupted at step “{replay.step}”: the process that ran it ended. "
            "The journal below shows how far it came; run it again for a verdict."
        )
    elif replay.status == "failed":
        st.error(str((replay.result or {}).get("error") or f"The replay failed at step “{replay.step}”."))


def show_journal(entries: Sequence[JournalEntry], limit: int | None = None) -> None:
    """The journal, oldest first (the newest `limit` entries, if given)."""
    shown = list(entries)[-limit:] if limit else list(entries)
    if not shown:
        st.caption("The journal is empty so far.")
        return
    rows = [{"time": words.clock(e.ts), "step": e.step, "what happened": e.message} for e in shown]
    st.table(pd.DataFrame(rows), hide_index=True, border="horizontal")


def show_alerts(alerts: Sequence[Alert], replay_id: str) -> None:
    """The alerts of this replay with links to the alert and to its runbook."""
    if not alerts:
        st.caption("No alert yet.")
    for alert in alerts:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(f"{words.alert_mark(alert.state).badge} **{alert.rule}** {alert.summary}")
            link("alerts", f"Alert {alert.id}", ":material/notifications:", alert=alert.id)
            link(
                "runbooks", f"Runbook {alert.runbook}", ":material/menu_book:",
                runbook=alert.runbook, alert=alert.id, replay=replay_id,
            )  # fmt: skip


def alerts_of(store: Store, replay: Replay) -> list[Alert]:
    """Alerts raised on the replay's target, newest first."""
    return store.alerts.history(limit=200, target=replay.target)


def before_after(result: Mapping[str, Any]) -> pd.DataFrame:
    """Rows `figure, before, after` from the two dicts of a result, nested ones flattened, lists left out."""
    before, after = _flat(result.get("before") or {}), _flat(result.get("after") or {})
    names = list(before) + [name for name in after if name not in before]
    rows = [{"figure": n, "before": _cell(before.get(n)), "after": _cell(after.get(n))} for n in names]
    return pd.DataFrame(rows, columns=["figure", "before", "after"])


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, (list, tuple)) or key == "started_at":
            continue
        if isinstance(item, Mapping):
            out.update(_flat(item, f"{name}."))
        else:
            out[name] = item
    return out


def _cell(value: Any) -> str:
    if value is None:
        return words.DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
