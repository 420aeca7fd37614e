"""Rotary position embedding: frequencies by kind of scaling, the table of cosines and sines, and its application.

Pairs are (i, i + head_dim / 2), "rotate halves", as in Hugging Face's Llama. The table is laid out so that
applying it takes three operators: x * cos + roll(x, head_dim / 2) * signed_sin, where signed_sin carries the
minus of rotate-half.

Keys are cached after rotation and cannot be rotated anew, so frequencies are fixed when the model loads. For
"dynamic" (NTK) scaling, whose frequencies follow the length of the sequence, they are those of a sequence of
max_model_len, as in vLLM: up to the original context they equal the unscaled ones and so agree with `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.models.config_values import positive_float

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


class RotaryTable:
    """cos and signed sin for every position, in the model's dtype, each [max_positions, 1, head_dim].

    factor multiplies both (YaRN's attention factor), and with them each of query and key.
    """

    def __init__(
        self,
        inverse_frequencies: Tensor,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        factor: float = 1.0,
    ) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies)  # [max_positions, head_dim / 2]
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self.cos = torch.cat((cos, cos), dim=-1).unsqueeze(1).to(device, dtype)
        self.signed_sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(device, dtype)
        self.half = inverse_frequencies.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of both tables."""
        return self.cos.nbytes + self.signed_sin.nbytes

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin of positions [T], each [T, 1, head_dim]; gathered once a step for all layers."""
        return self.cos.index_select(0, positions), self.signed_sin.index_select(0, positions)

    def rotate(self, heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        """heads [T, num_heads, head_dim] rotated to the positions that cos and signed_sin were gathered for."""
        return torch.addcmul(heads * cos, heads.roll(self.half, -1), signed_sin)


def rope_parameters(
    config: Mapping[str, Any], layer_type: str | None = None, default_theta: float = 10000.0
) -> dict[str, Any]:
    """The rope keys of a `config.json`, which spells them `rope_parameters` or `rope_theta`/`rope_scaling`.

    layer_type: which of the sets to read where layers of different types have their own (Gemma 3).
    The result has `rope_type`, `rope_theta` and what the scaling needs.
    """
    found: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise ModelLoadError(f"config.json: rope_parameters and rope_scaling are objects, found {found!r}")
    if layer_type is not None and isinstance(found.get(layer_type), Mapping):
        found = found[layer_type]
    kind = found.get("rope_type") or found.get("type") or "default"
    theta = positive_float(found, "rope_theta", positive_float(config, "rope_theta", default_theta))
    return {**found, "rope_type": str(kind), "rope_theta": theta}


def rotary_frequencies(
    parameters: Mapping[str, Any], head_dim: int, original_context: int, max_model_len: int
) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [head_dim / 2], and the factor of the rotary table.

    parameters: from `rope_parameters`. original_context: `max_position_embeddings` of `config.json`.
    Raises `ModelLoadError` on a kind of scaling that is not one of `ROPE_TYPES`, or lacks what it needs.
    """
    kind, theta = parameters["rope_type"], parameters["rope_theta"]
    if parameters.get("partial_rotary_factor") not in (None, 1):
        raise ModelLoadError("config.json: partial_rotary_factor is not 1; this engine rotates whole heads only")
    try:
        if kind == "dynamic":
            theta = _dynamic_theta(theta, float(parameters["factor"]), head_dim, original_context, max_model_len)
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if kind in ("default", "dynamic"):
            return frequencies, 1.0
        if kind == "linear":
            return frequencies / float(parameters["factor"]), 1.0
        if kind == "llama3":
            return _llama3_frequencies(frequencies, parameters), 1.0
        if kind == "yarn":
            return _yarn_frequencies(frequencies, parameters, original_context), yarn_table_factor(parameters)
    except KeyError as error:
        raise ModelLoadError(f"config.json: rope scaling {kind!r} lacks the key {error}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelLoadError(f"config.json: rope scaling {kind!r} cannot be computed: {error}") from None
    raise ModelLoadError(f"rope scaling {kind!r} is not supported; the engine knows: {', '.join(ROPE_TYPES)}")


def _dynamic_theta(theta: float, factor: float, head_dim: int, original: int, max_model_len: int) -> float:
    """NTK-aware base for sequences of max_model_len; the base itself up to the original context."""
    stretch = factor * max(max_model_len, original) / original - (factor - 1)
    return float(theta * stretch ** (head_dim / (head_dim - 2)))


def _llama3_frequencies(frequencies: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's rule: slow rotations are divided by `factor`, fast ones kept, those between are blended."""
    factor, original = float(parameters["factor"]), float(parameters["original_max_position_embeddings"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    wavelengths = 2 * math.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)  # 1 = fast, 0 = slow
    return frequencies * (blend + (1 - blend) / factor)


def _yarn_frequencies(frequencies: Tensor, parameters: Mapping[str, Any], original_context: int) -> Tensor:
    """YaRN (arXiv 2309.00071): pairs that turn often are kept, slow ones divided by `factor`, a ramp between.

    The ramp's ends are the pairs that make beta_fast and beta_slow turns over the original context.
    """
    theta, factor = float(parameters["rope_theta"]), float(parameters["factor"])
    original = float(parameters.get("original_max_position_embeddings") or original_context)
    half = len(frequencies)

    def pair_that_turns(times: float) -> float:
        return 2 * half * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_that_turns(float(parameters.get("beta_fast") or 32))
    high = pair_that_turns(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    slow = ((torch.arange(half, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - slow) + frequencies / factor * slow


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature for a context stretched by `factor`: 0.1 * mscale * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_table_factor(parameters: Mapping[str, Any]) -> float:
    """What YaRN multiplies cosines and sines by; 1 where DeepSeek's mscale and mscale_all_dim are equal."""
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    factor = float(parameters["factor"])
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_mscale(factor, float(mscale)) / yarn_mscale(factor, float(all_dim))
    return yarn_mscale(factor)
