"""Time to first token burns its budget: it is the wait in the queue plus the prompt's computation.

Which of the two took longer decides: a queue wants places, pool or replicas; a slow prefill wants fewer steps.
"""

from __future__ import annotations

import math

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import has_vllm_flags
from runbooks.facts import TargetFacts
from runbooks.isolation_flags import PREFIX_CACHING
from runbooks.remedies.admission import bound_queue, more_sequences
from runbooks.remedies.elsewhere import steps_elsewhere
from runbooks.remedies.fewer_bits import consider_eight_bits
from runbooks.remedies.pool import more_pool

ID = "ttft-slo-burn"
STEP, LARGEST_STEP = "--max-num-batched-tokens", 16_384
QUEUE, PREFILL = "queue", "prefill"


def advise(facts: TargetFacts) -> Recommendation:
    """Flag changes for the `ttft-slo-burn` runbook."""
    draft = Draft(ID, facts)
    if not has_vllm_flags(facts.engine):
        return steps_elsewhere(draft)
    slow, seen = slower_part(facts)
    if slow is None:
        draft.lacks("mean times in queue and prefill, or the queue's length")
        return draft.done("Not known whether requests wait or prompts are slow: the two want different flags")
    if slow == QUEUE:
        _shorter_queue(draft)
        draft.refuse(STEP, "higher", f"will not help: requests wait before their prompt is touched ({seen})")
        end = "Lasting: more replicas, as the queue is demand above capacity"
    else:
        _fewer_steps(draft)
        draft.refuse("--max-num-queued-reqs", "lower", f"will not help: the queue is not where the time goes ({seen})")
        end = "Lasting: shorter prompts, prefix hits, or more GPUs for each replica"
    draft.step(end)
    what = "in the queue" if slow == QUEUE else "in prefill"
    if not draft.changes:
        return draft.done(f"The time goes {what} ({seen}), and no flag can be computed that shortens it")
    return draft.done(f"The time goes {what} ({seen}): " + ", ".join(f"{c.flag} {c.to}" for c in draft.changes))


def slower_part(facts: TargetFacts) -> tuple[str | None, str]:
    """Where the time to first token goes, and what shows it; None when nothing was measured."""
    traffic = facts.traffic
    queue, prefill = traffic.queue_s_mean, traffic.prefill_s_mean
    if queue is not None and prefill is not None:
        return (QUEUE if queue >= prefill else PREFILL), f"{queue:.2f} s in the queue, {prefill:.2f} s in prefill"
    if traffic.peak_waiting is None:
        return None, ""
    if traffic.peak_waiting > 0:
        return QUEUE, f"up to {traffic.peak_waiting} requests waited"
    return PREFILL, "nobody waited"


def _shorter_queue(draft: Draft) -> None:
    if not more_sequences(draft):
        pool = more_pool(draft)
        bound_queue(draft, pool)
        consider_eight_bits(draft)


def _fewer_steps(draft: Draft) -> None:
    facts = draft.facts
    if facts.flags.get(PREFIX_CACHING) is False:
        draft.step(
            f"{PREFIX_CACHING} is off: every prompt is computed in full. On again, unless it is off as first aid for "
            "prefix-isolation-breach"
        )
    now, mean = facts.max_num_batched_tokens, facts.traffic.prompt_tokens_mean
    if now is None or mean is None:
        draft.lacks(f"{STEP} in force and the mean length of prompts")
        return
    prompt = math.ceil(mean)
    if prompt <= now:
        draft.refuse(STEP, now, f"will not help: a prompt of {prompt} tokens takes one step of {now} already")
        return
    to = min(LARGEST_STEP, 1 << (prompt - 1).bit_length())
    if to <= now:
        draft.refuse(STEP, to, f"will not help: {now} is a large step already")
        return
    steps, then = -(-prompt // now), -(-prompt // to)
    peak = facts.activation_peak_bytes
    room = "" if peak is None else f" (up to {to / now:.1f} times {peak / 1024**2:.0f} MiB)"
    draft.propose(
        STEP,
        to,
        why=f"a prompt of {prompt} tokens takes {steps} steps of {now}; with {to} it takes {then}.",
        expected=f"{then} in place of {steps} steps before the first token",
        cost=f"answers in flight wait for larger steps: inter-token latency grows; so does the activation peak{room}, "
        "and the pool shrinks by it",
        verify="histogram_quantile(0.99, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[5m]))) < 2.5",
    )
