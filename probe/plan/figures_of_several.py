"""Figures of several pools: variants of one server, ranks, host memory, and what a device has left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import ConfigError
from engine.memory.capacity import CapacityPlan
from engine.memory.offload import HostTier, plan_offload
from engine.memory.plan import plan
from engine.memory.slots import canonical_format
from probe.plan.anchors import GIB, Anchor
from probe.plan.finding import L2_GIB, Figure, Finding, l1
from probe.plan.pool_of import Pool, deployment_of, plan_with, stated_pool

_SWAP_GIB = 4  # --swap-space of vLLM V0, per GPU


def by_variant(anchor: Anchor) -> list[Finding]:
    """`tokens_X`, `mml_X`, `conc_X` of several checkpoints or KV formats.

    With dims and a pool each (`kv_gib_X`, or one for all) they are planned; without, the printed tokens must be
    concurrency x max_model_len.
    """
    found = []
    for key, expected in anchor.reported.items():
        if not key.startswith(("conc_", "tokens_")) or key == "tokens_per_rank":
            continue
        what, _, suffix = key.partition("_")
        count, length = anchor.reported.get(f"tokens_{suffix}"), anchor.reported.get(f"mml_{suffix}")
        planned = _variant(anchor, suffix, length)
        if planned is not None:
            pool, plan_of_it = planned
            got = plan_of_it.kv_tokens if what == "tokens" else plan_of_it.max_concurrency
            found.append(Finding(key, expected, got, l1(anchor, pool, expected)))
        elif what == "conc" and isinstance(count, int) and isinstance(length, int) and length:
            note = (
                "for a hybrid model the printed tokens are concurrency x max_model_len, not bytes over a token's bytes"
            )
            found.append(
                Finding(f"max_concurrency {suffix}", expected, count / length, l1(anchor, None, expected), note=note)
            )
            found.append(Finding(key, "consistent", "consistent" if count >= length * (expected - 0.005) else "not"))
    return found


def _variant(anchor: Anchor, suffix: str, length: Any) -> tuple[Pool, CapacityPlan] | None:
    own = {key.removesuffix(f"_{suffix}"): value for key, value in anchor.inputs.items() if key.endswith(f"_{suffix}")}
    varied = replace(anchor, inputs={**anchor.inputs, **own, **({"max_model_len": length} if length else {})})
    try:
        varied = replace(varied, kv_dtype=canonical_format(suffix, "bfloat16"))
    except ConfigError:
        if not own:
            return None
    pool = stated_pool(varied)
    if anchor.shape is None or pool is None:
        return None
    return pool, plan_with(varied, pool)


def per_rank(anchor: Anchor) -> list[Finding]:
    """An engine's ranks print a size each; the least of them counts, never their sum."""
    ranks, expected = anchor.reported.get("tokens_per_rank"), anchor.reported.get("effective_tokens")
    if not isinstance(ranks, list) or not ranks:
        return []
    block = anchor.block_size or 1
    pools = [plan(deployment_of(anchor, num_gpu_blocks_override=max(1, count // block))) for count in ranks]
    found = [
        Finding(f"tokens_per_rank {rank}", count, planned.kv_tokens, l1(anchor, None))
        for rank, (count, planned) in enumerate(zip(ranks, pools, strict=True))
    ]
    if expected is not None:
        found.append(Finding("effective_tokens", expected, min(p.kv_tokens for p in pools), l1(anchor, None)))
    return found


def host_memory(anchor: Anchor) -> list[Finding]:
    """A tier that every rank takes for itself."""
    table, stated = anchor.reported.get("cpu_gib_by_tp"), anchor.size("kv") or anchor.size("cpu")
    if not isinstance(table, dict):
        return []
    if stated is None:
        return [Finding("cpu_gib_by_tp", str(table), None, note="the anchor states no size of the tier")]
    tier = HostTier("tier", stated, True, "its size")
    return [
        Finding(f"cpu_gib_by_tp {tp}", value, plan_offload([tier], int(tp), None).total_bytes / GIB, l1(anchor, None))
        for tp, value in table.items()
    ]


def cpu_blocks(anchor: Anchor) -> list[Finding]:
    """vLLM V0's swap space, 4 GiB a GPU unless stated."""
    expected = anchor.reported.get("cpu_blocks")
    if not isinstance(expected, int | float):
        return []
    swap = anchor.size("swap") or anchor.size("swap_space") or _SWAP_GIB * GIB
    planned = plan(deployment_of(anchor, num_gpu_blocks_override=2))
    return [Finding("cpu_blocks", expected, swap // planned.kv_bytes_per_block, l1(anchor, None))]


def left_after_pool(anchor: Anchor) -> list[Finding]:
    """What a device has free once weights and pool are allocated."""
    found = []
    for key in ("avail_after_pool_gib", "free_after_gib"):
        expected = anchor.reported.get(key)
        if not isinstance(expected, int | float):
            continue
        total, weights, pool = anchor.size("total"), anchor.size("weights"), stated_pool(anchor)
        if total is None or weights is None or pool is None:
            found.append(Finding(key, expected, None, note="the GPU's memory or the weights are not stated"))
            continue
        others = sum(anchor.size(base) or 0 for base in ("non_torch", "other", "activation"))
        found.append(Finding(key, expected, (total - weights - pool.kv_bytes - others) / GIB, tol_gib=L2_GIB))
    return found


FIGURES_OF_SEVERAL = (
    Figure("conc", by_variant),
    Figure("tokens_per_rank", per_rank),
    Figure("cpu_gib_by_tp", host_memory),
    Figure("cpu_blocks", cpu_blocks),
    Figure("avail_after_pool_gib", left_after_pool),
)
