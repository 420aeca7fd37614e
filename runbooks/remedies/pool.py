"""A larger KV pool: the lever that more than one runbook pulls, and how it is sized."""

from __future__ import annotations

import math

from runbooks.changes import Draft
from runbooks.engine_names import has_vllm_flags
from runbooks.facts import TargetFacts, bytes_of
from runbooks.flags import default_of

UTILIZATION = "--gpu-memory-utilization"
EXPLICIT_POOL = "--kv-cache-memory-bytes"
BLOCKS_OVERRIDE = "--num-gpu-blocks-override"


def size(count: float) -> str:
    """Bytes as GiB or MiB with the precision an operator reads."""
    if abs(count) >= 1024**3:
        return f"{count / 1024**3:.2f} GiB"
    return f"{count / 1024**2:.1f} MiB"


def requests_held(pool_tokens: int, tokens_per_request: int, block_size: int | None) -> int:
    """Requests of that length the pool holds at once; each takes whole blocks."""
    if block_size is None:
        return pool_tokens // tokens_per_request
    return (pool_tokens // block_size) // -(-tokens_per_request // block_size)


def wanted_tokens(facts: TargetFacts) -> int | None:
    """Pool tokens that would hold every request that wanted to run (at most --max-num-seqs) at its full length."""
    need, _ = facts.request_tokens
    wishes = [n for n in (facts.max_num_seqs, facts.traffic.peak_demand) if n is not None]
    if need is None or not wishes:
        return None
    block = facts.block_size or 1
    return min(wishes) * -(-need // block) * block


def more_pool(draft: Draft, *, for_cache: bool = False) -> int | None:
    """Proposes the larger pool that fits the device; returns the pool's tokens afterwards (None: unknown).

    No more than the requests want at once, unless it is `for_cache`: cached blocks use whatever there is. Only flags
    of vLLM and the embedded engine are proposed.
    """
    facts = draft.facts
    wanted = None if for_cache else wanted_tokens(facts)
    if not has_vllm_flags(facts.engine):
        return facts.kv_cache_size_tokens
    if not for_cache and facts.traffic.compute_bound:
        draft.refuse(UTILIZATION, "higher", why_compute_bound(facts))
        return facts.kv_cache_size_tokens
    if facts.flags.get(EXPLICIT_POOL) is not None:
        return _larger_explicit_pool(draft, wanted)
    if facts.flags.get(BLOCKS_OVERRIDE) is not None:
        return _without_override(draft)
    return _higher_utilization(draft, wanted)


def why_compute_bound(facts: TargetFacts) -> str:
    """Why no pool, however large, shortens a queue that waits for computing."""
    usage, waiting = facts.traffic.kv_usage_peak or 0.0, facts.traffic.peak_waiting
    return (
        f"will not help: the pool was {usage:.0%} full at most while {waiting} requests waited; they wait for computing"
    )


def _higher_utilization(draft: Draft, wanted: int | None) -> int | None:
    facts = draft.facts
    pool, now = facts.kv_cache_size_tokens, facts.utilization
    cap = default_of(facts.engine, facts.version, UTILIZATION)
    device, per_token = facts.device_memory_bytes, facts.kv_bytes_per_token
    if now is None or cap is None:
        draft.lacks("the --gpu-memory-utilization in force")
        return pool
    if now >= cap:
        draft.refuse(UTILIZATION, None, _at_cap(now, cap, device))
        return pool
    if pool is None or device is None or per_token is None:
        draft.lacks(
            f"device memory and KV bytes per token: {UTILIZATION} {now:g} is below the default {cap:g}, but "
            "how many tokens a higher value adds cannot be computed"
        )
        return pool
    reach = cap if wanted is None else now + (wanted - pool) * per_token / device
    if reach <= now:
        draft.refuse(
            UTILIZATION,
            None,
            f"will not help: the pool of {pool} tokens holds the {wanted} tokens that the requests want at once",
        )
        return pool
    to = min(cap, math.ceil(reach * 100 - 1e-9) / 100)
    added = int(device * (to - now) / per_token)
    added -= added % (facts.block_size or 1)
    after = pool + added
    goal = "" if wanted is None else f" The requests want {wanted} tokens at once."
    limit = f" {cap:g} is the limit: the rest of the device is for what no profile sees." if to == cap else ""
    added_up = draft.propose(
        UTILIZATION,
        to,
        why=f"the pool holds {pool} tokens at {now:g}.{goal} {to:g} adds {size(device)} x ({to:g} - {now:g}) = "
        f"{size(device * (to - now))} = {added} tokens at {per_token} bytes each: {after} tokens.{limit}",
        expected=f"pool {pool} -> {after} tokens",
        cost=f"{size(device * (1 - to))} of the device stay outside the budget, {size(device * (1 - now))} before",
        verify="max(vllm:kv_cache_usage_perc) < 0.95",
    )
    return after if added_up else pool


def _at_cap(now: float, cap: float, device: int | None) -> str:
    outside = "" if device is None else f" ({size(device * (1 - now))} outside the budget)"
    return f"{now:g} is at or above the default {cap:g} already{outside}; more risks running out of memory"


def _larger_explicit_pool(draft: Draft, wanted: int | None) -> int | None:
    """--kv-cache-memory-bytes is set, so --gpu-memory-utilization has no effect: the flag itself is the lever."""
    facts = draft.facts
    now, pool, per_token = bytes_of(facts.flags[EXPLICIT_POOL]), facts.kv_cache_size_tokens, facts.kv_bytes_per_token
    draft.refuse(UTILIZATION, None, f"will not help: {EXPLICIT_POOL} is set, which replaces the sizing by utilization")
    limit = pool_that_fits(facts)
    if now is None or pool is None or per_token is None or limit is None:
        draft.lacks("device memory, weights, activation peak and KV bytes per token")
        return pool
    block = facts.kv_bytes_per_block or per_token
    to = limit if wanted is None else min(limit, wanted * per_token + block)
    to -= to % block
    if to <= now:
        draft.refuse(EXPLICIT_POOL, to, f"will not help: {size(limit)} fit the device and the pool has {size(now)}")
        return pool
    after = pool + (to - now) // per_token
    goal = "the cache can use all of it" if wanted is None else f"the requests want {wanted} tokens"
    draft.propose(
        EXPLICIT_POOL,
        to,
        why=f"device {size(facts.device_memory_bytes or 0)} x default utilization - weights - activation peak leaves "
        f"{size(limit)} for the pool; {goal} and it has {pool}. {size(to)} hold {after}.",
        expected=f"pool {pool} -> {after} tokens",
        cost="an explicit size is not checked against the device; removing the flag lets the profile size the pool",
        verify="max(vllm:kv_cache_usage_perc) < 0.95",
    )
    return after


def _without_override(draft: Draft) -> int | None:
    facts = draft.facts
    pool, per_block, limit = facts.kv_cache_size_tokens, facts.kv_bytes_per_block, pool_that_fits(facts)
    draft.refuse(
        UTILIZATION, None, f"will not help: {BLOCKS_OVERRIDE} is set, which replaces the sizing by utilization"
    )
    if pool is None or per_block is None or limit is None or facts.block_size is None:
        draft.lacks(f"device memory, weights and activation peak: the pool without {BLOCKS_OVERRIDE} is unknown")
        return pool
    after = (limit // per_block - 1) * facts.block_size
    if after <= pool:
        draft.refuse(
            BLOCKS_OVERRIDE, None, f"will not help: the profile would give {after} tokens, the pool has {pool}"
        )
        return pool
    draft.propose(
        BLOCKS_OVERRIDE,
        None,
        why=f"the override holds the pool at {pool} tokens; without it {size(limit)} fit, {after} tokens.",
        expected=f"pool {pool} -> {after} tokens",
        cost="start-up measures the activation peak again",
        verify="max(vllm:kv_cache_usage_perc) < 0.95",
    )
    return after


def pool_that_fits(facts: TargetFacts, *, activation_bytes: int | None = None) -> int | None:
    """Device x utilization - weights - activation peak, in bytes; None when one is unknown.

    Open blocks, and the bookkeeping that comes with every block of the pool, are taken off where the engine has them.
    The utilization is the one in force, or the engine's default where the pool is sized explicitly and it is unset.
    """
    activation = facts.activation_peak_bytes if activation_bytes is None else activation_bytes
    utilization = facts.utilization
    if utilization is None:
        utilization = default_of(facts.engine, facts.version, UTILIZATION)
    if facts.device_memory_bytes is None or facts.weights_bytes is None or activation is None or utilization is None:
        return None
    budget = int(facts.device_memory_bytes * utilization)
    left = budget - facts.weights_bytes - activation - (facts.open_blocks_bytes or 0)
    if not facts.bookkeeping_bytes or not facts.kv_cache_bytes:
        return left
    return left * facts.kv_cache_bytes // (facts.kv_cache_bytes + facts.bookkeeping_bytes)
