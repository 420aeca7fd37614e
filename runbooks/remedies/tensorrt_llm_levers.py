"""What each runbook computes for TensorRT-LLM: fields of the YAML its server is given, and two flags."""

from __future__ import annotations

import math
from collections.abc import Callable

from runbooks.changes import Draft
from runbooks.in_force import value_in_force
from runbooks.remedies.admission import context_that_fits, fit_max_num_seqs, more_sequences
from runbooks.remedies.pool import size, wanted_tokens

FRACTION, MOST_TOKENS = "kv_cache_config.free_gpu_memory_fraction", "kv_cache_config.max_tokens"
HOST, REUSE = "kv_cache_config.host_cache_size", "kv_cache_config.enable_block_reuse"
MOST = 0.95
ANSWERS = "up == 1"


def _more_pool(draft: Draft) -> int | None:
    """The share of what the weights leave, up to what requests want; tokens of the pool afterwards."""
    facts = draft.facts
    pool, now = facts.kv_cache_size_tokens, float(value_in_force(facts, FRACTION).value or 0.9)
    if facts.flags.get(MOST_TOKENS) is not None:
        return _more_tokens(draft)
    wanted = wanted_tokens(facts)
    if pool is None or wanted is None:
        draft.lacks("the pool in tokens, and how many tokens requests want at once")
        return pool
    if wanted <= pool:
        draft.refuse(FRACTION, now, f"will not help: the pool of {pool} tokens holds the {wanted} that requests want")
        return pool
    to = min(MOST, math.ceil(now * wanted / pool * 100 - 1e-9) / 100)
    if to <= now:
        draft.refuse(FRACTION, to, f"will not help: {now:g} leaves too little for activations already")
        return pool
    after = int(pool * to / now)
    done = draft.propose(
        FRACTION,
        to,
        why=f"the pool is {now:g} of what the weights leave and holds {pool} tokens; requests want {wanted}. {pool} x "
        f"{to:g} / {now:g} = {after}.",
        expected=f"pool {pool} -> about {after} tokens",
        cost=f"{(1 - to) / (1 - now):.0%} of the room outside the pool that there was: large steps may run out "
        "of memory",
        verify=ANSWERS,
        risk="memory outside the pool may be too little for activations: it shows under load",
    )
    return after if done else pool


def _more_tokens(draft: Draft) -> int | None:
    """max_tokens is set, and the smaller of it and the free share counts."""
    facts = draft.facts
    now, wanted = facts.flags[MOST_TOKENS], wanted_tokens(facts)
    draft.refuse(FRACTION, None, f"may not help: {MOST_TOKENS} is {now}, and the smaller of both counts")
    if wanted is None or wanted <= now:
        draft.refuse(MOST_TOKENS, wanted, "will not help: requests want no more at once, as far as is known")
        return facts.kv_cache_size_tokens
    draft.propose(
        MOST_TOKENS,
        wanted,
        why=f"it caps the pool at {now} tokens; requests want {wanted} at once.",
        expected=f"pool {now} -> {wanted} tokens, if the free share allows it",
        cost=f"{size((wanted - now) * (facts.kv_bytes_per_token or 0))} more of the "
        "GPU" if facts.kv_bytes_per_token else
        "more of the GPU",
        verify=ANSWERS,
        risk="memory outside the pool may be too little for activations: it shows under load",
    )  # fmt: skip
    return facts.kv_cache_size_tokens


def _eviction_storm(draft: Draft) -> None:
    before = draft.facts.kv_cache_size_tokens
    after = _more_pool(draft)
    fit_max_num_seqs(draft, after, after_change=after != before)


def _preemption_livelock(draft: Draft) -> None:
    context_that_fits(draft)
    fit_max_num_seqs(draft, draft.facts.kv_cache_size_tokens, after_change=False)


def _cache_thrash(draft: Draft) -> None:
    facts = draft.facts
    pool, ranks = facts.kv_cache_bytes, (facts.tp or 1) * (facts.pp or 1)
    if facts.flags.get(HOST):
        draft.refuse(HOST, facts.flags[HOST], "no change: dropped blocks are kept in host memory already")
        return
    if pool is None:
        draft.lacks(f"the pool's size in bytes: {HOST} is measured by it")
        return
    if facts.host_memory_bytes is not None and pool * ranks > 0.9 * facts.host_memory_bytes:
        draft.refuse(HOST, pool, f"does not fit: {size(pool * ranks)} over {ranks} ranks, the host has less")
        return
    draft.propose(
        HOST,
        pool,
        why="blocks asked for soon after would still be there in twice the room: as much again as the pool, "
        f"{size(pool)}.",
        expected=f"room for {facts.kv_cache_size_tokens or 0} tokens more; dropped prefixes come back over PCIe",
        cost=f"{size(pool * ranks)} of host memory over {ranks} ranks",
        verify=ANSWERS,
        risk="pinned host memory: too much, and the host kills processes",
    )


def _kv_saturated(draft: Draft) -> None:
    _more_pool(draft)


def _head_of_line_block(draft: Draft) -> None:
    if not more_sequences(draft):
        context_that_fits(draft)


def _prefix_hit_collapse(draft: Draft) -> None:
    if value_in_force(draft.facts, REUSE).value is False:
        draft.propose(
            REUSE,
            True,
            why="it is off, so 0 tokens can be found",
            expected="the hit rate of before, once the cache has filled: above 0",
            cost="none for the pool: cached blocks nobody uses give way",
            verify=ANSWERS,
            risk="hits make times depend on what others asked: isolate tenants",
        )


LEVERS: dict[str, Callable[[Draft], None]] = {
    "cache-thrash": _cache_thrash,
    "eviction-storm": _eviction_storm,
    "head-of-line-block": _head_of_line_block,
    "kv-saturated": _kv_saturated,
    "preemption-livelock": _preemption_livelock,
    "prefix-hit-collapse": _prefix_hit_collapse,
}
