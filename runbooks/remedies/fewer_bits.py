"""An 8-bit KV cache as a lever for room: only where memory is what is short, and where its quality was measured."""

from __future__ import annotations

from runbooks.changes import Draft, refusal_reason
from runbooks.engine_names import flag_for
from runbooks.facts import TargetFacts
from runbooks.hardware import storage_only
from runbooks.kv_dtypes import FULL_PRECISION, bits_of
from runbooks.remedies.pool import why_compute_bound

_EIGHT_BITS = ("fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head")


def consider_eight_bits(draft: Draft) -> None:
    """Proposes an 8-bit cache where a measurement on this model holds; else says why not."""
    facts = draft.facts
    flag = flag_for(facts.engine, "--kv-cache-dtype")
    now = facts.flags.get(flag)
    if now is not None and now not in FULL_PRECISION:
        bits = bits_of(now)
        kept = f"{bits[0]} bits" if bits else "fewer bits"
        draft.refuse(flag, now, f"no change: {now} keeps {kept} already")
        return
    value, reason = _that_works(facts, draft.runbook, flag)
    if facts.traffic.compute_bound:
        draft.refuse(flag, value or _EIGHT_BITS[0], why_compute_bound(facts))
        return
    if value is None:
        draft.refuse(flag, _EIGHT_BITS[0], reason)
        return
    pool, held = facts.kv_cache_size_tokens, next(
        (c for c in facts.quality_candidates if c.holds and c.flags.get(flag) == value), None
    )  # fmt: skip
    room = "about 2 times the tokens" if pool is None else f"pool {pool} -> about {2 * pool} tokens"
    slow = (
        "; storage only on this GPU: computed in 16 bits, no faster"
        if storage_only(facts.compute_capability, value)
        else ""
    )
    if held is None:
        draft.refuse(
            flag, value, f"not before quality is measured (`kvoncall quality`): {room}, answers may change{slow}"
        )
        return
    draft.propose(
        flag,
        value,
        why=f"8 bits in place of 16; measured on this model: {value} {held.fall}.",
        expected=room,
        cost=f"the prefix cache starts empty{slow}",
        verify="max(vllm:kv_cache_usage_perc) < 0.95",
    )


def _that_works(facts: TargetFacts, runbook: str, flag: str) -> tuple[str | None, str]:
    """The first 8-bit format that passes the gate, or why the first of all does not."""
    first = ""
    for value in _EIGHT_BITS:
        reason = refusal_reason(runbook, facts, flag, value)
        if reason is None:
            return value, ""
        first = first or reason
    return None, first
