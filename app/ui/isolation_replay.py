"""The isolation part of a replay's result: what leaked from one session to another, and the prefix tree then.

`result["isolation"]` has variant, kind, before and after; a phase has requests, breaches, breach_rate, upper_bound,
legit, examples (each of a breach), tree, engine. A replay that ended early has no `after`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import streamlit as st

from app.ui import words
from app.ui.conversations import side_by_side
from app.ui.isolation_charts import show_times
from app.ui.isolation_rounds import with_interval
from app.ui.prefix_tree_view import show_tree
from app.ui.tables import show_table
from probe.alerts.isolation import whose
from probe.store import JournalEntry, Replay

NODES_SHOWN = 16
LEAK_SHOWN = 40
PHASES = {"before": "before the change", "after": "after the change"}
Phase = Mapping[str, Any]


def variant_of(replay: Replay) -> str | None:
    """Which form of the incident an ended replay ran; None where its result does not tell."""
    isolation = (replay.result or {}).get("isolation")
    return str(isolation["variant"]) if isinstance(isolation, Mapping) and isolation.get("variant") else None


def show_isolation(result: Mapping[str, Any]) -> None:
    """Nothing for replays that have no isolation part."""
    isolation = result.get("isolation")
    if not isinstance(isolation, Mapping):
        return
    st.markdown(f"**What one session saw of another** (variant {words.plain(str(isolation.get('variant')))})")
    for phase in PHASES:
        found = isolation.get(phase)
        if isinstance(found, Mapping):
            show_examples(found, phase)
    show_table(figures(isolation))
    st.caption(
        "The upper bound holds with 95% confidence: with no breach in so many requests, the true rate may still be "
        "that high. Legitimate hits are prompt tokens of a session's own next turns that came from the cache."
    )
    for phase, title in PHASES.items():
        show_times((isolation.get(phase) or {}).get("ttft") or {}, f"Time to the first token {title}, a tick a probe")
    show_trees(isolation)


def show_seen(journal: Sequence[JournalEntry]) -> None:
    """Of a replay under way: what its first attack brought to light, as the journal keeps it."""
    seen = next((entry.data for entry in journal if entry.data and "breach_rate" in entry.data), None)
    if seen is not None:
        show_examples(seen, "before")


def show_examples(phase: Phase, name: str) -> None:
    """The first breach, and further ones folded away."""
    examples = list(phase.get("examples") or [])
    if not examples:
        why = "no conversation was kept" if phase.get("breaches") else "no request was a breach"
        st.caption(f"Nothing to show {PHASES[name]}: {why}.")
    for example in examples[:1]:
        show_example(example, name)
    if examples[1:]:
        with st.expander(f"{len(examples) - 1} more"):
            for example in examples[1:]:
                show_example(example, name)


def show_example(example: Mapping[str, Any], name: str) -> None:
    """One breach: what happened in a sentence, and both conversations."""
    st.markdown(f"##### {words.plain(str(example.get('title') or 'Two sessions'))}, {PHASES[name]}")
    st.markdown(words.plain(str(example.get("sentence") or "")))
    st.html(side_by_side(example.get("sessions") or []))
    show_outcome(example)


def show_outcome(example: Mapping[str, Any]) -> None:
    """What leaked, and what the same question gets when nothing is cached."""
    leaked = shorten(str(example.get("leaked") or "").strip())
    badge = f":red-badge[■ leaked] “**{words.plain(leaked)}**”" if leaked else ":red-badge[■ not from its own text]"
    cold = words.plain(str(example.get("cold_answer") or "").strip())
    st.markdown(f"{badge} &nbsp; Answered cold, with nothing cached: “{cold}”")


def shorten(text: str, most: int = LEAK_SHOWN) -> str:
    """At most `most` characters; the whole stands marked in the conversation."""
    return text if len(text) <= most else text[: most - 1] + "…"


def show_trees(isolation: Mapping[str, Any]) -> None:
    """The prefix tree before and after, one below the other: the columns stay readable."""
    for name, title in PHASES.items():
        phase = isolation.get(name)
        tree = phase.get("tree") if isinstance(phase, Mapping) else None
        if isinstance(tree, Mapping):
            st.markdown(f"**Prefix tree {title}**")
            show_tree(tree, limit=NODES_SHOWN)


def figures(isolation: Mapping[str, Any]) -> list[dict[str, str]]:
    """Rows `figure, before, after`; what neither phase measured is left out."""
    phases = {name: dict(_figures(isolation.get(name) or {})) for name in PHASES}
    labels = {label: None for found in phases.values() for label in found}
    return [{"figure": label, **{n: found.get(label, words.DASH) for n, found in phases.items()}} for label in labels]


def _figures(phase: Phase) -> Iterator[tuple[str, str]]:
    if "requests" in phase:
        yield "cross-session requests", words.count(phase["requests"])
        yield "breaches", f"{words.count(phase.get('breaches'))} ({words.ratio(phase.get('breach_rate'))})"
    if phase.get("upper_bound") is not None:
        yield "breach rate, upper bound", words.ratio(phase["upper_bound"], 2)
    if phase.get("model_errors"):
        yield "wrong answers of the model itself", words.count(phase["model_errors"])
    ttft = phase.get("ttft") or {}
    if ttft.get("effect") is not None:
        yield "cached told by time to first token", f"{ttft.get('verdict')}, AUC {with_interval(ttft)}"
    legit = phase.get("legit") or {}
    if legit.get("asked_tokens"):
        hit, asked = words.count(legit.get("hit_tokens")), words.count(legit["asked_tokens"])
        yield "legitimate hits", f"{words.ratio(legit.get('rate'))} ({hit} of {asked} tokens)"
    engine = phase.get("engine") or {}
    if "isolation_breaches" in engine:
        yield "wrong blocks counted by the engine", foreign(engine["isolation_breaches"])
    if any((engine.get("prefix_hits_refused") or {}).values()):
        yield "hits refused by the engine", foreign(engine["prefix_hits_refused"])
    if engine.get("prefix_hits_by_scope"):
        yield "hit tokens by whose they were", counts(engine["prefix_hits_by_scope"])
    if engine.get("hit_rate_lost") is not None:
        yield "hit rate lost to isolation", words.ratio(engine["hit_rate_lost"])


def foreign(by_kind: Mapping[str, Any]) -> str:
    """`12 of another text, 3 of another image`; `none` when all are zero."""
    return counts({whose(kind): count for kind, count in by_kind.items()})


def counts(by_kind: Mapping[str, Any]) -> str:
    """`12 own, 3 shared`; `none` when all are zero."""
    return ", ".join(f"{words.count(n)} {kind}" for kind, n in by_kind.items() if n) or "none"
