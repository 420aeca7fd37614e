"""Random lives of one target, from a seed: what each scrape brought, and what happened in between.

One to eight engines go through idleness, steady and bursty load and every kind of trouble a rule knows. Processes
restart (counters begin again), scrapes fail, come late or are not made at all, engines leave and come back. Times are
whole seconds from 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from probe.store import Sample

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]

BOUNDS = {"ttft_seconds": (0.1, 0.5, 1.0, 2.0, 2.5, 10.0), "itl_seconds": (0.01, 0.025, 0.05, 0.1, 0.5, 1.0)}
GAUGES = ("requests_running", "requests_waiting", "kv_usage_ratio")
COUNTERS = (
    "preemptions_total",
    "requests_finished_total",
    "generation_tokens_total",
    "prompt_tokens_total",
    "prefix_hits_total",
    "prefix_queries_total",
    "kv_block_evictions_total",
    "kv_evicted_before_reuse_total",
)


@dataclass(frozen=True)
class Regime:
    """How an engine fares for a while: rates a second, shares, levels."""

    preempted: float = 0.0
    finished: float = 0.0
    tokens: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    usage: float = 0.0
    hits: float = 0.7
    slow: float = 0.004
    evicted: float = 0.0
    missed: float = 0.1
    bursty: float = 0.0
    admits: bool = True


REGIMES = {
    "idle": Regime(),
    "leak": Regime(usage=0.05),
    "steady": Regime(0.0, 2.0, 300.0, 8.0, 0.5, 0.6, evicted=0.3),
    "bursty": Regime(0.02, 1.0, 200.0, 6.0, 2.0, 0.7, bursty=0.9, evicted=0.5),
    "thin": Regime(0.01, 0.03, 5.0, 0.8, 0.0, 0.008, slow=0.1, bursty=0.9),
    "storm": Regime(0.5, 1.0, 150.0, 16.0, 9.0, 0.97, slow=0.3, evicted=3.0, missed=0.4),
    "livelock": Regime(0.5, 0.0, 10.0, 4.0, 9.0, 0.99, slow=0.9),
    "stall": Regime(running=3.0, waiting=4.0, usage=0.8),
    "blocked": Regime(0.0, 0.3, 90.0, 5.0, 3.0, 0.5, admits=False),
    "slow": Regime(0.0, 3.0, 400.0, 12.0, 1.0, 0.8, slow=0.25),
    "cold": Regime(0.0, 2.0, 300.0, 8.0, 0.5, 0.6, hits=0.05),
    "thrash": Regime(0.0, 2.0, 300.0, 8.0, 0.5, 0.92, evicted=4.0, missed=0.5),
}
HEALTHY = ("idle", "steady", "bursty", "thin")
TROUBLED = tuple(name for name in REGIMES if name not in HEALTHY)


@dataclass
class Engine:
    """One engine process: its counters since it started."""

    labels: Labels
    spelled: bool  # whole bounds as "1.0", not "1"
    regime: Regime = field(default_factory=Regime)
    until: float = -1.0
    away_until: float = -1.0
    last: float = 0.0
    counts: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, np.ndarray] = field(default_factory=dict)

    def restart(self, rng: np.random.Generator, warm: bool = False) -> None:
        self.counts = {name: float(rng.integers(0, 100_000)) if warm else 0.0 for name in COUNTERS}
        self.counts["prefix_queries_total"] = self.counts["prompt_tokens_total"]
        for name, bounds in BOUNDS.items():
            self.histograms[name] = np.zeros(len(bounds) + 1)

    def advance(self, at: float, cold: bool, rng: np.random.Generator) -> None:
        """Live until a time; `cold`: prompts share little with those before."""
        span, self.last = at - self.last, at
        now = self.regime
        busy = 1.0 if rng.random() >= now.bursty else float(rng.choice([0.0, 0.0, 3.0]))
        finished = self._count("requests_finished_total", now.finished * span * busy, rng)
        self._count("preemptions_total", now.preempted * span * busy, rng)
        made = self._count("generation_tokens_total", now.tokens * span * busy, rng)
        prompt = self._count("prompt_tokens_total", 3 * now.tokens * span * busy, rng)
        self.counts["prefix_queries_total"] += prompt
        self.counts["prefix_hits_total"] += int(rng.binomial(prompt, now.hits * (0.1 if cold else 1.0)))
        evicted = self._count("kv_block_evictions_total", now.evicted * span * busy, rng)
        self.counts["kv_evicted_before_reuse_total"] += int(rng.binomial(evicted, now.missed))
        self._observe("ttft_seconds", finished if now.admits else 0, rng)
        self._observe("itl_seconds", made, rng)

    def _count(self, name: str, mean: float, rng: np.random.Generator) -> int:
        grown = int(rng.poisson(mean))
        self.counts[name] += grown
        return grown

    def _observe(self, name: str, count: int, rng: np.random.Generator) -> None:
        bounds = BOUNDS[name]
        shares = rng.dirichlet(np.ones(4)) * (1 - self.regime.slow)
        beyond = len(bounds) + 1 - 4
        late = rng.dirichlet(np.ones(beyond)) * self.regime.slow
        self.histograms[name] += rng.multinomial(count, [*shares, *late])

    def exposed(self, rng: np.random.Generator) -> Iterator[tuple[Key, float]]:
        """What a scrape reads now."""
        now = self.regime
        noise = rng.random(3)
        yield ("requests_running", self.labels), float(round(now.running * (0.6 + 0.8 * noise[0])))
        yield ("requests_waiting", self.labels), float(round(now.waiting * (0.4 + 1.2 * noise[1])))
        yield ("kv_usage_ratio", self.labels), float(min(1.0, now.usage * (0.95 + 0.1 * noise[2])))
        for name, value in self.counts.items():
            yield (name, self.labels), value
        for name, bounds in BOUNDS.items():
            buckets = np.cumsum(self.histograms[name])
            for bound, value in zip((*bounds, np.inf), buckets, strict=True):
                le = "+Inf" if np.isinf(bound) else repr(bound) if self.spelled else f"{bound:g}"
                yield (f"{name}_bucket", (*self.labels, ("le", le))), float(value)
            yield (f"{name}_count", self.labels), float(buckets[-1])


@dataclass(frozen=True)
class Scrape:
    """One attempt; `values` is empty when it failed. The driver's readings are no attempt: `up` is None."""

    at: int
    up: bool | None
    values: dict[Key, float]

    def samples(self) -> list[Sample]:
        """As the collector stores it."""
        found = [
            Sample("t", metric, dict(labels), float(self.at), value) for (metric, labels), value in self.values.items()
        ]
        return found if self.up is None else [*found, Sample("t", "up", {}, float(self.at), float(self.up))]


