"""Divides one GPU's memory the way each engine does. The parts add up to the GPU; what is left over is KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError
from engine.memory.activation import Overheads, lora_bytes, overheads
from engine.memory.capacity import Part
from engine.memory.deployment import Deployment, Gpu
from engine.memory.semantics import TGI_WIGGLE_ROOM, Semantics
from engine.memory.units import gib
from engine.memory.weights import rank_weights_bytes


@dataclass(frozen=True)
class Division:
    """parts: all of the GPU. kv_bytes: the KV cache's, negative where the rest does not fit. outside: beyond budget."""

    parts: tuple[Part, ...]
    kv_bytes: int
    budget_bytes: int
    lines: tuple[str, ...]


def sglang_kv(free_before: int, free_after_weights: int, fraction: float) -> int:
    """SGLang: what weights have left, less the part of the GPU that is not static."""
    return free_after_weights - int(free_before * (1 - fraction))


def kv_of_free(free_bytes: int, fraction: float) -> int:
    """TensorRT-LLM: the KV cache is a fraction of what is free once weights and activations have their memory."""
    return int(free_bytes * fraction)


def stage_weights(deployment: Deployment, stage: int) -> int | None:
    """Weights of one rank of a stage; a stated figure is every rank's."""
    if deployment.weights_bytes is not None:
        return deployment.weights_bytes
    return rank_weights_bytes(deployment.shape, deployment.tp, deployment.pp, stage, deployment.stage_layers)


def divide(
    deployment: Deployment, semantics: Semantics, stage: int, stage_layers: int, open_blocks: int = 0
) -> Division:
    """The memory of one GPU of a stage. open_blocks: bytes of the embedded engine beside its pool.

    Raises `ConfigError` where a figure is missing that nothing can estimate.
    """
    gpu, fraction = deployment.gpu, deployment.gpu_memory_utilization
    if gpu is None or fraction is None:
        raise ConfigError("no GPU was given: add --gpu or --gpu-memory, or state the KV memory with --kv-gib")
    weights = stage_weights(deployment, stage)
    if weights is None:
        raise ConfigError(
            "the size of the weights is not known: add --weights-gib (of one GPU), or name the model or its config.json"
        )
    over = overheads(deployment, semantics, stage_layers)
    parts = _fixed_parts(deployment, semantics, weights, over, stage)
    if open_blocks and semantics.engine == "kvoncall":
        parts.append(Part("open blocks", open_blocks, True, "one block a sequence at full precision, until it is full"))
    if semantics.engine == "sglang":
        return _sglang(gpu, fraction, deployment, parts)
    if semantics.engine in ("tensorrt-llm", "tgi"):
        return _of_the_rest(gpu, fraction, parts, semantics)
    return _vllm(gpu, fraction, parts)


def known_parts(
    deployment: Deployment, semantics: Semantics, stage: int, stage_layers: int, kv: int
) -> tuple[Part, ...]:
    """The GPU's parts where the KV memory was stated: what can be said of the rest, and what then is left."""
    if deployment.gpu is None:
        return ()
    weights = stage_weights(deployment, stage)
    try:
        over = overheads(deployment, semantics, stage_layers)
    except ConfigError:  # plain dims: nothing is known of activations, and nothing depends on them here
        over = None
    parts = _fixed_parts(deployment, semantics, weights or 0, over, stage)
    parts.append(Part("KV cache", kv, True, "stated"))
    return _with_reserve(deployment.gpu, parts)


