"""The figures that logs report, each computed by the planner from an anchor's dims and inputs."""

from __future__ import annotations

import re
from dataclasses import replace

from engine.memory.capacity import CapacityPlan
from engine.memory.plan import plan
from engine.memory.pools import kv_bytes_of, stages_of
from engine.memory.semantics import resolve, semantics_of
from probe.plan.anchors import GIB, Anchor, size_of
from probe.plan.end_to_end import own_end_to_end, table_row
from probe.plan.figures_of_several import FIGURES_OF_SEVERAL
from probe.plan.finding import L1_PCT, L2_GIB, L3_PCT, TOKEN_KEYS, Figure, Finding, l1, reported_tokens
from probe.plan.pool_of import (
    deployment_of,
    divided_plan,
    first_version,
    last_version,
    plan_with,
    stated_pool,
)

LENGTH_KEYS = ("est_max_model_len", "largest_len", "estimated_max_model_len", "largest_model_len")
_ASKED_KEYS = ("tokens", "num_tokens", "n_ctx")  # a stated number of tokens whose KV the log prints
_MINIMUM = "one rank's memory is stated, the pool is the least of all ranks: the log's figure may lie below"


def _per_token(anchor: Anchor) -> int:
    """Bytes a token takes on one rank of the widest stage, every layer that pages counted for all tokens."""
    deployment = resolve(deployment_of(anchor))
    stages = stages_of(deployment, semantics_of(deployment.engine, deployment.version))
    return max(kv_bytes_of(stage.kinds, deployment) for stage in stages)


def bytes_per_token(anchor: Anchor) -> list[Finding]:
    if not anchor.bytes_per_token:
        return []
    return [Finding("kv_bytes_per_token", anchor.bytes_per_token, _per_token(anchor), L1_PCT)]


def kv_memory(anchor: Anchor) -> list[Finding]:
    """The division of the GPU: budget, and what it leaves for KV."""
    found = []
    budget, total = anchor.size("budget"), anchor.size("total")
    if budget and total and anchor.utilization and anchor.gpu:
        found.append(Finding("budget_gib", budget / GIB, total * anchor.utilization / GIB, tol_gib=L2_GIB))
    stated = next((size for key in ("kv", "available_kv") if (size := anchor.size(key)) is not None), None)
    reported = next((s for key in ("kv", "available_kv") if (s := size_of(anchor.reported, key)) is not None), None)
    expected = stated if reported is None else reported
    if expected is None:
        return found
    divided = divided_plan(anchor)
    name = "kv_gib (divided)" if reported is None else _reported_kv_key(anchor)
    if divided is not None:
        found.append(Finding(name, expected / GIB, divided.kv_cache_bytes / GIB, tol_gib=L2_GIB))
    if divided is None:
        unstated = {key: value for key, value in anchor.inputs.items() if not key.startswith(("kv_", "available_kv"))}
        pool = stated_pool(replace(anchor, inputs=unstated))
        if pool is not None and pool.how not in ("stated for each stage", "keys and values stated"):
            found.append(Finding(name, expected / GIB, pool.kv_bytes / GIB, tol_gib=L2_GIB))
    return found


def _reported_kv_key(anchor: Anchor) -> str:
    return next(key for key in anchor.reported if re.fullmatch(r"(available_)?kv_(gib|gb|mib|bytes)", key))


