"""Silences, acknowledgements, notifications and imported alerts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

IN_FORCE = sa.text("removed_at IS NULL")


def upgrade() -> None:
    _acknowledgements_and_silences()
    _notifications()
    _imported_alerts()


def _acknowledgements_and_silences() -> None:
    op.create_table(
        "acknowledgements",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column(
            "alert_id",
            sa.Integer(),
            sa.ForeignKey("alerts.id", name="fk_acknowledgements_alert", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("author", sa.String(200), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("removed_at", sa.Double()),
        sa.Column("removed_by", sa.String(200)),
    )
    op.create_index(
        "uq_acknowledgements_in_force",
        "acknowledgements",
        ["alert_id"],
        unique=True,
        sqlite_where=IN_FORCE,
        postgresql_where=IN_FORCE,
    )
    op.create_table(
        "silences",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("matchers", sa.JSON(), nullable=False),
        sa.Column("starts_at", sa.Double(), nullable=False),
        sa.Column("ends_at", sa.Double(), nullable=False),
        sa.Column("author", sa.String(200), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expired_by", sa.String(200)),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_silences_ends_at", "silences", ["ends_at"])


def _notifications() -> None:
    op.create_table(
        "notifications",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column(
            "alert_id",
            sa.Integer(),
            sa.ForeignKey("alerts.id", name="fk_notifications_alert", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("transition", sa.String(20), nullable=False),
        sa.Column("receiver", sa.String(200), nullable=False),
        sa.Column("group_key", sa.Text(), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("done_at", sa.Double()),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("unconfirmed", sa.Boolean(), nullable=False),
        sa.Column("error", sa.Text()),
        sa.Column("claimed_by", sa.String(40)),
        sa.Column("claimed_until", sa.Double()),
        sa.UniqueConstraint("alert_id", "transition", "receiver", name="uq_notifications_transition"),
    )
    op.create_index("ix_notifications_state", "notifications", ["state"])
    op.create_index("ix_notifications_group", "notifications", ["receiver", "group_key"])
    op.create_index("ix_notifications_created_at", "notifications", ["created_at"])


def _imported_alerts() -> None:
    op.create_table(
        "imported_alerts",
        sa.Column("fingerprint", sa.String(64), primary_key=True),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("annotations", sa.JSON(), nullable=False),
        sa.Column("starts_at", sa.Double(), nullable=False),
        sa.Column("ends_at", sa.Double()),
        sa.Column("generator_url", sa.Text(), nullable=False),
        sa.Column("external_url", sa.Text(), nullable=False),
        sa.Column("receiver", sa.Text(), nullable=False),
        sa.Column("received_at", sa.Double(), nullable=False),
        sa.Column("runbook", sa.String(200)),
    )
    op.create_index("ix_imported_alerts_received_at", "imported_alerts", ["received_at"])
