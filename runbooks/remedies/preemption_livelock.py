"""Preemption livelock: requests are thrown out, computed again and thrown out again, and none ends.

First a context that can be served at all, then as many sequences as the pool holds. Where lengths are not known, a
reserve at admission does what can be done without them.
"""

from __future__ import annotations

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import has_vllm_flags, no_preemptions_query
from runbooks.facts import TargetFacts
from runbooks.remedies.admission import context_that_fits, fit_max_num_seqs
from runbooks.remedies.elsewhere import steps_elsewhere
from runbooks.remedies.eviction_storm import refuse_less_pool

ID = "preemption-livelock"
WATERMARK, RESERVE, LEAST_RESERVE = "--watermark", 0.05, 0.02


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
        _keep_a_reserve(draft)
    refuse_less_pool(draft)
    draft.refuse("--swap-space", None, "will not help: preempted requests are computed again, nothing is swapped")
    if not draft.changes:
        return draft.done("No flag can be computed; drain and cancel, then see what is missing")
    parts = [f"{c.flag} {c.to}" for c in draft.changes]
    what = "Refuse what can never fit, and admit" if shorter else "Admit"
    return draft.done(f"{what} only what the pool holds to its end: {', '.join(parts)}")


def _keep_a_reserve(draft: Draft) -> None:
    facts = draft.facts
    now = facts.flags.get(WATERMARK) or 0.0
    if now >= LEAST_RESERVE:
        draft.refuse(WATERMARK, RESERVE, f"not needed: {now:g} of the blocks stay free at admission already")
        return
    blocks = facts.num_gpu_blocks
    kept = "" if blocks is None else f" Of {blocks} blocks {int(blocks * RESERVE)} stay free."
    draft.propose(
        WATERMARK,
        RESERVE,
        why=f"admission leaves nothing for answers to grow into (reserve {now:g}). Measured by vLLM: 1,065 "
        f"preemptions with 0, 187 with {RESERVE:g} on the same 450 requests.{kept}",
        expected="most preemptions gone (82% in that measurement); not all, as it knows no lengths: "
        "--max-num-seqs does, once they are measured",
        cost="requests are admitted later: time to first token grows",
        verify=no_preemptions_query(facts.engine, facts.version),
    )
