"""The overview's figures for one target: the value now and its line over the chosen range.

Every figure says its formula, its window and whether it is measured (read from the engine) or computed (from
counters over a window). The eviction rate now is the alert evaluator's own reading, so that tile and alert agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.history import Floats, History, Line
from app.ui import series
from probe.alerts.evaluate import stale_after
from probe.alerts.rules import EVICTION_STORM
from probe.store import Reading, Target

EVICTION_RULE = EVICTION_STORM.id
EVICTION_THRESHOLD = EVICTION_STORM.threshold
POINTS = 120
RATE_WINDOW_S = 60.0
UP_LOOK_BACK_S = 6 * 3600.0
STALE_SLACK_S = 3.0  # samples are committed in batches


@dataclass(frozen=True)
class Signal:
    """One figure. `line` holds a value for each moment of `Reader.at`, NaN where nothing is known."""

    label: str
    value: float | None
    line: Floats
    source: str
    formula: str
    window_s: float | None = None
    numerator: float | None = None
    denominator: float | None = None


class Reader:
    """Reads one target's samples at the moments `at`: a grid over the range, and last the moment `until` itself.

    A chart draws the grid; a figure "now" is the value at `until`.
    """

    def __init__(self, history: History, target: Target, since: float, until: float) -> None:
        self.target = target
        self.window_s = max(RATE_WINDOW_S * target.time_scale, 4 * target.scrape_interval_s)
        self.max_age = stale_after(target.scrape_interval_s)
        self.at = np.append(series.grid(since, until, POINTS), until)
        self._history = history
        # The longest window of any signal, so that the first moments of the grid are known too.
        self._since = since - max(300.0 * target.time_scale, 20 * target.scrape_interval_s, self.window_s)

    def lines(self, metric: str) -> list[Line]:
        """The series of `metric`, the window before `since` included."""
        return self._history.lines(self.target.name, metric, self._since)

    def gauges(self, metric: str) -> list[Floats]:
        """One line per series of a gauge."""
        return [series.held(line.ts, line.values, self.at, self.max_age) for line in self.lines(metric)]

    def gauge_sum(self, metric: str) -> Floats:
        """A count, summed over series."""
        return series.total(self.gauges(metric), len(self.at))

    def increase(self, metric: str, window_s: float | None = None) -> Floats:
        """Growth of a counter over the window, summed over series, resets counted as starts from zero."""
        return series.total([self.increase_of(line, window_s) for line in self.lines(metric)], len(self.at))

    def increase_of(self, line: Line, window_s: float | None = None) -> Floats:
        """Growth of one series over the window."""
        return series.increases(line.ts, line.values, self.at, window_s or self.window_s, self.max_age)

    def rate(self, metric: str, window_s: float | None = None) -> Floats:
        """Growth of a counter per second, summed over series."""
        window = window_s or self.window_s
        parts = [series.rates(line.ts, line.values, self.at, window, self.max_age) for line in self.lines(metric)]
        return series.total(parts, len(self.at))


def now_of(line: Floats) -> float | None:
    """The newest value of a line, None when it is unknown."""
    return float(line[-1]) if len(line) and np.isfinite(line[-1]) else None


def kv_usage(reader: Reader) -> Signal:
    """Share of KV blocks in use, of the fullest engine of the target."""
    line = series.hottest(reader.gauges("kv_usage_ratio"), len(reader.at))
    return Signal(
        "KV usage (hottest)", now_of(line), line, "measured",
        "kv_usage_ratio, the highest over the target's engines: blocks held by requests / blocks of the pool. "
        "Cached blocks that nobody holds count as free. Newest scrape, no window.",
    )  # fmt: skip


def requests(reader: Reader) -> tuple[Signal, Signal]:
    """Requests running and waiting, summed over engines."""
    formula = "requests_{}, summed over the target's engines. Newest scrape, no window."
    out = []
    for word in ("running", "waiting"):
        line = reader.gauge_sum(f"requests_{word}")
        out.append(Signal(f"Requests {word}", now_of(line), line, "measured", formula.format(word)))
    return out[0], out[1]


def eviction_rate(reader: Reader, reading: Reading | None) -> Signal:
    """Preemptions per request in service: the evaluator's reading now, and the line of the past."""
    window = reading.window_s if reading is not None else reader.window_s
    preempted, in_service = _eviction_parts(reader, window)
    line = series.quotient(preempted, in_service)
    return Signal(
        "Eviction rate",
        reading.value if reading is not None else now_of(line),
        line,
        "computed",
        f"increase(preemptions_total) / (increase(requests_finished_total) + requests_running) over "
        f"{window:g} s. It can exceed 100%: one request can be preempted many times. Preempted requests are "
        "recomputed, not cut.",
        window_s=window,
        numerator=reading.numerator if reading is not None else now_of(preempted),
        denominator=reading.denominator if reading is not None else now_of(in_service),
    )


