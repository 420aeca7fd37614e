"""Alembic environment: runs on the connection (and in the transaction) that `Database.migrate` opened."""

from __future__ import annotations

from alembic import context

from probe.store.models import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
context.run_migrations()
