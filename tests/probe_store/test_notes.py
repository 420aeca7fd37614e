"""Team notes and checklists on both databases: nothing that was written is lost."""

from __future__ import annotations

import pytest

from probe.store import NoteVersion, Store, StoreError, apply_retention

NOW = 1_800_000_000.0


def test_an_edited_note_keeps_what_it_said(store: Store) -> None:
    note = store.notes.add("runbook", "oom", author=" kim ", text=" drain first é ", now=NOW)
    assert (note.version, note.current) == (1, NoteVersion("kim", NOW, "drain first é"))
    edited = store.notes.edit(note.id, author="lee", text="drain first, then restart", seen=1, now=NOW + 9)
    assert edited.versions == (note.current, NoteVersion("lee", NOW + 9, "drain first, then restart"))
    assert edited.first.author == "kim"
    assert store.notes.edit(note.id, author="lee", text="drain first, then restart", seen=2).version == 2
    assert store.notes.list("runbook", "oom") == [edited]


def test_two_who_edit_at_once_do_not_overwrite_each_other(store: Store) -> None:
    note = store.notes.add("alert", "7", author="kim", text="a", now=NOW)
    store.notes.edit(note.id, author="lee", text="b", seen=1)
    with pytest.raises(StoreError, match="lee edited note"):
        store.notes.edit(note.id, author="kim", text="c", seen=1)
    assert store.notes.list("alert", "7")[0].current.text == "b"


def test_notes_belong_to_one_thing_and_the_newest_comes_first(store: Store) -> None:
    first = store.notes.add("alert", "7", author="kim", text="one", now=NOW)
    second = store.notes.add("alert", "7", author="lee", text="two", now=NOW + 1)
    store.notes.add("alert", "8", author="lee", text="another alert")
    store.notes.add("replay", "7", author="lee", text="a replay of that id")
    assert [n.current.text for n in store.notes.list("alert", "7")] == ["two", "one"]
    store.notes.remove(second.id, author="kim", now=NOW + 2)
    assert store.notes.list("alert", "7") == [first]
    gone = store.notes.list("alert", "7", removed=True)[0]
    assert (gone.current.text, gone.removed_by, gone.removed_at) == ("two", "kim", NOW + 2)
    with pytest.raises(StoreError, match="kim removed note"):
        store.notes.edit(second.id, author="lee", text="three", seen=1)
    apply_retention(store, NOW + 1e9)
    assert len(store.notes.list("alert", "7", removed=True)) == 2


def test_a_tick_says_who_and_when_and_can_be_taken_back(store: Store) -> None:
    step = "diagnosis-1"
    store.notes.tick("alert", "7", step, text="look at the queue", author="kim", now=NOW)
    store.notes.tick("alert", "7", "mitigation-1", text="drain", author="kim", now=NOW + 1)
    store.notes.tick("alert", "7", step, text="look at the queue", author="lee", done=False, now=NOW + 2)
    checklist = store.notes.checklist("alert", "7")
    assert {name: (t.done, t.author, t.at) for name, t in checklist.items()} == {
        step: (False, "lee", NOW + 2),
        "mitigation-1": (True, "kim", NOW + 1),
    }
    assert [t.author for t in store.notes.ticks("alert", "7")] == ["kim", "kim", "lee"]
    assert store.notes.checklist("alert", "8") == {}


@pytest.mark.parametrize(
    ("about", "author", "text", "words"),
    [
        ("runbook", " ", "x", "needs an author"),
        ("runbook", "kim", " \n", "needs a text"),
        ("runbook", "kim", "x" * 10_001, "1 to 10000 characters"),
        ("weather", "kim", "x", "one of runbook, alert, replay"),
    ],
)
def test_notes_without_sense_are_refused(store: Store, about: str, author: str, text: str, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        store.notes.add(about, "oom", author=author, text=text)
    assert store.notes.list(about, "oom") == []


def test_what_is_not_there_is_said(store: Store) -> None:
    with pytest.raises(StoreError, match="no note 99"):
        store.notes.remove(99, author="kim")
    with pytest.raises(StoreError, match="a name of 1 to"):
        store.notes.tick("alert", "7", "", text="x", author="kim")
