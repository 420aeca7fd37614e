"""First schema: targets, series and samples, events, alerts, replays, leases, settings."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

ACTIVE_ALERT = sa.text("state IN ('pending', 'firing')")


def upgrade() -> None:
    _targets_and_samples()
    _events_and_alerts()
    _replays()
    op.create_table(
        "leases",
        sa.Column("name", sa.String(40), primary_key=True),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "settings",
        sa.Column("key", sa.String(60), primary_key=True),
        sa.Column("value", sa.JSON(), nullable=False),
    )


def _targets_and_samples() -> None:
    op.create_table(
        "targets",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("name", sa.String(200), nullable=False, unique=True),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("engine", sa.String(40), nullable=False),
        sa.Column("flags", sa.JSON(), nullable=False),
        sa.Column("facts", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("scrape_interval_s", sa.Double(), nullable=False),
        sa.Column("time_scale", sa.Double(), nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "series",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("target_id", sa.Integer(), sa.ForeignKey("targets.id", name="fk_series_target"), nullable=False),
        sa.Column("metric", sa.String(200), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.UniqueConstraint("target_id", "metric", "labels", name="uq_series_identity"),
    )
    op.create_table(
        "samples",
        sa.Column(
            "series_id",
            sa.Integer(),
            sa.ForeignKey("series.id", name="fk_samples_series"),
            primary_key=True,
            autoincrement=False,
        ),
        sa.Column("ts_ms", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("value", sa.Double(), nullable=False),
        sqlite_with_rowid=False,
    )


def _events_and_alerts() -> None:
    op.create_table(
        "events",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("target", sa.String(200)),
        sa.Column("ts", sa.Double(), nullable=False),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("severity", sa.String(20), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=False),
    )
    op.create_index("ix_events_ts", "events", ["ts"])
    op.create_index("ix_events_target_ts", "events", ["target", "ts"])
    op.create_table(
        "alerts",
        sa.Column("id", sa.Integer(), primary_key=True),
        *_evaluation_columns(),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("severity", sa.String(20), nullable=False),
        sa.Column("hold_s", sa.Double(), nullable=False),
        sa.Column("runbook", sa.String(200), nullable=False),
        sa.Column("replay_id", sa.String(32)),
        sa.Column("progress_s", sa.Double(), nullable=False),
        sa.Column("pending_at", sa.Double(), nullable=False),
        sa.Column("firing_at", sa.Double()),
        sa.Column("resolved_at", sa.Double()),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "uq_alerts_active",
        "alerts",
        ["rule", "target"],
        unique=True,
        sqlite_where=ACTIVE_ALERT,
        postgresql_where=ACTIVE_ALERT,
    )
    op.create_index("ix_alerts_target_pending_at", "alerts", ["target", "pending_at"])
    op.create_table(
        "alert_transitions",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column(
            "alert_id",
            sa.Integer(),
            sa.ForeignKey("alerts.id", name="fk_transitions_alert", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("ts", sa.Double(), nullable=False),
        sa.Column("from_state", sa.String(20), nullable=False),
        sa.Column("to_state", sa.String(20), nullable=False),
        sa.Column("value", sa.Double()),
    )
    op.create_index("ix_alert_transitions_alert", "alert_transitions", ["alert_id"])
    op.create_table(
        "readings",
        *_evaluation_columns(primary_key=True),
        sa.Column("verdict", sa.String(20), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
    )


def _evaluation_columns(*, primary_key: bool = False) -> list[sa.Column[object]]:
    return [
        sa.Column("rule", sa.String(200), nullable=False, primary_key=primary_key),
        sa.Column("target", sa.String(200), nullable=False, primary_key=primary_key),
        sa.Column("value", sa.Double()),
        sa.Column("threshold", sa.Double(), nullable=False),
        sa.Column("numerator", sa.Double()),
        sa.Column("denominator", sa.Double()),
        sa.Column("window_s", sa.Double(), nullable=False),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.Column("coverage", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
    ]


def _replays() -> None:
    op.create_table(
        "replays",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("scenario", sa.String(200), nullable=False),
        sa.Column("target", sa.String(200), nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("step", sa.String(40)),
        sa.Column("options", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("result", sa.JSON(none_as_null=True)),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double()),
        sa.Column("owner_pid", sa.Integer(), nullable=False),
        sa.Column("owner_host", sa.String(200), nullable=False),
        sa.Column("apply_requested", sa.Boolean(), nullable=False),
    )
    op.create_index("ix_replays_started_at", "replays", ["started_at"])
    op.create_index("ix_replays_target", "replays", ["target"])
    op.create_table(
        "replay_journal",
        sa.Column(
            "replay_id",
            sa.String(32),
            sa.ForeignKey("replays.id", name="fk_journal_replay", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("seq", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("ts", sa.Double(), nullable=False),
        sa.Column("step", sa.String(40), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(none_as_null=True)),
    )
