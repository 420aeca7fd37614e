"""Leases: one process at a time holds a name, until it releases it or lets it expire.

The token grows with every change of hands; a write that must come from the holder checks owner, token and
expiry inside its own transaction (`require_lease`), so a process that slept through its expiry writes nothing.
Expiry compares wall clocks: processes on different hosts need clocks that agree to well within the lease time.
"""

from __future__ import annotations

import time

from sqlalchemy.orm import Session

from probe.store.database import Database
from probe.store.models import LeaseRow
from probe.store.records import Lease, LeaseLostError
from probe.store.writer import Writer


class Leases:
    """`store.leases`."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer

    def acquire(self, name: str, owner: str, ttl_s: float) -> Lease | None:
        """Take or renew the lease for `ttl_s` from now; None while another owner holds it."""

        def work(session: Session) -> Lease | None:
            now = time.time()
            row = session.get(LeaseRow, name, with_for_update=True)
            if row is None:
                row = LeaseRow(name=name, owner=owner, token=1, expires_at=0.0)
                session.add(row)
            elif row.owner != owner:
                if row.expires_at > now:
                    return None
                row.owner = owner
                row.token += 1
            row.expires_at = now + ttl_s
            return Lease(name, owner, row.token, row.expires_at)

        return self._writer.call(work)

    def release(self, lease: Lease) -> None:
        """Give the lease back at once; does nothing if another process took it meanwhile."""

        def work(session: Session) -> None:
            row = session.get(LeaseRow, lease.name, with_for_update=True)
            if row is not None and row.owner == lease.owner and row.token == lease.token:
                row.expires_at = 0.0

        self._writer.call(work)

    def get(self, name: str) -> Lease | None:
        """Who held the lease last, or None; compare `expires_at` with the clock."""
        with self._database.read() as session:
            row = session.get(LeaseRow, name)
            return Lease(row.name, row.owner, row.token, row.expires_at) if row else None


def require_lease(session: Session, lease: Lease) -> None:
    """Raise `LeaseLostError` unless the lease is held right now, inside the caller's write transaction."""
    row = session.get(LeaseRow, lease.name, with_for_update=True)
    now = time.time()
    if row is None or row.owner != lease.owner or row.token != lease.token or row.expires_at <= now:
        raise LeaseLostError("Another process watches this store by now; this one stands by.")
