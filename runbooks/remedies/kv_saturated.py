"""KV saturated: the pool is full and requests wait. Not a fault by itself: demand is above capacity."""

from __future__ import annotations

from runbooks.changes import Draft, Recommendation
from runbooks.facts import TargetFacts
from runbooks.remedies.pool import more_pool, requests_held


def advise(facts: TargetFacts) -> Recommendation:
    """Flag changes for the `kv-saturated` runbook: more pool, then a bound on the queue."""
    draft = Draft("kv-saturated", facts)
    pool = more_pool(draft)
    need, source = facts.request_tokens
    flag = "--max-num-queued-reqs"
    draft.refuse("--max-num-seqs", "higher", "will not help: the pool is full, more sequences cannot be admitted")
    if pool is None or need is None:
        draft.lacks("the pool's size and the requests' length in tokens")
    elif facts.flags.get(flag) is not None:
        draft.refuse(flag, facts.flags[flag], f"no change: the queue is bounded at {facts.flags[flag]} already")
    elif (held := requests_held(pool, need, facts.block_size)) < 1:
        draft.refuse(flag, held, f"the pool of {pool} tokens does not hold one request of {need} tokens")
    else:
        draft.propose(
            flag,
            held,
            why=f"the pool of {pool} tokens holds {held} requests of {need} tokens ({source}); with as many waiting, "
            "the last in the queue waits about as long as one full batch takes.",
            expected="a bounded wait; a router or client can go elsewhere at once",
            cost=f"beyond {held} waiting, requests are refused with 503",
            verify=f"vllm:num_requests_waiting <= {held}",
        )
    if not draft.changes:
        return draft.done("flags will not help: add replicas, or send less")
    return draft.done("Make the pool as large as fits and bound the queue; capacity is the lasting answer")
