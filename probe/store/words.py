"""What a person must say with an action: who they are, and why."""

from __future__ import annotations

from probe.store.records import StoreError

MAX_REASON = 2_000


def said_by(author: str, reason: str, what: str) -> tuple[str, str]:
    """Author and reason without surrounding space; raises `StoreError` when one is missing or too long."""
    author, reason = author.strip(), reason.strip()
    if not author or len(author) > 200:
        raise StoreError(f"{what} needs an author of 1 to 200 characters.")
    if not reason or len(reason) > MAX_REASON:
        raise StoreError(f"{what} needs a reason of 1 to {MAX_REASON} characters.")
    return author, reason
