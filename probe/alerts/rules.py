"""The rules, as data. Each has a runbook of the same name.

Ratios are ratios of sums over the engines of a target, never means of ratios; a gauge of several engines counts by
its hottest one.
"""

from __future__ import annotations

from probe.alerts.expr import (
    Aggregate,
    Arithmetic,
    ClampMin,
    Compare,
    Derivative,
    Expr,
    Increase,
    Instant,
    Logical,
    OverTime,
)
from probe.alerts.rule import (
    AbsenceSignal,
    BreachSignal,
    EventMatch,
    EventSignal,
    QualitySignal,
    Rule,
    ValueSignal,
)

ENGINE = ("engine",)

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0
# Multiwindow burn rates (Google SRE workbook, chapter 5): 2% of a 30-day budget in 1 h, 5% in 6 h.
FAST_BURN, SLOW_BURN = 14.4, 6.0
LATENCY_OBJECTIVE = 0.99
TTFT_BOUND_S, ITL_BOUND_S = 2.5, 0.1
PREFIX_BASELINE_LEAST = 0.1


def grown(metric: str, window_s: float, *, offset_s: float = 0.0, by: tuple[str, ...] = ()) -> Expr:
    """Growth of a counter over all engines, or by labels."""
    return Aggregate("sum", Increase(metric, window_s, offset_s=offset_s), by)


def over_time(how: str, metric: str, window_s: float) -> Expr:
    """A gauge over the window, by engine; how: avg, min or max."""
    assert how in ("avg", "min", "max")
    return Aggregate("min" if how == "min" else "max", OverTime(how, metric, window_s), ENGINE)  # type: ignore[arg-type]


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

_PREEMPTED = grown("preemptions_total", 300.0)
# Nothing finished and nothing runs while requests are thrown out: one request at least is in service.
_IN_SERVICE = ClampMin(
    Arithmetic("+", grown("requests_finished_total", 300.0), Aggregate("sum", Instant("requests_running"))), 1.0
)
EVICTION_STORM = Rule(
    id="eviction-storm",
    title="Eviction rate above 5%",
    severity="warning",
    signal=ValueSignal(
        value=Arithmetic("/", _PREEMPTED, _IN_SERVICE),
        sentence="{value} ({numerator} preemptions / {denominator} requests in service in {window})",
        unit="percent",
        floor=Logical("or", Compare(">=", _IN_SERVICE, 20.0), Compare(">=", _PREEMPTED, 3.0)),
        floor_unit="20 requests in service",
        numerator=_PREEMPTED,
        denominator=_IN_SERVICE,
    ),
    threshold=0.05,
    window_s=300.0,
    hold_s=60.0,
    keep_firing_s=60.0,
    inhibited_by=("oom", "preemption-livelock"),
)

# By engine: one that is stuck does not finish more because its neighbour does.
PREEMPTION_LIVELOCK = Rule(
    id="preemption-livelock",
    title="Preempting and finishing nothing",
    severity="critical",
    signal=ValueSignal(
        value=grown("preemptions_total", 300.0, by=ENGINE),
        sentence="{value} preemptions and no request finished in {window}{where}",
        when=Compare("==", grown("requests_finished_total", 300.0, by=ENGINE), 0.0),
        per=ENGINE,
    ),
    threshold=3.0,
    window_s=300.0,
    hold_s=60.0,
    keep_firing_s=60.0,
    inhibited_by=("oom",),
)

_EVICTED = grown("kv_block_evictions_total", 300.0)
_MISSED_SOON = grown("kv_evicted_before_reuse_total", 300.0)
CACHE_THRASH = Rule(
    id="cache-thrash",
    title="Cached blocks evicted before they are used again",
    severity="warning",
    signal=ValueSignal(
        value=Arithmetic("/", _MISSED_SOON, _EVICTED),
        sentence="{value} of the evicted blocks asked for again soon after ({numerator} of {denominator} in {window})",
        unit="percent",
        floor=Compare(">=", _EVICTED, 50.0),
        floor_unit="50 evicted blocks",
        numerator=_MISSED_SOON,
        denominator=_EVICTED,
    ),
    threshold=0.2,
    window_s=300.0,
    hold_s=120.0,
    keep_firing_s=60.0,
    inhibited_by=("oom",),
)

