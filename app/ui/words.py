"""How values and states are written: every number with its unit, every state as a word with a shape.

Colour is never the only carrier of a state. Times are UTC, since alerts are compared with other logs.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime

DASH = "—"
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#+!|$~:])")


@dataclass(frozen=True)
class Mark:
    """A state for people: `badge` is Streamlit markdown, `text` the same without colour."""

    shape: str
    word: str
    color: str

    @property
    def text(self) -> str:
        return f"{self.shape} {self.word}"

    @property
    def badge(self) -> str:
        return f":{self.color}-badge[{self.shape} {plain(self.word)}]"


_TARGET = {
    "up": Mark("●", "up", "green"),
    "running": Mark("●", "running", "green"),
    "down": Mark("✖", "down", "red"),
    "stale": Mark("◌", "stale", "orange"),
    "starting": Mark("◔", "starting", "blue"),
    "stopping": Mark("◔", "stopping", "blue"),
    "stopped": Mark("□", "stopped", "gray"),
    "crashed": Mark("✖", "crashed", "red"),
    "no data": Mark("◌", "no data", "gray"),
}
_ALERT = {
    "firing": Mark("■", "firing", "red"),
    "pending": Mark("▲", "pending", "orange"),
    "resolved": Mark("✔", "resolved", "green"),
    "inactive": Mark("○", "inactive", "gray"),
}
_REPLAY = {
    "running": Mark("◔", "running", "blue"),
    "waiting_apply": Mark("▲", "waiting for your change", "orange"),
    "done": Mark("✔", "done", "green"),
    "failed": Mark("✖", "failed", "red"),
    "interrupted": Mark("◌", "interrupted", "gray"),
}


def target_mark(state: str) -> Mark:
    """The mark of a target or of the embedded engine's process; an unknown state keeps its own word."""
    return _TARGET.get(state, Mark("○", state, "gray"))


def alert_mark(state: str) -> Mark:
    """The mark of an alert's state."""
    return _ALERT.get(state, Mark("○", state, "gray"))


def replay_mark(status: str) -> Mark:
    """The mark of a replay's status."""
    return _REPLAY.get(status, Mark("○", status, "gray"))


def verified_mark(verified: bool | None) -> Mark:
    """The mark of a replay's verdict; None while there is none."""
    if verified is None:
        return Mark("○", "not verified yet", "gray")
    return Mark("✔", "verified", "green") if verified else Mark("✖", "not verified", "red")


def plain(text: str) -> str:
    """`text` as Markdown that shows exactly these characters.

    Needed for everything that comes from data: Streamlit reads `:metric_total[5m]` as a directive and `$` as math.
    """
    return _SPECIAL.sub(r"\\\1", text)


def ratio(value: float | None, digits: int = 1) -> str:
    """0.053 -> `5.3%`."""
    return DASH if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f}%"


def count(value: float | None) -> str:
    """Integers whole, other numbers with two digits, thousands separated by a thin space."""
    if value is None or not math.isfinite(value):
        return DASH
    text = f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:,.2f}"
    return text.replace(",", "\u202f")


def nats(value: float | None) -> str:
    """Divergences, which matter from the third digit on."""
    return DASH if value is None or not math.isfinite(value) else f"{value:.4f}"


def seconds(value: float | None) -> str:
    """Durations below a second in ms, above in s."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def size(value: float | None) -> str:
    """Bytes in binary units."""
    if value is None or not math.isfinite(value):
        return DASH
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def span(value: float) -> str:
    """A duration in the two units that matter: `8 s`, `4 min 10 s`, `3 h 5 min`, `2 d 4 h`."""
    total = max(0, round(value))
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s" if total % 60 else f"{total // 60} min"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60} min".removesuffix(" 0 min")
    return f"{total // 86400} d {total % 86400 // 3600} h".removesuffix(" 0 h")


def ago(ts: float | None, now: float | None = None) -> str:
    """Age of a unix timestamp."""
    if ts is None:
        return "never"
    return f"{span((time.time() if now is None else now) - ts)} ago"


def clock(ts: float | None) -> str:
    """`03:12:05 UTC` of a unix timestamp, with the date when it is not today's."""
    if ts is None:
        return DASH
    moment = datetime.fromtimestamp(ts, UTC)
    today = datetime.now(UTC).date()
    return moment.strftime("%H:%M:%S UTC" if moment.date() == today else "%Y-%m-%d %H:%M:%S UTC")
