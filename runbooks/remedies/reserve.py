"""What admission keeps or asks for: a reserve of free blocks, and whether a whole prompt must fit at once."""

from __future__ import annotations

from runbooks.changes import Draft
from runbooks.engine_names import no_preemptions_query
from runbooks.in_force import value_in_force

WATERMARK, RESERVE, LEAST_RESERVE = "--watermark", 0.05, 0.02
WHOLE_PROMPT = "--scheduler-reserve-full-isl"


def keep_a_reserve(draft: Draft, *, instead: bool = False) -> None:
    """Proposes --watermark, which helps without knowing lengths; `instead`: as an alternative to the changes."""
    facts = draft.facts
    now = facts.flags.get(WATERMARK) or 0.0
    if now >= LEAST_RESERVE:
        draft.refuse(WATERMARK, RESERVE, f"not needed: {now:g} of the blocks stay free at admission already")
        return
    blocks = facts.num_gpu_blocks
    kept = "" if blocks is None else f" Of {blocks} blocks {int(blocks * RESERVE)} stay free."
    (draft.offer if instead else draft.propose)(
        WATERMARK,
        RESERVE,
        why=f"admission leaves nothing for answers to grow into (reserve {now:g}). Measured by vLLM: 1,065 "
        f"preemptions with 0, 187 with {RESERVE:g} on the same 450 requests.{kept}",
        expected="most preemptions gone (82% in that measurement); not all, as it knows no lengths: "
        "--max-num-seqs does, "
        "once they are measured",
        cost="requests are admitted later: time to first token grows",
        verify=no_preemptions_query(facts.engine, facts.version),
    )


def admit_in_part(draft: Draft) -> None:
    """Offers to admit prompts that do not fit whole (vLLM since 0.19), where a prompt can be longer than the pool."""
    facts = draft.facts
    pool, longest = facts.kv_cache_size_tokens, facts.max_model_len
    if facts.engine != "vllm" or pool is None or longest is None or longest <= pool:
        return
    if value_in_force(facts, WHOLE_PROMPT).value is not True:
        return
    draft.offer(
        WHOLE_PROMPT,
        False,
        why=f"the head is admitted only when its whole prompt fits; up to {longest} tokens are accepted and the "
        f"pool has {pool}.",
        expected=f"prompts of up to {pool} tokens get in as blocks come free; a longer one still ends in preemption",
        cost="prompts admitted in part may be preempted before their end",
        verify="increase(vllm:time_to_first_token_seconds_count[2m]) > 0",
    )
