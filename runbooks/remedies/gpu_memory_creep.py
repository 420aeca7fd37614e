"""GPU memory creep: the device fills slowly. A pool is taken whole at start, so what grows is something else.

Less utilization makes room for another process; against a leak it buys hours, and is not advised.
"""

from __future__ import annotations

import math

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import SGLANG, flag_for, has_vllm_flags
from runbooks.facts import TargetFacts
from runbooks.flags import default_of
from runbooks.remedies.elsewhere import steps_elsewhere
from runbooks.remedies.pool import EXPLICIT_POOL, UTILIZATION, size

ID = "gpu-memory-creep"


def advise(facts: TargetFacts) -> Recommendation:
    """Room for another process where one was measured; else steps."""
    draft = Draft(ID, facts)
    draft.step(
        "`nvidia-smi --query-compute-apps=pid,used_memory --format=csv`, twice with an hour between: which process "
        "grows?"
    )
    draft.step("Another process: move it off the device, or give it a fixed share")
    draft.step(
        "The engine itself: note what loads over time (adapters, images, new shapes, a connector), then restart it "
        "before the device is full"
    )
    flag = flag_for(facts.engine, UTILIZATION)
    if not has_vllm_flags(facts.engine):
        if facts.other_processes_bytes and facts.engine == SGLANG:
            _make_room(draft, facts.other_processes_bytes)
        return steps_elsewhere(draft)
    if not facts.other_processes_bytes:
        draft.lacks("device memory of other processes: without it nothing says that the engine should give way")
        draft.refuse(
            flag,
            "lower",
            "will not help against growth inside the engine: the pool shrinks and the leak fills the room",
        )
    else:
        _make_room(draft, facts.other_processes_bytes)
    if not draft.changes:
        return draft.done("Find out which process grows; a restart before the device is full is the mitigation")
    change = draft.changes[0]
    return draft.done(f"Another process is on the device: {change.flag} {change.to} leaves it the room it has taken")


def _make_room(draft: Draft, others: int) -> None:
    facts = draft.facts
    flag = flag_for(facts.engine, UTILIZATION)
    if facts.flags.get(EXPLICIT_POOL) is not None:
        draft.refuse(
            UTILIZATION, "lower", f"will not help: {EXPLICIT_POOL} is set, which replaces the sizing by utilization"
        )
        return
    now, device = facts.utilization, facts.device_memory_bytes
    cap = default_of(facts.engine, facts.version, flag) or now
    if now is None or device is None or cap is None:
        draft.lacks(f"{flag} in force and the device's memory")
        return
    to = math.floor((cap - others / device) * 100 + 1e-9) / 100
    if to >= now:
        draft.refuse(flag, to, f"not needed: {now:g} leaves {size(device * (1 - now))}, and others hold {size(others)}")
        return
    if to <= 0:
        draft.refuse(
            flag,
            to,
            f"will not help: others hold {size(others)} of {size(device)}; nothing is left to serve from",
        )
        return
    draft.propose(
        flag,
        to,
        why=f"other processes hold {size(others)} of {size(device)}, {others / device:.0%}; {cap:g} less that is "
        f"{to:g}, so that the rest of the device stays free for what no profile sees.",
        expected=f"{size(device * (now - to))} more outside the budget: no failed allocation when the other "
        "process and a large step meet",
        cost=f"{size(device * (now - to))} less for the KV pool: watch preemptions",
        verify="changes(process_start_time_seconds[6h]) == 0",
    )
