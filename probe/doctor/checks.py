"""Findings of the doctor's own, which no alert has: where a queue comes from, where time is lost, unused levers.

They use the thresholds of the alert rules they stand beside. Each returns findings without `next`.
"""

from __future__ import annotations

from collections.abc import Iterator

from probe.alerts.backtest import VISIBLE_SHARE
from probe.doctor.finding import Confidence, Evidence, Finding, LookAlike
from probe.doctor.look_alikes import FULL, ROOMY, Scene, compute_bound, preempted_first, recomputed, seats_taken
from runbooks.flags import default_of

LEAST_SLOW = 5.0  # requests, to say where their time goes
SURE_SLOW = 50.0  # the burn rules' floor


def queue_with_room(scene: Scene) -> Iterator[Finding]:
    """Requests wait all the time, are admitted, and the pool has room: no change of KV memory helps."""
    figures = scene.figures
    waiting, usage = figures.least("requests_waiting"), figures.usage
    admitted = figures.grown("ttft_seconds_count")
    if waiting is None or usage is None or waiting < 1 or usage[2] >= FULL or not figures.tokens or not admitted:
        return
    seats = seats_taken(scene)
    where = (
        "every place of --max-num-seqs is taken" if seats.excluded is False else "steps are full, or compute is slow"
    )
    confidence: Confidence = "high" if seats.excluded is False else "medium"
    yield Finding(
        "queue-with-room",
        "warning",
        "Requests wait, but not for KV memory",
        f"{waiting:,.0f} or more waited all of {scene.window} with {1 - usage[2]:.0%} of the pool free: {where}",
        (_waiting(scene), _usage(scene), Evidence("admitted", f"{admitted:,.0f} first tokens", admitted)),
        confidence,
        "the pool never filled, requests were admitted"
        + ("" if confidence == "high" else "; --max-num-seqs is not known"),
        (LookAlike("a full KV pool", True, compute_bound(scene).by), preempted_first(scene), seats),
        "ttft-slo-burn",
    )


def slow_first_tokens(scene: Scene) -> Iterator[Finding]:
    """First tokens above the objective, too few for a burn rate: whether they lose their time in queue or prefill."""
    figures = scene.figures
    slow = figures.slow("ttft_seconds")
    if slow is None or slow[1] < LEAST_SLOW or slow[0] / slow[1] <= VISIBLE_SHARE:
        return
    late, served, bound = slow
    queue, prefill = figures.mean("queue_seconds"), figures.mean("prefill_seconds")
    where = "the page does not tell where"
    if queue is not None and prefill is not None:
        where = "most of it in the queue" if queue >= prefill else "most of it in prefill"
    yield Finding(
        "slow-first-tokens",
        "warning",
        "First tokens come late",
        f"{late:,.0f} of {served:,.0f} first tokens took more than {bound:g} s in {scene.window}: {where}",
        (
            _late(scene, "late first tokens", late, served, bound),
            *(_mean(scene, name) for name in ("queue_seconds", "prefill_seconds")),
        ),
        "high" if served >= SURE_SLOW else "medium" if served >= 2 * LEAST_SLOW else "low",
        f"{served:,.0f} observations",
        (compute_bound(scene), preempted_first(scene)),
        "ttft-slo-burn",
    )


def slow_tokens(scene: Scene) -> Iterator[Finding]:
    """Gaps between tokens above the objective."""
    figures = scene.figures
    slow = figures.slow("itl_seconds")
    if slow is None or slow[1] < SURE_SLOW or slow[0] / slow[1] <= VISIBLE_SHARE:
        return
    late, served, bound = slow
    prompts = figures.grown("prompt_tokens_total") or 0.0
    yield Finding(
        "slow-tokens",
        "warning",
        "Answers stutter",
        f"{late:,.0f} of {served:,.0f} gaps between tokens were longer than {bound:g} s in {scene.window}",
        (
            _late(scene, "long gaps", late, served, bound),
            Evidence("prompts beside", f"{prompts:,.0f} prompt tokens computed meanwhile", prompts),
        ),
        "high" if served >= 10 * SURE_SLOW else "medium",
        f"{served:,.0f} observations",
        (recomputed(scene),),
        "itl-slo-burn",
    )


def hot_replica(scene: Scene) -> Iterator[Finding]:
    """One replica of several is full and has a queue, another has room."""
    means, waiting = scene.figures.usage_by_engine, scene.figures.by_engine("requests_waiting")
    if len(means) < 2:
        return
    hot, cold = max(means, key=lambda e: means[e]), min(means, key=lambda e: means[e])
    if means[hot] < FULL or means[cold] >= ROOMY or min(waiting.get(hot, [0.0])) < 1:
        return
    yield Finding(
        "hot-replica",
        "warning",
        "One replica is full while another has room",
        f"engine {hot} is {means[hot]:.0%} full with a queue, engine {cold} {means[cold]:.0%}: routing, not memory",
        tuple(Evidence(f"engine {e}", f"KV usage {means[e]:.1%} on average", means[e]) for e in sorted(means)),
        "high",
        f"both were read at every scrape of {scene.window}",
        (LookAlike("a pool that is too small", True, f"engine {cold} has {1 - means[cold]:.0%} of its pool free"),),
        "kv-saturated",
    )


