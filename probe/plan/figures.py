"""The figures that logs report, each computed by the planner from an anchor's dims and inputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ConfigError
from engine.memory.capacity import CapacityPlan
from engine.memory.offload import HostTier, plan_offload
from engine.memory.plan import plan
from engine.memory.pools import kv_bytes_of, stages_of
from engine.memory.semantics import resolve, semantics_of
from probe.plan.anchors import GIB, Anchor, size_of
from probe.plan.end_to_end import named_shape
from probe.plan.pool_of import (
    Pool,
    deployment_of,
    divided_plan,
    first_version,
    last_version,
    plan_with,
    stated_pool,
)

L1_PCT, L2_GIB, L3_PCT = 0.3, 0.03, 5.0
TOKEN_KEYS = ("tokens", "kv_tokens", "max_total_num_tokens", "max_total_tokens", "max_batch_total_tokens")
LENGTH_KEYS = ("est_max_model_len", "largest_len", "estimated_max_model_len", "largest_model_len")
_MINIMUM = "one rank's memory is stated, the pool is the least of all ranks: the log's figure may lie below"
_SWAP_GIB = 4  # --swap-space of vLLM V0, per GPU


@dataclass(frozen=True)
class Finding:
    """One comparison. got None: not checkable, `note` says why. tol_gib: an absolute tolerance in place of percent."""

    quantity: str
    expected: Any
    got: Any
    tol_pct: float = L1_PCT
    tol_gib: float | None = None
    note: str = ""

    @property
    def matches(self) -> bool:
        return bool(self.expected == self.got)

    def deviation(self) -> tuple[float, float, str]:
        """(deviation, tolerance, unit)."""
        if self.tol_gib is not None:
            return float(self.got - self.expected), self.tol_gib, " GiB"
        return 100 * (self.got - self.expected) / self.expected, self.tol_pct, "%"


@dataclass(frozen=True)
class Figure:
    name: str
    find: Callable[[Anchor], list[Finding]]


def _l1(anchor: Anchor, pool: Pool | None, expected: Any = None) -> float:
    """0.3% or the rounding of the memory, what the anchor adds, and the rounding of a printed fraction."""
    rounding = pool.rounding_pct if pool else 0.0
    printed = 0.0
    if isinstance(expected, float) and expected:
        places = len(str(expected).split(".")[1]) if "." in str(expected) and "e" not in str(expected) else 0
        printed = 100 * 0.5 * 10 ** -max(1, places) / abs(expected)
    return max(L1_PCT, rounding) + anchor.extra_pct + printed


def end_to_end(anchor: Anchor, name: str, dims: tuple[int, int, int], version: str) -> CapacityPlan:
    """The plan from the model's name and dims, the GPU and the utilization alone."""
    if anchor.gpu is None:
        raise ConfigError("the GPU's memory is not known")
    shape = named_shape(name, *dims)
    if anchor.kv_dtype in ("fp16", "float16"):
        shape = replace(shape, dtype="float16")
    base = deployment_of(replace(anchor, shape=shape, version=version))
    return plan(
        replace(
            base,
            gpu=anchor.gpu,
            gpu_memory_utilization=anchor.utilization,
            max_model_len=anchor.max_model_len or shape.max_position_embeddings,
        )
    )


def _own_end_to_end(anchor: Anchor, version: str) -> CapacityPlan:
    layers = anchor.shape.layers if anchor.shape else ()
    if len(layers) != 1 or not layers[0].num_kv_heads:
        raise ConfigError("only a model of equal layers is planned from its name")
    return end_to_end(anchor, anchor.model, (layers[0].count, layers[0].num_kv_heads, layers[0].head_dim), version)


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
            found.append(Finding(key, expected, got, _l1(anchor, pool), note=note))
        elif isinstance(anchor.reported.get("blocks"), int):
            planned = plan(deployment_of(anchor, num_gpu_blocks_override=anchor.reported["blocks"]))
            found.append(Finding(key, expected, planned.kv_tokens, _l1(anchor, None), note="of the reported blocks"))
        elif "L3" in anchor.level:
            planned = _own_end_to_end(anchor, last_version(anchor.version))
            found.append(Finding(key, expected, planned.kv_tokens, L3_PCT + anchor.extra_pct))
        elif (divided := divided_plan(anchor)) is not None:
            found.append(Finding(key, expected, divided.kv_tokens, _divided_pct(anchor, divided)))
        elif "derived_kv_gib" not in anchor.reported:
            found.append(Finding(key, expected, None, note="the anchor states no KV memory"))
    return found


