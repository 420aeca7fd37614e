"""Team notes with their versions, and who ticked which step of a checklist."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "notes",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("about", sa.String(20), nullable=False),
        sa.Column("key", sa.String(200), nullable=False),
        sa.Column("removed_at", sa.Double()),
        sa.Column("removed_by", sa.String(200)),
    )
    op.create_index("ix_notes_subject", "notes", ["about", "key"])
    op.create_table(
        "note_versions",
        sa.Column(
            "note_id",
            sa.Integer(),
            sa.ForeignKey("notes.id", name="fk_note_versions_note", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("version", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("author", sa.String(200), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
    )
    op.create_table(
        "checklist_ticks",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("about", sa.String(20), nullable=False),
        sa.Column("key", sa.String(200), nullable=False),
        sa.Column("step", sa.String(100), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("done", sa.Boolean(), nullable=False),
        sa.Column("author", sa.String(200), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
    )
    op.create_index("ix_checklist_ticks_subject", "checklist_ticks", ["about", "key"])
