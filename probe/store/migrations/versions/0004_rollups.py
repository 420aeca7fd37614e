"""Samples clustered by minute, the newest sample of each series, and rollups to 1 minute and 1 hour."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

COUNTER_ENDS = ("_total", "_bucket", "_count", "_sum")


def upgrade() -> None:
    # SQLite cannot alter these; the new tables refer to each other, and follow when the series are renamed.
    series = "series_new" if op.get_bind().dialect.name == "sqlite" else "series"
    _series(series)
    op.rename_table("samples", "samples_old")
    _samples(series)
    op.drop_table("samples_old")
    if series != "series":
        op.drop_table("series")
        op.rename_table(series, "series")
    _rollups()


def _series(name: str) -> None:
    """`counter`, and on SQLite ids that are never used again."""
    if name == "series":
        op.add_column("series", sa.Column("counter", sa.Boolean(), nullable=False, server_default=sa.false()))
        op.alter_column("series", "counter", server_default=None)
    else:
        op.create_table(
            name,
            sa.Column("id", sa.Integer(), primary_key=True),
            sa.Column("target_id", sa.Integer(), sa.ForeignKey("targets.id", name="fk_series_target"), nullable=False),
            sa.Column("metric", sa.String(200), nullable=False),
            sa.Column("labels", sa.Text(), nullable=False),
            sa.Column("counter", sa.Boolean(), nullable=False),
            sa.UniqueConstraint("target_id", "metric", "labels", name="uq_series_identity"),
            sqlite_autoincrement=True,
        )
        op.execute(f"INSERT INTO {name} SELECT id, target_id, metric, labels, false FROM series")
    table = sa.table(name, sa.column("metric", sa.String()), sa.column("counter", sa.Boolean()))
    is_counter = sa.or_(*(table.c.metric.endswith(end, autoescape=True) for end in COUNTER_ENDS))
    op.execute(sa.update(table).where(is_counter).values(counter=True))


def _samples(series: str) -> None:
    if op.get_bind().dialect.name == "postgresql":  # names that the new table needs
        op.execute("ALTER INDEX samples_pkey RENAME TO samples_old_pkey")
    op.create_table(
        "samples",
        sa.Column("minute", sa.Integer(), primary_key=True, autoincrement=False),
        _series_id(series, "fk_samples_series"),
        sa.Column("ms", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("value", sa.Double(), nullable=False),
        sqlite_with_rowid=False,
    )
    op.execute(
        "INSERT INTO samples (minute, series_id, ms, value) SELECT ts_ms / 60000, series_id, ts_ms % 60000, value "
        "FROM samples_old WHERE ts_ms >= 0 ORDER BY 1, 2, 3"
    )
    op.create_table(
        "newest_samples",
        _series_id(series, "fk_newest_series"),
        sa.Column("ts_ms", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sqlite_with_rowid=False,
    )
    op.execute(
        "INSERT INTO newest_samples (series_id, ts_ms, value) SELECT s.series_id, s.ts_ms, s.value FROM samples_old s "
        "JOIN (SELECT series_id, max(ts_ms) AS ts_ms FROM samples_old WHERE ts_ms >= 0 GROUP BY series_id) n "
        "ON n.series_id = s.series_id AND n.ts_ms = s.ts_ms"
    )


def _series_id(series: str, foreign_key: str) -> sa.Column[int]:
    key = sa.ForeignKey(f"{series}.id", name=foreign_key)
    return sa.Column("series_id", sa.Integer(), key, primary_key=True, autoincrement=False)


def _rollups() -> None:
    op.create_table(
        "rollups_1m",
        *_key("hour", "series_id", "minute"),
        *_stretch(),
        sqlite_with_rowid=False,
    )
    op.create_table("rollups_1h", *_key("series_id", "hour"), *_stretch(), sqlite_with_rowid=False)
    op.create_table("rollup_late", *_key("minute", "series_id"), sqlite_with_rowid=False)
    progress = op.create_table(
        "rollup_progress",
        *_key("id"),
        sa.Column("raw_from", sa.Integer(), nullable=False),
        sa.Column("minutes_until", sa.Integer(), nullable=False),
        sa.Column("hours_until", sa.Integer(), nullable=False),
    )
    op.bulk_insert(progress, [{"id": 1, "raw_from": 0, "minutes_until": 0, "hours_until": 0}])


def _key(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.Integer(), primary_key=True, autoincrement=False) for name in names]


def _stretch() -> list[sa.Column[float]]:
    return [
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("last", sa.Double(), nullable=False),
        sa.Column("low", sa.Double()),
        sa.Column("high", sa.Double()),
        sa.Column("total", sa.Double()),
        sa.Column("increase", sa.Double()),
        sa.Column("resets", sa.Integer()),
    ]