def tokens(anchor: Anchor) -> list[Finding]:
    found = []
    for key in TOKEN_KEYS:
        expected = anchor.reported.get(key)
        if not isinstance(expected, int | float):
            continue
        pool = stated_pool(anchor)
        if pool is not None:
            got = plan_with(anchor, pool).kv_tokens
            note = _MINIMUM if got > expected and anchor.tp * anchor.pp > 1 else ""
            found.append(Finding(key, expected, got, l1(anchor, pool), note=note))
        elif isinstance(anchor.reported.get("blocks"), int):
            planned = plan(deployment_of(anchor, num_gpu_blocks_override=anchor.reported["blocks"]))
            found.append(Finding(key, expected, planned.kv_tokens, l1(anchor, None), note="of the reported blocks"))
        elif "L3" in anchor.level:
            planned = own_end_to_end(anchor, last_version(anchor.version))
            found.append(Finding(key, expected, planned.kv_tokens, L3_PCT + anchor.extra_pct))
        elif (divided := divided_plan(anchor)) is not None:
            found.append(Finding(key, expected, divided.kv_tokens, _divided_pct(anchor, divided)))
        elif not any(re.fullmatch(r"(derived_|available_)?kv_(gib|gb|mib|bytes)", name) for name in anchor.reported):
            found.append(Finding(key, expected, None, note="the anchor states no KV memory"))
    return found


def _divided_pct(anchor: Anchor, divided: CapacityPlan) -> float:
    """0.03 GiB of the division, in percent of the pool."""
    return 100 * L2_GIB * GIB / max(1, divided.kv_cache_bytes) + L1_PCT + anchor.extra_pct


