"""What each change of a flag would buy: every lever is planned anew, so its gain is exact, and its cost is named."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ConfigError
from engine.memory.capacity import CapacityPlan
from engine.memory.deployment import Deployment
from engine.memory.offload import host_tier, plan_offload
from engine.memory.plan import plan
from engine.memory.semantics import Semantics, semantics_of
from engine.memory.slots import canonical_format
from engine.memory.units import gib


@dataclass(frozen=True)
class Lever:
    """One change. changes: the engine's flag -> value (None unsets). gained_tokens against the plan as it is.

    possible: False when the engine, its version or the hardware cannot do it; then why_not says why and plan is the
    plan as it would be if it could. key: "kv_fp8", "kv_int8", "kv_int4", "tp_x2", "half_length", "half_seqs",
    "smaller_batch", "eager", "utilization" or "offload".
    """

    key: str
    what: str
    changes: dict[str, Any]
    plan: CapacityPlan
    gained_tokens: int
    cost: str
    possible: bool = True
    why_not: str = ""


@dataclass(frozen=True)
class _Draft:
    key: str
    what: str
    changes: dict[str, Any]
    changed: Deployment
    cost: str
    why_not: str = ""


def levers(deployment: Deployment) -> list[Lever]:
    """Every lever, the largest gain first, impossible ones last."""
    base = plan(deployment)
    filled, semantics = base.deployment, semantics_of(deployment.engine, deployment.version)
    stated = deployment.kv_cache_bytes is not None or deployment.stage_kv_cache_bytes is not None
    drafts: list[_Draft] = []
    for build in (_formats, _parallel, _lengths, _batches, _budget, _offload):
        drafts += build(filled, semantics)
    found = []
    for draft in drafts:
        why_not = draft.why_not
        if stated and draft.key in ("tp_x2", "half_seqs", "smaller_batch", "eager", "utilization"):
            why_not = "the KV memory was stated, and this changes how it comes about: plan from the GPU instead"
        try:
            changed = plan(draft.changed)
        except ConfigError as error:
            changed, why_not = base, why_not or str(error)
        gained = changed.kv_tokens - base.kv_tokens
        if draft.key == "offload":
            gained = _host_tokens(draft.changed, base)
        found.append(Lever(draft.key, draft.what, draft.changes, changed, gained, draft.cost, not why_not, why_not))
    return sorted(found, key=lambda lever: (not lever.possible, -lever.gained_tokens))


def _host_tokens(deployment: Deployment, base: CapacityPlan) -> int:
    """KV tokens that the deployment's host tier keeps beside the GPU's."""
    tier = host_tier(deployment)
    if tier is None or not base.kv_bytes_per_token:
        return 0
    ranks = deployment.tp * deployment.pp
    return plan_offload([tier], ranks, None, kv_bytes_per_token=base.kv_bytes_per_token).tokens


def _formats(deployment: Deployment, semantics: Semantics) -> list[_Draft]:
    current = canonical_format(deployment.kv_cache_dtype, deployment.shape.dtype)
    latent = any(group.attention == "latent" for group in deployment.shape.layers)
    drafts = []
    for key, label, values, cost in (
        (
            "kv_fp8",
            "KV cache in fp8",
            _fp8_values(semantics, deployment),
            "a little accuracy on long contexts; needs calibrated scales",
        ),
        ("kv_int8", "KV cache in int8", _int8_values(semantics), "a little speed: every read dequantizes"),
        (
            "kv_int4",
            "KV cache in 4 bits",
            _int4_values(semantics),
            "accuracy on long contexts and small models, and speed",
        ),
    ):
        value, why_not = values
        if canonical_format(value, deployment.shape.dtype) == current:
            continue
        if latent and key != "kv_fp8":
            why_not = "latents of multi-head latent attention have no such format"
        changed = replace(deployment, kv_cache_dtype=value)
        drafts.append(_Draft(key, label, {semantics.kv_dtype_flag: value}, changed, cost, why_not))
    return drafts


def _fp8_values(semantics: Semantics, deployment: Deployment) -> tuple[str, str]:
    capability = deployment.gpu.compute_capability if deployment.gpu else None
    quantized = (deployment.shape.quantization or "").startswith("fp8")
    if semantics.engine == "kvoncall" or capability is None or capability >= (8, 9):
        return "fp8_e4m3", ""
    if capability >= (8, 0) and not quantized and semantics.engine in ("vllm", "sglang"):
        return "fp8_e5m2", ""  # storage only on Ampere
    return "fp8_e4m3", f"sm_{capability[0]}{capability[1]} cannot compute with fp8_e4m3, which needs sm_89 or later"


def _int8_values(semantics: Semantics) -> tuple[str, str]:
    if semantics.engine == "tensorrt-llm":
        return "int8", ""
    if semantics.engine == "vllm" and semantics.version < (0, 20):
        return "int8_per_token_head", "vLLM has int8_per_token_head from 0.20 on"
    if semantics.engine in ("sglang", "tgi"):
        return "int8_per_token_head", f"{semantics.engine} has no int8 KV cache"
    return "int8_per_token_head", ""


def _int4_values(semantics: Semantics) -> tuple[str, str]:
    if semantics.engine == "vllm" and semantics.version < (0, 25):
        return "int4_per_token_head", "vLLM has int4_per_token_head from 0.25 on"
    if semantics.engine in ("tensorrt-llm", "tgi", "sglang"):
        return "int4_per_token_head", f"{semantics.engine} has no int4 KV cache"
    return "int4_per_token_head", ""


def _parallel(deployment: Deployment, semantics: Semantics) -> list[_Draft]:
    tp = deployment.tp * 2
    changed = replace(deployment, tp=tp, num_gpus=max(deployment.num_gpus, tp * deployment.pp))
    if deployment.weights_bytes is not None:
        changed = replace(changed, weights_bytes=deployment.weights_bytes // 2)
    why_not = ""
    if 1 < deployment.num_gpus < tp * deployment.pp:
        why_not = f"needs {tp * deployment.pp} GPUs, there are {deployment.num_gpus}"
    if semantics.engine == "kvoncall":
        why_not = "one process serves one device"
    cost = f"{tp * deployment.pp} GPUs for one server, and communication in every layer"
    return [_Draft("tp_x2", f"tensor parallel over {tp} GPUs", {semantics.tp_flag: tp}, changed, cost, why_not)]


def _lengths(deployment: Deployment, semantics: Semantics) -> list[_Draft]:
    half = max(1, (deployment.max_model_len or 2) // 2)
    changed = replace(deployment, max_model_len=half)
    cost = "longer requests are refused; the pool is as large as before, but more requests of full length fit"
    return [_Draft("half_length", f"requests of at most {half:,} tokens", {semantics.length_flag: half}, changed, cost)]


def _batches(deployment: Deployment, semantics: Semantics) -> list[_Draft]:
    seqs = max(1, (deployment.max_num_seqs or 2) // 2)
    drafts = [
        _Draft(
            "half_seqs",
            f"at most {seqs:,} requests in a step",
            {semantics.seqs_flag: seqs},
            replace(deployment, max_num_seqs=seqs),
            "further requests wait in the queue: less throughput when the pool had room for them",
        )
    ]
    tokens = deployment.max_num_batched_tokens or 0
    if tokens > 2048:
        smaller = max(2048, tokens // 4)
        drafts.append(
            _Draft(
                "smaller_batch",
                f"at most {smaller:,} tokens in a step",
                {semantics.batch_flag: smaller},
                replace(deployment, max_num_batched_tokens=smaller),
                "prefills take more steps: slower first tokens and less throughput of long prompts",
            )
        )
    return drafts


def _budget(deployment: Deployment, semantics: Semantics) -> list[_Draft]:
    drafts = []
    if not deployment.enforce_eager and semantics.engine in ("vllm", "sglang"):
        flag = "--enforce-eager" if semantics.engine == "vllm" else "--disable-cuda-graph"
        why_not = (
            ""
            if semantics.graphs_inside_budget
            else ("graphs lie outside the budget here: the pool stays, only the reserve grows")
        )
        drafts.append(
            _Draft(
                "eager",
                "no CUDA graphs",
                {flag: True},
                replace(deployment, enforce_eager=True),
                "slower decoding, most of all of small batches",
                why_not,
            )
        )
    current = deployment.gpu_memory_utilization
    if current is not None and current < 0.95:
        raised = min(0.95, round(current + 0.03, 4))
        drafts.append(
            _Draft(
                "utilization",
                f"{raised:.0%} of the GPU's memory",
                {semantics.utilization_flag: raised},
                replace(deployment, gpu_memory_utilization=raised),
                "less room for CUDA graphs and spikes outside the budget: out of memory under load",
            )
        )
    return drafts


def _offload(deployment: Deployment, semantics: Semantics) -> list[_Draft]:
    if deployment.kv_offloading_bytes:
        return []
    size = (deployment.host_memory_bytes or 128 << 30) // 2
    changed = replace(deployment, kv_offloading_bytes=size)
    tier = host_tier(changed)
    flag = tier.flag if tier else "--kv-offloading-size"
    ranks = deployment.tp * deployment.pp
    value = size // ranks >> 30 if tier and tier.per_rank else size >> 30
    changed = replace(deployment, kv_offloading_bytes=value << 30)
    why_not = ""
    if semantics.engine == "vllm" and semantics.version < (0, 11, 1):
        why_not = "vLLM has --kv-offloading-size from 0.11.1 on; before, LMCache does this"
    if semantics.engine == "tgi":
        why_not = "TGI keeps no KV cache on the host"
    return [
        _Draft(
            "offload",
            f"{gib(size)} of host memory for KV",
            {flag: value},
            changed,
            "host memory, and a copy over PCIe on each hit; it keeps prefixes, it does not let more requests run",
            why_not,
        )
    ]
