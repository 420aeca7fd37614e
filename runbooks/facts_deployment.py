"""A target as the planner wants it: `deployment_of(facts)`, and its plan. Measured figures win over estimated ones."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from engine.config import ConfigError
from engine.memory.capacity import CapacityPlan
from engine.memory.deployment import Deployment
from engine.memory.plan import plan
from runbooks.engine_names import flag_for
from runbooks.facts import TargetFacts, bytes_of

_GIB = 1024**3


def deployment_of(facts: TargetFacts) -> Deployment | None:
    """The server as a `Deployment`; None where the model is not known (no plan may guess it)."""
    if facts.shape is None:
        return None
    flags, engine = facts.flags, facts.engine
    tp, pp = facts.tp or 1, facts.pp or 1
    offload = flags.get("--kv-offloading-size")
    return Deployment(
        shape=facts.shape,
        engine=engine,
        version=facts.version,
        gpu=facts.gpu,
        num_gpus=facts.num_gpus or tp * pp,
        tp=tp,
        pp=pp,
        max_model_len=facts.max_model_len,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        block_size=facts.block_size,
        kv_cache_dtype=str(flags.get(flag_for(engine, "--kv-cache-dtype")) or "auto"),
        kv_cache_dtype_skip_layers=tuple(str(flags.get("--kv-cache-dtype-skip-layers") or "").split()),
        gpu_memory_utilization=_share(flags.get(flag_for(engine, "--gpu-memory-utilization"))),
        enforce_eager=bool(flags.get("--enforce-eager") or flags.get("--disable-cuda-graph")),
        hybrid_kv_cache=not flags.get("--disable-hybrid-kv-cache-manager"),
        num_gpu_blocks_override=flags.get("--num-gpu-blocks-override"),
        kv_cache_bytes=bytes_of(flags.get("--kv-cache-memory-bytes")),
        weights_bytes=facts.weights_bytes,
        activation_bytes=facts.activation_peak_bytes,
        other_processes_bytes=facts.other_processes_bytes or 0,
        kv_offloading_bytes=int(float(offload) * _GIB) if offload is not None else 0,
        host_memory_bytes=facts.host_memory_bytes,
        tokens_per_request=facts.traffic.tokens_per_request_peak,
    )


@functools.lru_cache(maxsize=4096)
def planned(deployment: Deployment) -> CapacityPlan | str:
    """The plan of a deployment, or one sentence why there is none."""
    try:
        return plan(deployment)
    except ConfigError as error:
        return str(error)


def plan_of(facts: TargetFacts) -> CapacityPlan | str | None:
    """The plan of a target, one sentence why it cannot be planned, or None where the model or the GPU is unknown."""
    deployment = deployment_of(facts)
    if deployment is None or (deployment.gpu is None and deployment.kv_cache_bytes is None):
        return None
    return planned(deployment)


def completed(facts: TargetFacts) -> TargetFacts:
    """The facts with KV bytes per token and block computed from the model, where nobody measured them.

    A model whose layers differ has no such figure: its pool is not counted in tokens.
    """
    deployment = deployment_of(facts) if facts.kv_bytes_per_token is None and not facts.hybrid else None
    if deployment is None:
        return facts
    plan = planned(replace(deployment, kv_cache_bytes=_GIB, gpu=None, max_model_len=None))
    if isinstance(plan, str) or plan.kv_bytes_per_token is None:
        return facts
    block = facts.block_size
    per_block = facts.kv_bytes_per_block or (plan.kv_bytes_per_token * block if block is not None else None)
    return replace(facts, kv_bytes_per_token=plan.kv_bytes_per_token, kv_bytes_per_block=per_block)


def _share(value: Any) -> float | None:
    return None if value is None else float(value)
