"""Which engine suits: a few questions, and for each engine what speaks for and against it, with sources."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from app.ui import words
from app.ui.wording import in_language
from runbooks.knowledge.chooser import Ranking, Reason, choose, questions


def show_chooser(language: str) -> None:
    """The questions on the left, engines on the right, best first; what is not answered does not count."""
    left, right = st.columns([2, 3], gap="medium")
    answers: dict[str, str | None] = {}
    with left:
        for question in questions():
            labels = {option.id: in_language(option.label, language) for option in question.options}
            answers[question.id] = st.pills(
                in_language(question.question, language), list(labels), key=f"choose-{question.id}",
                format_func=labels.__getitem__, persist_state="session", wrap=True,
            )  # fmt: skip
    with right:
        if not any(answers.values()):
            st.info("Answer what you know: every answer counts facts for and against each engine, with their sources.")
        for ranking in choose(answers):
            show_engine(ranking, language)


def show_engine(ranking: Ranking, language: str) -> None:
    """One engine: its points, what blocks it, its facts."""
    with st.container(border=True):
        mark = ":red-badge[✖ cannot]" if ranking.blocked else ""
        version = f" {ranking.version}" if ranking.version else ""
        st.markdown(f"**{words.plain(ranking.title + version)}** &nbsp; {ranking.points:+d} points {mark}")
        if ranking.notice is not None:
            st.caption(f"▲ {words.plain(in_language(ranking.notice, language))}")
        told = [(reason, "✔") for reason in ranking.reasons_for] + [(r, "✖") for r in ranking.reasons_against]
        if told:
            st.markdown("\n".join(f"- {shape} {reason_line(reason, language)}" for reason, shape in told))
            show_sources([reason for reason, _ in told], language, ranking.engine)


def reason_line(reason: Reason, language: str) -> str:
    """`+2 what it says`."""
    return f"{reason.points:+d} {words.plain(in_language(reason.text, language))}"


def show_sources(reasons: Sequence[Reason], language: str, engine: str) -> None:
    """Where the facts were read, folded away."""
    sources = dict.fromkeys(in_language(reason.source, language) for reason in reasons)
    with st.expander(f"Sources ({len(sources)})", key=f"sources-{engine}"):
        st.markdown("\n".join(f"- {words.plain(source)}" for source in sources))
