"""Resumed conversations hold the blocks that were loaded for them and wait for the rest, which nobody gives back.

Fewer at once is what helps with the connector in place; without it nothing is loaded, so nothing waits half loaded.
"""

from __future__ import annotations

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import has_vllm_flags
from runbooks.facts import TargetFacts
from runbooks.remedies.admission import fit_max_num_seqs
from runbooks.remedies.pool import UTILIZATION

ID = "offload-resume-deadlock"
OFFLOAD, CONNECTOR = "--kv-offloading-size", "--kv-transfer-config"
MOVES = "increase(vllm:request_success_total[5m]) > 0"


def advise(facts: TargetFacts) -> Recommendation:
    """As many sequences as the pool holds whole; or no tier to resume from."""
    draft = Draft(ID, facts)
    draft.step("Now: cancel one of the waiting requests, which frees what was loaded for it; else restart")
    draft.step("Upgrade to a version that reserves a whole prompt when it loads (the line of PR 57104)")
    if not has_vllm_flags(facts.engine):
        return draft.done("Take the host tier out until the engine reserves whole prompts")
    set_here = [flag for flag in (OFFLOAD, CONNECTOR) if facts.flags.get(flag) is not None]
    if not set_here:
        draft.lacks(f"whether {OFFLOAD} or {CONNECTOR} is set: without a tier nothing is resumed from one")
    fit_max_num_seqs(draft, facts.kv_cache_size_tokens, after_change=False)
    alone = not draft.changes
    for flag in set_here:
        (draft.propose if alone else draft.offer)(
            flag,
            None,
            why="without the tier every prompt is computed, and admitted whole or not at all: 0 blocks wait "
            "half loaded.",
            expected="0 stalls of this kind",
            cost="resumed conversations are computed again: their first token comes later",
            verify=MOVES,
        )
    draft.refuse(UTILIZATION, "lower", "wrong direction: a smaller pool deadlocks earlier")
    if not draft.changes:
        return draft.done("No flag can be computed: cancel one waiting request, and upgrade")
    return draft.done("Let no request wait half loaded: " + ", ".join(_word(c.flag, c.to) for c in draft.changes))


def _word(flag: str, to: object) -> str:
    return f"remove {flag}" if to is None else f"{flag} {to}"
