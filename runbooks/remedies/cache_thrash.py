"""Cache thrash: the prefix cache drops blocks that are asked for again soon after.

Running requests are well; what they share does not fit. More room for it: in the pool first, then in host memory.
"""

from __future__ import annotations

import math

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import has_vllm_flags
from runbooks.facts import TargetFacts
from runbooks.flags import EMBEDDED
from runbooks.isolation_flags import PREFIX_CACHING, TTL
from runbooks.remedies.elsewhere import steps_elsewhere
from runbooks.remedies.pool import UTILIZATION, more_pool, size
from runbooks.wrong_way import WRONG_WAY

ID = "cache-thrash"
OFFLOAD = "--kv-offloading-size"
GIB = 1024**3


def advise(facts: TargetFacts) -> Recommendation:
    """Flag changes for the `cache-thrash` runbook."""
    draft = Draft(ID, facts)
    draft.step(
        "Send a session, and requests with one system prompt, to the same replica: N replicas without that keep N "
        "copies"
    )
    draft.step(
        "Put what is the same for all at the front of the prompt: whatever follows the first difference is never found"
    )
    if not has_vllm_flags(facts.engine):
        return steps_elsewhere(draft)
    before = facts.kv_cache_size_tokens
    after = more_pool(draft, for_cache=True)
    if facts.engine != EMBEDDED:
        _host_tier(draft)
    draft.refuse(UTILIZATION, "lower", WRONG_WAY[ID, UTILIZATION][1])
    draft.refuse(PREFIX_CACHING, False, "will not help: evictions end because nothing is found any more")
    if facts.flags.get(TTL) is not None:
        draft.refuse(
            TTL, None, "will not help: the oldest blocks go first anyway; it only forgets what is idle for longer"
        )
    if not draft.changes:
        return draft.done("No flag makes room: route by session, shorten what is not shared, or add replicas")
    parts = []
    if after is not None and before is not None and after > before:
        parts.append(f"give the pool {after} tokens in place of {before}")
    if any(c.flag == OFFLOAD for c in draft.changes):
        parts.append("keep what it drops in host memory")
    return draft.done("; ".join(parts).capitalize())


def _host_tier(draft: Draft) -> None:
    facts = draft.facts
    now, pool = facts.flags.get(OFFLOAD), facts.kv_cache_bytes
    if now is not None:
        draft.refuse(OFFLOAD, now, f"no change: {now} GiB of host memory keep dropped blocks already")
        return
    if pool is None:
        draft.lacks(f"the pool's size in bytes (the model's dimensions): {OFFLOAD} is measured by it")
        return
    to = math.ceil(pool / GIB)
    draft.propose(
        OFFLOAD,
        to,
        why=f"blocks asked for soon after would still be there in twice the room: the pool has {size(pool)}, so as "
        f"much again, {to} GiB, in host memory.",
        expected=f"room for about {2 * (facts.kv_cache_size_tokens or 0)} cached tokens in all; dropped "
        "prefixes come back "
        "over PCIe in place of being computed",
        cost=f"{to} GiB of host memory over all tensor-parallel ranks; loads compete with other PCIe traffic",
        verify="increase(vllm:external_prefix_cache_hits_total[10m]) > 0",
    )
