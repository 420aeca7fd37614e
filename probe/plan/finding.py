"""One comparison of a reported figure with the planner's, and how exactly each level must agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from probe.plan.anchors import Anchor
from probe.plan.pool_of import Pool

L1_PCT, L2_GIB, L3_PCT = 0.3, 0.03, 5.0
TOKEN_KEYS = ("tokens", "kv_tokens", "max_total_num_tokens", "max_total_tokens", "max_batch_total_tokens")


@dataclass(frozen=True)
class Finding:
    """One comparison. got None: not checkable, `note` says why. tol_gib: an absolute tolerance in place of percent."""

    quantity: str
    expected: Any
    got: Any
    tol_pct: float = L1_PCT
    tol_gib: float | None = None
    note: str = ""

    @property
    def matches(self) -> bool:
        return bool(self.expected == self.got)

    def deviation(self) -> tuple[float, float, str]:
        """(deviation, tolerance, unit)."""
        if self.tol_gib is not None:
            return float(self.got - self.expected), self.tol_gib, " GiB"
        return 100 * (self.got - self.expected) / self.expected, self.tol_pct, "%"


@dataclass(frozen=True)
class Figure:
    name: str
    find: Callable[[Anchor], list[Finding]]


def l1(anchor: Anchor, pool: Pool | None, expected: Any = None) -> float:
    """0.3% or the rounding of the memory, what the anchor adds, and the rounding of a printed fraction."""
    rounding = pool.rounding_pct if pool else 0.0
    printed = 0.0
    if isinstance(expected, float) and expected:
        places = len(str(expected).split(".")[1]) if "." in str(expected) and "e" not in str(expected) else 0
        printed = 100 * 0.5 * 10 ** -max(1, places) / abs(expected)
    return max(L1_PCT, rounding) + anchor.extra_pct + printed


def reported_tokens(anchor: Anchor) -> Any:
    """The tokens of the whole pool, by whatever name; None where the log has none."""
    return next((anchor.reported[key] for key in TOKEN_KEYS if key in anchor.reported), None)
