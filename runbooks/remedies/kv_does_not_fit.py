"""The engine refuses to start: the pool is negative, or does not hold one request of --max-model-len.

Room first where it costs nothing (utilization below its limit, a smaller step when the step's activations are what
eats the budget), then a shorter context, which always lets it start. An fp8 cache and more GPUs are alternatives.
"""

from __future__ import annotations

import math
from dataclasses import replace

from engine.memory.capacity import CapacityPlan
from engine.memory.deployment import Deployment
from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import SGLANG, flag_for
from runbooks.facts import TargetFacts
from runbooks.facts_deployment import deployment_of, planned
from runbooks.flags import default_of
from runbooks.hardware import storage_only
from runbooks.remedies.pool import BLOCKS_OVERRIDE, EXPLICIT_POOL, UTILIZATION, size

ID = "kv-does-not-fit"
LENGTH, STEP, SEQS, DTYPE = "--max-model-len", "--max-num-batched-tokens", "--max-num-seqs", "--kv-cache-dtype"
TP = "--tensor-parallel-size"
MOST, LEAST_RESERVE = 0.95, 1024**3  # the most to ask for, and what must stay outside the budget
SMALL_STEP, SMALL_BATCH = 2048, 64
STARTS = "up == 1"


def advise(facts: TargetFacts) -> Recommendation:
    """The fewest changes that let one request fit, and what else would."""
    draft = Draft(ID, facts)
    draft.step("Read the start-up log: weights, activation peak, available KV memory; the sum says which part is large")
    deployment = deployment_of(facts)
    if facts.kv_available_bytes is not None and deployment is not None:
        deployment = replace(deployment, kv_cache_bytes=None)
    if deployment is None or deployment.gpu is None:
        return _from_the_log(draft)
    now = planned(deployment)
    if isinstance(now, str):
        draft.lacks(now)
        return draft.done("No plan can be made of what is known")
    now = _as_measured(facts, deployment, now)
    if now.fits:
        draft.refuse(flag_for(facts.engine, LENGTH), now.max_model_len, f"not needed: {_holds(now)}")
        return draft.done(f"By these numbers it fits: {_holds(now)}. Compare them with the start-up log")
    if now.margin_bytes >= 0:  # the pool would do, but cannot be taken
        draft.step("See the runbook shared-gpu-memory: what others hold has to go, or this pool gets smaller")
        return draft.done(_short(now))
    pool_by_hand = facts.flags.get(EXPLICIT_POOL) is not None or facts.flags.get(BLOCKS_OVERRIDE) is not None
    solved = _larger_pool_by_hand(draft, now) if pool_by_hand else _more_room(draft, deployment, now)
    if not solved and now.largest_model_len < 1 and not pool_by_hand:
        _everything(draft, deployment, now)
    else:
        _shorter_context(draft, now, alone=not solved)
    _fewer_bits(draft, deployment, now)
    _more_gpus(draft, deployment, now)
    _name_what_does_not_help(draft)
    if not draft.changes:
        return draft.done(f"No flag makes one request fit ({_short(now)}): more GPUs, a smaller model or fewer bits")
    changes = ", ".join(f"{c.flag} {_word(c.to)}" for c in draft.changes)
    return draft.done(f"{_short(now)}: {changes}")


def _word(value: object) -> str:
    return "unset" if value is None else str(value)


def _holds(now: CapacityPlan) -> str:
    return (
        f"the pool of {size(now.kv_cache_bytes)} holds a request of {now.max_model_len} tokens "
        f"({size(now.needed_bytes)})"
    )


def _short(now: CapacityPlan) -> str:
    if now.margin_bytes >= 0:
        return now.reasons[0][:1].upper() + now.reasons[0][1:]
    if now.kv_cache_bytes <= 0:
        return f"{size(-now.kv_cache_bytes)} are missing before the first block"
    return (
        f"One request of {now.max_model_len} tokens needs {size(now.needed_bytes)} and the pool has "
        f"{size(now.kv_cache_bytes)}, {size(-now.margin_bytes)} too little"
    )


def _as_measured(facts: TargetFacts, deployment: Deployment, now: CapacityPlan) -> CapacityPlan:
    """The plan with the pool that the engine's log states in place of the computed one."""
    if facts.kv_available_bytes is None or facts.kv_available_bytes <= 0:
        return now
    stated = planned(replace(deployment, kv_cache_bytes=facts.kv_available_bytes))
    return now if isinstance(stated, str) else stated


def _most(deployment: Deployment) -> float:
    """The largest utilization that leaves something outside the budget."""
    device = deployment.gpu.memory_bytes if deployment.gpu else 0
    if not device:
        return MOST
    taken = max(LEAST_RESERVE, deployment.other_processes_bytes)
    return math.floor(min(MOST, 1 - taken / device) * 100) / 100


