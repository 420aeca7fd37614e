"""Inter-token latency burns its budget: answers wait for the steps they share with prompts and with each other.

A smaller step bounds how much prompt comes between two tokens. A gap from preemption is another page's matter.
"""

from __future__ import annotations

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import has_vllm_flags
from runbooks.facts import TargetFacts
from runbooks.remedies.elsewhere import steps_elsewhere

ID = "itl-slo-burn"
STEP, EAGER = "--max-num-batched-tokens", "--enforce-eager"
SMALLEST_STEP = 512
FAST = "histogram_quantile(0.99, sum by (le) (rate(vllm:inter_token_latency_seconds_bucket[5m]))) < 0.1"


def advise(facts: TargetFacts) -> Recommendation:
    """Flag changes for the `itl-slo-burn` runbook."""
    draft = Draft(ID, facts)
    draft.step("Preemptions above zero: a gap of seconds is a request computed again; that is eviction-storm")
    if not has_vllm_flags(facts.engine):
        return steps_elsewhere(draft)
    _smaller_step(draft)
    if facts.flags.get(EAGER) is True:
        draft.propose(
            EAGER,
            False,
            why="graphs are off: each of a step's kernels is launched on its own, which small batches feel most (1 "
            "token a request and step)",
            expected="1 launch for a step's kernels in place of one for each: shorter decode steps",
            cost="graph capture at start takes time and device memory",
            verify=FAST,
        )
    draft.step("Steps long with little prompt in them: the batch is too large. Fewer --max-num-seqs, or more replicas")
    if not draft.changes:
        return draft.done("No flag can be computed that would shorten the steps; see what is missing and refused")
    return draft.done(
        "Let less come between two tokens: " + ", ".join(f"{c.flag} {_word(c.to)}" for c in draft.changes)
    )


def _word(value: object) -> str:
    return "off" if value is False else str(value)


def _smaller_step(draft: Draft) -> None:
    facts = draft.facts
    now = facts.max_num_batched_tokens
    if now is None:
        draft.lacks(f"{STEP} in force")
        return
    least = max(SMALLEST_STEP, facts.max_num_seqs or 0)
    to, seen = max(least, now // 2), ""
    gap, bound, speed = facts.traffic.itl_s_p99, facts.traffic.itl_bound_s, facts.traffic.prefill_tokens_per_s
    if gap is not None and bound is not None and gap > bound and speed is not None:
        to = max(least, min(to, int(bound * speed / 2) // SMALLEST_STEP * SMALLEST_STEP))
        seen = (
            f" 99% of the gaps are within {gap:.2g} s and {bound:g} s are wanted; prompts are computed at {speed:,.0f} "
            "tokens/s or more, and half of what that makes of the bound leaves room for decoding."
        )
    if to >= now:
        draft.refuse(
            STEP,
            to,
            f"will not help: {now} leaves no room below; {facts.max_num_seqs or 'the'} running requests take one each",
        )
        return
    if facts.flags.get("--enable-chunked-prefill") is False:
        draft.refuse(STEP, to, "not without chunked prefill: a prompt must then fit one step")
        return
    draft.propose(
        STEP,
        to,
        why=f"a running answer gets one token a step, and a step may carry {now} tokens of prompts; with {to} at most "
        f"{to / now:.0%} of that comes in between.{seen}",
        expected=f"a running answer waits for {to} tokens of prompts at most, {now} before: gaps that prompts "
        f"cause are {1 - to / now:.0%} shorter",
        cost="prompts take more steps: time to first token grows",
        verify=FAST,
    )
