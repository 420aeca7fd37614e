"""Public logs against the planner: every figure that an anchor reports is computed from its dims and inputs.

Tolerances are the anchor's own level: L1 0.3% or the rounding of the stated memory, L2 0.03 GiB, L3 5%, plus its
`extra_tol_pct`. A figure that cannot be computed is "not checkable", which is neither a pass nor a miss.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from probe.plan.anchors import Anchor, anchor_of, read_anchors
from probe.plan.figures import FIGURES
from probe.plan.finding import L1_PCT, TOKEN_KEYS, Figure, Finding
from probe.plan.verdicts import verdict_figures

BEYOND = "beyond the level's tolerance, within"


@dataclass(frozen=True)
class CheckRow:
    """One figure of one anchor. status: "pass", "miss" or "not checkable". deviation: in the tolerance's unit."""

    anchor: str
    source: str
    quantity: str
    expected: str
    got: str
    deviation: str
    tolerance: str
    status: str
    explained: str

    @property
    def passed(self) -> bool:
        return self.status != "miss"


def check(path: str | Path) -> list[CheckRow]:
    """All anchors of a file in the format of `planner_anchors`. Raises `ConfigError` for a file that is none."""
    rows: list[CheckRow] = []
    for position, raw in enumerate(read_anchors(path)):
        rows += check_anchor(raw, position)
    return rows


def check_anchor(raw: dict[str, Any], position: int = 0) -> list[CheckRow]:
    """The rows of one anchor; what it lacks makes a figure "not checkable", never an error."""
    try:
        anchor = anchor_of(raw, position)
    except (ConfigError, TypeError, ValueError, ArithmeticError) as error:
        name = str(raw.get("pa") or raw.get("id") or f"#{position}")
        return [_uncheckable(name, "", "anchor", "", str(error))]
    rows: list[CheckRow] = []
    for figure in FIGURES:
        rows += _rows(anchor, figure)
    handled = {row.quantity for row in rows}
    for key, value in anchor.reported.items():
        if not any(name == key or name.startswith(f"{key} ") for name in handled) and not _covered(key, handled):
            reason = "the planner has no figure of that name"
            rows.append(_uncheckable(anchor.name, anchor.source, key, _short(value), reason))
    rows += _verdict_rows(anchor)
    return rows or [_uncheckable(anchor.name, anchor.source, "anchor", "", "it reports nothing")]


def _covered(key: str, handled: Iterable[str]) -> bool:
    """Keys that another row has used up, such as the lengths that a concurrency refers to."""
    if key in TOKEN_KEYS and any(
        re.fullmatch(r"(derived_|available_)?kv_(gib|gb|mib|bytes)", name) for name in handled
    ):
        return True
    return key.startswith(("tokens_", "mml_")) and any(
        name.startswith(("max_concurrency", "conc_")) for name in handled
    )


def _rows(anchor: Anchor, figure: Figure) -> list[CheckRow]:
    return [_row(anchor, finding) for finding in _guarded(anchor, figure.name, figure.find)]


def _verdict_rows(anchor: Anchor) -> list[CheckRow]:
    return [_row(anchor, finding) for finding in _guarded(anchor, "verdict", verdict_figures)]


def _guarded(anchor: Anchor, name: str, find: Callable[[Anchor], list[Finding]]) -> list[Finding]:
    try:
        return find(anchor)
    except (ConfigError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        expected = anchor.verdict if name == "verdict" else anchor.reported.get(name)
        return [] if expected is None else [Finding(name, expected, None, note=str(error))]


def _row(anchor: Anchor, finding: Finding) -> CheckRow:
    if finding.got is None:
        return _uncheckable(anchor.name, anchor.source, finding.quantity, _short(finding.expected), finding.note)
    if isinstance(finding.expected, str) or isinstance(finding.got, str):
        status = "pass" if finding.matches else "miss"
        expected, got = str(finding.expected), str(finding.got)
        return CheckRow(anchor.name, anchor.source, finding.quantity, expected, got, "", "", status, finding.note)
    try:
        deviation, allowed, unit = finding.deviation()
    except (TypeError, ZeroDivisionError, OverflowError):
        why = "nothing can be compared with such a figure"
        return _uncheckable(anchor.name, anchor.source, finding.quantity, _short(finding.expected), why)
    ok = abs(deviation) <= allowed + 1e-9
    explained = finding.note
    if ok and anchor.extra_pct and unit == "%" and abs(deviation) > max(L1_PCT, allowed - anchor.extra_pct):
        explained = f"{BEYOND} the anchor's own extra {anchor.extra_pct:g}%: {finding.note or 'see its source'}"
    return CheckRow(
        anchor=anchor.name,
        source=anchor.source,
        quantity=finding.quantity,
        expected=_short(finding.expected),
        got=_short(finding.got),
        deviation=f"{deviation:+.3f}{unit}",
        tolerance=f"{allowed:.3f}{unit}",
        status="pass" if ok else "miss",
        explained=explained,
    )


def _uncheckable(anchor: str, source: str, quantity: str, expected: str, why: str) -> CheckRow:
    return CheckRow(anchor, source, quantity, expected, "", "", "", "not checkable", why)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}".rstrip("0").rstrip(".")
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def text(rows: Sequence[CheckRow]) -> str:
    """A table of all figures, and the count of passes, misses and figures that could not be checked."""
    header = ("anchor", "quantity", "expected", "got", "deviation", "tolerance", "result")
    lines = [
        (row.anchor, row.quantity, row.expected, row.got, row.deviation, row.tolerance, row.status) for row in rows
    ]
    widths = [min(44, max(len(line[column]) for line in (header, *lines))) for column in range(len(header))]
    out = ["  ".join(cell.ljust(width) for cell, width in zip(header, widths, strict=True)).rstrip()]
    for row, line in zip(rows, lines, strict=True):
        out.append("  ".join(cell[:44].ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        if row.explained and (row.status != "pass" or row.explained.startswith(BEYOND)):
            out.append(f"    {row.explained}")
    counts = {status: sum(row.status == status for row in rows) for status in ("pass", "miss", "not checkable")}
    anchors = {row.anchor for row in rows}
    missed = {row.anchor for row in rows if row.status == "miss"}
    out.append(
        f"{len(anchors) - len(missed)} of {len(anchors)} anchors reproduced; figures: {counts['pass']} pass, "
        f"{counts['miss']} miss, {counts['not checkable']} not checkable"
    )
    return "\n".join(out)


def to_json(rows: Sequence[CheckRow]) -> dict[str, Any]:
    """The rows and their counts, JSON-ready."""
    return {
        "anchors": len({row.anchor for row in rows}),
        "passed": sum(row.status == "pass" for row in rows),
        "missed": sum(row.status == "miss" for row in rows),
        "not_checkable": sum(row.status == "not checkable" for row in rows),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
