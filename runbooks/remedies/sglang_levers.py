"""What each runbook computes for SGLang: which levers, in which order."""

from __future__ import annotations

from collections.abc import Callable

from runbooks.changes import Draft
from runbooks.remedies.admission import bound_queue, context_that_fits, fit_max_num_seqs, more_sequences
from runbooks.remedies.sglang import host_tier, larger_chunk, more_careful, more_static_memory, smaller_chunk


def _eviction_storm(draft: Draft) -> None:
    pool = draft.facts.kv_cache_size_tokens
    after = more_static_memory(draft)
    fit_max_num_seqs(draft, after, after_change=after != pool)
    more_careful(draft)


def _preemption_livelock(draft: Draft) -> None:
    context_that_fits(draft)
    fit_max_num_seqs(draft, draft.facts.kv_cache_size_tokens, after_change=False)
    more_careful(draft)


def _cache_thrash(draft: Draft) -> None:
    if not draft.facts.flags.get("--disable-radix-cache"):
        host_tier(draft)
    more_static_memory(draft, for_cache=True)


def _kv_saturated(draft: Draft) -> None:
    bound_queue(draft, more_static_memory(draft))


def _head_of_line_block(draft: Draft) -> None:
    if not more_sequences(draft):
        context_that_fits(draft)


def _engine_stall(draft: Draft) -> None:
    if not draft.facts.traffic.peak_running:
        context_that_fits(draft)


def _ttft_slo_burn(draft: Draft) -> None:
    traffic = draft.facts.traffic
    queue, prefill = traffic.queue_s_mean, traffic.prefill_s_mean
    waited = queue >= prefill if queue is not None and prefill is not None else bool(traffic.peak_waiting)
    if not waited:
        larger_chunk(draft)
    elif not more_sequences(draft):
        bound_queue(draft, more_static_memory(draft))


def _itl_slo_burn(draft: Draft) -> None:
    smaller_chunk(draft)


def _prefix_hit_collapse(draft: Draft) -> None:
    flag = "--disable-radix-cache"
    if not draft.facts.flags.get(flag):
        return
    draft.propose(
        flag,
        None,
        why="it is set, so 0 tokens can be found",
        expected="the hit rate of before, once the cache has filled: above 0",
        cost="none for the pool: cached tokens nobody uses give way",
        verify="sglang:cache_hit_rate > 0",
    )


LEVERS: dict[str, Callable[[Draft], None]] = {
    "cache-thrash": _cache_thrash,
    "engine-stall": _engine_stall,
    "eviction-storm": _eviction_storm,
    "head-of-line-block": _head_of_line_block,
    "itl-slo-burn": _itl_slo_burn,
    "kv-saturated": _kv_saturated,
    "preemption-livelock": _preemption_livelock,
    "prefix-hit-collapse": _prefix_hit_collapse,
    "ttft-slo-burn": _ttft_slo_burn,
}