@dataclass(frozen=True)
class Trace:
    """A target's scrapes over `minutes`, made every `interval_s` or so."""

    seed: int
    engines: int
    interval_s: int
    minutes: int
    scrapes: tuple[Scrape, ...]


def trace(seed: int, minutes: int, most_engines: int = 8) -> Trace:
    """The trace of a seed. Gaps longer than three scrapes only at 75 s, where ours and Prometheus' staleness agree."""
    rng = np.random.default_rng(seed)
    engines = [
        Engine((("engine", str(i)), ("model_name", f"m{i % 2}")), spelled=bool(rng.integers(2)))
        for i in range(int(rng.integers(1, most_engines + 1)))
    ]
    for engine in engines:
        engine.restart(rng, warm=True)
    interval = int(rng.choice([15, 15, 30, 75]))
    cold_from = minutes * 60 * (0.3 + 0.5 * rng.random())
    cold_until = cold_from + float(rng.integers(600, 2400))
    scrapes: list[Scrape] = []
    due, down_until, started = 0, -1, 0
    while due <= minutes * 60:
        late = int(rng.integers(0, interval - 3)) if rng.random() < 0.1 else int(rng.integers(0, 2))
        late = late if scrapes else 0
        at = due + late
        if rng.random() < 0.01:
            down_until = at + int(rng.integers(1, 9)) * interval
            if rng.random() < 0.6:
                started = at
                for engine in engines:
                    engine.restart(rng)
        scrape = _scrape(at, at >= down_until, cold_from <= at < cold_until, engines, rng)
        if scrape.up:
            scrape.values["process_start_time_seconds", ()] = 1.7e9 + started
        scrapes.append(scrape)
        due += interval * (1 + _missed(rng, interval))
    scrapes += _driver(minutes, rng)
    return Trace(seed, len(engines), interval, minutes, tuple(sorted(scrapes, key=lambda s: s.at)))


def _missed(rng: np.random.Generator, interval: int) -> int:
    """How many scrapes were not made at all before the next."""
    if rng.random() >= 0.02:
        return 0
    return int(rng.integers(1, 8 if interval == 75 else 3))


def _scrape(at: int, answers: bool, cold: bool, engines: list[Engine], rng: np.random.Generator) -> Scrape:
    values: dict[Key, float] = {}
    for engine in engines:
        if at >= engine.until:
            healthy = rng.random() < 0.5 + 0.05 * len(engines)
            engine.regime = REGIMES[str(rng.choice(HEALTHY if healthy else TROUBLED))]
            engine.until = at + float(rng.choice([240, 480, 600, 900, 2400])) * (0.5 + rng.random())
        if rng.random() < 0.004:
            engine.restart(rng)
        if rng.random() < 0.003:
            engine.away_until = at + float(rng.integers(1, 900))
        engine.advance(at, cold, rng)
        if answers and at >= engine.away_until:
            values.update(engine.exposed(rng))
    if answers:
        values["required_metrics_missing", ()] = float(rng.random() < 0.5 and at % 1800 < 600)
    return Scrape(at, answers, values)


def _driver(minutes: int, rng: np.random.Generator) -> list[Scrape]:
    """Readings of up to two GPUs every 20 s: constant, creeping, or with steps."""
    found: dict[int, dict[Key, float]] = {}
    for gpu in range(int(rng.integers(0, 3))):
        labels: Labels = (("gpu", str(gpu)),)
        used, creep = 40e9 + 1e9 * gpu, float(rng.choice([0.0, 4e5, 1e6])) * 20
        steps = float(rng.choice([0.0, 0.01]))
        noise = float(rng.choice([0.0, 1e8]))
        for at in range(int(rng.integers(0, 20)), minutes * 60, 20):
            used += creep + (2e9 if rng.random() < steps else 0.0)
            values = found.setdefault(at, {})
            values["device_memory_used_bytes", labels] = float(round(used + noise * rng.random()))
            values["device_memory_total_bytes", labels] = 80e9
    return [Scrape(at, None, values) for at, values in found.items()]
