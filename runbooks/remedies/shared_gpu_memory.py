"""A pool takes the whole card: another process starves, or the second server finds nothing left.

The pool is cut to the tokens that are really needed, and to what others leave; servers start one after the other.
"""

from __future__ import annotations

import math

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import SGLANG, TENSORRT_LLM, flag_for, has_vllm_flags, no_preemptions_query
from runbooks.facts import TargetFacts
from runbooks.flags import default_of, version_key, why_absent
from runbooks.remedies.pool import BLOCKS_OVERRIDE, EXPLICIT_POOL, UTILIZATION, size, wanted_tokens

ID = "shared-gpu-memory"
RESERVE = 0.02  # of the device: what no server's budget counts


def advise(facts: TargetFacts) -> Recommendation:
    """The pool that requests really need, beside what others hold."""
    draft = Draft(ID, facts)
    draft.step(
        "Start servers on one card one after the other, each when the one before is ready: memory is measured at start"
    )
    draft.step("Add up the budgets of all processes on the card: they must stay below 1, with some percent left over")
    if _counts_others(facts):
        draft.step(
            f"{facts.engine} {facts.version} counts what others hold as its own: give the second server the sum "
            "of both shares, or upgrade"
        )
    if facts.engine == TENSORRT_LLM:
        return _tensorrt_llm(draft)
    if not has_vllm_flags(facts.engine) and facts.engine != SGLANG:
        return draft.done("Limit the pool by the engine's own setting; what it is called here is not known")
    tokens, source = _needed_tokens(facts)
    if tokens is None or facts.kv_bytes_per_token is None or facts.device_memory_bytes is None:
        draft.lacks("the requests' length and number, KV bytes per token and the device's memory")
        return draft.done("How much pool is needed cannot be computed yet")
    pool, have = tokens * facts.kv_bytes_per_token, facts.kv_cache_size_tokens
    if have is not None and have <= tokens and not facts.other_processes_bytes:
        draft.refuse(UTILIZATION, "lower", f"not needed: the pool of {have} tokens is no more than the {tokens} needed")
        return draft.done(
            "The pool is no larger than what requests need: the neighbour has to move, or they share less"
        )
    sized = _explicit(draft, pool, tokens, source) or _by_share(draft, pool, tokens, source)
    if not sized:
        return draft.done("The pool cannot be cut by a flag here; see what was refused and what is missing")
    change = draft.changes[0]
    return draft.done(f"Cut the pool to the {tokens} tokens that are needed: {change.flag} {change.to}")


def _counts_others(facts: TargetFacts) -> bool:
    """vLLM's first V1 releases charge an instance for the memory of its neighbours (fixed in 0.9.x)."""
    if facts.engine != "vllm" or facts.version is None:
        return False
    return (0, 8) <= version_key(facts.version) < (0, 9)


def _needed_tokens(facts: TargetFacts) -> tuple[int | None, str]:
    """Tokens for every request that ran or waited at the peak; at least one of --max-model-len."""
    need, source = facts.request_tokens
    wanted = wanted_tokens(facts)
    if need is None or wanted is None:
        return None, source
    tokens = max(wanted, facts.max_model_len or 0)
    block = facts.block_size or 1
    return -(-tokens // block) * block + block, source  # and the null block


def _explicit(draft: Draft, pool: int, tokens: int, source: str) -> bool:
    facts = draft.facts
    if not has_vllm_flags(facts.engine) or facts.flags.get(BLOCKS_OVERRIDE) is not None:
        return False
    absent = why_absent(facts.engine, facts.version, EXPLICIT_POOL)
    if absent is not None:
        draft.refuse(EXPLICIT_POOL, pool, absent)
        return False
    now = facts.kv_cache_bytes
    if now is not None and pool >= now:
        draft.refuse(EXPLICIT_POOL, pool, f"not needed: the pool has {size(now)}, and {size(pool)} are needed")
        return False
    room = _room(facts)
    if room is not None and pool > room:
        draft.refuse(EXPLICIT_POOL, pool, f"does not fit: others leave {size(room)} for the pool")
        return False
    before = "the share of the device" if now is None else size(now)
    return draft.propose(
        EXPLICIT_POOL,
        pool,
        why=f"{tokens} tokens ({source}) x {facts.kv_bytes_per_token} bytes = {size(pool)}; the pool now takes "
        f"{before} whatever is needed.",
        expected=f"{size((now or 0) - pool)} of the card are free for others"
        if now
        else f"a pool of {size(pool)}: the rest of the card is free",
        cost="fewer cached prefixes, and no room for more requests than were seen",
        verify=no_preemptions_query(facts.engine, facts.version),
    )


def _room(facts: TargetFacts) -> int | None:
    if facts.weights_bytes is None or facts.activation_peak_bytes is None or facts.device_memory_bytes is None:
        return None
    left = facts.device_memory_bytes * (1 - RESERVE) - facts.weights_bytes - facts.activation_peak_bytes
    return int(left) - (facts.other_processes_bytes or 0)


def _by_share(draft: Draft, pool: int, tokens: int, source: str) -> bool:
    """A utilization that pays for weights, activations and the pool that is needed."""
    facts = draft.facts
    flag = flag_for(facts.engine, UTILIZATION)
    device, weights, peak = facts.device_memory_bytes, facts.weights_bytes, facts.activation_peak_bytes
    now = facts.flags.get(flag, default_of(facts.engine, facts.version, flag))
    if device is None or weights is None or now is None:
        draft.lacks("weights, activation peak and the device's memory")
        return False
    own = weights + (0 if facts.engine == SGLANG else peak or 0) + pool
    to = math.ceil(own / device * 100 - 1e-9) / 100
    most = 1 - RESERVE - (facts.other_processes_bytes or 0) / device
    if to > most:
        draft.refuse(flag, to, f"does not fit: {size(own)} are needed, and others leave {most:.2f} of the device")
        return False
    if to >= now:
        draft.refuse(flag, to, f"not needed: {size(own)} take {to:g} of the device, and {now:g} is given")
        return False
    parts = "weights and pool" if facts.engine == SGLANG else "weights, activations and pool"
    return draft.propose(
        flag,
        to,
        why=f"{parts} of {tokens} tokens ({source}) take {size(own)} of {size(device)}: {to:g} in place of {now:g}.",
        expected=f"{size(device * (now - to))} of the card are free for others",
        cost="fewer cached prefixes, and no room for more requests than were seen",
        verify=no_preemptions_query(facts.engine, facts.version),
    )


def _tensorrt_llm(draft: Draft) -> Recommendation:
    facts = draft.facts
    tokens, source = _needed_tokens(facts)
    if tokens is None:
        draft.lacks("the requests' length and number")
        return draft.done(
            "Set kv_cache_config.max_tokens to requests x length: the smaller of it and the free share counts"
        )
    draft.propose(
        "kv_cache_config.max_tokens",
        tokens,
        why=f"requests need {tokens} tokens ({source}); the default is 0.9 of all that the weights leave.",
        expected=f"a pool of {tokens} tokens"
        + (f" in place of {facts.kv_cache_size_tokens}" if facts.kv_cache_size_tokens else ""),
        cost="fewer cached prefixes, and no room for more requests than were seen",
        verify="up == 1",
    )
    if not draft.changes:
        draft.step(f"Set kv_cache_config.max_tokens: {tokens} in the YAML: {source}")
    return draft.done(f"Cut the pool to the {tokens} tokens that are needed")
