"""Out of memory: the engine process died of a failed allocation.

The pool that really fits is device x utilization - weights - activation peak. A pool set by hand beyond that dies at
the first large step. After the pool: a smaller step when its activations eat the budget, and as many sequences as
the pool holds, so that the repair does not turn into an eviction storm.
"""

from __future__ import annotations

import math

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import SGLANG, flag_for, has_vllm_flags
from runbooks.facts import TargetFacts, bytes_of
from runbooks.flags import default_of
from runbooks.remedies.admission import fit_max_num_seqs
from runbooks.remedies.pool import BLOCKS_OVERRIDE, EXPLICIT_POOL, UTILIZATION, pool_that_fits, size
from runbooks.remedies.sglang import smaller_chunk

STAYS_UP = "changes(process_start_time_seconds[10m]) == 0"
ACTIVATION_SHARE = 0.25  # of what weights leave: beyond it a smaller step buys more pool than it costs
SMALLEST_STEP = 512


def advise(facts: TargetFacts) -> Recommendation:
    """Flag changes for the `oom` runbook."""
    draft = Draft("oom", facts)
    if not has_vllm_flags(facts.engine):
        return _elsewhere(draft)
    activation = _activation_peak(facts)
    explicit = facts.flags.get(EXPLICIT_POOL) is not None or facts.flags.get(BLOCKS_OVERRIDE) is not None
    if explicit:
        _pool_by_profile(draft, activation)
    else:
        _lower_utilization(draft)
    activation = _smaller_step(draft, activation)
    fits = pool_that_fits(facts, activation_bytes=activation)
    tokens = _tokens_in(facts, fits) if explicit else facts.kv_cache_size_tokens
    fit_max_num_seqs(draft, tokens, after_change=explicit)
    if not draft.changes:
        return draft.done("nothing can be computed that would help; see what is missing and what was refused")
    return draft.done("; ".join(_in_words(c.flag, c.to) for c in draft.changes).capitalize())


def _elsewhere(draft: Draft) -> Recommendation:
    """Engines that leave activations outside their share: less of it, and smaller chunks of prompt."""
    facts = draft.facts
    flag = flag_for(facts.engine, UTILIZATION)
    draft.step("At the start: the pool finds no room beside the weights, so raise the share. Under load: lower it")
    _lower_utilization(draft)
    if facts.engine == SGLANG:
        smaller_chunk(draft)
    fit_max_num_seqs(draft, facts.kv_cache_size_tokens, after_change=False)
    if not draft.changes:
        return draft.done(f"Lower {flag} by the size of the failed allocation; a value cannot be computed yet")
    return draft.done("; ".join(_in_words(c.flag, c.to) for c in draft.changes).capitalize())


def _in_words(flag: str, to: object) -> str:
    return f"remove {flag}" if to is None else f"set {flag} to {to}"


def _activation_peak(facts: TargetFacts) -> int | None:
    """The measured peak, or at least the allocation that failed (then a lower bound)."""
    known = [n for n in (facts.activation_peak_bytes, facts.oom_allocation_bytes) if n]
    return max(known) if known else None


def _tokens_in(facts: TargetFacts, pool_bytes: int | None) -> int | None:
    """Usable tokens of a pool of that size (one block is the null block)."""
    if pool_bytes is None or facts.kv_bytes_per_block is None or facts.block_size is None:
        return None
    blocks = pool_bytes // facts.kv_bytes_per_block
    return max(0, blocks - 1) * facts.block_size


def _pool_by_profile(draft: Draft, activation: int | None) -> None:
    """The pool was sized by hand: back to the sizing by profile when it does not fit."""
    facts = draft.facts
    flag = EXPLICIT_POOL if facts.flags.get(EXPLICIT_POOL) is not None else BLOCKS_OVERRIDE
    pool = facts.kv_cache_bytes or (bytes_of(facts.flags[flag]) if flag == EXPLICIT_POOL else None)
    fits = pool_that_fits(facts, activation_bytes=activation)
    if pool is None or fits is None:
        _pool_by_failed_allocation(draft, flag, pool)
        return
    if pool <= fits:
        draft.refuse(flag, None, f"not the cause: the pool of {size(pool)} is within the {size(fits)} that fit")
        return
    parts = {
        "weights": facts.weights_bytes or 0,
        "activation peak" if facts.activation_peak_bytes else "failed allocation (a lower bound)": activation or 0,
        "open blocks": facts.open_blocks_bytes or 0,
        "pool": pool,
        "its records": facts.bookkeeping_bytes or 0,
    }
    terms = " + ".join(f"{name} {size(count)}" for name, count in parts.items() if count)
    draft.propose(
        flag,
        None,
        why=f"{terms} = {size(sum(parts.values()))}, and the device has {size(facts.device_memory_bytes or 0)}. The "
        f"budget leaves {size(fits)} for the pool ({_tokens_in(facts, fits)} tokens); without the flag the engine "
        "sizes it so.",
        expected=f"pool {size(pool)} -> about {size(max(0, fits))}, as the profile measures at start",
        cost=f"the pool holds {_tokens_in(facts, fits)} tokens instead of {facts.kv_cache_size_tokens}: fewer long "
        "requests at once",
        verify=STAYS_UP,
    )


