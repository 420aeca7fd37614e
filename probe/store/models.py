"""The tables, as SQLAlchemy typed models. The schema is created by the migrations, never from here.

Sample times are integers (Unix minutes, hours, milliseconds); every other time is a Unix timestamp in float seconds.
Targets are referred to by name outside `series`, so that a replay or an event may name one before it is registered.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Double, ForeignKey, Index, String, Text, UniqueConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAME = String(200)
ACTIVE_ALERT = text("state IN ('pending', 'firing')")


class Base(DeclarativeBase):
    """Common type map: floats are doubles, dicts and lists are JSON."""

    type_annotation_map = {  # noqa: RUF012
        float: Double(),
        dict[str, Any]: JSON(none_as_null=True),
        list[str]: JSON(),
    }


class TargetRow(Base):
    __tablename__ = "targets"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(NAME, unique=True)
    url: Mapped[str] = mapped_column(Text)
    kind: Mapped[str] = mapped_column(String(20))
    engine: Mapped[str] = mapped_column(String(40))
    flags: Mapped[list[str]]
    facts: Mapped[dict[str, Any]]
    scrape_interval_s: Mapped[float]
    time_scale: Mapped[float]
    active: Mapped[bool]
    created_at: Mapped[float]
    source: Mapped[str] = mapped_column(String(20))
    options: Mapped[dict[str, Any]]


class SeriesRow(Base):
    """A metric of a target with one set of labels; `labels` is canonical JSON (sorted keys, no spaces).

    Ids are never used again: another process may still write samples by the id of a series that was removed.
    """

    __tablename__ = "series"
    __table_args__ = (
        UniqueConstraint("target_id", "metric", "labels", name="uq_series_identity"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    target_id: Mapped[int] = mapped_column(ForeignKey("targets.id", name="fk_series_target"))
    metric: Mapped[str] = mapped_column(NAME)
    labels: Mapped[str] = mapped_column(Text)
    counter: Mapped[bool]


class SampleRow(Base):
    """Raw samples, clustered by (Unix minute, series, millisecond of the minute).

    What is scraped now lies together at the end of the tree, so that a batch dirties few pages; a minute is rolled
    up in one sequential read and removed from the front in another. One series is read with a seek a minute.
    """

    __tablename__ = "samples"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012

    minute: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    series_id: Mapped[int] = mapped_column(
        ForeignKey("series.id", name="fk_samples_series"), primary_key=True, autoincrement=False
    )
    ms: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[float]


class NewestRow(Base):
    """The newest sample of each series, in one narrow table: what the pages show as "now"."""

    __tablename__ = "newest_samples"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012

    series_id: Mapped[int] = mapped_column(
        ForeignKey("series.id", name="fk_newest_series"), primary_key=True, autoincrement=False
    )
    ts_ms: Mapped[int] = mapped_column(BigInteger)
    value: Mapped[float]


class RollupColumns:
    """A stretch of one series. Gauges have `low`, `high` and `total` (the sum); counters `increase` and `resets`.

    `increase` counts from the last sample before the stretch, so increases of adjacent stretches add up.
    """

    count: Mapped[int]
    last: Mapped[float]
    low: Mapped[float | None]
    high: Mapped[float | None]
    total: Mapped[float | None]
    increase: Mapped[float | None]
    resets: Mapped[int | None]


class MinuteRow(RollupColumns, Base):
    """One minute of a series, clustered by hour as samples are by minute. `hour` and `minute` count from 1970."""

    __tablename__ = "rollups_1m"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012

    hour: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    series_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    minute: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class HourRow(RollupColumns, Base):
    """One hour of a series, clustered by series: months of it are one stretch of the tree."""

    __tablename__ = "rollups_1h"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012

    series_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    hour: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class RollupProgressRow(Base):
    """One row: minutes from `raw_from` on have their raw samples; minutes and hours before the others are rolled up."""

    __tablename__ = "rollup_progress"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    raw_from: Mapped[int]
    minutes_until: Mapped[int]
    hours_until: Mapped[int]


class LateRow(Base):
    """A minute of a series that got a sample after it was rolled up."""

    __tablename__ = "rollup_late"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012

    minute: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    series_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class EventRow(Base):
    __tablename__ = "events"
    __table_args__ = (Index("ix_events_ts", "ts"), Index("ix_events_target_ts", "target", "ts"))

    id: Mapped[int] = mapped_column(primary_key=True)
    target: Mapped[str | None] = mapped_column(NAME)
    ts: Mapped[float]
    kind: Mapped[str] = mapped_column(String(40))
    severity: Mapped[str] = mapped_column(String(20))
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any]]


class AlertRow(Base):
    __tablename__ = "alerts"
    __table_args__ = (
        # At most one active alert per rule and target, whatever the processes do.
        Index(
            "uq_alerts_active",
            "rule",
            "target",
            unique=True,
            sqlite_where=ACTIVE_ALERT,
            postgresql_where=ACTIVE_ALERT,
        ),
        Index("ix_alerts_target_pending_at", "target", "pending_at"),
        {"sqlite_autoincrement": True},  # a link to an alert never shows another one
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    rule: Mapped[str] = mapped_column(NAME)
    target: Mapped[str] = mapped_column(NAME)
    state: Mapped[str] = mapped_column(String(20))
    severity: Mapped[str] = mapped_column(String(20))
    value: Mapped[float | None]
    threshold: Mapped[float]
    numerator: Mapped[float | None]
    denominator: Mapped[float | None]
    window_s: Mapped[float]
    hold_s: Mapped[float]
    summary: Mapped[str] = mapped_column(Text)
    coverage: Mapped[str] = mapped_column(Text)
    runbook: Mapped[str] = mapped_column(NAME)
    replay_id: Mapped[str | None] = mapped_column(String(32))
    progress_s: Mapped[float]
    pending_at: Mapped[float]
    firing_at: Mapped[float | None]
    resolved_at: Mapped[float | None]
    updated_at: Mapped[float]


class TransitionRow(Base):
    __tablename__ = "alert_transitions"
    __table_args__ = (Index("ix_alert_transitions_alert", "alert_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    alert_id: Mapped[int] = mapped_column(ForeignKey("alerts.id", name="fk_transitions_alert", ondelete="CASCADE"))
    ts: Mapped[float]
    from_state: Mapped[str] = mapped_column(String(20))
    to_state: Mapped[str] = mapped_column(String(20))
    value: Mapped[float | None]


class ReadingRow(Base):
    __tablename__ = "readings"

    rule: Mapped[str] = mapped_column(NAME, primary_key=True)
    target: Mapped[str] = mapped_column(NAME, primary_key=True)
    verdict: Mapped[str] = mapped_column(String(20))
    state: Mapped[str] = mapped_column(String(20))
    value: Mapped[float | None]
    threshold: Mapped[float]
    numerator: Mapped[float | None]
    denominator: Mapped[float | None]
    window_s: Mapped[float]
    summary: Mapped[str] = mapped_column(Text)
    coverage: Mapped[str] = mapped_column(Text)
    updated_at: Mapped[float]


class ReplayRow(Base):
    __tablename__ = "replays"
    __table_args__ = (Index("ix_replays_started_at", "started_at"), Index("ix_replays_target", "target"))

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    scenario: Mapped[str] = mapped_column(NAME)
    target: Mapped[str] = mapped_column(NAME)
    status: Mapped[str] = mapped_column(String(20))
    step: Mapped[str | None] = mapped_column(String(40))
    options: Mapped[dict[str, Any]]
    result: Mapped[dict[str, Any] | None]
    started_at: Mapped[float]
    ended_at: Mapped[float | None]
    owner_pid: Mapped[int]
    owner_host: Mapped[str] = mapped_column(NAME)
    apply_requested: Mapped[bool]


class JournalRow(Base):
    __tablename__ = "replay_journal"

    replay_id: Mapped[str] = mapped_column(
        ForeignKey("replays.id", name="fk_journal_replay", ondelete="CASCADE"), primary_key=True
    )
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    ts: Mapped[float]
    step: Mapped[str] = mapped_column(String(40))
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any] | None]


class QualityRunRow(Base):
    __tablename__ = "quality_runs"
    __table_args__ = (
        Index("ix_quality_runs_started_at", "started_at"),
        Index("ix_quality_runs_target", "target", "started_at"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    target: Mapped[str] = mapped_column(NAME)
    label: Mapped[str] = mapped_column(NAME)
    model: Mapped[str] = mapped_column(Text)
    suite: Mapped[dict[str, Any]]
    suite_key: Mapped[str] = mapped_column(String(64))
    facts: Mapped[dict[str, Any]]
    baseline_id: Mapped[str | None] = mapped_column(String(32))
    status: Mapped[str] = mapped_column(String(20))
    result: Mapped[dict[str, Any] | None]
    error: Mapped[str | None] = mapped_column(Text)
    started_at: Mapped[float]
    ended_at: Mapped[float | None]


class QualityItemRow(Base):
    __tablename__ = "quality_items"

    run_id: Mapped[str] = mapped_column(
        ForeignKey("quality_runs.id", name="fk_quality_items_run", ondelete="CASCADE"), primary_key=True
    )
    key: Mapped[str] = mapped_column(String(100), primary_key=True)
    task: Mapped[str] = mapped_column(String(40))
    turn: Mapped[int | None]
    is_right: Mapped[bool | None]
    is_valid: Mapped[bool | None]
    data: Mapped[dict[str, Any]]


class LeaseRow(Base):
    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    owner: Mapped[str] = mapped_column(NAME)
    token: Mapped[int]
    expires_at: Mapped[float]


class SettingRow(Base):
    __tablename__ = "settings"

    key: Mapped[str] = mapped_column(String(60), primary_key=True)
    value: Mapped[Any] = mapped_column(JSON())