def blocks(anchor: Anchor) -> list[Finding]:
    expected = anchor.reported.get("blocks")
    if isinstance(expected, dict):
        return [table_row(anchor, str(key), value) for key, value in expected.items()]
    if not isinstance(expected, int | float):
        return []
    pool = stated_pool(anchor)
    if pool is not None:
        return [Finding("blocks", expected, plan_with(anchor, pool).kv_blocks, l1(anchor, pool))]
    if "L3" in anchor.level:
        planned = own_end_to_end(anchor, last_version(anchor.version))
        return [Finding("blocks", expected, planned.kv_blocks, L3_PCT + anchor.extra_pct)]
    if (divided := divided_plan(anchor)) is not None:
        return [Finding("blocks", expected, divided.kv_blocks, _divided_pct(anchor, divided))]
    reported = reported_tokens(anchor)
    if reported is None or not anchor.block_size:
        return [Finding("blocks", expected, None, note="the anchor states no KV memory")]
    return [Finding("blocks", expected, reported // anchor.block_size, note="of the reported tokens")]


def blocks_before(anchor: Anchor) -> list[Finding]:
    """The version before an upgrade that the anchor compares."""
    expected = anchor.reported.get("blocks_before")
    if not isinstance(expected, int | float):
        return []
    planned = own_end_to_end(anchor, first_version(anchor.version))
    return [Finding("blocks_before", expected, planned.kv_blocks, L3_PCT + anchor.extra_pct)]


def blocks_approx(anchor: Anchor) -> list[Finding]:
    expected, pool = anchor.reported.get("blocks_approx"), stated_pool(anchor)
    if not isinstance(expected, int | float):
        return []
    if pool is None or not anchor.block_size:
        return [Finding("blocks_approx", expected, None, note="the anchor states no KV memory")]
    planned = plan_with(anchor, pool)
    got = planned.kv_tokens // anchor.block_size
    return [Finding("blocks_approx", expected, got, l1(anchor, pool), note="printed tokens over the block size")]


def max_concurrency(anchor: Anchor) -> list[Finding]:
    expected, length = anchor.reported.get("max_concurrency"), anchor.max_model_len
    if expected is None:
        return []
    if length is None:
        return [Finding("max_concurrency", expected, None, note="the anchor states no max_model_len")]
    ranks = anchor.reported.get("tokens_per_rank")
    if isinstance(expected, list) and isinstance(ranks, list):
        return [
            Finding(f"max_concurrency rank {rank}", value, _of_tokens(anchor, count), l1(anchor, None, value))
            for rank, (value, count) in enumerate(zip(expected, ranks, strict=False))
        ]
    pool = stated_pool(anchor)
    if pool is not None:
        planned = plan_with(anchor, pool)
        note = _MINIMUM if planned.max_concurrency > expected and anchor.tp * anchor.pp > 1 else ""
        tolerance = l1(anchor, pool, float(expected))
        return [Finding("max_concurrency", expected, planned.max_concurrency, tolerance, note=note)]
    reported = reported_tokens(anchor)
    if reported is None:
        return [Finding("max_concurrency", expected, None, note="the anchor states no KV memory")]
    got = _of_tokens(anchor, reported)
    return [Finding("max_concurrency", expected, got, l1(anchor, None, float(expected)), note="of the reported tokens")]


def _of_tokens(anchor: Anchor, count: int) -> float:
    """Concurrency of a pool of so many tokens."""
    block = anchor.block_size or 1
    return plan(deployment_of(anchor, num_gpu_blocks_override=max(1, count // block))).max_concurrency


def needed(anchor: Anchor) -> list[Finding]:
    """KV of one request of full length, or of a stated number of tokens."""
    found = []
    expected = size_of(anchor.reported, "needed")
    if expected is not None:
        key = next(key for key in anchor.reported if key.startswith("needed_"))
        got = _request_bytes(anchor, anchor.max_model_len)
        found.append(_gib_finding(anchor, key, expected, got))
    for key, value in anchor.reported.items():
        match = re.fullmatch(r"kv_for_(\d+)_(gib|gb|mib)", key)
        if match:
            expected = size_of({f"kv_{match[2]}": value}, "kv") or 0
            found.append(_gib_finding(anchor, key, expected, _request_bytes(anchor, int(match[1]))))
    return found


def _gib_finding(anchor: Anchor, key: str, expected: int, got: int | None) -> Finding:
    if got is None:
        return Finding(key, expected / GIB, None, note="the anchor states no max_model_len")
    return Finding(key, expected / GIB, got / GIB, l1(anchor, None, round(expected / GIB, 6)))


def _request_bytes(anchor: Anchor, length: int | None) -> int | None:
    if length is None:
        return None
    return plan(deployment_of(anchor, max_model_len=length, num_gpu_blocks_override=2)).needed_bytes


def largest_length(anchor: Anchor) -> list[Finding]:
    found = []
    for key in LENGTH_KEYS:
        expected = anchor.reported.get(key)
        if not isinstance(expected, int | float):
            continue
        pool = stated_pool(anchor)
        if pool is None:
            found.append(Finding(key, expected, None, note="the anchor states no KV memory"))
        else:
            got = plan_with(anchor, pool).largest_model_len
            found.append(Finding(key, expected, got, l1(anchor, pool)))
    return found


def derived_kv(anchor: Anchor) -> list[Finding]:
    """Solved back: the reported tokens at the planner's bytes a token."""
    expected, key = anchor.reported.get("derived_kv_gib"), "derived_kv_gib"
    if expected is None and stated_pool(anchor) is None and divided_plan(anchor) is None:
        reported = next((s for name in ("kv", "available_kv") if (s := size_of(anchor.reported, name))), None)
        if reported is not None:
            key, expected = _reported_kv_key(anchor), round(reported / GIB, 4)
    if not isinstance(expected, int | float):
        return []
    count = anchor.reported.get("effective_tokens")
    count = count or reported_tokens(anchor)
    count = count or next((anchor.inputs[name] for name in _ASKED_KEYS if name in anchor.inputs), None)
    if count is None and isinstance(anchor.reported.get("blocks"), int) and anchor.block_size:
        count = anchor.reported["blocks"] * anchor.block_size
    if count is None:
        return [Finding(key, expected, None, note="no tokens or blocks are reported to derive it from")]
    got = count * _per_token(anchor) / GIB
    note = "reported tokens x the planner's bytes a token"
    return [Finding(key, expected, got, l1(anchor, None, float(expected)), note=note)]


FIGURES = (
    Figure("kv_bytes_per_token", bytes_per_token),
    Figure("kv_gib", kv_memory),
    Figure("tokens", tokens),
    Figure("blocks", blocks),
    Figure("blocks_before", blocks_before),
    Figure("blocks_approx", blocks_approx),
    Figure("max_concurrency", max_concurrency),
    Figure("needed_gib", needed),
    Figure("est_max_model_len", largest_length),
    Figure("derived_kv_gib", derived_kv),
    *FIGURES_OF_SEVERAL,
)
