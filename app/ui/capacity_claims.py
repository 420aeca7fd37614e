"""What widely read articles say about KV caches, beside what comes out when it is computed."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import streamlit as st

from app.ui import words
from app.ui.tables import show_table
from app.ui.wording import in_language
from probe.catalog.metrics import metric_versions, metrics_at
from runbooks.knowledge.claims import TOPICS, Claim, claims

VERDICTS = {
    "right": words.Mark("✔", "right", "green"),
    "half": words.Mark("▲", "half right", "orange"),
    "wrong": words.Mark("✖", "wrong", "red"),
}
ALL = "all"


@functools.cache
def computed() -> tuple[Claim, ...]:
    """Every claim, computed once a process: it rests on nothing that changes."""
    return tuple(claims(lambda engine: {v: metrics_at(engine, v) for v in metric_versions(engine)}))


def show_claims(language: str) -> None:
    """A table a topic, and the arithmetic below it."""
    found = computed()
    counts = {verdict: sum(claim.verdict == verdict for claim in found) for verdict in VERDICTS}
    st.markdown(" ".join(f"{VERDICTS[verdict].badge} {count}" for verdict, count in counts.items()))
    topic = st.segmented_control("Topic", [ALL, *TOPICS], default=ALL, required=True, key="topic", bind="query-params")
    for one in TOPICS:
        chosen = [claim for claim in found if claim.topic == one]
        if chosen and topic in (ALL, one):
            show_topic(one, chosen, language)


def show_topic(topic: str, found: Sequence[Claim], language: str) -> None:
    """What is said, what holds."""
    st.subheader(topic.capitalize())
    show_table([
        {
            "the article says": in_language(claim.claim, language),
            "verdict": VERDICTS[claim.verdict],
            "its figure": in_language(claim.said, language),
            "computed": in_language(claim.computed, language) or words.DASH,
            "what holds": in_language(claim.truth, language),
        }
        for claim in found
    ])  # fmt: skip
    with st.expander(f"Arithmetic and sources: {topic}", key=f"arithmetic-{topic}"):
        for claim in found:
            st.markdown(f"**{words.plain(in_language(claim.claim, language))}**")
            if claim.arithmetic:
                st.code("\n".join(claim.arithmetic), language=None, wrap_lines=True)
            st.caption(words.plain(f"{in_language(claim.article, language)}; {in_language(claim.source, language)}"))