def _pool_by_failed_allocation(draft: Draft, flag: str, pool: int | None) -> None:
    """Device numbers are unknown: what failed to be allocated is what the pool must give up."""
    facts = draft.facts
    draft.lacks("device memory, weights and activation peak (start-up log), so the pool that fits is unknown")
    if flag != EXPLICIT_POOL or pool is None or not facts.oom_allocation_bytes:
        draft.lacks("the size of the failed allocation (last log lines)")
        return
    to = pool - facts.oom_allocation_bytes
    if facts.kv_bytes_per_block:
        to -= to % facts.kv_bytes_per_block
    if to <= 0:
        draft.refuse(flag, to, "the failed allocation is larger than the whole pool; the pool is not the lever")
        return
    draft.propose(
        flag,
        to,
        why=f"an allocation of {size(facts.oom_allocation_bytes)} failed beside a pool of {size(pool)}; the pool must "
        f"give up at least that: {size(to)}.",
        expected=f"the allocation of {size(facts.oom_allocation_bytes)} that failed fits",
        cost="fewer tokens in the pool",
        verify=STAYS_UP,
    )


def _lower_utilization(draft: Draft) -> None:
    """The profile sized the pool, so memory outside the budget ran out: leave more of it outside."""
    facts = draft.facts
    flag = flag_for(facts.engine, UTILIZATION)
    now, device, failed = facts.utilization, facts.device_memory_bytes, facts.oom_allocation_bytes
    default = default_of(facts.engine, facts.version, flag)
    if now is None:
        draft.lacks(f"the {flag} in force")
        return
    if device is not None and failed is not None:
        to = math.floor((now - failed / device) * 100 + 1e-9) / 100
        if to <= 0:
            draft.refuse(flag, to, "the failed allocation is as large as the budget; utilization is not the lever")
            return
        why = (
            f"outside the budget are {size(device)} x (1 - {now:g}) = {size(device * (1 - now))}; an allocation of "
            f"{size(failed)} did not fit. {now:g} - {size(failed)} / {size(device)} = {to:g}."
        )
    elif default is not None and now > default:
        to = default
        why = f"{now:g} is above the default {default:g}, and little is left outside the budget."
        draft.lacks("device memory and the size of the failed allocation, to compute the value instead of the default")
    else:
        draft.lacks("device memory and the size of the failed allocation (last log lines)")
        return
    freed = f"{now - to:.2f} of the GPU" if device is None else size(device * (now - to))
    draft.propose(
        flag,
        to,
        why=why,
        expected=f"{freed} more outside the budget, where the allocation failed",
        cost="a smaller pool: watch preemptions",
        verify=STAYS_UP,
    )


def _smaller_step(draft: Draft, activation: int | None) -> int | None:
    """Halves --max-num-batched-tokens while its activations take too much; returns the peak to count with.

    A part of the peak does not shrink with the step (logits, sampling, decoding), so half of the saving is counted
    until the next start has measured it.
    """
    flag, facts = "--max-num-batched-tokens", draft.facts
    step, device, weights, utilization = (
        facts.max_num_batched_tokens,
        facts.device_memory_bytes,
        facts.weights_bytes,
        facts.utilization,
    )
    if step is None or activation is None or device is None or weights is None or utilization is None:
        draft.lacks("the activation peak of one step")
        return activation
    budget = int(device * utilization) - weights
    least = max(SMALLEST_STEP, facts.max_num_seqs or 1)
    to = step
    while activation * to / step > ACTIVATION_SHARE * budget and to // 2 >= least:
        to //= 2
    if to == step:
        share = activation / budget if budget > 0 else math.inf
        draft.refuse(
            flag,
            step,
            f"not needed: a step of {step} tokens peaks at {size(activation)}, {share:.0%} of the "
            f"{size(budget)} that weights leave",
        )
        return activation
    peak = int(activation * to / step)
    draft.propose(
        flag,
        to,
        why=f"a step of {step} tokens peaks at {size(activation)}, {activation / budget:.0%} of the "
        f"{size(budget)} that weights leave; activations grow with the tokens of a step, so {to} tokens peak at "
        f"about {size(peak)}. Half of the saving is counted for the pool until the next start has measured it.",
        expected=f"activation peak {size(activation)} -> about {size(peak)}",
        cost=f"a long prompt takes {step // to} times as many steps: later first token, smoother decoding beside it",
        verify=STAYS_UP,
    )
    return (activation + peak) // 2
