"""Where the scales of an fp8 KV cache come from: 1, the checkpoint, or the first batch.

One scale for K and one for V a layer. With 1, values beyond the format's largest are stored as that: what the model
computed is lost. `--calculate-kv-scales` takes them from the first batch that is computed, before its tokens are
stored, and they stay: tokens that are stored must remain readable, so values beyond that batch's largest saturate too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.kv_cache import LayerKVCache

UNSCALED = (1.0, 1.0)


@dataclass(frozen=True)
class LayerScales:
    """source: "default", "checkpoint", "first batch", or "pending" while that has not come."""

    layer: int
    k_scale: float
    v_scale: float
    source: str


def fp8_scales(
    caches: Sequence[LayerKVCache | Tensor], from_checkpoint: Mapping[int, tuple[float, float]], calculated: bool
) -> list[LayerScales]:
    """The scales in force of the layers whose cache is fp8."""
    return [
        LayerScales(layer, cache.key.scale, cache.value.scale, _source(cache, layer in from_checkpoint, calculated))
        for layer, cache in enumerate(caches)
        if isinstance(cache, LayerKVCache) and cache.kv_format.scaled
    ]


def _source(cache: LayerKVCache, in_checkpoint: bool, calculated: bool) -> str:
    if calculated:
        return "pending" if cache.awaits_scales else "first batch"
    return "checkpoint" if in_checkpoint else "default"