def _fixed_parts(
    deployment: Deployment, semantics: Semantics, weights: int, over: Overheads | None, stage: int
) -> list[Part]:
    """All but KV cache and reserve. Which of them utilization pays for differs by engine."""
    inside = semantics.engine in ("vllm", "kvoncall")
    how = "stated" if deployment.weights_bytes is not None else deployment.shape.weights_how or "of this rank"
    parts = [Part("weights", weights, inside or semantics.engine == "sglang", how)]
    if over is not None:
        parts += [
            Part("activation peak", over.activation.bytes, inside, over.activation.how),
            Part("logits and sampler", over.logits.bytes, inside, over.logits.how),
            Part("CUDA graphs", over.graphs.bytes, semantics.graphs_inside_budget, over.graphs.how),
            Part("non-torch", over.non_torch.bytes, inside, over.non_torch.how),
        ]
    if deployment.draft is not None and stage == deployment.pp - 1:
        draft = rank_weights_bytes(deployment.draft, deployment.tp)
        if draft is None:
            raise ConfigError("the size of the draft model's weights is not known: give its config.json")
        parts.append(Part("draft", draft, inside, "weights of the draft model; its KV is in the pool"))
    lora = lora_bytes(deployment)
    if lora.bytes:
        parts.append(Part("LoRA", lora.bytes, inside, lora.how))
    if deployment.other_processes_bytes:
        parts.append(Part("other processes", deployment.other_processes_bytes, semantics.global_cap, "stated"))
    return parts


def _with_reserve(gpu: Gpu, parts: list[Part], how: str = "what nobody has claimed") -> tuple[Part, ...]:
    left = gpu.memory_bytes - sum(part.bytes for part in parts)
    return (*parts, Part("reserve", left, False, how))


def _vllm(gpu: Gpu, fraction: float, parts: list[Part]) -> Division:
    budget = int(gpu.memory_bytes * fraction)
    inside = [part for part in parts if part.inside_budget]
    kv = budget - sum(part.bytes for part in inside)
    lines = [f"budget: {gib(gpu.memory_bytes)} x {fraction:g} = {gib(budget)}", *_minus(inside)]
    lines.append(f"KV cache: {gib(kv)}")
    how = "(1 - utilization) x GPU, less what it must hold"
    return Division(
        _with_reserve(gpu, [*parts, Part("KV cache", kv, True, "what the budget leaves")], how),
        kv,
        budget,
        tuple(lines),
    )


def _sglang(gpu: Gpu, fraction: float, deployment: Deployment, parts: list[Part]) -> Division:
    """Weights and pool are a fraction of what is free at the start; everything else must fit into the rest."""
    free = gpu.memory_bytes - deployment.other_processes_bytes
    budget = int(free * fraction)
    static = [part for part in parts if part.name in ("weights", "draft")]
    kv = budget - sum(part.bytes for part in static)
    lines = [f"static memory: {gib(free)} x {fraction:g} = {gib(budget)}", *_minus(static), f"KV pool: {gib(kv)}"]
    lines.append(f"activations, graphs and the rest must fit into the other {gib(free - budget)}")
    how = "outside the static fraction, less activations and graphs"
    return Division(
        _with_reserve(gpu, [*parts, Part("KV cache", kv, True, "static memory - weights")], how),
        kv,
        budget,
        tuple(lines),
    )


def _of_the_rest(gpu: Gpu, fraction: float, parts: list[Part], semantics: Semantics) -> Division:
    """TensorRT-LLM: a fraction of what is left. TGI: of the card's fraction, less 5%."""
    held = [part for part in parts if part.name != "CUDA graphs"]
    if semantics.engine == "tgi":
        free = int(gpu.memory_bytes * fraction) - sum(part.bytes for part in held)
        share = TGI_WIGGLE_ROOM
    else:
        free = gpu.memory_bytes - sum(part.bytes for part in held)
        share = fraction
    kv = kv_of_free(free, share)
    lines = [f"GPU: {gib(gpu.memory_bytes)}", *_minus(held), f"free: {gib(free)}; x {share:g} = KV cache {gib(kv)}"]
    how = f"{1 - share:.0%} of what is free, less graphs"
    return Division(
        _with_reserve(gpu, [*parts, Part("KV cache", kv, True, f"{share:g} of what is free")], how),
        kv,
        max(0, free),
        tuple(lines),
    )


def _minus(parts: list[Part]) -> list[str]:
    return [f"  - {part.name} {gib(part.bytes)}: {part.how}" for part in parts if part.bytes]
