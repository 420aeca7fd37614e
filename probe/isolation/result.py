"""What a check and a round found. A verdict never says more than was seen: silence is a number of probes, a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

CheckName = Literal["leak-canary", "side-channel-tokens", "side-channel-ttft", "cache-salt"]
Verdict = Literal["leak shown", "no leak", "inconclusive", "not run"]


@dataclass(frozen=True)
class CheckResult:
    """One check.

    probes: those that could have shown a leak; leaks: those that did (of "side-channel-ttft", which judges all its
    probes together, 1 or 0). upper_bound: one-sided 95 % bound of the share of leaks (None: no share was counted).
    effect: of "side-channel-ttft" the AUC, with its 95 % interval; of "side-channel-tokens" the mean difference in
    cached tokens; of "leak-canary" the largest distance of a cross-tenant answer from its cold one (total variation).
    data: JSON-ready figures behind it, and examples of the probe's own text.
    """

    check: CheckName
    verdict: Verdict
    probes: int
    leaks: int
    sentence: str
    upper_bound: float | None = None
    effect: float | None = None
    interval: tuple[float, float] | None = None
    p_value: float | None = None
    data: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "interval": list(self.interval) if self.interval else None}


@dataclass(frozen=True)
class IsolationResult:
    """One round. `error`: why it stopped early, else None. `scope`: the cache's scope where the server tells it.

    callers: what each of the cast sent as tenant, session, user and salt; passing ones (fresh salts) are not listed,
    but all ids of a round begin alike. budget: what was stated before the first request. Times are Unix seconds.
    """

    target: str
    base_url: str
    model: str
    engine: str | None
    scope: str | None
    checks: tuple[CheckResult, ...]
    verdict: Verdict
    sentence: str
    requests_sent: int
    requests_failed: int
    budget: dict[str, Any]
    options: dict[str, Any]
    callers: dict[str, dict[str, str]]
    started_at: float
    ended_at: float
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "checks": [check.to_dict() for check in self.checks]}


def conclude(checks: Sequence[CheckResult], error: str | None) -> tuple[Verdict, str]:
    """The verdict of a round and its sentence. A leak that was shown stands, whatever else went wrong."""
    shown = [check for check in checks if check.verdict == "leak shown"]
    if shown:
        others = ", ".join(check.check for check in shown[1:])
        return "leak shown", f"leak shown: {shown[0].sentence}" + (f"; also by {others}" if others else "")
    if error is not None:
        return "inconclusive", f"inconclusive: stopped early, {error}"
    open_ones = [check for check in checks if check.verdict == "inconclusive"]
    if open_ones:
        return "inconclusive", "inconclusive: " + "; ".join(check.sentence for check in open_ones)
    done = [check for check in checks if check.verdict == "no leak"]
    if not done:
        return "inconclusive", "inconclusive: no check could be carried out"
    bounds = [check.upper_bound for check in done if check.upper_bound is not None]
    highest = [check.interval[1] for check in done if check.interval is not None]
    bound = f" (AUC at most {max(highest):.2f})" if highest else ""
    if bounds:
        bound = f" (upper bound {max(bounds):.1%} of such requests, with 95% confidence)"
    return "no leak", f"no leak in {_distinct(done):,} probes{bound}"


def _distinct(checks: Sequence[CheckResult]) -> int:
    """Probes of all checks; the two side channels judge the same ones."""
    channels = [check.probes for check in checks if check.check.startswith("side-channel")]
    return max(channels, default=0) + sum(c.probes for c in checks if not c.check.startswith("side-channel"))
