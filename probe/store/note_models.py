"""Tables of what a team writes down: notes in versions, and ticks of checklists, which are only ever added."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from probe.store.models import NAME, Base


class NoteRow(Base):
    """`about` and `key` name a runbook, an alert or a replay; the text is in the versions."""

    __tablename__ = "notes"
    __table_args__ = (Index("ix_notes_subject", "about", "key"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    about: Mapped[str] = mapped_column(String(20))
    key: Mapped[str] = mapped_column(NAME)
    removed_at: Mapped[float | None]
    removed_by: Mapped[str | None] = mapped_column(NAME)


class NoteVersionRow(Base):
    """One wording of a note, from 1 on; the highest is what the note says."""

    __tablename__ = "note_versions"

    note_id: Mapped[int] = mapped_column(
        ForeignKey("notes.id", name="fk_note_versions_note", ondelete="CASCADE"), primary_key=True
    )
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    author: Mapped[str] = mapped_column(NAME)
    at: Mapped[float]
    text: Mapped[str] = mapped_column(Text)


class TickRow(Base):
    """A step of a checklist was done, or found not to be; the newest row of a step holds."""

    __tablename__ = "checklist_ticks"
    __table_args__ = (Index("ix_checklist_ticks_subject", "about", "key"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    about: Mapped[str] = mapped_column(String(20))
    key: Mapped[str] = mapped_column(NAME)
    step: Mapped[str] = mapped_column(String(100))
    text: Mapped[str] = mapped_column(Text)
    done: Mapped[bool]
    author: Mapped[str] = mapped_column(NAME)
    at: Mapped[float]
