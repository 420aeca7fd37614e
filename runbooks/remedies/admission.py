"""Who may enter: as many sequences as the pool holds, a bounded queue, a context that can be served at all."""

from __future__ import annotations

from runbooks.changes import Draft
from runbooks.engine_names import flag_for, metric_for, no_preemptions_query
from runbooks.facts import TargetFacts
from runbooks.remedies.pool import requests_held

PREEMPTING = ("eviction-storm", "offload-resume-deadlock", "preemption-livelock", "slow-after-retraction")


def fit_max_num_seqs(draft: Draft, pool_tokens: int | None, *, after_change: bool) -> None:
    """Proposes --max-num-seqs = what the pool holds at the requests' length, when that is less than now.

    Under the engine's own name of the flag.
    """
    facts = draft.facts
    flag = flag_for(facts.engine, "--max-num-seqs")
    need, source = facts.request_tokens
    if pool_tokens is None or need is None:
        draft.lacks("the pool's size in tokens" if pool_tokens is None else "the requests' length in tokens")
        return
    held = requests_held(pool_tokens, need, facts.block_size)
    if not facts.lengths_known and draft.runbook not in PREEMPTING:
        draft.lacks("the requests' length in tokens: by the context length alone it would be cut too far")
        draft.refuse(flag, held, f"not by --max-model-len alone: {held} of {need} tokens fit, and requests are shorter")
        return
    now = facts.max_num_seqs
    pool = f"pool of {pool_tokens} tokens{' after the change' if after_change else ''}"
    sum_ = f"floor({pool_tokens} / {need}) = {held} requests of {need} tokens ({source}, whole blocks)"
    if held < 1:
        draft.refuse(
            flag, held, f"the {pool} does not hold one request of {need} tokens; lower --max-model-len instead"
        )
        return
    ceiling = now if now is not None else _may_run(facts, draft.runbook)
    if ceiling is None:
        draft.lacks(f"{flag} in force, or how many requests ran at once")
        return
    if held >= ceiling:
        draft.refuse(flag, held, f"not needed: the {pool} holds {sum_}, and {ceiling} at most want to run at once")
        return
    waiting = facts.traffic.peak_demand
    queue = (
        f"; at the peak {waiting - held} of {waiting} requests wait" if waiting is not None and waiting > held else ""
    )
    draft.propose(
        flag,
        held,
        why=f"the {pool} holds {sum_}; {ceiling} at once would want {ceiling * need} tokens.",
        expected=f"admitted requests want {held * need} of {pool_tokens} tokens at their end, and keep their "
        f"blocks: no preemption{_now_preempted(facts)}",
        cost=f"requests beyond {held} queue, so time to first token grows by their wait{queue}",
        verify=f"{no_preemptions_query(facts.engine, facts.version)} and "
        f"{metric_for(facts.engine, 'vllm:num_requests_running')} <= {held}",
    )


def _may_run(facts: TargetFacts, runbook: str) -> int | None:
    """How many would run where the limit is not known; who waits was thrown out, or would be next, where any was."""
    traffic = facts.traffic
    return traffic.peak_demand if runbook in PREEMPTING or traffic.preemptions else traffic.peak_running


def _now_preempted(facts: TargetFacts) -> str:
    seen = facts.traffic.preemptions
    return f", {seen} in the window before" if seen else ""


def bound_queue(draft: Draft, pool_tokens: int | None) -> None:
    """Proposes --max-num-queued-reqs = the requests the pool holds, where the queue has no bound."""
    facts = draft.facts
    flag = flag_for(facts.engine, "--max-num-queued-reqs")
    need, source = facts.request_tokens
    if pool_tokens is None or need is None:
        draft.lacks("the pool's size and the requests' length in tokens")
    elif facts.flags.get(flag) is not None:
        draft.refuse(flag, facts.flags[flag], f"no change: the queue is bounded at {facts.flags[flag]} already")
    elif (held := requests_held(pool_tokens, need, facts.block_size)) < 1:
        draft.refuse(flag, held, f"the pool of {pool_tokens} tokens does not hold one request of {need} tokens")
    else:
        draft.propose(
            flag,
            held,
            why=f"the pool of {pool_tokens} tokens holds {held} requests of {need} tokens ({source}); with as many "
            "waiting, the last in the queue waits about as long as one full batch takes.",
            expected=f"at most {held} wait, {_at_the_peak(facts)}a router or client can go elsewhere at once",
            cost=f"beyond {held} waiting, requests are refused with 503",
            verify=f"vllm:num_requests_waiting <= {held}",
        )


def _at_the_peak(facts: TargetFacts) -> str:
    seen = facts.traffic.peak_waiting
    return f"{seen} at the peak; " if seen else ""


def more_sequences(draft: Draft) -> bool:
    """Proposes a higher --max-num-seqs where that limit was reached and the pool holds more; tells whether it did."""
    facts = draft.facts
    flag = flag_for(facts.engine, "--max-num-seqs")
    need, source = facts.request_tokens
    now, running, pool = facts.max_num_seqs, facts.traffic.peak_running, facts.kv_cache_size_tokens
    if now is None or running is None:
        draft.lacks(f"{flag} in force and how many requests ran at once")
        return False
    if running < now:
        draft.refuse(flag, None, f"will not help: at most {running} ran at once, {now} may")
        return False
    if pool is None or need is None:
        draft.lacks("the pool's size and the requests' length in tokens")
        return False
    held = requests_held(pool, need, facts.block_size)
    if held <= now:
        draft.refuse(flag, held, f"will not help: the pool of {pool} tokens holds {held} requests of {need} tokens")
        return False
    to, why = held, ""
    budget = facts.max_num_batched_tokens
    if budget is not None and budget < held:  # each running request needs a token of every step
        to, why = budget, f" A step takes {budget} tokens (--max-num-batched-tokens), one of each request at least."
        if to <= now:
            draft.refuse(flag, held, f"will not help: a step takes {budget} tokens, one of each running request")
            return False
    return draft.propose(
        flag,
        to,
        why=f"{running} requests ran at once, which is all that {now} allows, and the pool of {pool} tokens holds "
        f"{held} of {need} tokens ({source}).{why}",
        expected=f"{to - now} more requests run in place of waiting",
        cost="larger steps: the time between tokens grows for everybody",
        verify="vllm:num_requests_waiting == 0",
    )


def context_that_fits(draft: Draft) -> bool:
    """Proposes --max-model-len = the pool's tokens where a longer request would be accepted; tells whether it did."""
    facts = draft.facts
    flag = flag_for(facts.engine, "--max-model-len")
    pool, longest = facts.kv_cache_size_tokens, facts.max_model_len
    if pool is None or longest is None:
        draft.lacks(f"the pool's size in tokens and {flag}")
        return False
    if longest <= pool:
        draft.refuse(flag, pool, f"not needed: the pool of {pool} tokens holds a request of {longest}, the longest")
        return False
    to = pool - pool % (facts.block_size or 1)
    return draft.propose(
        flag,
        to,
        why=f"the pool holds {pool} tokens and requests of up to {longest} are accepted: one beyond {to} can never "
        "be served, and waits or is preempted for ever.",
        expected=f"a request of {to + 1} to {longest} tokens is refused at once, with an error its client sees",
        cost=f"no request beyond {to} tokens; with speculative decoding go lower, its look-ahead takes blocks too",
        verify="vllm:num_requests_running > 0",
    )
