"""Eviction storm: running requests lose their KV blocks to each other and are recomputed.

First more pool (no cost in queueing), then as many sequences as the pool holds. Never less pool.
"""

from __future__ import annotations

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import has_vllm_flags
from runbooks.facts import TargetFacts
from runbooks.remedies.admission import fit_max_num_seqs
from runbooks.remedies.elsewhere import steps_elsewhere
from runbooks.remedies.fewer_bits import consider_eight_bits
from runbooks.remedies.pool import UTILIZATION, more_pool, size
from runbooks.remedies.reserve import keep_a_reserve
from runbooks.wrong_way import WRONG_WAY


def advise(facts: TargetFacts) -> Recommendation:
    """Flag changes for the `eviction-storm` runbook."""
    draft = Draft("eviction-storm", facts)
    before = facts.kv_cache_size_tokens
    if not has_vllm_flags(facts.engine):
        return steps_elsewhere(draft)
    after = more_pool(draft)
    fit_max_num_seqs(draft, after, after_change=after != before)
    keep_a_reserve(draft, instead=True)
    consider_eight_bits(draft)
    refuse_less_pool(draft)
    if not draft.changes:
        return draft.done("nothing can be computed that would help; see what is missing and what was refused")
    parts = []
    if after is not None and before is not None and after > before:
        parts.append(f"give the pool {after} tokens in place of {before}")
    seqs = next((c for c in draft.changes if c.flag == "--max-num-seqs"), None)
    if seqs is not None:
        parts.append(f"run at most {seqs.to} requests at once, which is what it holds")
    return draft.done("; ".join(parts).capitalize())


def refuse_less_pool(draft: Draft) -> None:
    """Says what the published advice to lower the utilization against preemptions would do here."""
    device = draft.facts.device_memory_bytes
    lower = "" if device is None else f" (0.1 less takes {size(device * 0.1)} from the pool)"
    draft.refuse(UTILIZATION, "lower", WRONG_WAY[draft.runbook, UTILIZATION][1] + lower)
