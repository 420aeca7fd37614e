"""After the pool was full once and a request retracted, tokens stay slow: giants are computed again beside the rest.

As many requests as the pool holds at the length that was seen, more careful admission, and no context beyond the pool.
"""

from __future__ import annotations

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import SGLANG, has_vllm_flags
from runbooks.facts import TargetFacts
from runbooks.remedies.admission import context_that_fits, fit_max_num_seqs
from runbooks.remedies.elsewhere import steps_elsewhere
from runbooks.remedies.pool import UTILIZATION
from runbooks.remedies.sglang import more_careful, more_static_memory

ID = "slow-after-retraction"
SPLIT = "--swa-full-tokens-ratio"


def advise(facts: TargetFacts) -> Recommendation:
    """Flag changes for the `slow-after-retraction` runbook."""
    draft = Draft(ID, facts)
    draft.step("Mark retractions on the chart of tokens a second: a fall that begins with one is this page's matter")
    draft.step("Now: let the queue run dry, or restart; the slow state may not end by itself")
    if not has_vllm_flags(facts.engine) and facts.engine != SGLANG:
        return steps_elsewhere(draft)
    fit_max_num_seqs(draft, facts.kv_cache_size_tokens, after_change=False)
    context_that_fits(draft)
    if facts.engine == SGLANG:
        more_careful(draft)
        more_static_memory(draft)
        if facts.hybrid:
            draft.step(
                f"Two pools: when sglang:full_token_usage is 1 and sglang:swa_token_usage low, lower {SPLIT}, "
                "the window pool's share, so that the full one gets its room"
            )
    draft.refuse(UTILIZATION, "lower", "wrong direction: a smaller pool retracts earlier")
    if not draft.changes:
        return draft.done("No flag can be computed: see what is missing, and restart to end the slow state")
    return draft.done("Retract no more: " + ", ".join(f"{c.flag} {c.to}" for c in draft.changes))
