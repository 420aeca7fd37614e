"""Team notes on a runbook's page: about the page for whoever comes next, and about the incident at hand."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from app.runtime import get_runtime
from app.ui import words
from app.ui.forms import AUTHOR
from app.ui.guard import guarded, sentence
from app.ui.runbook_subject import Subject
from probe.store import Note, StoreError

_TEXT, _TROUBLE = "note-text", "note-trouble"


def show_notes(subjects: Sequence[Subject]) -> None:
    """Notes about each subject, newest first, and the field for a new one about the first."""
    for subject in subjects:
        notes = get_runtime().store.notes.list(subject.about, subject.key)
        st.markdown(f"**Notes about {subject.words}: {len(notes)}**")
        for note in notes:
            show_note(note)
    names = {subject.words: subject for subject in subjects}
    chosen = next(iter(names))
    if len(names) > 1:
        chosen = st.segmented_control("About", list(names), default=chosen, required=True, key="note-about") or chosen
    st.text_area("New note", key=_TEXT, height=90, placeholder="what the next person on call should know")
    st.button("Add note", icon=":material/note_add:", key="note-add", on_click=_add, args=(names[chosen],))
    if trouble := st.session_state.pop(_TROUBLE, None):
        st.error(words.plain(trouble))


def show_note(note: Note) -> None:
    """Text, author and time, and what it said before."""
    with st.container(border=True):
        st.text(note.current.text)
        line = f"{note.first.author}, {words.clock(note.first.at)}"
        if note.version > 1:
            line += f"; edited by {note.current.author}, {words.clock(note.current.at)}"
        with st.container(horizontal=True, vertical_alignment="center"):
            st.caption(words.plain(line))
            if st.button("Edit", icon=":material/edit:", key=f"note-edit-{note.id}", type="tertiary"):
                edit(note)
        if note.version > 1:
            with st.expander(f"Earlier wordings ({note.version - 1})"):
                for version in reversed(note.versions[:-1]):
                    st.caption(words.plain(f"{version.author}, {words.clock(version.at)}"))
                    st.text(version.text)


def _add(subject: Subject) -> None:
    author, text = str(st.session_state[AUTHOR]), str(st.session_state[_TEXT])
    try:
        get_runtime().store.notes.add(subject.about, subject.key, author=author, text=text)
    except StoreError as error:
        st.session_state[_TROUBLE] = sentence(error)
    else:
        st.session_state[_TEXT] = ""


@st.dialog("Edit the note")
def edit(note: Note) -> None:
    """A new wording, or off the page; both keep what it said."""
    with guarded():
        author = st.text_input("Your name", str(st.session_state.get("operator", "")), key="note-edit-author")
        text = st.text_area("Note", note.current.text, key="note-edit-text", height=160)
        notes = get_runtime().store.notes
        with st.container(horizontal=True):
            if st.button("Save", type="primary", key="note-edit-confirm"):
                notes.edit(note.id, author=author, text=text, seen=note.version)
                st.rerun()
            if st.button("Remove from the page", key="note-remove-confirm"):
                notes.remove(note.id, author=author)
                st.rerun()
