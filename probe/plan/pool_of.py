"""From an anchor to the planner: which memory its pool has, and how exactly the log states it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ConfigError
from engine.memory.budget import kv_of_free, sglang_kv
from engine.memory.capacity import CapacityPlan
from engine.memory.deployment import Deployment
from engine.memory.engines import version_numbers
from engine.memory.plan import plan
from engine.memory.semantics import semantics_of
from probe.plan.anchors import GIB, Anchor, size_of

_PARTS = ("weights", "activation")


@dataclass(frozen=True)
class Pool:
    """KV memory of one rank. rounding_pct: half a unit of the last place that the log prints."""

    kv_bytes: int
    stages: tuple[int, ...] | None
    rounding_pct: float
    how: str


def deployment_of(anchor: Anchor, **changes: Any) -> Deployment:
    """The anchor's server, without its memory. Raises `ConfigError` where its dims are unknown."""
    if anchor.shape is None:
        raise ConfigError("its dims do not tell what a layer keeps of a token")
    stages = stage_inputs(anchor)
    layers = [count for stage in stages if isinstance(count := stage.get("layers"), int)]
    deployment = Deployment(
        shape=anchor.shape,
        engine=anchor.engine,
        version=anchor.version or None,
        num_gpus=anchor.tp * anchor.pp,
        tp=anchor.tp,
        pp=anchor.pp,
        stage_layers=tuple(layers) if layers and len(layers) == anchor.pp else None,
        max_model_len=anchor.max_model_len or anchor.block_size or 1,
        max_num_seqs=_whole(anchor.inputs.get("max_num_seqs")),
        max_num_batched_tokens=_whole(
            anchor.inputs.get("max_num_batched_tokens", anchor.inputs.get("chunked_prefill_size"))
        ),
        block_size=anchor.block_size,
        kv_cache_dtype=anchor.kv_dtype,
        enforce_eager=bool(anchor.inputs.get("enforce_eager", False)),
        hybrid_kv_cache=not anchor.inputs.get("disable_hybrid_kv_cache_manager", False),
        enable_prefix_caching=_flag(anchor.inputs.get("enable_prefix_caching", anchor.inputs.get("prefix_caching"))),
        max_kv_tokens=_whole(anchor.inputs.get("max_tokens_requested", anchor.inputs.get("max_tokens"))),
        num_speculative_tokens=_whole(anchor.inputs.get("num_speculative_tokens")) or 0,
    )
    return replace(deployment, **changes)


def stage_inputs(anchor: Anchor) -> list[Mapping[str, Any]]:
    """Inputs of each pipeline stage, where the anchor has them (`stage0`, `stage1`, ...)."""
    found: list[Mapping[str, Any]] = []
    while isinstance(stage := anchor.inputs.get(f"stage{len(found)}"), Mapping):
        found.append(stage)
    return found


def stated_pool(anchor: Anchor) -> Pool | None:
    """The KV memory that the anchor states; None where it must be divided or solved back."""
    stages = stage_inputs(anchor)
    sizes = [size_of(stage, "kv") for stage in stages]
    if stages and all(size is not None for size in sizes):
        known = tuple(size for size in sizes if size is not None)
        return Pool(min(known), known, _rounding(anchor, min(known)), "stated for each stage")
    exact = anchor.inputs.get("kv_bytes")
    if isinstance(exact, int | float):
        return Pool(int(exact), None, 0.0, "stated in bytes")
    halves = anchor.size("k"), anchor.size("v")
    for size, how in (
        (anchor.size("kv"), "stated"),
        (anchor.size("available_kv"), "stated"),
        (halves[0] + halves[1] if halves[0] and halves[1] else None, "keys and values stated"),
    ):
        if size is not None and size > 0:
            factor = 2 if how.startswith("keys") else 1
            return Pool(size, None, factor * _rounding(anchor, size), how)
    return _of_free(anchor)


def _of_free(anchor: Anchor) -> Pool | None:
    """From what the device had free: TensorRT-LLM at allocation, SGLang before and after it loaded weights."""
    fraction = anchor.utilization
    if fraction is None:
        return None
    free = size_of({"free_gib": anchor.inputs.get("free_gib_at_alloc")}, "free") or anchor.size("free")
    if free is not None and anchor.engine == "tensorrt-llm":
        return Pool(kv_of_free(free, fraction), None, _rounding(anchor, free), "a fraction of what was free")
    before = anchor.size("avail_before") or anchor.size("free_before")
    after = anchor.size("avail_after_weights") or anchor.size("free_after_weights")
    if before is not None and after is not None and anchor.engine == "sglang":
        left = sglang_kv(before, after, fraction)
        return Pool(left, None, 2 * _rounding(anchor, max(1, left)), "what weights leave of the static fraction")
    return None


def _rounding(anchor: Anchor, size: int) -> float:
    decimals = 2 if anchor.decimals is None else anchor.decimals
    return float(100 * 0.5 * 10.0**-decimals * GIB / size)


def plan_with(anchor: Anchor, pool: Pool, **changes: Any) -> CapacityPlan:
    """The planner's answer for a stated pool."""
    if pool.stages is not None:
        changes["stage_kv_cache_bytes"] = pool.stages
    else:
        changes["kv_cache_bytes"] = pool.kv_bytes
    return plan(deployment_of(anchor, **changes))


def divided_plan(anchor: Anchor, **changes: Any) -> CapacityPlan | None:
    """The KV memory from the GPU's total, utilization and the stated parts; None where one of them is missing."""
    if anchor.gpu is None or size_of(anchor.inputs, "total") is None or anchor.utilization is None:
        return None
    parts = {name: anchor.largest(name) for name in _PARTS}
    if parts["weights"] is None or (parts["activation"] is None and anchor.engine != "sglang"):
        return None
    others = [size for base in ("non_torch", "other") if (size := anchor.largest(base)) is not None]
    divided = {
        "gpu": anchor.gpu,
        "gpu_memory_utilization": anchor.utilization,
        "weights_bytes": parts["weights"],
        "activation_bytes": parts["activation"],
        "non_torch_bytes": sum(others),
        "cuda_graph_bytes": _graphs(anchor),
    }
    return plan(deployment_of(anchor, **{**divided, **changes}))


def _graphs(anchor: Anchor) -> int | None:
    """Graphs as stated; where the budget pays for them and the log is silent, they are part of the stated peak."""
    stated = anchor.size("cuda_graph") or anchor.size("graphs")
    if stated is not None:
        return stated
    return 0 if semantics_of(anchor.engine, anchor.version or None).graphs_inside_budget else None


def first_version(version: str) -> str:
    """ "0.2.4->0.2.5 V0" -> "0.2.4"; the whole text where there is one version."""
    return version.split("->")[0].strip()


def last_version(version: str) -> str:
    """ "0.2.4->0.2.5 V0" -> "0.2.5 V0"."""
    last = version.split("->")[-1].strip()
    return last if version_numbers(last) else version


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None
