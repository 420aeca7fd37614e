"""Two sessions side by side, what one was shown of the other marked. Pure: text in, HTML out.

Every text is escaped; the only markup is ours. The marked text is bold and underlined too, so that colour is not the
only sign. Colours are translucent: they hold on white and on near-black.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

_GRID = "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:1rem;align-items:start"
_SESSION = "border:1px solid #8893a066;border-radius:.4rem;padding:.7rem .9rem"
_MESSAGE = "margin-top:.6rem;padding:.45rem .7rem;border-left:3px solid {};background:#8893a01f;border-radius:.2rem"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;font-size:.95rem"
_ROLE = "font-size:.75rem;opacity:.75"
_MARK = "background:#d6453d40;color:inherit;font-weight:700;text-decoration:underline 2px #d6453d;padding:0 .1em"
_EDGE = {"user": "#2f7ed8", "assistant": "#2a9d76"}


def segments(text: str, marks: Sequence[Sequence[int]]) -> Iterator[tuple[str, bool]]:
    """`text` cut into pieces, each with whether it is marked; overlaps are joined, what lies outside is ignored."""
    at = 0
    for start, end in sorted((int(mark[0]), int(mark[1])) for mark in marks):
        start, end = max(start, at), min(end, len(text))
        if start < end:
            if at < start:
                yield text[at:start], False
            yield text[start:end], True
            at = end
    if at < len(text):
        yield text[at:], False


def side_by_side(sessions: Sequence[Mapping[str, Any]]) -> str:
    """Beside each other where there is room, below each other on a phone."""
    return f'<div style="{_GRID}">{"".join(_session(session) for session in sessions)}</div>'


def _session(session: Mapping[str, Any]) -> str:
    name, owner = escape(str(session.get("name") or "Session")), escape(str(session.get("owner") or ""))
    who = f' <span style="{_ROLE}">owner {owner}</span>' if owner else ""
    messages = "".join(_message(message) for message in session.get("messages") or [])
    return f'<section aria-label="{name}" style="{_SESSION}"><b>{name}</b>{who}{messages}</section>'


def _message(message: Mapping[str, Any]) -> str:
    role = str(message.get("role") or "")
    pieces = segments(str(message.get("text") or ""), message.get("marks") or [])
    text = "".join(_marked(piece) if marked else escape(piece) for piece, marked in pieces)
    style = _MESSAGE.format(_EDGE.get(role, "#8893a0"))
    return f'<div style="{style}"><div style="{_ROLE}">{escape(role)}</div><div style="{_TEXT}">{text}</div></div>'


def _marked(text: str) -> str:
    return f'<mark title="the leaked text" style="{_MARK}">{escape(text)}</mark>'
