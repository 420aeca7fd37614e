"""Reading what somebody else's Alertmanager posts to a webhook (payload version 4), with limits.

Grafana's contact points post the same shape. Everything in it comes from outside: only http links are kept, texts are
cut, and an alert without labels is refused.
"""

from __future__ import annotations

import datetime
import json
import re
import time
from typing import Any
from urllib.parse import urlsplit

from probe.notify.message import fingerprint
from probe.notify.runbooks import runbook_for
from probe.store.records import ImportedAlert

MAX_BYTES = 1024 * 1024
MAX_ALERTS = 1_000
MAX_PAIRS = 100
MAX_NAME = 200
MAX_TEXT = 4_000


class PayloadError(ValueError):
    """What was posted is not an Alertmanager webhook; the message is one sentence."""


def parse_alertmanager(payload: bytes, now: float | None = None) -> list[ImportedAlert]:
    """The alerts of one webhook call, each with the runbook that fits; raises `PayloadError`."""
    received_at = time.time() if now is None else now
    if len(payload) > MAX_BYTES:
        raise PayloadError(f"The payload is larger than {MAX_BYTES // 1024} KiB.")
    try:
        content = json.loads(payload)
    except (ValueError, RecursionError):
        raise PayloadError("The payload is not JSON.") from None
    if not isinstance(content, dict) or not isinstance(content.get("alerts"), list):
        raise PayloadError('The payload is not an Alertmanager webhook: it has no list "alerts".')
    if str(content.get("version", "4")) not in ("4", "1"):  # Grafana says 1 and means the same shape
        raise PayloadError(f"The webhook's version is {_cut(content.get('version'), 20)}; version 4 is understood.")
    if len(content["alerts"]) > MAX_ALERTS:
        raise PayloadError(f"The payload holds more than {MAX_ALERTS} alerts.")
    receiver, external = _cut(content.get("receiver"), MAX_NAME), _link(content.get("externalURL"))
    return [_alert(entry, index, receiver, external, received_at) for index, entry in enumerate(content["alerts"], 1)]


def _alert(entry: Any, index: int, receiver: str, external: str, received_at: float) -> ImportedAlert:
    where = f"Alert {index} of the payload"
    if not isinstance(entry, dict):
        raise PayloadError(f"{where} is not an object.")
    labels = _texts(entry.get("labels"), f"{where}: its labels")
    annotations = _texts(entry.get("annotations") or {}, f"{where}: its annotations")
    if not labels:
        raise PayloadError(f"{where} has no labels.")
    status = entry.get("status", "firing")
    if status not in ("firing", "resolved"):
        raise PayloadError(f"{where} is neither firing nor resolved.")
    starts_at = _time(entry.get("startsAt"), where) or received_at
    given = entry.get("fingerprint")
    is_fingerprint = isinstance(given, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", given)
    return ImportedAlert(
        fingerprint=str(given) if is_fingerprint else fingerprint(labels),
        status=status,
        labels=labels,
        annotations=annotations,
        starts_at=starts_at,
        ends_at=(_time(entry.get("endsAt"), where) or received_at) if status == "resolved" else None,
        generator_url=_link(entry.get("generatorURL")),
        external_url=external,
        receiver=receiver,
        received_at=received_at,
        runbook=runbook_for(labels, annotations),
    )


def _texts(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise PayloadError(f"{where} are not an object.")
    if len(value) > MAX_PAIRS:
        raise PayloadError(f"{where} are more than {MAX_PAIRS}.")
    if any(not isinstance(text, str) for text in value.values()):
        raise PayloadError(f"{where} are not all text.")
    return {_cut(name, MAX_NAME): _cut(text, MAX_TEXT) for name, text in value.items()}


def _cut(value: Any, length: int) -> str:
    """Text without control characters (PostgreSQL takes no NUL), and not longer than asked."""
    text = "" if value is None else str(value)
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]", "\ufffd", text[: length + 1])
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _link(value: Any) -> str:
    text = _cut(value, MAX_TEXT)
    try:
        parts = urlsplit(text)
    except ValueError:
        return ""
    return text if parts.scheme in ("http", "https") and parts.netloc and "@" not in parts.netloc else ""


def _time(value: Any, where: str) -> float | None:
    """Unix seconds of an RFC 3339 time; None for none and for Alertmanager's "never" (year 1)."""
    if value in (None, ""):
        return None
    try:
        text = re.sub(r"(\.\d{6})\d+", r"\1", str(value))  # nanoseconds are cut to microseconds
        at = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise PayloadError(f"{where} has a time that is not RFC 3339.") from None
    if at.tzinfo is None:
        raise PayloadError(f"{where} has a time without a time zone.")
    if at.year <= 1970 or at.year >= 9000:
        return None
    return at.timestamp()
