"""A metric says what is not so: hits that are a request's own, a renamed gauge, shares added up, two tiers in one.

Which of them it can be follows from engine and version; one flag switches metrics on again, the rest is reading.
"""

from __future__ import annotations

from collections.abc import Iterator

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import SGLANG, TENSORRT_LLM, VLLM, has_vllm_flags, metric_for
from runbooks.facts import TargetFacts
from runbooks.flags import version_key
from runbooks.remedies.metrics_unknown import hidden_again, stats_on

ID = "metrics-misread"
RENAMED_IN, HITS_FIXED_IN, COUNTER_FIXED_AFTER = "0.9.2", "0.11.0", "0.18.0"


def advise(facts: TargetFacts) -> Recommendation:
    """How to read what the target tells, and what switches missing metrics on."""
    draft = Draft(ID, facts)
    for step in _reading(facts):
        draft.step(step)
    draft.step("Shares are averaged over replicas, never added: 40% and 40% are 40%")
    draft.step(
        "Counters in a window: increase(); a negative rise is a restart or a fault, never traffic that went away"
    )
    if has_vllm_flags(facts.engine):
        stats_on(draft)
    if facts.engine == VLLM and facts.unread:
        hidden_again(draft)
    if draft.changes:
        return draft.done(
            ", ".join(f"{'remove' if c.to is None else 'set'} {c.flag}" for c in draft.changes).capitalize()
        )
    return draft.done("No flag is at fault: read the metric as the steps say")


def _reading(facts: TargetFacts) -> Iterator[str]:
    if facts.engine == VLLM:
        yield from _vllm(facts)
    elif facts.engine == SGLANG:
        yield (
            "sglang:token_usage covers the pool of full attention; sglang:swa_token_usage the one with a window: read "
            "both, the fuller one decides"
        )
    elif facts.engine == TENSORRT_LLM:
        yield (
            "Statistics of older builds add the host's pool to the GPU's (PR 15075): usage looks low while the "
            "GPU's is full. Take primary figures only, or set kv_cache_config.host_cache_size to 0 while you measure"
        )
    else:
        yield (
            "See what a metric covers before comparing: window, numerator and denominator are beside every figure here"
        )


def _vllm(facts: TargetFacts) -> Iterator[str]:
    usage = metric_for(VLLM, "vllm:kv_cache_usage_perc", facts.version)
    yield (
        f"KV usage is {usage} in this version (renamed in {RENAMED_IN}): a panel with the other name is empty, "
        "not at zero"
    )
    if _before(facts, HITS_FIXED_IN):
        yield (
            "A preempted request finds its own blocks again and counts as a hit before the repair of PR 25787 (32% on "
            "prompts that share nothing): put vllm:num_preemptions_total beside the hit rate"
        )
    preempted = facts.traffic.preemptions
    if preempted:
        yield f"{preempted} preemptions in the window: their recomputed prompts are in the hit rate's denominator too"
    if "--kv-transfer-config" in facts.flags or facts.flags.get("--kv-offloading-size") is not None:
        yield (
            "External hits are counted again when a request is admitted again: cached can then seem below "
            f"external, and {COUNTER_FIXED_AFTER} crashed on it. Read local and external hits apart"
        )
    if facts.hybrid:
        yield "The pool's tokens of a hybrid model are concurrency x --max-model-len: compare them at one length only"


def _before(facts: TargetFacts, version: str) -> bool:
    return facts.version is None or version_key(facts.version) < version_key(version)
