"""Flag changes for a runbook, computed from a target's own numbers. Pure: facts in, recommendation out."""

from __future__ import annotations

from collections.abc import Callable

from runbooks.changes import FlagChange, Recommendation, Refusal, refusal_reason
from runbooks.facts import TargetFacts, TrafficFacts, from_facts
from runbooks.isolation_facts import IsolationFacts
from runbooks.load import RunbookError
from runbooks.quality_candidates import QualityCandidate
from runbooks.remedies import (
    cache_thrash,
    engine_stall,
    eviction_storm,
    gpu_memory_creep,
    head_of_line_block,
    itl_slo_burn,
    kv_block_leak,
    kv_quality_drop,
    kv_saturated,
    metrics_unknown,
    oom,
    preemption_livelock,
    prefix_hit_collapse,
    prefix_isolation_breach,
    target_missing,
    ttft_slo_burn,
)

__all__ = [
    "FlagChange",
    "IsolationFacts",
    "QualityCandidate",
    "Recommendation",
    "Refusal",
    "TargetFacts",
    "TrafficFacts",
    "from_facts",
    "recommend",
    "refusal_reason",
]

_ADVISE: dict[str, Callable[[TargetFacts], Recommendation]] = {
    "cache-thrash": cache_thrash.advise,
    "engine-stall": engine_stall.advise,
    "eviction-storm": eviction_storm.advise,
    "gpu-memory-creep": gpu_memory_creep.advise,
    "head-of-line-block": head_of_line_block.advise,
    "itl-slo-burn": itl_slo_burn.advise,
    "kv-block-leak": kv_block_leak.advise,
    "kv-quality-drop": kv_quality_drop.advise,
    "kv-saturated": kv_saturated.advise,
    "metrics-unknown": metrics_unknown.advise,
    "oom": oom.advise,
    "preemption-livelock": preemption_livelock.advise,
    "prefix-hit-collapse": prefix_hit_collapse.advise,
    "prefix-isolation-breach": prefix_isolation_breach.advise,
    "target-missing": target_missing.advise,
    "ttft-slo-burn": ttft_slo_burn.advise,
}


def recommend(runbook_id: str, facts: TargetFacts) -> Recommendation:
    """The changes a runbook advises for this target; raises `RunbookError` for a runbook that computes none."""
    if runbook_id not in _ADVISE:
        raise RunbookError(
            f"runbook {runbook_id!r} computes no recommendation; there are: {', '.join(sorted(_ADVISE))}"
        )
    return _ADVISE[runbook_id](facts)
