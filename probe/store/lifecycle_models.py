"""Tables of what follows an alert: acknowledgements, silences, the outbox of notifications, imported alerts."""

from __future__ import annotations

from sqlalchemy import JSON, ForeignKey, Index, String, Text, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from probe.store.models import NAME, Base

IN_FORCE = text("removed_at IS NULL")


class AcknowledgementRow(Base):
    """Kept when it is taken back or replaced: who knew what, and when."""

    __tablename__ = "acknowledgements"
    __table_args__ = (
        Index(
            "uq_acknowledgements_in_force",
            "alert_id",
            unique=True,
            sqlite_where=IN_FORCE,
            postgresql_where=IN_FORCE,
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    alert_id: Mapped[int] = mapped_column(ForeignKey("alerts.id", name="fk_acknowledgements_alert", ondelete="CASCADE"))
    author: Mapped[str] = mapped_column(NAME)
    kind: Mapped[str] = mapped_column(String(20))
    reason: Mapped[str] = mapped_column(Text)
    at: Mapped[float]
    removed_at: Mapped[float | None]
    removed_by: Mapped[str | None] = mapped_column(NAME)


class SilenceRow(Base):
    """`matchers` as text, one string each (`rule="oom"`)."""

    __tablename__ = "silences"
    __table_args__ = (Index("ix_silences_ends_at", "ends_at"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(primary_key=True)
    matchers: Mapped[list[str]]
    starts_at: Mapped[float]
    ends_at: Mapped[float]
    author: Mapped[str] = mapped_column(NAME)
    reason: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float]
    expired_by: Mapped[str | None] = mapped_column(NAME)


class NotificationRow(Base):
    """The outbox: written in the transaction of the transition it tells of."""

    __tablename__ = "notifications"
    __table_args__ = (
        UniqueConstraint("alert_id", "transition", "receiver", name="uq_notifications_transition"),
        Index("ix_notifications_state", "state"),
        Index("ix_notifications_group", "receiver", "group_key"),
        Index("ix_notifications_created_at", "created_at"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    alert_id: Mapped[int] = mapped_column(ForeignKey("alerts.id", name="fk_notifications_alert", ondelete="CASCADE"))
    transition: Mapped[str] = mapped_column(String(20))
    receiver: Mapped[str] = mapped_column(NAME)
    group_key: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(20))
    created_at: Mapped[float]
    due_at: Mapped[float]
    done_at: Mapped[float | None]
    tries: Mapped[int]
    unconfirmed: Mapped[bool]
    error: Mapped[str | None] = mapped_column(Text)
    claimed_by: Mapped[str | None] = mapped_column(String(40))
    claimed_until: Mapped[float | None]


class ImportedAlertRow(Base):
    """The newest word of somebody else's Alertmanager on one of its alerts."""

    __tablename__ = "imported_alerts"
    __table_args__ = (Index("ix_imported_alerts_received_at", "received_at"),)

    fingerprint: Mapped[str] = mapped_column(String(64), primary_key=True)
    status: Mapped[str] = mapped_column(String(20))
    labels: Mapped[dict[str, str]] = mapped_column(JSON())
    annotations: Mapped[dict[str, str]] = mapped_column(JSON())
    starts_at: Mapped[float]
    ends_at: Mapped[float | None]
    generator_url: Mapped[str] = mapped_column(Text)
    external_url: Mapped[str] = mapped_column(Text)
    receiver: Mapped[str] = mapped_column(Text)
    received_at: Mapped[float]
    runbook: Mapped[str | None] = mapped_column(NAME)