def _more_room(draft: Draft, deployment: Deployment, now: CapacityPlan) -> bool:
    """Utilization up to its limit, else a smaller step; tells whether one request then fits."""
    facts = draft.facts
    flag = flag_for(facts.engine, UTILIZATION)
    used, device = now.gpu_memory_utilization, deployment.gpu.memory_bytes if deployment.gpu else None
    if used is None:
        used = facts.utilization or default_of(facts.engine, facts.version, flag)
    if used is None or device is None:
        draft.lacks(f"{flag} in force")
        return False
    needed = used + max(0, -now.margin_bytes) / device
    to = math.ceil(needed * 100 - 1e-9) / 100
    if to <= _most(deployment):
        return draft.propose(
            flag,
            to,
            why=f"{_short(now)}. {used:g} + {size(-now.margin_bytes)} / {size(device)} = {needed:.4f}: {to:g}.",
            expected=f"pool {size(now.kv_cache_bytes)} -> {size(now.kv_cache_bytes + device * (to - used))}: "
            f"one request of {now.max_model_len} tokens fits",
            cost=f"{size(device * (1 - to))} of the device stay outside the budget, {size(device * (1 - used))} before",
            verify=STARTS,
        )
    draft.refuse(
        flag,
        to,
        f"not enough alone: it would take {needed:.3f}, and above {_most(deployment):g} too little stays outside",
    )
    smaller = _with_smaller_step(draft, deployment, now)
    if smaller is None:
        return False
    if not smaller.fits:
        draft.refuse(
            flag_for(facts.engine, STEP), smaller.max_num_batched_tokens, f"not enough alone: {_short(smaller)}"
        )
        return False
    return _propose_step(draft, now, smaller)


def _with_smaller_step(
    draft: Draft, deployment: Deployment, now: CapacityPlan, utilization: float | None = None
) -> CapacityPlan | None:
    """The plan with a small step and batch, at another utilization if given; None where they are small already."""
    step, seqs = min(now.max_num_batched_tokens, SMALL_STEP), min(now.max_num_seqs, SMALL_BATCH)
    if step == now.max_num_batched_tokens and seqs == now.max_num_seqs and utilization is None:
        draft.refuse(
            flag_for(draft.facts.engine, STEP), step, f"will not help: a step of {step} tokens is small already"
        )
        return None
    smaller = planned(
        replace(
            deployment,
            max_num_batched_tokens=step,
            max_num_seqs=seqs,
            activation_bytes=None,
            kv_cache_bytes=None,
            gpu_memory_utilization=utilization if utilization is not None else deployment.gpu_memory_utilization,
        )
    )
    return smaller if isinstance(smaller, CapacityPlan) else None


def _propose_step(draft: Draft, now: CapacityPlan, then: CapacityPlan) -> bool:
    """The flags of the batch and the step that lead from one plan to the other."""
    engine = draft.facts.engine
    step, seqs = then.max_num_batched_tokens, then.max_num_seqs
    made = False
    for flag, to, before in ((SEQS, seqs, now.max_num_seqs), (STEP, step, now.max_num_batched_tokens)):
        if to < before:
            made |= draft.propose(
                flag_for(engine, flag),
                to,
                why=f"{_short(now)}. Activations, logits and sampler grow with the step: with {step} tokens for {seqs} "
                f"sequences in place of {now.max_num_batched_tokens} for {now.max_num_seqs} the pool gains "
                f"{size(then.kv_cache_bytes - now.kv_cache_bytes)}.",
                expected=f"pool {size(now.kv_cache_bytes)} -> {size(then.kv_cache_bytes)}",
                cost="prompts take more steps, and fewer requests run at once: later first tokens, less throughput",
                verify=STARTS,
            )
    return made


def _everything(draft: Draft, deployment: Deployment, now: CapacityPlan) -> None:
    """No lever alone is enough and there is no room at all: the most utilization, a small step, and what then fits."""
    engine, most = draft.facts.engine, _most(deployment)
    then = _with_smaller_step(draft, deployment, now, most)
    if then is None or then.largest_model_len < 1:
        return
    if now.gpu_memory_utilization is not None and most > now.gpu_memory_utilization:
        draft.propose(
            flag_for(engine, UTILIZATION),
            most,
            why=f"{_short(now)}; {most:g} is the most that leaves something outside the budget.",
            expected=f"pool {size(now.kv_cache_bytes)} -> {size(then.kv_cache_bytes)}, with the smaller step",
            cost="little stays outside the budget: a peak that no profile saw ends the engine",
            verify=STARTS,
        )
    _propose_step(draft, now, then)
    if not then.fits:
        _shorter_context(draft, then, alone=True)


def _larger_pool_by_hand(draft: Draft, now: CapacityPlan) -> bool:
    """The pool was sized by hand, and the profile may give more."""
    facts = draft.facts
    flag = BLOCKS_OVERRIDE if facts.flags.get(BLOCKS_OVERRIDE) is not None else EXPLICIT_POOL
    deployment = deployment_of(facts)
    if deployment is None:
        return False
    by_profile = planned(replace(deployment, kv_cache_bytes=None, num_gpu_blocks_override=None))
    if isinstance(by_profile, str) or by_profile.kv_cache_bytes <= now.kv_cache_bytes:
        draft.refuse(flag, None, "will not help: the profile would not give a larger pool")
        return False
    draft.propose(
        flag,
        None,
        why=f"{_short(now)}, because {flag} says so; the profile leaves {size(by_profile.kv_cache_bytes)}.",
        expected=f"pool {size(now.kv_cache_bytes)} -> about {size(by_profile.kv_cache_bytes)}",
        cost="start-up measures the activation peak again",
        verify=STARTS,
    )
    return by_profile.fits


