"""Head-of-line block: requests wait and none gets in, though blocks are free and answers go on.

Admission goes in order. Either every place is taken, or the first in the queue does not fit, or one long prompt takes
every step's tokens; each has a lever of its own.
"""

from __future__ import annotations

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import has_vllm_flags
from runbooks.facts import TargetFacts
from runbooks.flags import default_of
from runbooks.remedies.admission import context_that_fits, more_sequences
from runbooks.remedies.elsewhere import steps_elsewhere
from runbooks.remedies.pool import UTILIZATION
from runbooks.remedies.reserve import admit_in_part

ID = "head-of-line-block"
THRESHOLD, WATERMARK, MOST_RESERVE = "--long-prefill-token-threshold", "--watermark", 0.05
SHARE = 4  # prompts that share a step
LEAST_CHUNK = 256
FIRST_TOKENS = "increase(vllm:time_to_first_token_seconds_count[2m]) > 0"


def advise(facts: TargetFacts) -> Recommendation:
    """Flag changes for the `head-of-line-block` runbook."""
    draft = Draft(ID, facts)
    draft.step("Cancel the request at the head of the queue, or let its client: those behind it move at once")
    draft.step(
        "Refuse prompts beyond what free blocks ever hold at the gateway; send long ones to a replica of their own"
    )
    if not has_vllm_flags(facts.engine):
        return steps_elsewhere(draft)
    if not more_sequences(draft):
        context_that_fits(draft)
        _smaller_reserve(draft)
        admit_in_part(draft)
        _share_steps(draft)
    draft.refuse(UTILIZATION, None, "will not help much: blocks are free, the head asks for more at once than that")
    if not draft.changes:
        return draft.done("No flag can be computed: cancel the head of the queue, and see what it asked for")
    return draft.done("Let those behind the head pass: " + ", ".join(f"{c.flag} {c.to}" for c in draft.changes))


def _smaller_reserve(draft: Draft) -> None:
    now = draft.facts.flags.get(WATERMARK)
    if not isinstance(now, int | float) or now <= MOST_RESERVE:
        return
    draft.propose(
        WATERMARK,
        MOST_RESERVE,
        why=f"admission keeps {now:g} of the blocks free while anything runs; {MOST_RESERVE:g} prevents most "
        "preemptions.",
        expected=f"{now - MOST_RESERVE:.2f} of the blocks more for the head of the queue",
        cost="a few preemptions at a peak",
        verify=FIRST_TOKENS,
    )


def _share_steps(draft: Draft) -> None:
    facts = draft.facts
    step = facts.max_num_batched_tokens
    if step is None:
        draft.lacks("--max-num-batched-tokens in force")
        return
    now = facts.flags.get(THRESHOLD, default_of(facts.engine, facts.version, THRESHOLD))
    to = max(LEAST_CHUNK, step // SHARE)
    if now and now <= to:
        draft.refuse(THRESHOLD, to, f"no change: no prompt takes more than {now} of a step's {step} tokens already")
        return
    if to >= step:
        draft.refuse(THRESHOLD, to, f"will not help: a step has {step} tokens, too few to share")
        return
    draft.propose(
        THRESHOLD,
        to,
        why=f"a prompt in chunks takes all {step} tokens of a step, and nobody gets in until it is through; with {to} "
        f"at most, {SHARE} prompts share a step.",
        expected=f"a short request waits for {to} tokens of a long prompt in a step, {step} before",
        cost=f"a long prompt takes up to {SHARE} times as many steps",
        verify=FIRST_TOKENS,
    )