def over_admission(scene: Scene) -> Iterator[Finding]:
    """More requests run than the pool can hold at their full length."""
    facts, each = scene.facts, scene.figures.request_tokens
    running, pool = scene.figures.most("requests_running"), facts.kv_cache_size_tokens
    if each is None or running is None or not pool or running < 2 or running * each <= pool * scene.figures.replicas:
        return
    fit = int(pool * scene.figures.replicas / each)
    preempted = scene.figures.grown("preemptions_total") or 0.0
    yield Finding(
        "over-admission",
        "warning" if preempted else "info",
        "More requests run than the pool can hold at their full length",
        f"{running:,.0f} ran at once, each {each:,.0f} tokens long on average: the pool of {pool:,} tokens holds {fit}",
        (
            Evidence("pool", f"{pool:,} tokens", float(pool)),
            Evidence("demand", f"{running:,.0f} x {each:,.0f} tokens", running * each, running, each),
            Evidence("preemptions", f"{preempted:,.0f}", preempted, window_s=scene.figures.window_s),
        ),
        "medium",
        "means of requests that ended in the window stand for those that run",
        (),
        "eviction-storm",
    )


def unused_memory(scene: Scene) -> Iterator[Finding]:
    """Memory utilization below the default of the version, while the pool is full."""
    facts, usage = scene.facts, scene.figures.usage
    default = default_of(facts.engine, facts.version, "--gpu-memory-utilization")
    if facts.utilization is None or not isinstance(default, float) or usage is None or usage[2] < FULL:
        return
    if facts.utilization >= default or facts.flags.get("--num-gpu-blocks-override") is not None:
        return
    yield Finding(
        "unused-memory",
        "info",
        "Less GPU memory is used than the engine would by default",
        f"--gpu-memory-utilization is {facts.utilization:g}, the default {default:g}; the pool reached {usage[2]:.0%}",
        (_usage(scene),),
        "medium",
        "whether another process needs the rest of the card is not known",
        (LookAlike("a card shared on purpose", None, "look at nvidia-smi"),),
        "kv-saturated",
    )


def cache_off(scene: Scene) -> Iterator[Finding]:
    """Prefix caching is off: whether prompts repeat cannot be seen then."""
    if scene.facts.flags.get("--enable-prefix-caching") is not False or not scene.figures.grown("prompt_tokens_total"):
        return
    yield Finding(
        "prefix-cache-off",
        "info",
        "Prefix caching is off",
        "prompts that repeat are computed each time; whether they do cannot be seen while it is off",
        (
            Evidence(
                "prompt tokens",
                f"{scene.figures.grown('prompt_tokens_total') or 0:,.0f} computed",
                window_s=scene.figures.window_s,
            ),
        ),
        "low",
        "nothing counts repeated prompts while the cache is off: switch it on at one replica",
        (LookAlike("prompts that share nothing by nature", None, "switch it on at one replica and read its hit rate"),),
        "prefix-hit-collapse",
    )


def corrupted(scene: Scene) -> Iterator[Finding]:
    """NaN among the logits of requests."""
    count = scene.figures.grown("requests_corrupted_total")
    if not count:
        return
    yield Finding(
        "corrupted-requests",
        "critical",
        "Requests with NaN in their logits",
        f"{count:,.0f} requests in {scene.window}",
        (Evidence("corrupted", f"{count:,.0f} requests", count, window_s=scene.figures.window_s),),
        "high",
        "the engine counts them itself",
        (),
        "kv-quality-drop",
    )


def restarted(scene: Scene) -> Iterator[Finding]:
    """Counters that began anew, where no start time says that the process was replaced."""
    events = [event for event in scene.figures.observed.events if event.kind == "counter_reset"]
    told = any(event.kind == "engine_restart" for event in scene.figures.observed.events)
    events = [event for event in events if event.ts >= scene.figures.observed.since]
    if not events or told:
        return
    yield Finding(
        "restarted",
        "critical",
        "Counters began anew: the engine restarted within the window",
        events[-1].message,
        (Evidence("resets", f"{len(events)} in {scene.window}", float(len(events)), window_s=scene.figures.window_s),),
        "medium",
        "the page has no start time of the process to prove it",
        (LookAlike("a storm that seems to end", True, "counters are added up across the reset"),),
        "oom",
    )


def _waiting(scene: Scene) -> Evidence:
    least, most = scene.figures.least("requests_waiting"), scene.figures.most("requests_waiting")
    return Evidence(
        "waiting", f"{least or 0:,.0f} to {most or 0:,.0f} requests", least, window_s=scene.figures.window_s
    )


def _usage(scene: Scene) -> Evidence:
    usage = scene.figures.usage or (0.0, 0.0, 0.0)
    text = f"{usage[0]:.1%} to {usage[2]:.1%}, mean {usage[1]:.1%}"
    return Evidence("KV usage", text, usage[1], window_s=scene.figures.window_s)


def _late(scene: Scene, name: str, late: float, served: float, bound: float) -> Evidence:
    text = f"{late:,.0f} of {served:,.0f} above {bound:g} s"
    return Evidence(name, text, late / served, late, served, scene.figures.window_s)


def _mean(scene: Scene, histogram: str) -> Evidence:
    name, value = histogram.removesuffix("_seconds"), scene.figures.mean(histogram)
    text = "not exposed, or no request ended" if value is None else f"{value:.2f} s on average"
    return Evidence(name, text, value, window_s=scene.figures.window_s)


CHECKS = (
    restarted,
    corrupted,
    hot_replica,
    queue_with_room,
    slow_first_tokens,
    slow_tokens,
    over_admission,
    unused_memory,
    cache_off,
)
