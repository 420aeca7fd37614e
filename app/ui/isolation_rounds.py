"""Rounds of the isolation probe, as its events keep them: verdict, checks in figures, history.

A verdict is `leak shown`, `no leak` with how many probes found none, or `inconclusive`. No round proves more than it
asked, so none is ever green.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from app.ui import words
from app.ui.isolation_charts import show_times
from app.ui.tables import show_choices, show_table
from probe.alerts.isolation import ROUND_EVENT
from probe.store import Event, Store

ROUNDS_READ = 50
Check = Mapping[str, Any]
_VERDICTS = {
    "leak shown": words.Mark("■", "leak shown", "red"),
    "no leak": words.Mark("◇", "no leak found", "blue"),
    "inconclusive": words.Mark("▲", "inconclusive", "orange"),
    "not run": words.Mark("◌", "not run", "gray"),
}
ASKS = {
    "leak-canary": "Does one tenant get another's text? Twin prompts with different answers, cold, cached and across.",
    "side-channel-tokens": "Does cached_tokens tell an outsider which prefix another tenant sent?",
    "side-channel-ttft": "Does the time to the first token tell it? Warmed and fresh prefixes in random order.",
    "cache-salt": "Is cache_salt honoured: hits with the same one, none with another?",
}


def rounds(store: Store, target: str) -> list[Event]:
    """Newest first."""
    return store.events.recent(limit=ROUNDS_READ, target=target, kinds=[ROUND_EVENT])


def verdict_mark(verdict: object) -> words.Mark:
    """The mark of a check's or a round's verdict (`no leak in 40 probes` is `no leak`)."""
    text = str(verdict or "not run")
    found = next((mark for word, mark in _VERDICTS.items() if text.startswith(word)), None)
    return found or words.Mark("○", text, "gray")


def show_round(event: Event) -> None:
    """One round: verdict, every check in figures, what was sent."""
    data = event.data
    verdict = str(data.get("verdict"))
    found = str(data.get("sentence") or event.message).removeprefix(f"{verdict}: ")
    st.markdown(f"{verdict_mark(verdict).badge} {words.plain(found)}")
    if data.get("error"):
        st.warning(words.plain(f"The round stopped early: {data['error']}."))
    checks = list(data.get("checks") or [])
    show_table([check_row(check) for check in checks])
    for check in checks:
        show_times(check)
    st.caption(told(event))
    with st.expander("What each check asks"):
        asked = [str(check.get("check")) for check in checks]
        show_table([{"check": name, "asks": text} for name, text in ASKS.items() if name in asked])
        st.caption(
            "The effect on the time to the first token is the share of pairs (one warmed, one fresh prefix) in which "
            "the warmed one was faster: 0.5 is chance. The upper bound holds with 95% confidence: with no leak in so "
            "many probes the true share may still be that high."
        )
        if data.get("ids"):
            st.caption(words.plain(f"Every id it sent starts with {data['ids']}: look for it in the server's log."))


def told(event: Event) -> str:
    """When, at which price, against what."""
    data = event.data
    started, ended = data.get("started_at"), data.get("ended_at")
    took = f" in {words.span(float(ended) - float(started))}" if started is not None and ended is not None else ""
    limit = (data.get("budget") or {}).get("requests")
    of = f" of at most {words.count(limit)}" if limit else ""
    served = ", ".join(words.plain(str(data[key])) for key in ("model", "engine") if data.get(key))
    scope = f", scope {words.plain(str(data['scope']))}" if data.get("scope") else ""
    failed = f", {data['requests_failed']} failed" if data.get("requests_failed") else ""
    sent = f"{words.count(data.get('requests_sent'))} requests{of} sent{took}{failed}"
    return f"{words.clock(event.ts)}, {words.ago(event.ts)}: {sent}. {served}{scope}"


def check_row(check: Check) -> dict[str, object]:
    """One check in figures."""
    bound = check.get("upper_bound")
    return {
        "check": check.get("check"),
        "verdict": verdict_mark(check.get("verdict")),
        "probes": words.count(check.get("probes")),
        "leaks": words.count(check.get("leaks")),
        "upper bound": words.ratio(bound) if bound is not None else words.DASH,
        "effect": effect(check),
        "p": p_value(check.get("p_value")),
        "finding": check.get("sentence") or words.DASH,
    }


def effect(check: Check) -> str:
    """How large the difference was, in the unit of the check."""
    value = check.get("effect")
    if value is None:
        return words.DASH
    if check.get("check") == "side-channel-ttft":
        return f"AUC {with_interval(check)}"
    if check.get("check") == "side-channel-tokens":
        return f"{words.count(value)} tokens"
    return f"distance {value:.2g}"


def with_interval(check: Check) -> str:
    """`0.61 (0.48 to 0.74)`: a check's effect with its 95% interval."""
    interval = check.get("interval")
    return f"{check['effect']:.2f}" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def p_value(p: Any) -> str:
    """Small ones as a bound."""
    if not isinstance(p, int | float):
        return words.DASH
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def show_history(events: Sequence[Event]) -> None:
    """All rounds; a row opens its round."""
    st.markdown("**Earlier rounds**")
    rows = [
        {
            "at": words.clock(event.ts),
            "verdict": verdict_mark(event.data.get("verdict")).text,
            "found": str(event.data.get("sentence") or event.message),
            "requests": event.data.get("requests_sent"),
        }
        for event in events
    ]
    show_choices(rows, [event.id for event in events], "round")
