"""The steps of a runbook as a checklist of one alert or drill: who did which, and when."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import streamlit as st

from app.runtime import get_runtime
from app.ui import words
from app.ui.forms import AUTHOR
from app.ui.guard import sentence
from app.ui.runbook_subject import Subject
from probe.store import StoreError, Tick
from runbooks.load import Runbook

SECTIONS = ("Diagnosis", "Mitigation", "Verify")
_TROUBLE = "checklist-trouble"
_ITEM = re.compile(r"^(?:\d+\.|[-*])\s+", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """One thing to do. `id` is the same in every language of the page."""

    id: str
    section: str
    text: str


def steps_of(runbook: Runbook) -> list[Step]:
    """What the page says to do: the items of each section's list, or its paragraphs where it has none."""
    found: list[Step] = []
    for section in SECTIONS:
        lines = [_one_line(part) for part in _parts(runbook.sections.get(section, ""))]
        texts = [line for line in lines if line]
        found += [Step(f"{section.lower()}-{n}", section, text) for n, text in enumerate(texts, 1)]
    return found


def _parts(markdown: str) -> list[str]:
    """Top-level list items, else paragraphs."""
    starts = [match.start() for match in _ITEM.finditer(markdown)]
    if starts:
        ends = [*starts[1:], len(markdown)]
        return [_ITEM.sub("", markdown[a:b], count=1) for a, b in zip(starts, ends, strict=True)]
    return markdown.split("\n\n")


def _one_line(part: str) -> str:
    """The first paragraph of a step in one line; nothing for a table or a block of code."""
    first = part.strip().split("\n\n")[0]
    return "" if first.lstrip().startswith(("|", "```")) else " ".join(first.split())


def show_checklist(runbook: Runbook, subject: Subject) -> None:
    """A box a step, with who ticked it last; a change is kept at once."""
    steps = steps_of(runbook)
    ticks = get_runtime().store.notes.checklist(subject.about, subject.key)
    done = sum(step.id in ticks and ticks[step.id].done for step in steps)
    st.markdown(f"**Checklist of {subject.words}: {done} of {len(steps)} done**")
    if trouble := st.session_state.pop(_TROUBLE, None):
        st.error(words.plain(trouble))
    section = ""
    for step in steps:
        if step.section != section:
            section = step.section
            st.caption(section)
        show_step(step, subject, ticks)


def show_step(step: Step, subject: Subject, ticks: Mapping[str, Tick]) -> None:
    """The box shows what the store says, also after somebody else ticked."""
    tick = ticks.get(step.id)
    key = f"step-{subject.about}-{subject.key}-{step.id}"
    st.session_state[key] = tick is not None and tick.done
    st.checkbox(step.text, key=key, on_change=_change, args=(key, step, subject))
    if tick is not None:
        verb = "done" if tick.done else "taken back"
        changed = "" if tick.text == step.text else f" The step read otherwise then: {tick.text}"
        st.caption(words.plain(f"{verb} by {tick.author}, {words.clock(tick.at)}.{changed}"))


def _change(key: str, step: Step, subject: Subject) -> None:
    author, done = str(st.session_state[AUTHOR]), bool(st.session_state[key])
    try:
        get_runtime().store.notes.tick(subject.about, subject.key, step.id, text=step.text, author=author, done=done)
    except StoreError as error:
        st.session_state[_TROUBLE] = sentence(error)
