"""Bytes of weights: parameters times what dtype and quantization take, over all ranks and for one of them.

Raises nothing of its own: what a config does not tell is None, and the plan asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.parameters import Parameters
from engine.memory.quantization import Quantization
from engine.memory.recurrent import DTYPE_BYTES
from engine.memory.shape import ModelShape
from engine.memory.units import gib


@dataclass(frozen=True)
class Weights:
    """Bytes over all ranks, and of those: embedding, output head, what every rank holds whole, K and V projections."""

    bytes: int
    embedding: int
    head: int
    replicated: int
    kv_projection: int
    how: str


def weights_of(counted: Parameters, dtype: str, quantization: Quantization | None) -> Weights | None:
    """None where the quantization's bits are not known."""
    plain = DTYPE_BYTES.get(dtype, 2) * 8.0
    if quantization is not None and quantization.bits is None:
        return None
    bits = {}
    for kind in ("attention", "dense", "experts", "shared_experts", "head"):
        kept = quantization is None or kind in quantization.kept
        bits[kind] = plain if kept or quantization is None or quantization.bits is None else quantization.bits
    if quantization is not None and quantization.expert_bits and "experts" not in quantization.kept:
        bits["experts"] = quantization.expert_bits
    sized = {kind: getattr(counted, kind) * width / 8 for kind, width in bits.items()}
    unquantized = (counted.embedding + counted.other + counted.vision) * plain / 8
    total = int(sum(sized.values()) + unquantized)
    return Weights(
        bytes=total,
        embedding=int(counted.embedding * plain / 8),
        head=int(sized["head"]),
        replicated=int(counted.other * plain / 8 + max(0, counted.replicated - counted.other) * bits["attention"] / 8),
        kv_projection=int(counted.kv_projection * bits["attention"] / 8),
        how=_how(counted, plain, bits, quantization, total),
    )


def _how(
    counted: Parameters, plain: float, bits: dict[str, float], quantization: Quantization | None, total: int
) -> str:
    if quantization is None:
        return f"{counted.total / 1e9:,.3f} billion parameters x {plain / 8:g} bytes = {gib(total)}"
    quantized = sum(getattr(counted, kind) for kind, width in bits.items() if width != plain)
    return (
        f"{quantized / 1e9:,.3f} billion parameters in {quantization.name} at {quantization.bits:g} bits a weight "
        f"({quantization.how}), {(counted.total - quantized) / 1e9:,.3f} billion at {plain:g} bits = "
        f"{gib(total)}"
    )


def even_stages(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each pipeline stage as vLLM splits them: what is left over goes to the stages before the last."""
    stages = [layers // pp] * pp
    for i in range(layers % pp):
        stages[-(i + 2) % pp] += 1
    return tuple(stages)


def rank_weights_bytes(
    shape: ModelShape, tp: int = 1, pp: int = 1, stage: int = 0, stage_layers: tuple[int, ...] | None = None
) -> int | None:
    """Weights of one rank in bytes; None where the shape does not tell them.

    Tensor parallelism divides all but norms, routers and latent down-projections; K and V projections are repeated
    where ranks outnumber KV heads. The first stage holds the embedding, the last one the output head (a tied head
    is the embedding again, so a last stage of its own holds it too).
    """
    if shape.weights_bytes is None:
        return None
    layers = stage_layers or even_stages(shape.num_layers, pp)
    share = layers[stage] / max(1, shape.num_layers)
    body = shape.weights_bytes - shape.embedding_bytes - shape.head_bytes
    whole = min(body, shape.replicated_bytes)
    held = (body - whole) * share / tp + whole * share
    heads = max((group.num_kv_heads for group in shape.layers), default=0)
    if heads and tp > heads:
        held += shape.kv_projection_bytes * share * (1 / heads - 1 / tp)
    if stage == 0:
        held += shape.embedding_bytes / tp
    if stage == len(layers) - 1:
        held += shape.head_bytes / tp if shape.head_bytes else (shape.embedding_bytes / tp if stage else 0)
    return int(held)
