"""Scales of an fp8 KV cache that a checkpoint carries, under the names that exist for them.

llm-compressor writes `self_attn.k_scale`, vLLM's own module adds `attn`, TensorRT Model Optimizer and older
compressed-tensors put them below the projections, and `kv_scale` is one for both. One number a layer; scales of queries
and of softmax weights, which only fp8 matrix products need, are left alone.
"""

from __future__ import annotations

import re

from engine.errors import ModelLoadError
from engine.models.checkpoint import Checkpoint

_NAMES = {
    "k": ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    "v": ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
}
OTHER_SCALES = re.compile(r"self_attn\.(attn\.)?(q_scale|prob_scale|prob_output_scale)$")


def read_kv_scales(checkpoint: Checkpoint, num_layers: int) -> dict[int, tuple[float, float]]:
    """Layer -> scales of K and V, for the layers that have both; `ModelLoadError` when one is alone or no scale."""
    found: dict[int, tuple[float, float]] = {}
    for layer in range(num_layers):
        scales = {part: _read(checkpoint, layer, names) for part, names in _NAMES.items()}
        key, value = scales["k"], scales["v"]
        if key is not None and value is not None:
            found[layer] = (key, value)
        elif key is not None or value is not None:
            raise ModelLoadError(
                f"{str(checkpoint.source)!r} has a KV cache scale of layer {layer} for {'K' if value is None else 'V'} "
                "alone; the checkpoint is incomplete"
            )
    return found


def _read(checkpoint: Checkpoint, layer: int, names: tuple[str, ...]) -> float | None:
    name = next((n for n in (f"model.layers.{layer}.self_attn.{end}" for end in names) if n in checkpoint), None)
    if name is None:
        return None
    scale = checkpoint.take_number(name)
    if not 0 < scale < float("inf"):
        raise ModelLoadError(f"tensor {name} in {str(checkpoint.source)!r} is {scale}; a scale is a positive number")
    return scale