KV_SATURATED = Rule(
    id="kv-saturated",
    title="KV cache full while requests wait",
    severity="warning",
    signal=ValueSignal(
        value=over_time("avg", "kv_usage_ratio", 60.0),
        sentence="{value} of the KV blocks in use while requests wait{where} (means of {window})",
        unit="percent",
        when=Compare(">=", over_time("avg", "requests_waiting", 60.0), 1.0),
        per=ENGINE,
    ),
    threshold=0.9,
    window_s=60.0,
    hold_s=120.0,
    keep_firing_s=60.0,
    inhibited_by=("oom", "eviction-storm", "preemption-livelock"),
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

# Engines count a prompt's tokens with its first token, so a prompt that is computed alone for longer than window and
# hold time looks like a stall: four minutes are more than a million tokens take on what serves them.
ENGINE_STALL = Rule(
    id="engine-stall",
    title="Engine holds requests and makes no tokens",
    severity="critical",
    signal=ValueSignal(
        value=Arithmetic(
            "+",
            grown("generation_tokens_total", 180.0, by=ENGINE),
            grown("prompt_tokens_total", 180.0, by=ENGINE),
        ),
        sentence="{value} tokens in {window} while requests are held{where}",
        when=Logical(
            "or",
            Compare(">", over_time("min", "requests_running", 180.0), 0.0),
            Compare(">", over_time("min", "requests_waiting", 180.0), 0.0),
        ),
        per=ENGINE,
    ),
    comparison="==",
    threshold=0.0,
    window_s=180.0,
    hold_s=60.0,
    inhibited_by=("oom", "target-missing"),
)

HEAD_OF_LINE_BLOCK = Rule(
    id="head-of-line-block",
    title="The head of the queue blocks those behind it",
    severity="warning",
    signal=ValueSignal(
        value=over_time("min", "requests_waiting", 120.0),
        sentence="{value} or more waited all of {window} and none was admitted, with KV blocks free{where}",
        when=Logical(
            "and",
            Logical(
                "and",
                Compare("==", grown("ttft_seconds_count", 120.0, by=ENGINE), 0.0),
                Compare(">", grown("generation_tokens_total", 120.0, by=ENGINE), 0.0),
            ),
            Compare("<", over_time("max", "kv_usage_ratio", 120.0), 0.9),
        ),
        per=ENGINE,
    ),
    comparison=">=",
    threshold=1.0,
    window_s=120.0,
    hold_s=60.0,
    keep_firing_s=30.0,
    inhibited_by=("oom", "engine-stall"),
)


def hit_rate(window_s: float, offset_s: float = 0.0) -> Expr:
    """Prefix-cache hits per prompt token: queried tokens stand still where the cache was switched off."""
    hits = grown("prefix_hits_total", window_s, offset_s=offset_s)
    return Arithmetic("/", hits, grown("prompt_tokens_total", window_s, offset_s=offset_s))


_HITS_NOW, _HITS_BEFORE = hit_rate(600.0), hit_rate(DAY_S, 600.0)
PREFIX_HIT_COLLAPSE = Rule(
    id="prefix-hit-collapse",
    title="Prefix cache hit rate collapsed against its own baseline",
    severity="warning",
    signal=ValueSignal(
        value=Arithmetic("/", _HITS_NOW, _HITS_BEFORE),
        sentence="hit rate {numerator} in {window} against {denominator} in the day before: {value} of it",
        unit="percent",
        when=Compare(">=", _HITS_BEFORE, PREFIX_BASELINE_LEAST),
        floor=Logical(
            "and",
            Compare(">=", grown("prompt_tokens_total", 600.0), 10_000.0),
            Compare(">=", grown("prompt_tokens_total", DAY_S, offset_s=600.0), 10_000.0),
        ),
        floor_unit="10,000 prompt tokens, now or before",
        numerator=_HITS_NOW,
        denominator=_HITS_BEFORE,
    ),
    comparison="<",
    threshold=0.5,
    window_s=600.0,
    hold_s=300.0,
    keep_firing_s=120.0,
    inhibited_by=("oom",),
)


def burn(metric: str, bound_s: float, window_s: float) -> Expr:
    """How many times faster than its objective allows the error budget of a latency is used up."""
    served = Aggregate("sum", Increase(f"{metric}_count", window_s))
    good = Aggregate("sum", Increase(f"{metric}_bucket", window_s, match=(("le", f"{bound_s:g}"),)))
    slow = Arithmetic("/", Arithmetic("-", served, good), served)
    return Arithmetic("/", slow, round(1 - LATENCY_OBJECTIVE, 9))


def burn_rule(rule_id: str, words: str, metric: str, bound_s: float) -> Rule:
    """Pages when a long and a short window agree that the budget burns: 14.4 times, or 6 times for longer."""
    fast = Logical(
        "and",
        Compare(">", burn(metric, bound_s, HOUR_S), FAST_BURN),
        Compare(">", burn(metric, bound_s, 5 * MINUTE_S), FAST_BURN),
    )
    slow = Logical(
        "and",
        Compare(">", burn(metric, bound_s, 6 * HOUR_S), SLOW_BURN),
        Compare(">", burn(metric, bound_s, 30 * MINUTE_S), SLOW_BURN),
    )
    return Rule(
        id=rule_id,
        title=f"{words} burns its error budget",
        severity="critical",
        signal=ValueSignal(
            value=burn(metric, bound_s, HOUR_S),
            sentence=f"{{value}} times the budget in {{window}} ({LATENCY_OBJECTIVE:.0%} within {bound_s:g} s)",
            unit="ratio",
            condition=Logical("or", fast, slow),
            floor=Compare(">=", grown(f"{metric}_count", HOUR_S), 50.0),
            floor_unit="50 observations",
        ),
        threshold=FAST_BURN,
        window_s=HOUR_S,
        hold_s=0.0,
        keep_firing_s=60.0,
        inhibited_by=("oom", "target-missing", "engine-stall", "preemption-livelock"),
    )


TTFT_SLO_BURN = burn_rule("ttft-slo-burn", "Time to first token", "ttft_seconds", TTFT_BOUND_S)
ITL_SLO_BURN = burn_rule("itl-slo-burn", "Inter-token latency", "itl_seconds", ITL_BOUND_S)

# Cached blocks that nobody uses are free: with no request at all, nothing holds a block.
KV_BLOCK_LEAK = Rule(
    id="kv-block-leak",
    title="KV blocks stay in use after every request is gone",
    severity="warning",
    signal=ValueSignal(
        value=over_time("min", "kv_usage_ratio", 300.0),
        sentence="{value} of the KV blocks in use without a single request for {window}{where}",
        unit="percent",
        when=Logical(
            "and",
            Compare("==", over_time("max", "requests_running", 300.0), 0.0),
            Compare("==", over_time("max", "requests_waiting", 300.0), 0.0),
        ),
        per=ENGINE,
    ),
    threshold=0.01,
    window_s=300.0,
    hold_s=60.0,
    inhibited_by=("oom", "target-missing"),
)

_DEVICE = ("gpu",)
GPU_MEMORY_CREEP = Rule(
    id="gpu-memory-creep",
    title="Device memory creeps up",
    severity="warning",
    signal=ValueSignal(
        value=Arithmetic(
            "/",
            Arithmetic("*", Aggregate("max", Derivative("device_memory_used_bytes", HOUR_S), _DEVICE), HOUR_S),
            Aggregate("max", Instant("device_memory_total_bytes"), _DEVICE),
        ),
        sentence="{value} of the device an hour, over {window}{where}",
        unit="percent",
        # What an engine takes at its start is a step, and over after a quarter of an hour.
        when=Compare(">", Aggregate("max", Derivative("device_memory_used_bytes", 900.0), _DEVICE), 0.0),
        per=_DEVICE,
    ),
    threshold=0.01,
    window_s=HOUR_S,
    hold_s=1800.0,
    keep_firing_s=600.0,
    inhibited_by=("oom", "target-missing"),
)

METRICS_UNKNOWN = Rule(
    id="metrics-unknown",
    title="The target answers, but not with the metrics its engine should have",
    severity="warning",
    signal=ValueSignal(
        value=Instant("required_metrics_missing"),
        sentence="{value} metrics that alerts need are not exposed",
    ),
    threshold=0.0,
    window_s=60.0,
    hold_s=60.0,
    inhibited_by=("oom", "target-missing"),
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

DEFAULT_RULES: tuple[Rule, ...] = (
    OOM,
    TARGET_MISSING,
    ENGINE_STALL,
    PREEMPTION_LIVELOCK,
    EVICTION_STORM,
    KV_SATURATED,
    HEAD_OF_LINE_BLOCK,
    TTFT_SLO_BURN,
    ITL_SLO_BURN,
    PREFIX_HIT_COLLAPSE,
    CACHE_THRASH,
    KV_BLOCK_LEAK,
    GPU_MEMORY_CREEP,
    METRICS_UNKNOWN,
    KV_QUALITY_DROP,
    PREFIX_ISOLATION_BREACH,
)
