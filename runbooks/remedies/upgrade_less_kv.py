"""The same flags buy less pool after an upgrade, or the engine runs out of memory that it had before.

vLLM 0.21 charges CUDA graphs to the budget; profiles and kernels differ between releases. The way back to the same
pool is utilization; where that has no room, the longest request that fits, or fewer bits.
"""

from __future__ import annotations

import math
from dataclasses import replace

from engine.memory.capacity import CapacityPlan
from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import VLLM, flag_for, has_vllm_flags
from runbooks.facts import TargetFacts
from runbooks.facts_deployment import deployment_of, planned
from runbooks.flags import default_of, version_key
from runbooks.in_force import value_in_force
from runbooks.remedies.admission import context_that_fits, fit_max_num_seqs
from runbooks.remedies.pool import BLOCKS_OVERRIDE, EXPLICIT_POOL, UTILIZATION, size

ID = "upgrade-less-kv"
GRAPHS_INSIDE, NEW_DEFAULT = "0.21", "0.20"
MOST, LEAST_OUTSIDE = 0.97, 3 * 1024**3 // 4
SAME_POOL = "max(vllm:kv_cache_usage_perc) < 0.95"


def advise(facts: TargetFacts) -> Recommendation:
    """The utilization that buys the pool of before; after a failed allocation, less of it."""
    draft = Draft(ID, facts)
    draft.step(
        "Keep the start-up logs of both versions: compare weights, activation peak, graphs and KV memory line by line"
    )
    _what_changed(draft)
    if facts.oom_allocation_bytes:
        _less_after_oom(draft)
        return _done(draft, f"An allocation of {size(facts.oom_allocation_bytes)} failed")
    for hand in (EXPLICIT_POOL, BLOCKS_OVERRIDE):
        if facts.flags.get(hand) is not None:
            draft.refuse(UTILIZATION, None, f"will not help: {hand} is set, so the pool is the same in every version")
            return _done(draft, "The pool is sized by hand and did not change")
    before, now = _pools(draft)
    if before is None or now is None:
        return _done(draft, "Which pool there was, and which there is, is not known")
    if now >= before:
        draft.refuse(flag_for(facts.engine, UTILIZATION), None, f"not needed: {now} tokens now, {before} before")
        return _done(draft, f"The pool did not shrink: {before} -> {now} tokens")
    if not _same_pool(draft, before, now):
        if has_vllm_flags(facts.engine):
            context_that_fits(draft)
        fit_max_num_seqs(draft, now, after_change=False)
    return _done(draft, f"The pool went from {before} to {now} tokens")


def _done(draft: Draft, what: str) -> Recommendation:
    if not draft.changes:
        return draft.done(f"{what}; no flag can be computed that gives it back")
    return draft.done(f"{what}: " + ", ".join(f"{c.flag} {c.to}" for c in draft.changes))


def _what_changed(draft: Draft) -> None:
    facts = draft.facts
    if facts.engine != VLLM or facts.version is None:
        return
    before, now = version_key(facts.previous_version or "0"), version_key(facts.version)
    if before < version_key(GRAPHS_INSIDE) <= now:
        draft.step(
            "Since vLLM 0.21 CUDA graphs are paid from --gpu-memory-utilization: the same share leaves their size less "
            "to the pool (about 4 points of a GPU in one report)"
        )
    if before < version_key(NEW_DEFAULT) <= now and facts.flags.get(UTILIZATION) is None:
        draft.step("Since vLLM 0.20 the default of --gpu-memory-utilization is 0.92, 0.90 before: less stays outside")


def _pools(draft: Draft) -> tuple[int | None, int | None]:
    """Tokens before and now: as measured, else as planned for both versions."""
    facts = draft.facts
    before, now = facts.previous_kv_tokens, facts.kv_cache_size_tokens
    if before is None and facts.previous_version is not None:
        before = _planned_tokens(facts, facts.previous_version)
        now = _planned_tokens(facts, facts.version)
    if before is None:
        draft.lacks("the pool before the upgrade (its start-up log, or its version and the model)")
    if now is None:
        draft.lacks("the pool now")
    return before, now


def _planned_tokens(facts: TargetFacts, version: str | None) -> int | None:
    deployment = deployment_of(facts)
    if deployment is None or deployment.gpu is None:
        return None
    plan = planned(replace(deployment, version=version))
    return max(0, plan.kv_tokens) if isinstance(plan, CapacityPlan) else None


def _same_pool(draft: Draft, before: int, now: int) -> bool:
    facts = draft.facts
    flag = flag_for(facts.engine, UTILIZATION)
    used, device, per_token = value_in_force(facts, flag).value, facts.device_memory_bytes, facts.kv_bytes_per_token
    if used is None or device is None or per_token is None:
        draft.lacks(f"{flag} in force, the device's memory and KV bytes per token")
        return False
    missing = (before - now) * per_token
    needed = float(used) + missing / device
    to = math.ceil(needed * 1000 - 1e-9) / 1000
    most = min(MOST, 1 - LEAST_OUTSIDE / device)
    if to > most:
        draft.refuse(
            flag, to, f"not possible: the same pool takes {needed:.3f}, and above {most:.3f} too little is left"
        )
        return False
    return draft.propose(
        flag,
        to,
        why=f"{before - now} tokens x {per_token} bytes = {size(missing)}, {missing / device:.3f} of {size(device)}: "
        f"{used:g} + {missing / device:.3f} = {to:g}.",
        expected=f"pool {now} -> {before} tokens, as before the upgrade",
        cost=f"{size(device * (1 - to))} of the device stay outside the budget, {size(device * (1 - float(used)))} now",
        verify=SAME_POOL,
    )


def _less_after_oom(draft: Draft) -> None:
    """What is outside the budget is too little for what this version does outside it."""
    facts = draft.facts
    flag = flag_for(facts.engine, UTILIZATION)
    now, device, failed = value_in_force(facts, flag).value, facts.device_memory_bytes, facts.oom_allocation_bytes or 0
    default = default_of(facts.engine, facts.version, flag)
    if now is None or device is None:
        draft.lacks(f"{flag} in force and the device's memory")
        return
    to = math.floor((float(now) - failed / device) * 100 + 1e-9) / 100
    if default is not None and to > default and now > default:
        to = float(default)
    if to <= 0:
        draft.refuse(flag, to, "will not help: the failed allocation is larger than the budget")
        return
    draft.propose(
        flag,
        to,
        why=f"{size(device * (1 - float(now)))} stay outside a budget of {now:g}, and {size(failed)} more were "
        f"asked for; {to:g} leaves {size(device * (1 - to))}.",
        expected=f"{size(device * (float(now) - to))} more outside the budget, for graphs and peaks",
        cost=f"{size(device * (float(now) - to))} less for the KV pool: watch preemptions",
        verify="changes(process_start_time_seconds[1h]) == 0",
    )
