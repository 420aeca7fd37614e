"""Levers that only SGLang has, computed: careful admission, the static share, chunks, pages and the host tier."""

from __future__ import annotations

import math

from runbooks.changes import Draft
from runbooks.engine_names import no_preemptions_query
from runbooks.in_force import value_in_force
from runbooks.remedies.pool import size, wanted_tokens

CAREFUL, STATIC, CHUNK = "--schedule-conservativeness", "--mem-fraction-static", "--chunked-prefill-size"
# The scheduler counts with 0.7 x conservativeness of what answers may still take, at most all of it.
FIRST_RATIO = 0.7
MOST_STATIC, STEP_STATIC = 0.92, 0.02
SMALLEST_CHUNK, LARGEST_CHUNK = 512, 16_384


def more_careful(draft: Draft) -> bool:
    """Raises --schedule-conservativeness to where admission counts with all of an answer; tells whether it did."""
    facts = draft.facts
    now = float(value_in_force(facts, CAREFUL).value or 1.0)
    to = math.ceil(100 / FIRST_RATIO) / 100
    if now >= to:
        draft.refuse(CAREFUL, to, f"will not help: at {now:g} admission counts with whole answers already")
        return False
    return draft.propose(
        CAREFUL,
        to,
        why=f"admission counts with {FIRST_RATIO:g} x {now:g} = {FIRST_RATIO * now:.0%} of what answers may "
        f"still take; {to:g} makes it all of it. More has no effect.",
        expected=f"room for {1 / (FIRST_RATIO * now) - 1:.0%} more answer tokens is kept at admission: fewer "
        "retractions",
        cost="requests are admitted later: time to first token grows",
        verify=no_preemptions_query(facts.engine, facts.version),
    )


def more_static_memory(draft: Draft, *, for_cache: bool = False) -> int | None:
    """Raises --mem-fraction-static by what requests want; returns the pool's tokens afterwards (None: unknown)."""
    facts = draft.facts
    pool, device, per_token = facts.kv_cache_size_tokens, facts.device_memory_bytes, facts.kv_bytes_per_token
    now = facts.flags.get(STATIC)
    if now is None:
        draft.lacks(f"{STATIC} in force: unset it is computed at start, and the log tells it")
        return pool
    if float(now) >= MOST_STATIC:
        draft.refuse(STATIC, now, f"will not help: {now:g} leaves too little for activations and graphs already")
        return pool
    if pool is None or device is None or per_token is None:
        draft.lacks("the pool in tokens, the GPU's memory and KV bytes per token")
        return pool
    wanted = None if for_cache else wanted_tokens(facts)
    reach = MOST_STATIC if wanted is None else float(now) + (wanted - pool) * per_token / device
    if reach <= float(now):
        draft.refuse(
            STATIC, now, f"will not help: the pool of {pool} tokens holds the {wanted} that requests want at once"
        )
        return pool
    to = min(MOST_STATIC, math.ceil(reach * 100 - 1e-9) / 100)
    added = int(device * (to - float(now)) / per_token)
    done = draft.propose(
        STATIC,
        to,
        why=f"{size(device)} x ({to:g} - {now:g}) = {size(device * (to - float(now)))} = {added} tokens at {per_token} "
        f"bytes each, beside the {pool} there are.",
        expected=f"pool {pool} -> {pool + added} tokens",
        cost=f"{size(device * (1 - to))} of the device stay for activations and graphs, "
        f"{size(device * (1 - float(now)))} "
        "before; too little, and it runs out of memory under load",
        verify="max(sglang:token_usage) < 0.95",
    )
    return pool + added if done else pool


def smaller_chunk(draft: Draft) -> bool:
    """Halves --chunked-prefill-size, so that less prompt comes between two tokens."""
    facts = draft.facts
    now = facts.max_num_batched_tokens or facts.flags.get(CHUNK)
    if not isinstance(now, int) or now <= 0:
        draft.lacks(f"{CHUNK} in force: unset it depends on the GPU's memory, and the log tells it")
        return False
    to = max(SMALLEST_CHUNK, now // 2)
    if to >= now:
        draft.refuse(CHUNK, to, f"will not help: {now} is small already")
        return False
    return draft.propose(
        CHUNK,
        to,
        why=f"answers wait for the chunk of prompt computed in between: {to} tokens of it in place of {now}.",
        expected=f"an answer waits for {to} tokens of prompts at most, {now} before: gaps that prompts cause are "
        f"{1 - to / now:.0%} shorter",
        cost=f"a prompt takes {math.ceil(now / to)} times as many chunks: later first token",
        verify="histogram_quantile(0.99, sum by (le) (rate(sglang:inter_token_latency_seconds_bucket[5m]))) < 0.1",
    )


def larger_chunk(draft: Draft) -> bool:
    """Raises --chunked-prefill-size to one chunk a prompt, so that a first token waits for fewer of them."""
    facts = draft.facts
    now, mean = facts.max_num_batched_tokens or facts.flags.get(CHUNK), facts.traffic.prompt_tokens_mean
    if not isinstance(now, int) or now <= 0 or mean is None:
        draft.lacks(f"{CHUNK} in force and the mean length of prompts")
        return False
    prompt = math.ceil(mean)
    to = min(LARGEST_CHUNK, 1 << (prompt - 1).bit_length())
    if prompt <= now or to <= now:
        draft.refuse(
            CHUNK, now, f"will not help: a prompt of {prompt} tokens takes {-(-prompt // now)} chunks of {now}"
        )
        return False
    return draft.propose(
        CHUNK,
        to,
        why=f"a prompt of {prompt} tokens takes {-(-prompt // now)} chunks of {now}; with {to} it takes "
        f"{-(-prompt // to)}.",
        expected=f"{-(-prompt // to)} in place of {-(-prompt // now)} chunks before the first token",
        cost="answers in flight wait for larger chunks, and the activation peak grows",
        verify="histogram_quantile(0.99, sum by (le) (rate(sglang:time_to_first_token_seconds_bucket[5m]))) < 2.5",
    )


def host_tier(draft: Draft) -> None:
    """--enable-hierarchical-cache with as much host memory again as the pool has, where it is not on."""
    facts = draft.facts
    flag, ratio = "--enable-hierarchical-cache", "--hicache-ratio"
    if facts.flags.get(flag):
        draft.refuse(flag, True, "no change: dropped blocks are kept in host memory already")
        return
    pool, ranks = facts.kv_cache_bytes, (facts.tp or 1) * (facts.pp or 1)
    factor = float(value_in_force(facts, ratio).value or 2.0)
    takes = (
        f"{size(pool * factor)} on each of {ranks} ranks" if pool is not None else f"{factor:g} times the pool a rank"
    )
    if (
        facts.host_memory_bytes is not None
        and pool is not None
        and pool * factor * ranks > 0.9 * facts.host_memory_bytes
    ):
        draft.refuse(flag, True, f"does not fit: it takes {takes}, and the host has {size(facts.host_memory_bytes)}")
        return
    draft.propose(
        flag,
        True,
        why=f"blocks asked for soon after would still be there: {ratio} is {factor:g}, so host memory keeps {factor:g} "
        "times what the pool holds.",
        expected=f"room for {factor:g} times the pool's tokens more; dropped prefixes come back over PCIe",
        cost=f"host memory: {takes}",
        verify="sglang:cache_hit_rate > 0",
    )
