"""Flag changes for a runbook, computed from a target's own numbers. Pure: facts in, recommendation out."""

from __future__ import annotations

from collections.abc import Callable

from runbooks.changes import FlagChange, Recommendation, Refusal, refusal_reason
from runbooks.facts import TargetFacts, TrafficFacts, from_facts
from runbooks.facts_deployment import completed
from runbooks.isolation_facts import IsolationFacts
from runbooks.load import RunbookError
from runbooks.quality_candidates import QualityCandidate
from runbooks.remedies import (
    cache_thrash,
    capacity_misjudged,
    engine_stall,
    eviction_storm,
    flag_not_in_version,
    gpu_memory_creep,
    head_of_line_block,
    itl_slo_burn,
    kv_block_leak,
    kv_does_not_fit,
    kv_dtype_unsupported,
    kv_quality_drop,
    kv_saturated,
    metrics_misread,
    metrics_unknown,
    offload_host_memory,
    offload_resume_deadlock,
    oom,
    preemption_livelock,
    prefix_cache_inert,
    prefix_hit_collapse,
    prefix_isolation_breach,
    shared_gpu_memory,
    slow_after_retraction,
    target_missing,
    ttft_slo_burn,
    upgrade_less_kv,
)

__all__ = [
    "FlagChange",
    "IsolationFacts",
    "QualityCandidate",
    "Recommendation",
    "Refusal",
    "TargetFacts",
    "TrafficFacts",
    "advised_runbooks",
    "from_facts",
    "recommend",
    "refusal_reason",
]

_ADVISE: dict[str, Callable[[TargetFacts], Recommendation]] = {
    "cache-thrash": cache_thrash.advise,
    "capacity-misjudged": capacity_misjudged.advise,
    "engine-stall": engine_stall.advise,
    "eviction-storm": eviction_storm.advise,
    "flag-not-in-version": flag_not_in_version.advise,
    "gpu-memory-creep": gpu_memory_creep.advise,
    "head-of-line-block": head_of_line_block.advise,
    "itl-slo-burn": itl_slo_burn.advise,
    "kv-block-leak": kv_block_leak.advise,
    "kv-does-not-fit": kv_does_not_fit.advise,
    "kv-dtype-unsupported": kv_dtype_unsupported.advise,
    "kv-quality-drop": kv_quality_drop.advise,
    "kv-saturated": kv_saturated.advise,
    "metrics-misread": metrics_misread.advise,
    "metrics-unknown": metrics_unknown.advise,
    "offload-host-memory": offload_host_memory.advise,
    "offload-resume-deadlock": offload_resume_deadlock.advise,
    "oom": oom.advise,
    "preemption-livelock": preemption_livelock.advise,
    "prefix-cache-inert": prefix_cache_inert.advise,
    "prefix-hit-collapse": prefix_hit_collapse.advise,
    "prefix-isolation-breach": prefix_isolation_breach.advise,
    "shared-gpu-memory": shared_gpu_memory.advise,
    "slow-after-retraction": slow_after_retraction.advise,
    "target-missing": target_missing.advise,
    "ttft-slo-burn": ttft_slo_burn.advise,
    "upgrade-less-kv": upgrade_less_kv.advise,
}


def advised_runbooks() -> tuple[str, ...]:
    """The ids of all runbooks that compute advice."""
    return tuple(_ADVISE)


def recommend(runbook_id: str, facts: TargetFacts) -> Recommendation:
    """The changes a runbook advises for this target; raises `RunbookError` for a runbook that computes none."""
    if runbook_id not in _ADVISE:
        raise RunbookError(
            f"runbook {runbook_id!r} computes no recommendation; there are: {', '.join(sorted(_ADVISE))}"
        )
    return _ADVISE[runbook_id](completed(facts))
