"""Capacity was computed wrong: hidden size for KV heads, bits for bytes, weights' precision for the cache's.

Mostly a matter of arithmetic, shown with the target's own numbers; the one flag that follows from it is how many
sequences the pool really holds.
"""

from __future__ import annotations

from engine.memory.capacity import CapacityPlan
from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import SGLANG, has_vllm_flags
from runbooks.facts import TargetFacts
from runbooks.facts_deployment import plan_of
from runbooks.remedies.admission import fit_max_num_seqs
from runbooks.remedies.pool import UTILIZATION, requests_held, size

ID = "capacity-misjudged"


def advise(facts: TargetFacts) -> Recommendation:
    """The arithmetic with the target's numbers; --max-num-seqs where it promises more than the pool holds."""
    draft = Draft(ID, facts)
    plan = plan_of(facts)
    if isinstance(plan, str):
        draft.lacks(plan)
    _bytes_per_token(draft, plan if isinstance(plan, CapacityPlan) else None)
    if facts.hybrid:
        draft.step(
            "Layers with a window or a state cost the same for a request of any length beyond it: the pool's tokens in "
            "the log are concurrency x --max-model-len, no capacity. Compare concurrency at one length, or start twice "
            "with two lengths and solve for the fixed and the marginal part"
        )
    need, source = facts.request_tokens
    pool = facts.kv_cache_size_tokens
    if pool is not None and need is not None and not facts.hybrid:
        held = requests_held(pool, need, facts.block_size)
        draft.step(
            f"The pool of {pool} tokens holds {held} requests of {need} tokens ({source}) at once; the rest waits"
        )
    if pool is None:
        draft.lacks("the pool's size in tokens")
    elif (has_vllm_flags(facts.engine) or facts.engine == SGLANG) and not facts.hybrid:
        fit_max_num_seqs(draft, pool, after_change=False)
    draft.refuse(
        UTILIZATION, None, "will not help: it moves the pool by a few percent, and the estimate was off by more"
    )
    if not draft.changes:
        return draft.done("The flags are not at fault: use the bytes per token computed here")
    return draft.done("Admit what the pool holds: " + ", ".join(f"{c.flag} {c.to}" for c in draft.changes))


def _bytes_per_token(draft: Draft, plan: CapacityPlan | None) -> None:
    facts = draft.facts
    per_token = plan.kv_bytes_per_token if plan is not None else facts.kv_bytes_per_token
    if per_token is None:
        draft.lacks("the model (its config.json or name), to compute KV bytes per token")
        return
    need, source = facts.request_tokens
    each = "" if need is None else f"; a request of {need} tokens ({source}) takes {size(need * per_token)}"
    draft.step(f"KV cache: {per_token} bytes a token on each GPU{_factors(facts)}{each}")
    heads, hidden = _heads(facts), facts.shape.hidden_size if facts.shape is not None else None
    if heads and hidden and facts.shape is not None and facts.shape.num_q_heads and facts.shape.num_q_heads > heads:
        draft.step(
            f"By the hidden size the same cache would seem {facts.shape.num_q_heads / heads:.0f} times larger: queries "
            f"have {facts.shape.num_q_heads} heads, keys and values only {heads}"
        )


def _heads(facts: TargetFacts) -> int | None:
    if facts.shape is None or len(facts.shape.layers) != 1:
        return None
    return facts.shape.layers[0].num_kv_heads or None


def _factors(facts: TargetFacts) -> str:
    """The formula with its values, for models whose layers are all alike."""
    if facts.shape is None or len(facts.shape.layers) != 1:
        return ""
    group, tp = facts.shape.layers[0], facts.tp or 1
    if group.attention == "latent":
        return f" = {group.count} layers x {group.latent_width} values, on every rank alike"
    if group.attention != "full":
        return ""
    heads = max(1, group.num_kv_heads // tp)
    return f" = 2 x {group.count} layers x {heads} KV heads x {group.head_dim} x bytes a value, weights' bits aside"