def _divided_pct(anchor: Anchor, divided: CapacityPlan) -> float:
    """0.03 GiB of the division, in percent of the pool."""
    return 100 * L2_GIB * GIB / max(1, divided.kv_cache_bytes) + L1_PCT + anchor.extra_pct


def blocks(anchor: Anchor) -> list[Finding]:
    expected = anchor.reported.get("blocks")
    if isinstance(expected, dict):
        return [_table_row(anchor, str(key), value) for key, value in expected.items()]
    if not isinstance(expected, int | float):
        return []
    pool = stated_pool(anchor)
    if pool is not None:
        return [Finding("blocks", expected, plan_with(anchor, pool).kv_blocks, _l1(anchor, pool))]
    if "L3" in anchor.level:
        planned = _own_end_to_end(anchor, last_version(anchor.version))
        return [Finding("blocks", expected, planned.kv_blocks, L3_PCT + anchor.extra_pct)]
    if (divided := divided_plan(anchor)) is not None:
        return [Finding("blocks", expected, divided.kv_blocks, _divided_pct(anchor, divided))]
    reported = next((anchor.reported[key] for key in TOKEN_KEYS if key in anchor.reported), None)
    if reported is None or not anchor.block_size:
        return [Finding("blocks", expected, None, note="the anchor states no KV memory")]
    return [Finding("blocks", expected, reported // anchor.block_size, note="of the reported tokens")]


def _table_row(anchor: Anchor, key: str, expected: Any) -> Finding:
    """ "Meta-Llama-3-8B-Instruct (32,8,128)": a model of a table, planned end to end."""
    name = f"blocks {key}"
    match = re.match(r"(.*?)\s*\((\d+)\s*,\s*(\d+)\s*,\s*(\d+)\)", key)
    if match is None or not isinstance(expected, int | float):
        return Finding(name, expected, None, note="the model's dims cannot be read from the table's key")
    try:
        dims = (int(match[2]), int(match[3]), int(match[4]))
        got = end_to_end(anchor, match[1], dims, last_version(anchor.version)).kv_blocks
    except ConfigError as error:
        return Finding(name, expected, None, note=str(error))
    return Finding(name, expected, got, L3_PCT + anchor.extra_pct)


def blocks_before(anchor: Anchor) -> list[Finding]:
    """The version before an upgrade that the anchor compares."""
    expected = anchor.reported.get("blocks_before")
    if not isinstance(expected, int | float):
        return []
    planned = _own_end_to_end(anchor, first_version(anchor.version))
    return [Finding("blocks_before", expected, planned.kv_blocks, L3_PCT + anchor.extra_pct)]


def blocks_approx(anchor: Anchor) -> list[Finding]:
    expected, pool = anchor.reported.get("blocks_approx"), stated_pool(anchor)
    if not isinstance(expected, int | float):
        return []
    if pool is None or not anchor.block_size:
        return [Finding("blocks_approx", expected, None, note="the anchor states no KV memory")]
    planned = plan_with(anchor, pool)
    got = planned.kv_tokens // anchor.block_size
    return [Finding("blocks_approx", expected, got, _l1(anchor, pool), note="printed tokens over the block size")]


def max_concurrency(anchor: Anchor) -> list[Finding]:
    expected, length = anchor.reported.get("max_concurrency"), anchor.max_model_len
    if expected is None:
        return []
    if length is None:
        return [Finding("max_concurrency", expected, None, note="the anchor states no max_model_len")]
    ranks = anchor.reported.get("tokens_per_rank")
    if isinstance(expected, list) and isinstance(ranks, list):
        return [
            Finding(f"max_concurrency rank {rank}", value, _of_tokens(anchor, count), _l1(anchor, None, value))
            for rank, (value, count) in enumerate(zip(expected, ranks, strict=False))
        ]
    pool = stated_pool(anchor)
    if pool is not None:
        planned = plan_with(anchor, pool)
        note = _MINIMUM if planned.max_concurrency > expected and anchor.tp * anchor.pp > 1 else ""
        tolerance = _l1(anchor, pool, float(expected))
        return [Finding("max_concurrency", expected, planned.max_concurrency, tolerance, note=note)]
    reported = next((anchor.reported[key] for key in TOKEN_KEYS if key in anchor.reported), None)
    if reported is None:
        return [Finding("max_concurrency", expected, None, note="the anchor states no KV memory")]
    got = _of_tokens(anchor, reported)
    return [
        Finding("max_concurrency", expected, got, _l1(anchor, None, float(expected)), note="of the reported tokens")
    ]


def _of_tokens(anchor: Anchor, count: int) -> float:
    """Concurrency of a pool of so many tokens."""
    block = anchor.block_size or 1
    return plan(deployment_of(anchor, num_gpu_blocks_override=max(1, count // block))).max_concurrency


def by_checkpoint(anchor: Anchor) -> list[Finding]:
    """`tokens_X`, `mml_X`, `conc_X` of several checkpoints: printed tokens are concurrency x max_model_len."""
    found = []
    for key, expected in anchor.reported.items():
        if not key.startswith("conc_"):
            continue
        suffix = key.removeprefix("conc_")
        count, length = anchor.reported.get(f"tokens_{suffix}"), anchor.reported.get(f"mml_{suffix}")
        if isinstance(count, int) and isinstance(length, int) and length:
            note = (
                "for a hybrid model the printed tokens are concurrency x max_model_len, not bytes over a token's bytes"
            )
            found.append(
                Finding(f"max_concurrency {suffix}", expected, count / length, _l1(anchor, None, expected), note=note)
            )
            found.append(Finding(key, "consistent", "consistent" if count >= length * (expected - 0.005) else "not"))
    return found


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
    return Finding(key, expected / GIB, got / GIB, _l1(anchor, None, round(expected / GIB, 6)))


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
            found.append(Finding(key, expected, got, _l1(anchor, pool)))
    return found


def derived_kv(anchor: Anchor) -> list[Finding]:
    """Solved back: the reported tokens at the planner's bytes a token."""
    expected = anchor.reported.get("derived_kv_gib")
    if not isinstance(expected, int | float):
        return []
    count = anchor.reported.get("effective_tokens")
    count = count or next((anchor.reported[key] for key in TOKEN_KEYS if key in anchor.reported), None)
    if count is None and isinstance(anchor.reported.get("blocks"), int) and anchor.block_size:
        count = anchor.reported["blocks"] * anchor.block_size
    if count is None:
        return [Finding("derived_kv_gib", expected, None, note="no tokens or blocks are reported to derive it from")]
    got = count * _per_token(anchor) / GIB
    note = "reported tokens x the planner's bytes a token"
    return [Finding("derived_kv_gib", expected, got, _l1(anchor, None, float(expected)), note=note)]


def per_rank(anchor: Anchor) -> list[Finding]:
    """An engine's ranks print a size each; the least of them counts, never their sum."""
    ranks, expected = anchor.reported.get("tokens_per_rank"), anchor.reported.get("effective_tokens")
    if not isinstance(ranks, list) or not ranks:
        return []
    block = anchor.block_size or 1
    pools = [plan(deployment_of(anchor, num_gpu_blocks_override=max(1, count // block))) for count in ranks]
    found = [
        Finding(f"tokens_per_rank {rank}", count, planned.kv_tokens, _l1(anchor, None))
        for rank, (count, planned) in enumerate(zip(ranks, pools, strict=True))
    ]
    if expected is not None:
        found.append(Finding("effective_tokens", expected, min(p.kv_tokens for p in pools), _l1(anchor, None)))
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
        Finding(f"cpu_gib_by_tp {tp}", value, plan_offload([tier], int(tp), None).total_bytes / GIB, _l1(anchor, None))
        for tp, value in table.items()
    ]


def cpu_blocks(anchor: Anchor) -> list[Finding]:
    """vLLM V0's swap space, 4 GiB a GPU unless stated."""
    expected = anchor.reported.get("cpu_blocks")
    if not isinstance(expected, int | float):
        return []
    swap = anchor.size("swap") or anchor.size("swap_space") or _SWAP_GIB * GIB
    planned = plan(deployment_of(anchor, num_gpu_blocks_override=2))
    return [Finding("cpu_blocks", expected, swap // planned.kv_bytes_per_block, _l1(anchor, None))]


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


FIGURES = (
    Figure("kv_bytes_per_token", bytes_per_token),
    Figure("kv_gib", kv_memory),
    Figure("tokens", tokens),
    Figure("blocks", blocks),
    Figure("blocks_before", blocks_before),
    Figure("blocks_approx", blocks_approx),
    Figure("max_concurrency", max_concurrency),
    Figure("conc", by_checkpoint),
    Figure("needed_gib", needed),
    Figure("est_max_model_len", largest_length),
    Figure("derived_kv_gib", derived_kv),
    Figure("tokens_per_rank", per_rank),
    Figure("cpu_gib_by_tp", host_memory),
    Figure("cpu_blocks", cpu_blocks),
    Figure("avail_after_pool_gib", left_after_pool),
)
