"""The host runs out of memory for KV: a tier is sized per rank where its owner thought of the server, or too large.

vLLM's --kv-offloading-size is the sum over tensor-parallel ranks; LMCache and SGLang take theirs on every rank.
"""

from __future__ import annotations

import math

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import SGLANG, TENSORRT_LLM, VLLM
from runbooks.facts import TargetFacts
from runbooks.remedies.pool import size

ID = "offload-host-memory"
TOTAL, PER_RANK, RATIO, CONNECTOR = "--kv-offloading-size", "--hicache-size", "--hicache-ratio", "--kv-transfer-config"
MOST = 0.9  # of the host's memory: above it the kernel kills
GIB, GB = 1024**3, 10**9
ALIVE = "changes(process_start_time_seconds[1h]) == 0"


def advise(facts: TargetFacts) -> Recommendation:
    """A tier that fits the host, all ranks counted."""
    draft = Draft(ID, facts)
    ranks = (facts.tp or 1) * (facts.pp or 1)
    draft.step(
        "Count what the host gives all ranks together: `free -g`, or the pod's memory limit, which is what kills"
    )
    if facts.host_memory_bytes is None:
        draft.lacks("the host's memory (or the pod's limit)")
        return draft.done("What the host can give is not known")
    budget = int(facts.host_memory_bytes * MOST) - (facts.host_other_bytes or 0)
    if budget <= 0:
        draft.refuse(
            TOTAL, 0, f"no room: {size(facts.host_other_bytes or 0)} of {size(facts.host_memory_bytes)} are taken"
        )
        return draft.done("The host has no room for KV at all: no tier, or a larger host")
    said = f"{MOST:.0%} of {size(facts.host_memory_bytes)}" + (
        f" - {size(facts.host_other_bytes)} for the rest" if facts.host_other_bytes else ""
    )
    if facts.flags.get(CONNECTOR) is not None:
        _connector(draft, budget, ranks, said)
    elif facts.engine == SGLANG:
        _per_rank(draft, budget, ranks, said)
    elif facts.engine == VLLM:
        _total(draft, budget, ranks, said)
    elif facts.engine == TENSORRT_LLM:
        _tensorrt_llm(draft, budget, ranks, said)
    shared = f"{size(budget)} to {_ranks(ranks)}"
    draft.refuse("--cpu-offload-gb", None, "another thing: it keeps weights in host memory, per GPU, no KV")
    if not draft.changes:
        return draft.done(f"The host can give {shared}; set the tier by the steps")
    change = draft.changes[0]
    return draft.done(f"The host can give {shared}: {change.flag} {change.to}")


def _ranks(count: int) -> str:
    return "its one rank" if count == 1 else f"{count} ranks together"


def _total(draft: Draft, budget: int, ranks: int, said: str) -> None:
    facts = draft.facts
    now = facts.flags.get(TOTAL)
    if now is None:
        _swap(draft, budget, ranks)
        draft.refuse(TOTAL, None, "no change: no tier of vLLM's own is set")
        return
    to = math.floor(budget / GIB)
    if float(now) <= to:
        draft.refuse(TOTAL, to, f"not the cause: {now:g} GiB over all ranks are within {size(budget)}")
        return
    if to < 1:
        to_none = "the host can give less than 1 GiB"
        _drop(draft, TOTAL, now, to_none)
        return
    draft.propose(
        TOTAL,
        to,
        why=f"{said} = {size(budget)}; the flag is the sum over ranks: {to / ranks:.1f} GiB on each of {ranks}.",
        expected=f"{float(now) - to:.0f} GiB of host memory free again",
        cost=f"the tier keeps {to / float(now):.0%} of what it was meant to",
        verify=ALIVE,
    )


def _drop(draft: Draft, flag: str, now: object, because: str) -> None:
    draft.propose(
        flag,
        None,
        why=f"{because}, and {now} are asked for.",
        expected="host memory free again",
        cost="dropped prefixes are computed again",
        verify=ALIVE,
    )


def _swap(draft: Draft, budget: int, ranks: int) -> None:
    """The old V0 flag is per GPU, and was pinned at the start."""
    flag, now = "--swap-space", draft.facts.flags.get("--swap-space")
    if not isinstance(now, int | float):
        return
    to = math.floor(budget / GIB / ranks)
    if now * ranks * GIB <= budget:
        draft.refuse(flag, to, f"not the cause: {now:g} GiB x {ranks} ranks are within {size(budget)}")
        return
    draft.propose(
        flag,
        to,
        why=f"it is per GPU: {now:g} GiB x {ranks} = {now * ranks:g} GiB, and the host can give {size(budget)}.",
        expected=f"{(now - to) * ranks:.0f} GiB of host memory free again",
        cost="none: requests are computed again rather than swapped, except by the V0 engine with beams",
        verify=ALIVE,
    )


def _per_rank(draft: Draft, budget: int, ranks: int, said: str) -> None:
    facts = draft.facts
    to = math.floor(budget / GB / ranks)
    now, ratio = facts.flags.get(PER_RANK), facts.flags.get(RATIO)
    if not facts.flags.get("--enable-hierarchical-cache"):
        draft.refuse(PER_RANK, to, "no change: --enable-hierarchical-cache is not set, so no host memory is taken")
        return
    taken = float(now) * GB * ranks if now else None
    if taken is None and facts.kv_cache_bytes is not None:
        taken = facts.kv_cache_bytes * float(ratio or 2.0) * ranks
    if taken is not None and taken <= budget:
        draft.refuse(PER_RANK, to, f"not the cause: {size(taken)} over {ranks} ranks are within {size(budget)}")
        return
    if to < 1:
        draft.refuse(PER_RANK, to, "the host can give less than 1 GB a rank: take --enable-hierarchical-cache out")
        return
    have = f"{now} GB a rank" if now else f"--hicache-ratio {ratio or 2.0:g}"
    draft.propose(
        PER_RANK,
        to,
        why=f"{said} = {size(budget)}, over {ranks} ranks {to} GB each, as the flag is per rank; now {have}.",
        expected=f"{size(taken - to * GB * ranks)} of host memory free again"
        if taken
        else "the host keeps its reserve",
        cost="dropped prefixes beyond it are computed again",
        verify=ALIVE,
    )


def _connector(draft: Draft, budget: int, ranks: int, said: str) -> None:
    each = math.floor(budget / GIB / ranks)
    draft.step(
        f"LMCache sizes its buffer on every rank: LMCACHE_MAX_LOCAL_CPU_SIZE={each} ({said} = {size(budget)}, over "
        f"{ranks} ranks); LMCACHE_MAX_LOCAL_DISK_SIZE likewise, disk over ranks"
    )
    draft.refuse(TOTAL, None, f"not here: {CONNECTOR} names a connector with a tier of its own")


def _tensorrt_llm(draft: Draft, budget: int, ranks: int, said: str) -> None:
    flag = "kv_cache_config.host_cache_size"
    now, to = draft.facts.flags.get(flag), budget // ranks
    if isinstance(now, int) and now <= to:
        draft.refuse(flag, to, f"not the cause: {size(now)} a rank x {ranks} are within {size(budget)}")
        return
    draft.propose(
        flag,
        to,
        why=f"{said} = {size(budget)}, over {ranks} ranks {size(to)} each.",
        expected="the host keeps its reserve",
        cost="dropped blocks beyond it are computed again",
        verify="up == 1",
    )
