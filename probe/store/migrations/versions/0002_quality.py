"""Quality runs and what each of them asked and measured."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "quality_runs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("target", sa.String(200), nullable=False),
        sa.Column("label", sa.String(200), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("suite", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("suite_key", sa.String(64), nullable=False),
        sa.Column("facts", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("baseline_id", sa.String(32)),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("result", sa.JSON(none_as_null=True)),
        sa.Column("error", sa.Text()),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double()),
    )
    op.create_index("ix_quality_runs_started_at", "quality_runs", ["started_at"])
    op.create_index("ix_quality_runs_target", "quality_runs", ["target", "started_at"])
    op.create_table(
        "quality_items",
        sa.Column(
            "run_id",
            sa.String(32),
            sa.ForeignKey("quality_runs.id", name="fk_quality_items_run", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("key", sa.String(100), primary_key=True),
        sa.Column("task", sa.String(40), nullable=False),
        sa.Column("turn", sa.Integer()),
        sa.Column("is_right", sa.Boolean()),
        sa.Column("is_valid", sa.Boolean()),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=False),
    )
