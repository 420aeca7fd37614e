"""Where a target's samples come from: its own /metrics or a Prometheus server that scrapes it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("targets", sa.Column("source", sa.String(20), nullable=False, server_default="metrics"))
    op.add_column("targets", sa.Column("options", sa.JSON(none_as_null=True), nullable=False, server_default="{}"))
