"""What a check found: where, why it is wrong, what to write. `CODES` names every kind and how grave it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

ERROR, WARNING, INFO = "error", "warning", "info"
RANK = {INFO: 0, WARNING: 1, ERROR: 2}

CODES = {
    "parse-error": (ERROR, "the expression is not PromQL"),
    "unknown-metric": (ERROR, "no such metric in this version"),
    "missing-total": (ERROR, "a counter's name without _total"),
    "wrong-prefix": (ERROR, "an underscore where the exposed name has a colon, or the reverse"),
    "wrong-label": (ERROR, "the metric has no such label"),
    "le-spelling": (ERROR, "le is written otherwise than it is exposed"),
    "le-compared-with-none": (ERROR, "series with le matched with series without"),
    "silent-in-outage": (ERROR, "no result, and so no alert, when every target is gone"),
    "quantile-without-le": (ERROR, "a quantile of series that lost le, or of each series alone"),
    "rate-on-gauge": (ERROR, "rate() of a gauge"),
    "percent-scale": (ERROR, "a ratio of 0 to 1 taken for per cent, or the reverse"),
    "seconds-scale": (ERROR, "seconds taken for milliseconds, or the reverse"),
    "burn-rate-is-one": (ERROR, "both windows compared with the error budget itself"),
    "fixed-fleet-size": (WARNING, "the number of replicas written into the rule"),
    "no-rate-on-counter": (WARNING, "a total since the start shown as if it were now"),
    "gauge-without-for": (WARNING, "one sample of a gauge is enough to fire"),
    "average-hides-full": (WARNING, "the mean of KV usage hides a full replica"),
    "ratio-average": (WARNING, "ratios or quantiles averaged or added"),
    "interval-in-rate": (WARNING, "$__interval inside rate()"),
    "fixed-window-too-short": (WARNING, "a window of fewer than four scrapes"),
    "no-runbook": (INFO, "an alert without a runbook"),
}


@dataclass(frozen=True)
class Finding:
    """One defect. `write` says what to do; `corrected` is the whole expression, where it can be computed."""

    file: str
    line: int
    where: str
    code: str
    severity: str
    why: str
    write: str
    expr: str
    corrected: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
