"""A replay on a page: its steps, its journal, its alerts, its verdict and the table before/after."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import streamlit as st

from app.ui import words
from app.ui.links import link
from app.ui.tables import show_table
from probe.store import Alert, JournalEntry, Replay, Store

STEPS = ("hypothesis", "inject", "observe", "recommend", "apply", "verify", "done")
ENDED = frozenset({"done", "failed", "interrupted"})


def as_drawn(store: Store, replay_id: str, drawn_status: str) -> Replay | None:
    """A replay under way, None when it is gone; a change of its status draws the whole page again."""
    replay = store.replays.get(replay_id)
    if replay is not None and replay.status != drawn_status:
        st.rerun(scope="app")
    return replay


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
        st.error(words.plain((replay.result or {}).get("error") or f"The replay failed at step “{replay.step}”."))


def show_journal(entries: Sequence[JournalEntry], limit: int | None = None) -> None:
    """The journal, oldest first (the newest `limit` entries, if given)."""
    shown = list(entries)[-limit:] if limit else list(entries)
    if not shown:
        st.caption("The journal is empty so far.")
        return
    rows = [{"time": words.clock(e.ts), "step": e.step, "what happened": e.message} for e in shown]
    show_table(rows)


def show_alerts(alerts: Sequence[Alert], replay_id: str) -> None:
    """The alerts of this replay with links to the alert and to its runbook."""
    if not alerts:
        st.caption("No alert yet.")
    for alert in alerts:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(f"{words.alert_mark(alert.state).badge} **{alert.rule}** {words.plain(alert.summary)}")
            link("alerts", f"Alert {alert.id}", ":material/notifications:", alert=alert.id)
            link(
                "runbooks", f"Runbook {alert.runbook}", ":material/menu_book:",
                runbook=alert.runbook, alert=alert.id, replay=replay_id,
            )  # fmt: skip


def alerts_of(store: Store, replay: Replay) -> list[Alert]:
    """Alerts raised on the replay's target, newest first."""
    return store.alerts.history(limit=200, target=replay.target)


FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("completed", "requests completed", words.count),
    ("failed", "requests failed", words.count),
    ("not_sent", "requests never sent", words.count),
    ("engine_exit", "engine died", str),
    ("items", "questions asked", words.count),
    ("accuracy", "answers right", words.ratio),
    ("invalid", "answers invalid", words.count),
    ("quality_drop", "accuracy lost against full precision", words.ratio),
    ("mean_kl", "mean KL (nats)", words.nats),
    ("top1_agreement", "top-1 agreement", words.ratio),
    ("preemptions", "preemptions", words.count),
    ("requests_preempted", "requests preempted at least once", words.count),
    ("eviction_rate", "eviction rate", words.ratio),
    ("kv_usage_peak", "KV usage, peak", words.ratio),
    ("running_peak", "requests running, peak", words.count),
    ("waiting_peak", "requests waiting, peak", words.count),
    ("ttft_s.p95", "TTFT p95", words.seconds),
    ("itl_s.p95", "inter-token latency p95", words.seconds),
    ("e2e_s.p95", "whole request p95", words.seconds),
    ("output_tokens_per_s", "output tokens/s", words.count),
    ("kv_cache_dtype", "KV cache format", str),
    ("kv_bytes_per_token", "KV bytes per token", words.count),
    ("kv_cache_bytes", "KV pool", words.size),
    ("kv_cache_size_tokens", "tokens that fit", words.count),
    ("activation_peak_bytes", "activation peak", words.size),
    ("max_num_seqs", "--max-num-seqs", words.count),
    ("max_num_batched_tokens", "--max-num-batched-tokens", words.count),
    ("gpu_memory_utilization", "--gpu-memory-utilization", str),
    ("kv_cache_memory_bytes", "--kv-cache-memory-bytes", words.count),
)


def before_after(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """Rows `figure, before, after` of what both runs measured and were started with; unknown in both is left out."""
    before, after = result.get("before") or {}, result.get("after") or {}
    return [
        {"figure": label, "before": _cell(before, key, write), "after": _cell(after, key, write)}
        for key, label, write in FIGURES
        if _value(before, key) is not None or _value(after, key) is not None
    ]


def _value(phase: Mapping[str, Any], key: str) -> Any:
    value: Any = phase
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _cell(phase: Mapping[str, Any], key: str, write: Callable[[Any], str]) -> str:
    value = _value(phase, key)
    return words.DASH if value is None else write(value)


def show_checks(result: Mapping[str, Any]) -> None:
    """Every condition of "reproduced" and "verified" with what was measured."""
    rows = [
        {
            "condition": check["name"],
            "of": phase,
            "met": "✔ yes" if check["ok"] else "✖ no",
            "measured": str(check["measured"]),
            "expected": check["expected"],
        }
        for phase, checks in (result.get("checks") or {}).items()
        for check in checks
    ]

    if rows:
        st.markdown("**Conditions**")
        show_table(rows)


def show_result(replay: Replay) -> None:
    """What an ended replay measured: figures before and after, conditions, and where the load came from."""
    result = replay.result or {}
    figures = before_after(result)
    if figures:
        st.markdown("**Before and after the change**")
        show_table(figures)
        load = words.plain(str(result.get("load")))
        st.caption(f"Measured on the drill engine under the same load twice: {load}.")
    show_checks(result)