def preempted_share(reader: Reader, window_s: float) -> Signal:
    """Share of the requests in service that were preempted at least once; only the embedded engine counts them."""
    in_service = _eviction_parts(reader, window_s)[1]
    preempted = reader.increase("requests_preempted_total", window_s)
    line = series.quotient(preempted, in_service)
    return Signal(
        "Preempted at least once", now_of(line), line, "computed",
        "increase(requests_preempted_total) / (increase(requests_finished_total) + requests_running) over "
        f"{window_s:g} s: a true share, where the eviction rate counts every preemption of a request. The embedded "
        "engine counts it; vLLM does not.",
        window_s=window_s, numerator=now_of(preempted), denominator=now_of(in_service),
    )  # fmt: skip


def eviction_line(reader: Reader, window_s: float) -> Floats:
    """The eviction rate at each moment of the reader's grid."""
    return series.quotient(*_eviction_parts(reader, window_s))


def _eviction_parts(reader: Reader, window_s: float) -> tuple[Floats, Floats]:
    running = reader.gauge_sum("requests_running")
    finished = reader.increase("requests_finished_total", window_s)
    unknown = np.isnan(running) & np.isnan(finished)
    in_service = np.where(unknown, np.nan, np.nan_to_num(finished) + np.nan_to_num(running))
    preempted = reader.increase("preemptions_total", window_s)
    # As the evaluator counts: whoever is preempted is in service, though nothing finished and nothing runs.
    return preempted, np.where(preempted > 0, np.fmax(in_service, 1.0), in_service)


def tokens_per_second(reader: Reader) -> Signal:
    """Generated tokens per second."""
    line = reader.rate("generation_tokens_total")
    return Signal(
        "Tokens/s", now_of(line), line, "computed",
        f"increase(generation_tokens_total) per second over the last {reader.window_s:g} s, summed over the "
        "target's engines.",
        window_s=reader.window_s,
    )  # fmt: skip


def prefix_hit_rate(reader: Reader) -> Signal:
    """Share of prompt tokens found in the prefix cache."""
    hits, queries = reader.increase("prefix_hits_total"), reader.increase("prefix_queries_total")
    line = series.quotient(hits, queries)
    return Signal(
        "Prefix hit rate", now_of(line), line, "computed",
        f"increase(prefix_hits_total) / increase(prefix_queries_total) over {reader.window_s:g} s, in tokens.",
        window_s=reader.window_s, numerator=now_of(hits), denominator=now_of(queries),
    )  # fmt: skip


def ttft_p95(reader: Reader) -> Signal:
    """95th percentile of time to first token from the histogram's buckets."""
    window = max(5 * reader.window_s, 20 * reader.target.scrape_interval_s)
    parts: dict[float, list[Floats]] = {}
    for bucket in reader.lines("ttft_seconds_bucket"):
        parts.setdefault(float(bucket.labels["le"]), []).append(reader.increase_of(bucket, window))
    line = np.full(len(reader.at), np.nan)
    if parts:
        bounds = sorted(parts)
        stack = np.vstack([series.total(parts[le], len(reader.at)) for le in bounds])
        line = series.quantile(0.95, np.array(bounds), stack)
    return Signal(
        "TTFT p95", now_of(line), line, "computed",
        f"95th percentile of ttft_seconds over the last {window:g} s: the increases of the histogram's buckets are "
        "summed over engines, then interpolated. A value in the last open bucket is shown as that bucket's lower "
        "bound.",
        window_s=window,
    )  # fmt: skip


@dataclass(frozen=True)
class Freshness:
    """`state`: up, down, stale (nothing new for several scrapes) or no data. `answered_at`: newest good scrape."""

    state: str
    answered_at: float | None


def freshness(history: History, target: Target, now: float) -> Freshness:
    """What the scrapes of the last hours say about a target."""
    ups = history.lines(target.name, "up", now - UP_LOOK_BACK_S)
    ts = np.concatenate([line.ts for line in ups]) if ups else np.array([])
    if not len(ts):
        return Freshness("no data", None)
    values = np.concatenate([line.values for line in ups])
    newest = int(np.argmax(ts))
    answered = ts[values >= 1]
    state = "up" if values[newest] >= 1 else "down"
    if now - ts[newest] > stale_after(target.scrape_interval_s) + STALE_SLACK_S:
        state = "stale"
    return Freshness(state, float(answered.max()) if len(answered) else None)
