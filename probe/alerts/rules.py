"""Rules as data: what is read, over which window, against what, held for how long, and which runbook.

A rule's id is its runbook's id. Windows and hold times are written for a target at true scale; `scaled` fits
them to a target's `time_scale`, never below what its scrape interval can show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from probe.store import Target

MIN_SCRAPES_PER_WINDOW = 6
MIN_SCRAPES_PER_HOLD = 2


@dataclass(frozen=True)
class RatioSignal:
    """Ratio of sums over all engines of a target.

    Numerator: `increase(numerator)`; denominator: `increase(increases)` of counters plus the newest value of
    `gauges`. With a denominator below `floor` the value is shown but does not alert, unless the numerator
    reaches `unless_numerator`.
    """

    numerator: str
    increases: tuple[str, ...]
    gauges: tuple[str, ...] = ()
    floor: float = 0.0
    unless_numerator: float = float("inf")
    numerator_unit: str = ""
    denominator_unit: str = ""


@dataclass(frozen=True)
class SaturationSignal:
    """The hottest engine's mean of `metric` over the window, among engines whose mean `queue` is >= `min_queue`."""

    metric: str
    queue: str
    min_queue: float


@dataclass(frozen=True)
class EventMatch:
    """An event kind, and values its data must have (one of each tuple); no values match any event of the kind."""

    kind: str
    data: Mapping[str, tuple[object, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class EventSignal:
    """Number of matching events; over once the target was up for `recover_s` on end after the last of them."""

    matches: tuple[EventMatch, ...]
    recover_s: float


@dataclass(frozen=True)
class AbsenceSignal:
    """`up` of a target that should be up: not stopped on purpose, and not within `grace_s` of a start.

    The grace is not scaled: a drill's engine loads its model at the speed of any other.
    """

    grace_s: float


@dataclass(frozen=True)
class QualitySignal:
    """Fall of accuracy in the rounds of a quality canary, paired against its baseline.

    The metrics are counts of questions of one round: asked, lost, gained, without a usable answer. A round is worse
    when accuracy fell beyond the rule's threshold with a 95% interval clear of zero, or when more than
    `invalid_threshold` of the answers are none. The newest `min_rounds` rounds in the window must all be worse. A round
    takes its time at any scale, so the window is never scaled below `min_window_s`.
    """

    items: str
    lost: str
    gained: str
    invalid: str
    min_rounds: int
    invalid_threshold: float
    min_window_s: float


@dataclass(frozen=True)
class BreachSignal:
    """Isolation breaches: what the engine itself counted in the window, plus what an isolation probe found.

    `counter` grows by one for every block of another identity that is served. `probes` and `leaks` are counts of one
    round of the probe, by check; the newest reading of each check counts until a newer one replaces it, for `rounds_s`
    at most (not scaled): nothing but another round shows that a leak is gone.
    """

    counter: str
    probes: str
    leaks: str
    rounds_s: float


Signal = RatioSignal | SaturationSignal | EventSignal | AbsenceSignal | QualitySignal | BreachSignal


@dataclass(frozen=True)
class Rule:
    """One alert. The condition is `value comparison threshold`; all times in seconds.

    hold_s: how long the condition must be seen to hold before the alert fires (not scaled below `min_hold_s`).
    keep_firing_s: how long it must be seen to be clear before the alert resolves.
    inhibited_by: rules which, pending or firing on the same target, explain this one.
    """

    id: str
    title: str
    severity: Literal["warning", "critical"]
    signal: Signal
    threshold: float
    window_s: float
    hold_s: float
    comparison: Literal[">", "<"] = ">"
    keep_firing_s: float = 0.0
    min_hold_s: float = 0.0
    inhibited_by: tuple[str, ...] = ()

    @property
    def runbook(self) -> str:
        """The id of the runbook: the rule's own."""
        return self.id

    @property
    def metrics(self) -> frozenset[str]:
        """Canonical metrics the rule reads."""
        signal = self.signal
        if isinstance(signal, RatioSignal):
            return frozenset({signal.numerator, *signal.increases, *signal.gauges})
        if isinstance(signal, SaturationSignal):
            return frozenset({signal.metric, signal.queue})
        if isinstance(signal, QualitySignal):
            return frozenset({signal.items, signal.lost, signal.gained, signal.invalid})
        if isinstance(signal, BreachSignal):
            return frozenset({"up", signal.counter, signal.probes, signal.leaks})
        return frozenset({"up"})

    @property
    def round_metrics(self) -> frozenset[str]:
        """Those of `metrics` that are not scraped: whoever measured a round writes them to the store."""
        signal = self.signal
        if isinstance(signal, QualitySignal):
            return self.metrics
        return frozenset({signal.probes, signal.leaks}) if isinstance(signal, BreachSignal) else frozenset()

    @property
    def rounds_s(self) -> float:
        """How far back its rounds count, in seconds."""
        return self.signal.rounds_s if isinstance(self.signal, BreachSignal) else self.window_s


def scaled(rule: Rule, target: Target) -> Rule:
    """The rule as it applies to a target: times multiplied by its `time_scale`, with minimums."""
    scale, interval = target.time_scale, target.scrape_interval_s

    def shrink(seconds: float) -> float:
        return max(seconds * scale, MIN_SCRAPES_PER_HOLD * interval) if seconds > 0 else 0.0

    signal = rule.signal
    if isinstance(signal, EventSignal):
        signal = dataclasses.replace(signal, recover_s=shrink(signal.recover_s))
    least = signal.min_window_s if isinstance(signal, QualitySignal) else MIN_SCRAPES_PER_WINDOW * interval
    return dataclasses.replace(
        rule,
        signal=signal,
        window_s=max(rule.window_s * scale, least),
        hold_s=max(shrink(rule.hold_s), rule.min_hold_s),
        keep_firing_s=shrink(rule.keep_firing_s),
    )


# A process killed from outside is in the rule because that is how the kernel's OOM killer looks from here.
OOM = Rule(
    id="oom",
    title="Engine out of memory, or restarted unexpectedly",
    severity="critical",
    signal=EventSignal(
        matches=(
            EventMatch("engine_exit", {"reason": ("oom", "killed")}),
            EventMatch("engine_restart", {"unexpected": (True,)}),
        ),
        recover_s=60.0,
    ),
    threshold=0.0,
    window_s=600.0,
    hold_s=0.0,
)

EVICTION_STORM = Rule(
    id="eviction-storm",
    title="Eviction rate above 5%",
    severity="warning",
    signal=RatioSignal(
        numerator="preemptions_total",
        increases=("requests_finished_total",),
        gauges=("requests_running",),
        floor=20.0,
        unless_numerator=3.0,
        numerator_unit="preemptions",
        denominator_unit="requests in service",
    ),
    threshold=0.05,
    window_s=300.0,
    hold_s=60.0,
    keep_firing_s=60.0,
    inhibited_by=("oom",),
)

KV_SATURATED = Rule(
    id="kv-saturated",
    title="KV cache full while requests wait",
    severity="warning",
    signal=SaturationSignal(metric="kv_usage_ratio", queue="requests_waiting", min_queue=1.0),
    threshold=0.9,
    window_s=60.0,
    hold_s=120.0,
    keep_firing_s=60.0,
    inhibited_by=("oom", "eviction-storm"),
)

TARGET_MISSING = Rule(
    id="target-missing",
    title="Target down or not scraped",
    severity="critical",
    signal=AbsenceSignal(grace_s=60.0),
    comparison="<",
    threshold=1.0,
    window_s=60.0,
    hold_s=60.0,
    min_hold_s=30.0,
    inhibited_by=("oom",),
)

# Two rounds hold it already, so nothing is waited for beyond them; one good round is enough to end it.
KV_QUALITY_DROP = Rule(
    id="kv-quality-drop",
    title="Answers got worse than their baseline",
    severity="warning",
    signal=QualitySignal(
        items="quality_items",
        lost="quality_lost",
        gained="quality_gained",
        invalid="quality_invalid",
        min_rounds=2,
        invalid_threshold=0.05,
        min_window_s=300.0,
    ),
    threshold=0.05,
    window_s=3600.0,
    hold_s=0.0,
    inhibited_by=("oom", "target-missing"),
)

# One breach is one too many, and no other alert explains it.
PREFIX_ISOLATION_BREACH = Rule(
    id="prefix-isolation-breach",
    title="Prefix cache serves one customer's context to another",
    severity="critical",
    signal=BreachSignal(
        counter="isolation_breaches_total",
        probes="isolation_probes",
        leaks="isolation_leaks",
        rounds_s=86_400.0,
    ),
    threshold=0.0,
    window_s=600.0,
    hold_s=0.0,
)

# Evaluated in this order: a rule that inhibits comes before the rules it inhibits.
DEFAULT_RULES: tuple[Rule, ...] = (
    OOM,
    EVICTION_STORM,
    KV_SATURATED,
    TARGET_MISSING,
    KV_QUALITY_DROP,
    PREFIX_ISOLATION_BREACH,
)
