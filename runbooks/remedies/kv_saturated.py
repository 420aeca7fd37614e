"""KV saturated: the pool is full and requests wait. Not a fault by itself: demand is above capacity."""

from __future__ import annotations

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import has_vllm_flags
from runbooks.facts import TargetFacts
from runbooks.remedies.admission import bound_queue
from runbooks.remedies.elsewhere import steps_elsewhere
from runbooks.remedies.fewer_bits import consider_eight_bits
from runbooks.remedies.pool import more_pool


def advise(facts: TargetFacts) -> Recommendation:
    """Flag changes for the `kv-saturated` runbook: more pool, then a bound on the queue."""
    draft = Draft("kv-saturated", facts)
    if not has_vllm_flags(facts.engine):
        return steps_elsewhere(draft)
    pool = more_pool(draft)
    draft.refuse("--max-num-seqs", "higher", "will not help: the pool is full, more sequences cannot be admitted")
    bound_queue(draft, pool)
    consider_eight_bits(draft)
    if not draft.changes:
        return draft.done("flags will not help: add replicas, or send less")
    return draft.done("Make the pool as large as fits and bound the queue; capacity is the lasting answer")
