"""Eviction storm: running requests lose their KV blocks to each other and are recomputed.

First more pool (no cost in queueing), then as many sequences as the pool holds. Never less pool.
"""

from __future__ import annotations

from runbooks.changes import WRONG_WAY, Draft, Recommendation
from runbooks.facts import TargetFacts
from runbooks.remedies.pool import UTILIZATION, fit_max_num_seqs, more_pool, size


def advise(facts: TargetFacts) -> Recommendation:
    """Flag changes for the `eviction-storm` runbook."""
    draft = Draft("eviction-storm", facts)
    before = facts.kv_cache_size_tokens
    after = more_pool(draft)
    fit_max_num_seqs(draft, after, after_change=after != before)
    lower = (
        ""
        if facts.device_memory_bytes is None
        else (f" (0.1 less takes {size(facts.device_memory_bytes * 0.1)} from the pool)")
    )
    draft.refuse(UTILIZATION, "lower", WRONG_WAY["eviction-storm", UTILIZATION][1] + lower)
    if not draft.changes:
        return draft.done("nothing can be computed that would help; see what is missing and what was refused")
    parts = []
    if after is not None and before is not None and after > before:
        parts.append(f"give the pool {after} tokens in place of {before}")
    seqs = next((c for c in draft.changes if c.flag == "--max-num-seqs"), None)
    if seqs is not None:
        parts.append(f"run at most {seqs.to} requests at once, which is what it holds")
    return draft.done("; ".join(parts).capitalize())
