"""What a load run measured: one record a request, and their summary.

A request counts as completed only when its stream ended properly: HTTP 200, no error object, a last event. A stream
that stops early or carries an error object after status 200 is a failure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class RequestRecord:
    """One request as the client saw it. Times in seconds; `started_s` counts from the start of the run.

    `error` is None for a completed request, else a kind: connect, disconnected, timeout, http_NNN, stream_error,
    incomplete, cancelled. `error_message` is the server's sentence, where it gave one.
    """

    request_id: str
    started_s: float
    status: int | None = None
    error: str | None = None
    error_message: str = ""
    ttft_s: float | None = None
    itl_mean_s: float | None = None
    e2e_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None


@dataclass(frozen=True)
class LoadReport:
    """A finished run. `not_sent` counts requests that were never tried (server gone, time over, stopped)."""

    started_at: float
    duration_s: float
    total: int
    records: tuple[RequestRecord, ...] = field(repr=False)
    server_died: bool = False
    stopped_early: str | None = None

    @property
    def completed(self) -> int:
        """Requests whose stream ended properly."""
        return sum(r.error is None for r in self.records)

    @property
    def failed(self) -> int:
        """Requests that were sent and did not complete."""
        return len(self.records) - self.completed

    @property
    def not_sent(self) -> int:
        """Requests of the plan that were never sent."""
        return self.total - len(self.records)

    @property
    def errors(self) -> dict[str, int]:
        """Failures by kind."""
        return dict(Counter(r.error for r in self.records if r.error is not None))

    def to_dict(self) -> dict[str, Any]:
        """The summary as JSON-ready data, without the single records."""
        done = [r for r in self.records if r.error is None]
        output = sum(r.output_tokens for r in done)
        return {
            "started_at": self.started_at,
            "duration_s": round(self.duration_s, 3),
            "total": self.total,
            "completed": self.completed,
            "failed": self.failed,
            "not_sent": self.not_sent,
            "errors": self.errors,
            "first_error": next((r.error_message for r in self.records if r.error_message), ""),
            "server_died": self.server_died,
            "stopped_early": self.stopped_early,
            "prompt_tokens": sum(r.prompt_tokens for r in done),
            "cached_tokens": sum(r.cached_tokens for r in done),
            "output_tokens": output,
            "output_tokens_per_s": round(output / self.duration_s, 1) if self.duration_s > 0 else 0.0,
            "ttft_s": percentiles([r.ttft_s for r in done if r.ttft_s is not None]),
            "itl_s": percentiles([r.itl_mean_s for r in done if r.itl_mean_s is not None]),
            "e2e_s": percentiles([r.e2e_s for r in done if r.e2e_s is not None]),
        }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p95, p99 by nearest rank over single values (never over averages of buckets); None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return {f"p{p}": round(ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)], 6) for p in PERCENTILES}