def _shorter_context(draft: Draft, now: CapacityPlan, *, alone: bool) -> None:
    facts = draft.facts
    flag, to = flag_for(facts.engine, LENGTH), now.largest_model_len
    if to < 1:
        draft.refuse(flag, to, "will not help: there is no room for any request")
        return
    seen = facts.traffic.tokens_per_request_peak
    note = f"; the longest request seen had {seen}" if seen is not None else ""
    (draft.propose if alone else draft.offer)(
        flag,
        to,
        why=f"the pool of {size(now.kv_cache_bytes)} holds {to} tokens of one request; {now.max_model_len} would need "
        f"{size(now.needed_bytes)}.",
        expected=f"it starts, with requests of up to {to} tokens",
        cost=f"no request beyond {to} tokens{note}",
        verify=STARTS,
    )


def _fewer_bits(draft: Draft, deployment: Deployment, now: CapacityPlan) -> None:
    facts = draft.facts
    flag = flag_for(facts.engine, DTYPE)
    value = "fp8_e4m3" if facts.engine == SGLANG else "fp8"
    if deployment.kv_cache_dtype not in ("auto", "bfloat16", "float16", "bf16"):
        return
    after = planned(replace(deployment, kv_cache_dtype=value, kv_cache_bytes=facts.kv_available_bytes))
    if isinstance(after, str):
        draft.refuse(flag, value, after)
        return
    if not after.fits:
        draft.refuse(flag, value, f"not enough alone: {_short(after)}")
        return
    slow = "stored as fp8, computed in 16 bits: no faster; " if storage_only(facts.compute_capability, value) else ""
    draft.offer(
        flag,
        value,
        why=f"8 bits in place of 16: a request of {now.max_model_len} tokens needs {size(after.needed_bytes)} in place "
        f"of {size(now.needed_bytes)}.",
        expected=f"{after.max_concurrency:.2f} requests of {now.max_model_len} tokens fit",
        cost=f"{slow}answers may change: measure quality first (`kvoncall quality`)",
        verify=STARTS,
    )


def _more_gpus(draft: Draft, deployment: Deployment, now: CapacityPlan) -> None:
    facts = draft.facts
    tp = 2 * deployment.tp
    if deployment.num_gpus < tp * deployment.pp:
        draft.refuse(TP, tp, f"needs {tp * deployment.pp} GPUs, and {deployment.num_gpus} are known")
        return
    after = planned(replace(deployment, tp=tp, weights_bytes=None, activation_bytes=None, kv_cache_bytes=None))
    if isinstance(after, str):
        draft.refuse(TP, tp, after)
        return
    if not after.fits:
        draft.refuse(TP, tp, f"not enough: {_short(after)}")
        return
    draft.offer(
        TP if facts.engine != SGLANG else "--tp-size",
        tp,
        why=f"weights are divided by {tp} in place of {deployment.tp}: the pool has "
        f"{size(after.kv_cache_bytes)} on each.",
        expected=f"pool {size(now.kv_cache_bytes)} -> {size(after.kv_cache_bytes)} a GPU",
        cost="every layer waits for two more exchanges between GPUs",
        verify=STARTS,
    )


def _from_the_log(draft: Draft) -> Recommendation:
    """Without the model's shape: what the refused start said about itself."""
    facts = draft.facts
    available, per_token = facts.kv_available_bytes, facts.kv_bytes_per_token
    flag = flag_for(facts.engine, LENGTH)
    draft.lacks("the model (its config.json or name) and the GPU: with them `kvoncall plan` computes every lever")
    if available is None or per_token is None or available < per_token:
        draft.lacks("available KV memory (start-up log) and bytes per token")
        return draft.done("Nothing can be computed before the model and the GPU are known")
    to = available // per_token
    to -= to % (facts.block_size or 1)
    if facts.max_model_len is not None and to >= facts.max_model_len:
        draft.refuse(flag, to, f"not needed: {size(available)} hold {to} tokens")
        return draft.done(f"By these numbers it fits: {size(available)} hold {to} tokens")
    draft.propose(
        flag,
        to,
        why=f"{size(available)} / {per_token} bytes a token = {available // per_token} tokens, whole blocks: {to}.",
        expected=f"it starts, with requests of up to {to} tokens",
        cost=f"no request beyond {to} tokens",
        verify=STARTS,
    )
    if not draft.changes:
        return draft.done("No flag can be computed")
    return draft.done(f"Lower {flag} to {to}: that is what the pool holds")


def _name_what_does_not_help(draft: Draft) -> None:
    draft.refuse("--swap-space", None, "will not help: it never held what one request needs, and newer engines lack it")
    draft.refuse("--cpu-offload-gb", None, "moves weights to the host, not KV: every step then waits for PCIe")
