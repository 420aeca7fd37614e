"""Preemption livelock: requests are thrown out, computed again and thrown out again, and none ends.

First a context that can be served at all, then as many sequences as the pool holds. Where lengths are not known, a
reserve at admission does what can be done without them.
"""

from __future__ import annotations

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import has_vllm_flags
from runbooks.facts import TargetFacts
from runbooks.remedies.admission import context_that_fits, fit_max_num_seqs
from runbooks.remedies.elsewhere import steps_elsewhere
from runbooks.remedies.eviction_storm import refuse_less_pool
from runbooks.remedies.reserve import keep_a_reserve

ID = "preemption-livelock"


def advise(facts: TargetFacts) -> Recommendation:
    """Flag changes for the `preemption-livelock` runbook."""
    draft = Draft(ID, facts)
    draft.step(
        "Now, without a restart: stop new requests (drain, or shed at the gateway) until running ones have ended"
    )
    draft.step(
        "Cancel requests without max_tokens, or with one that can never fit: a cancelled request frees its blocks"
    )
    pool = facts.kv_cache_size_tokens
    if not has_vllm_flags(facts.engine):
        return steps_elsewhere(draft)
    shorter = context_that_fits(draft)
    fit_max_num_seqs(draft, pool, after_change=False)
    if not any(c.flag == "--max-num-seqs" for c in draft.changes):
        keep_a_reserve(draft)
    refuse_less_pool(draft)
    draft.refuse("--swap-space", None, "will not help: preempted requests are computed again, nothing is swapped")
    if not draft.changes:
        return draft.done("No flag can be computed; drain and cancel, then see what is missing")
    parts = [f"{c.flag} {c.to}" for c in draft.changes]
    what = "Refuse what can never fit, and admit" if shorter else "Admit"
    return draft.done(f"{what} only what the pool holds to its end: {', '.join(parts)}")
