"""Plans of a model that an anchor only names: the preset with the same dims, or an estimate from its parameters.

A quantization in the name ("GPTQ", "AWQ", "4bit", "FP8") applies to all but the embedding and the output head.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import replace
from typing import Any

from engine.errors import ConfigError
from engine.memory.capacity import CapacityPlan
from engine.memory.model_presets import model_names, model_preset
from engine.memory.plan import plan
from engine.memory.shape import LayerGroup, ModelShape
from probe.plan.anchors import Anchor
from probe.plan.finding import L3_PCT, Finding
from probe.plan.pool_of import deployment_of, last_version

_BITS = {"gptq": 4.25, "awq": 4.25, "4bit": 4.25, "int4": 4.25, "marlin": 4.25, "w4a16": 4.25, "nvfp4": 4.5}
_BYTES = {"fp8": 8.0, "int8": 8.0, "w8a8": 8.0, "smoothquant": 8.0}
_SAME_PARAMETERS = 0.15
_INNER_OF_HIDDEN = 3.5
_VOCAB = 32000
_LENGTH = 4096


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


def own_end_to_end(anchor: Anchor, version: str) -> CapacityPlan:
    layers = anchor.shape.layers if anchor.shape else ()
    if len(layers) != 1 or not layers[0].num_kv_heads:
        raise ConfigError("only a model of equal layers is planned from its name")
    return end_to_end(anchor, anchor.model, (layers[0].count, layers[0].num_kv_heads, layers[0].head_dim), version)


def table_row(anchor: Anchor, key: str, expected: Any) -> Finding:
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


def named_shape(name: str, layers: int, kv_heads: int, head_dim: int) -> ModelShape:
    """The shape of a model by name and dims. Raises `ConfigError` where neither presets nor the name tell its size."""
    parameters = _parameters(name)
    candidates = [
        shape
        for shape in _uniform_presets()
        if (shape.layers[0].count, shape.layers[0].num_kv_heads, shape.layers[0].head_dim)
        == (layers, kv_heads, head_dim)
        and (parameters is None or _near(shape.parameters, parameters))
    ]
    if candidates:
        lowered = name.lower()
        found = max(candidates, key=lambda s: difflib.SequenceMatcher(None, s.name.lower(), lowered).ratio())
        return _quantized(found, name)
    return _quantized(_estimated(name, layers, kv_heads, head_dim, parameters), name)


@functools.cache
def _uniform_presets() -> tuple[ModelShape, ...]:
    shapes = [model_preset(name) for name in model_names()]
    return tuple(shape for shape in shapes if len(shape.layers) == 1 and shape.layers[0].num_kv_heads)


def _parameters(name: str) -> float | None:
    """ "Llama-2-70B fp16" -> 70e9, "opt-125m" -> 125e6."""
    match = re.search(r"(?<![\d.])(\d+(?:\.\d+)?)\s*([bm])(?![a-z0-9])", name.lower())
    return float(match[1]) * (1e9 if match[2] == "b" else 1e6) if match else None


def _near(have: int | None, wanted: float) -> bool:
    return have is not None and abs(have - wanted) <= _SAME_PARAMETERS * wanted


def _quantized(shape: ModelShape, name: str) -> ModelShape:
    lowered = name.lower()
    bits = next((bits for word, bits in {**_BITS, **_BYTES}.items() if word in lowered), None)
    if bits is None or shape.quantization is not None or shape.weights_bytes is None:
        return shape
    kept = shape.embedding_bytes + shape.head_bytes
    body = (shape.weights_bytes - kept) * bits / 16
    how = f"{shape.weights_how}; all but embedding and head at {bits:g} bits"
    return replace(shape, weights_bytes=int(body + kept), weights_how=how, quantization="named")


def _estimated(name: str, layers: int, kv_heads: int, head_dim: int, parameters: float | None) -> ModelShape:
    """A decoder of that many parameters: about 12 x layers x hidden^2 of them lie outside the embedding."""
    if parameters is None:
        raise ConfigError(f"the size of {name!r} is not known: no preset has its dims and its name states none")
    hidden = int((parameters / (12 * layers)) ** 0.5)
    if kv_heads * head_dim > 0.7 * hidden:
        hidden = kv_heads * head_dim  # every head has its own K and V
    embedding = _VOCAB * hidden * 2
    return ModelShape(
        name=name,
        layers=(LayerGroup(layers, "full", kv_heads, head_dim),),
        hidden_size=hidden,
        intermediate_size=int(hidden * _INNER_OF_HIDDEN),
        vocab_size=_VOCAB,
        max_position_embeddings=_LENGTH,
        dtype="float16",
        parameters=int(parameters),
        weights_bytes=int(parameters * 2),
        weights_how=f"{parameters / 1e9:g} billion parameters, as the name says, x 2 bytes",
        embedding_bytes=embedding,
        head_bytes=embedding,
    )
