"""Bytes of one KV slot (one token, one KV head, keys and values) in every engine's formats.

`kernels.formats` knows the formats of the engine in this repository; this module adds those that only vLLM, SGLang
and TensorRT-LLM have, by their published layouts. A format whose layout is not published is an estimate and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import ConfigError
from kernels.formats import KV_FORMATS, KVFormat

_SPELLINGS = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "fp8_e4m3",
    "fp8_e4m3fn": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "fp8_inc": "fp8_e4m3",
    "float8": "fp8_e4m3",
    "fp4": "nvfp4",
    "fp4_e2m1": "fp4_mx_block16",
    "nvfp4_4over6": "nvfp4",
}


@dataclass(frozen=True)
class SlotFormat:
    """bytes_per_head: (key width, value width) -> bytes of one token and head. estimated: why it may be off."""

    name: str
    bytes_per_head: Callable[[int, int], int]
    estimated: str = ""


def _plain(element_bytes: int) -> Callable[[int, int], int]:
    return lambda key, value: (key + value) * element_bytes


def _with_scales(bits: int, scale_bytes: int) -> Callable[[int, int], int]:
    """Packed codes and one scale a vector (vLLM's per_token_head formats: float32, inline behind each head's data)."""
    return lambda key, value: key * bits // 8 + value * bits // 8 + 2 * scale_bytes


def _blocked(group: int, scale_bytes: int) -> Callable[[int, int], int]:
    """4-bit floating point with a scale for every `group` elements."""
    return lambda key, value: sum(width // 2 + width // group * scale_bytes for width in (key, value))


def _turboquant(key_bits: int, value_bits: int) -> Callable[[int, int], int]:
    """Keys: 8-bit floats, or packed indices and a 2-byte norm; values: codes, 2-byte scale and zero; even in all."""

    def slot(key: int, value: int) -> int:
        keys = key if key_bits == 8 else -(-key * key_bits // 8) + 2
        total = keys + -(-value * value_bits // 8) + 4
        return total + total % 2

    return slot


_ENGINE_FORMATS = {
    slot.name: slot
    for slot in (
        SlotFormat("int8", _plain(1)),  # TensorRT-LLM: one scale a layer, outside the pool
        SlotFormat("fp8_per_token_head", _with_scales(8, 4)),
        SlotFormat("nvfp4", _blocked(16, 1)),
        SlotFormat("fp4_mx_block16", _blocked(16, 1)),
        SlotFormat("ultraquant_4bit", _blocked(32, 1)),
        SlotFormat("turboquant_k8v4", _turboquant(8, 4)),
        SlotFormat("turboquant_4bit_nc", _turboquant(4, 4)),
        SlotFormat("turboquant_k3v4_nc", _turboquant(3, 4)),
        SlotFormat("turboquant_3bit_nc", _turboquant(3, 3)),
        *(
            SlotFormat(name, _turboquant(3, bits), "its layout is taken to be that of TurboQuant with as many bits")
            for name, bits in (("octave_k3v4", 4), ("octave_k3v3", 3), ("octave_k3v3_compact", 3))
        ),
    )
}
_LATENT_ONLY = {"fp8_ds_mla", "nvfp4_ds_mla"}
_ROPE_WIDTH = 64  # values of a latent that carry the position; DeepSeek's packed formats keep them apart
KNOWN_FORMATS = ("auto", *KV_FORMATS, *_SPELLINGS, *_ENGINE_FORMATS, *sorted(_LATENT_ONLY))


def canonical_format(kv_cache_dtype: str, model_dtype: str) -> str:
    """The format that a flag's value means: "auto" is the model's dtype, "fp8" is fp8_e4m3, ...

    Raises `ConfigError` for a value that no engine has.
    """
    asked = kv_cache_dtype.strip().lower().removeprefix("torch.").replace("-", "_")
    name = model_dtype.strip().lower().removeprefix("torch.") if asked == "auto" else asked
    name = _SPELLINGS.get(name, name)
    if name not in KV_FORMATS and name not in _ENGINE_FORMATS and name not in _LATENT_ONLY:
        raise ConfigError(
            f"KV cache format {kv_cache_dtype!r} is not known; use auto, bfloat16, fp8_e4m3, fp8_e5m2, "
            "int8_per_token_head, int4_per_token_head, nvfp4, turboquant_k8v4 or another value of your engine's "
            "--kv-cache-dtype"
        )
    return name


def estimate_note(name: str) -> str:
    """Why the bytes of a format are an estimate; empty where its layout is published."""
    return _ENGINE_FORMATS[name].estimated if name in _ENGINE_FORMATS else ""


def head_block_bytes(name: str, key_width: int, value_width: int, block_size: int) -> int:
    """Bytes of one block of one layer and KV head, keys and values with their scales. `name` is canonical."""
    if name in _LATENT_ONLY:
        raise ConfigError(f"--kv-cache-dtype {name} is for multi-head latent attention only; use fp8 for this model")
    if name in _ENGINE_FORMATS:
        return block_size * _ENGINE_FORMATS[name].bytes_per_head(key_width, value_width)
    kv_format: KVFormat = KV_FORMATS[name]
    stored = [(kv_format.key, key_width), (kv_format.value, value_width)]  # a width of 0: values are read from keys
    try:
        return sum(part.bytes_per_block_head(width, block_size) for part, width in stored if width)
    except ValueError as error:
        raise ConfigError(f"{name} cannot store heads of {key_width} and {value_width} values: {error}") from error


def latent_block_bytes(name: str, latent_width: int, block_size: int) -> int:
    """Bytes of one block of one layer's latents: one vector a token for all heads, on every tensor-parallel rank.

    fp8_ds_mla keeps the compressed part in fp8 with a float32 scale every 128 values and the 64 positional values in
    bfloat16 (656 bytes at a width of 576); nvfp4_ds_mla keeps it in 4 bits with a scale every 16, those in 8 bits.
    """
    compressed = latent_width - _ROPE_WIDTH
    if name == "fp8_ds_mla":
        return block_size * (compressed + -(-compressed // 128) * 4 + _ROPE_WIDTH * 2)
    if name == "nvfp4_ds_mla":
        return block_size * (compressed // 2 + compressed // 16 + _ROPE_WIDTH)
    if name in _ENGINE_FORMATS:
        return block_size * _ENGINE_FORMATS[name].bytes_per_head(latent_width, 0)
    return KV_FORMATS[name].key.bytes_per_block_head(latent_width, block_size)
