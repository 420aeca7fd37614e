"""KV block leak: blocks count as used though no request is left. Only a restart gives them back."""

from __future__ import annotations

from runbooks.changes import Draft, Recommendation
from runbooks.facts import TargetFacts
from runbooks.remedies.pool import UTILIZATION

ID = "kv-block-leak"


def advise(facts: TargetFacts) -> Recommendation:
    """Steps; no flag of an engine gives a lost block back."""
    draft = Draft(ID, facts)
    pool = facts.kv_cache_size_tokens
    if pool is not None:
        draft.step(
            f"Weigh it: every 1% of this pool is {pool // 100} tokens. Divide what is left of it by the growth an "
            "hour: that is how long the restart can wait"
        )
    draft.step(
        "See first that nothing is meant to hold blocks: a prefill replica keeps them until the decoder has fetched "
        "them, a KV connector until it has stored them"
    )
    draft.step(
        "Drain the replica, keep the evidence (usage over the day, cancelled requests, connector errors, version), "
        "restart it"
    )
    draft.step("Until the cause is known: restart at a quiet hour, before the leak reaches the blocks that peaks need")
    draft.refuse(UTILIZATION, None, "will not help: a larger pool leaks the same blocks, only later")
    draft.refuse(
        "--enable-prefix-caching", False, "will not help: cached blocks that nobody uses count as free on this metric"
    )
    return draft.done("Restart is the mitigation; an upgrade or a connector taken out is the repair")
