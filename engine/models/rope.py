"""Rotary position embedding: the table of cosines and sines, and its application to whole heads.

Pairs are (i, i + head_dim / 2), "rotate halves", as in Hugging Face's Llama. The table is laid out so that
applying it takes three operators: x * cos + roll(x, head_dim / 2) * signed_sin, where signed_sin carries the
minus of rotate-half.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.models.checkpoint import ModelLoadError

ROPE_TYPES = ("default", "linear", "llama3")


class RotaryTable:
    """cos and signed sin for every position, in the model's dtype, each [max_positions, 1, head_dim]."""

    def __init__(
        self, inverse_frequencies: Tensor, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies)  # [max_positions, head_dim / 2]
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat((cos, cos), dim=-1).unsqueeze(1).to(device, dtype)
        self.signed_sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(device, dtype)
        self.half = inverse_frequencies.shape[0]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin of positions [T], each [T, 1, head_dim]; gathered once a step for all layers."""
        return self.cos.index_select(0, positions), self.signed_sin.index_select(0, positions)

    def rotate(self, heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        """heads [T, num_heads, head_dim] rotated to the positions that cos and signed_sin were gathered for."""
        return torch.addcmul(heads * cos, heads.roll(self.half, -1), signed_sin)


def inverse_frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """float32 [head_dim / 2] from a `config.json`, which spells it `rope_parameters` or `rope_theta`/`rope_scaling`.

    Raises `ModelLoadError` on a kind of scaling that is not one of `ROPE_TYPES`.
    """
    scaling: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = float(scaling.get("rope_theta", config.get("rope_theta", 10000.0)))
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if kind == "default":
        return frequencies
    try:
        if kind == "linear":
            return frequencies / float(scaling["factor"])
        if kind == "llama3":
            return _llama3_frequencies(frequencies, scaling)
    except KeyError as error:
        raise ModelLoadError(f"config.json: rope scaling {kind!r} lacks the key {error}") from None
    raise ModelLoadError(f"rope scaling {kind!r} is not supported; the engine knows: {', '.join(ROPE_TYPES)}")


def _llama3_frequencies(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's rule: slow rotations are divided by `factor`, fast ones kept, those between are blended."""
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    wavelengths = 2 * math.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)  # 1 = fast, 0 = slow
    return frequencies * (blend + (1 - blend) / factor)
