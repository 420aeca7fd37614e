"""What a team writes down: notes about a runbook, an alert or a replay, and the ticked steps of a checklist.

Nothing is overwritten. An edit adds a version of the note, a removed note keeps its text, and taking a tick back is a
line of its own, so that afterwards it can be read who knew and did what, and when. Retention leaves them alone.
"""

from __future__ import annotations

import time
from collections import defaultdict

from sqlalchemy import select
from sqlalchemy.orm import Session

from probe.store.database import Database
from probe.store.note_models import NoteRow, NoteVersionRow, TickRow
from probe.store.records import ABOUT, Note, NoteVersion, StoreError, Tick
from probe.store.words import said_by
from probe.store.writer import Writer

MAX_TEXT = 10_000
MAX_STEP = 100


class Notes:
    """`store.notes`. `about` is one of `ABOUT`, `key` the id of the runbook, alert or replay."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer

    def add(self, about: str, key: str, *, author: str, text: str, now: float | None = None) -> Note:
        """A new note; raises `StoreError` without an author or a text."""
        _check_subject(about, key)
        author, text = _said(author, text)
        at = time.time() if now is None else now

        def work(session: Session) -> Note:
            row = NoteRow(about=about, key=key)
            session.add(row)
            session.flush()
            session.add(NoteVersionRow(note_id=row.id, version=1, author=author, at=at, text=text))
            session.flush()
            return _note(session, row)

        return self._writer.call(work)

    def edit(self, note_id: int, *, author: str, text: str, seen: int, now: float | None = None) -> Note:
        """A new version of a note, which stays as it is where the text is the same.

        `seen` is the version that the author read; raises `StoreError` where somebody wrote a newer one meanwhile.
        """
        author, text = _said(author, text)
        at = time.time() if now is None else now

        def work(session: Session) -> Note:
            row = _present(session, note_id)
            note = _note(session, row)
            if note.version != seen:
                raise StoreError(
                    f"{note.current.author} edited note {note_id} meanwhile: read it again, then make your change."
                )
            if note.current.text != text:
                session.add(NoteVersionRow(note_id=row.id, version=note.version + 1, author=author, at=at, text=text))
                session.flush()
            return _note(session, row)

        return self._writer.call(work)

    def remove(self, note_id: int, *, author: str, now: float | None = None) -> None:
        """Take a note off the page; its versions stay in the store."""
        author, _ = _said(author, "-")
        at = time.time() if now is None else now

        def work(session: Session) -> None:
            row = _present(session, note_id)
            row.removed_at, row.removed_by = at, author

        self._writer.call(work)

    def tick(
        self, about: str, key: str, step: str, *, text: str, author: str, done: bool = True, now: float | None = None
    ) -> Tick:
        """Say that a step is done (or is not after all); `text` is the step as its page read then."""
        _check_subject(about, key)
        author, text = _said(author, text)
        if not step or len(step) > MAX_STEP:
            raise StoreError(f"A step needs a name of 1 to {MAX_STEP} characters.")
        at = time.time() if now is None else now

        def work(session: Session) -> Tick:
            row = TickRow(about=about, key=key, step=step, text=text, done=done, author=author, at=at)
            session.add(row)
            session.flush()
            return _tick(row)

        return self._writer.call(work)

    def ticks(self, about: str, key: str) -> list[Tick]:
        """Every tick and every one taken back, oldest first."""
        query = select(TickRow).where(TickRow.about == about, TickRow.key == key).order_by(TickRow.id)
        with self._database.read() as session:
            return [_tick(row) for row in session.scalars(query)]

    def checklist(self, about: str, key: str) -> dict[str, Tick]:
        """The newest word on each step that anybody ever ticked."""
        return {tick.step: tick for tick in self.ticks(about, key)}

    def list(self, about: str, key: str, *, removed: bool = False) -> list[Note]:
        """Notes about one thing, newest first; with `removed`, those taken off the page as well."""
        query = select(NoteRow).where(NoteRow.about == about, NoteRow.key == key).order_by(NoteRow.id.desc())
        if not removed:
            query = query.where(NoteRow.removed_at.is_(None))
        with self._database.read() as session:
            rows = list(session.scalars(query))
            versions = _versions(session, [row.id for row in rows])
            return [_record(row, versions[row.id]) for row in rows]


def _check_subject(about: str, key: str) -> None:
    if about not in ABOUT:
        raise StoreError(f"A note is about one of {', '.join(ABOUT)}, not {about!r}.")
    if not key or len(key) > 200:
        raise StoreError(f"The id of the {about} must have 1 to 200 characters.")


def _said(author: str, text: str) -> tuple[str, str]:
    author, _ = said_by(author, "-", "A note or a tick")
    text = text.strip()
    if not text or len(text) > MAX_TEXT:
        raise StoreError(f"A note needs a text of 1 to {MAX_TEXT} characters.")
    return author, text


def _present(session: Session, note_id: int) -> NoteRow:
    row = session.get(NoteRow, note_id)
    if row is None:
        raise StoreError(f"There is no note {note_id}.")
    if row.removed_at is not None:
        raise StoreError(f"{row.removed_by} removed note {note_id} meanwhile.")
    return row


def _versions(session: Session, ids: list[int]) -> dict[int, tuple[NoteVersion, ...]]:
    query = select(NoteVersionRow).where(NoteVersionRow.note_id.in_(ids)).order_by(NoteVersionRow.version)
    found: defaultdict[int, tuple[NoteVersion, ...]] = defaultdict(tuple)
    for row in session.scalars(query):
        found[row.note_id] += (NoteVersion(author=row.author, at=row.at, text=row.text),)
    return found


def _note(session: Session, row: NoteRow) -> Note:
    return _record(row, _versions(session, [row.id])[row.id])


def _record(row: NoteRow, versions: tuple[NoteVersion, ...]) -> Note:
    return Note(
        id=row.id,
        about=row.about,
        key=row.key,
        versions=versions,
        removed_at=row.removed_at,
        removed_by=row.removed_by,
    )


def _tick(row: TickRow) -> Tick:
    return Tick(step=row.step, text=row.text, done=row.done, author=row.author, at=row.at)
