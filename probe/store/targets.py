"""Targets: what is watched. A target is never deleted, only deactivated, so that its history keeps its name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from probe.store.database import Database
from probe.store.models import TargetRow
from probe.store.records import StoreError, Target
from probe.store.writer import Writer


class Targets:
    """`store.targets`."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer

    def upsert(
        self,
        name: str,
        *,
        url: str,
        kind: str,
        engine: str = "vllm",
        flags: Sequence[str] = (),
        facts: dict[str, Any] | None = None,
        scrape_interval_s: float = 2.0,
        time_scale: float = 1.0,
        source: str = "metrics",
        options: dict[str, Any] | None = None,
    ) -> Target:
        """Register a target or bring it up to date, and (re)activate it.

        `facts` None keeps what is known. `time_scale` multiplies rule windows and hold times (a drill uses 0.05).
        """
        if not name or len(name) > 200:
            raise StoreError("A target's name must have 1 to 200 characters.")
        if kind not in ("embedded", "drill", "external"):
            raise StoreError(f"A target is embedded, drill or external, not {kind!r}.")
        if source not in ("metrics", "prometheus"):
            raise StoreError(f"A target is read from metrics or prometheus, not {source!r}.")
        if scrape_interval_s <= 0 or time_scale <= 0:
            raise StoreError("A target's scrape interval and time scale must be above 0.")

        def work(session: Session) -> Target:
            row = _find(session, name)
            if row is None:
                row = TargetRow(name=name, facts={}, created_at=time.time())
                session.add(row)
            row.url = url
            row.kind = kind
            row.engine = engine
            row.flags = list(flags)
            row.facts = dict(facts) if facts is not None else row.facts
            row.scrape_interval_s = scrape_interval_s
            row.time_scale = time_scale
            row.source = source
            row.options = dict(options or {})
            row.active = True
            session.flush()
            return _target(row)

        return self._writer.call(work)

    def get(self, name: str) -> Target | None:
        """The target, active or not, or None."""
        with self._database.read() as session:
            row = _find(session, name)
            return _target(row) if row else None

    def list(self, active: bool | None = True) -> list[Target]:
        """Targets by name; `active` None lists all."""
        query = select(TargetRow).order_by(TargetRow.name)
        if active is not None:
            query = query.where(TargetRow.active == active)
        with self._database.read() as session:
            return [_target(row) for row in session.scalars(query)]

    def deactivate(self, name: str) -> None:
        """Stop watching a target: it is not scraped, and its alerts resolve."""

        def work(session: Session) -> None:
            _require(session, name).active = False

        self._writer.call(work)

    def set_facts(self, name: str, facts: dict[str, Any]) -> None:
        """Merge facts into what is known: keys not named stay."""

        def work(session: Session) -> None:
            row = _require(session, name)
            row.facts = {**row.facts, **facts}

        self._writer.call(work)


def _find(session: Session, name: str) -> TargetRow | None:
    return session.scalars(select(TargetRow).where(TargetRow.name == name)).one_or_none()


def _require(session: Session, name: str) -> TargetRow:
    row = _find(session, name)
    if row is None:
        raise StoreError(f"There is no target named {name!r}.")
    return row


def _target(row: TargetRow) -> Target:
    return Target(
        id=row.id,
        name=row.name,
        url=row.url,
        kind=row.kind,
        engine=row.engine,
        flags=list(row.flags),
        facts=dict(row.facts),
        scrape_interval_s=row.scrape_interval_s,
        time_scale=row.time_scale,
        active=row.active,
        created_at=row.created_at,
        source=row.source,
        options=dict(row.options),
    )
