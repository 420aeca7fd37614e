"""Bits that a weight takes under a config's `quantization_config`, scales included, by class of module.

Embeddings, output head, norms and routers stay in the model's dtype; so does what the config excludes by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError
from engine.memory.hf_values import HfValues

# How modules of a class are named in checkpoints; an exclusion that fits any of them excludes the class.
_MODULES = {
    "attention": ("model.layers.{i}.self_attn.q_proj", "model.layers.{i}.self_attn.o_proj"),
    "dense": ("model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.down_proj"),
    "experts": ("model.layers.{i}.mlp.experts.0.gate_proj", "model.layers.{i}.block_sparse_moe.experts.0.w1"),
    "shared_experts": ("model.layers.{i}.mlp.shared_experts.gate_proj", "model.layers.{i}.mlp.shared_expert.up_proj"),
    "head": ("lm_head",),
}
CLASSES = tuple(_MODULES)
_EXCLUDED = (
    "ignore",
    "ignored_layers",
    "modules_to_not_convert",
    "exclude_modules",
    "exclude",
    "llm_int8_skip_modules",
)

# What `--quantization` makes of a checkpoint in 16 bits, or names of one that is already so.
BY_FLAG: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"quant_method": "fp8"},
    "int8": {"quant_method": "gptq", "bits": 8, "group_size": -1},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "int4": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "mxfp4": {"quant_method": "mxfp4"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}


@dataclass(frozen=True)
class Quantization:
    """bits: of a quantized weight with its share of scales; None when the method is not known. kept: the classes
    that stay in the model's dtype. expert_bits: of experts, where they are narrower than the rest."""

    name: str
    bits: float | None
    kept: tuple[str, ...] = ()
    how: str = ""
    expert_bits: float | None = None


def quantization_of(values: HfValues) -> Quantization | None:
    """The checkpoint's quantization; None for one in the model's dtype."""
    config = _config_of(values)
    if config is None:
        return None
    name, bits, how = _bits(config)
    kept = tuple(kind for kind in CLASSES if _excluded(kind, config, values))
    if "head" not in kept and not config.get("lm_head"):
        kept = (*kept, "head")
    narrow = str(config.get("expert_dtype") or values.raw("expert_dtype") or "")
    if "4" in narrow:  # DeepSeek-V4: 4-bit experts with an 8-bit scale for 32 weights beside fp8
        return Quantization(name, bits, kept, f"{how}; experts in {narrow} at 4.25 bits", 4.25)
    return Quantization(name, bits, kept, how)


def _config_of(values: HfValues) -> Mapping[str, Any] | None:
    for part in (values.config, values.text):
        for key in ("quantization_config", "compression_config"):
            if isinstance(part.get(key), Mapping) and part[key]:
                config: Mapping[str, Any] = part[key]
                return config
    return None


def _bits(config: Mapping[str, Any]) -> tuple[str, float | None, str]:
    """(name, bits a weight, arithmetic)."""
    method = str(config.get("quant_method") or config.get("quant_type") or "").lower().replace("-", "_")
    if method in ("awq", "gptq", "gptq_marlin", "awq_marlin", "auto_round", "intel/auto_round", "auto_awq"):
        name = "awq" if "awq" in method else "gptq" if "gptq" in method else "auto-round"
        return name, *_grouped(_whole(config, "bits", _whole(config, "w_bit", 4)), config, zeros=True)
    if method in ("fp8", "fbgemm_fp8", "ptpc_fp8"):
        return "fp8", 8.0, "fp8, one scale a tensor, channel or block"
    if method == "mxfp4":
        return "mxfp4", 4.25, "4 bits and an 8-bit scale for 32 weights"
    if method in ("bitsandbytes", "bnb"):
        if config.get("load_in_8bit") or config.get("_load_in_8bit"):
            return "bitsandbytes", 8.0, "8 bits, one scale a row"
        scales = 8 / 64 if config.get("bnb_4bit_use_double_quant") else 32 / 64
        return "bitsandbytes", 4 + scales, "4 bits and the scales of blocks of 64"
    if method in ("compressed_tensors", "compressed_tensor"):
        return _compressed_tensors(config)
    if method in ("modelopt", "modelopt_fp4", "nvfp4", "modelopt_mixed"):
        return _modelopt(config)
    if method in ("quark", "torchao", "hqq", "gguf", "quanto", "experts_int8", "eetq", "vptq", "aqlm", "exl2", "exl3"):
        bits = config.get("bits") or (8 if method in ("experts_int8", "eetq") else None)
    else:
        bits = config.get("bits") or config.get("num_bits")
    known = float(bits) if isinstance(bits, (int, float)) and 0 < bits <= 32 else None
    return method or "unknown", known, f"{bits} bits by its config"


def _whole(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key) or default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {key} of quantization_config must be a positive integer, found {value!r}")
    return value


def _grouped(bits: int, config: Mapping[str, Any], *, zeros: bool, scale: int = 16) -> tuple[float, str]:
    group = config.get("group_size") or config.get("q_group_size")
    if not isinstance(group, int) or group <= 0:
        return float(bits), f"{bits} bits, one scale a channel"
    extra = (scale + (bits if zeros else 0)) / group
    what = "scale and a zero point" if zeros else "scale"
    return bits + extra, f"{bits} bits, and a {scale}-bit {what} for {group} weights"


def _compressed_tensors(config: Mapping[str, Any]) -> tuple[str, float | None, str]:
    groups = config.get("config_groups")
    first: Any = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping) or not weights.get("num_bits"):
        return "compressed-tensors", None, "no bits named"
    bits, kind = _whole(weights, "num_bits", 0), str(weights.get("type", "int"))
    if kind == "float" and bits == 8:
        return "fp8", 8.0, "fp8 by compressed-tensors"
    if kind == "float" and bits == 4:
        group = _whole(weights, "group_size", 16)
        name = "mxfp4" if group == 32 else "nvfp4"
        return name, 4 + 8 / group, f"4 bits and an 8-bit scale for {group} weights"
    return f"w{bits}", *_grouped(bits, weights, zeros=not weights.get("symmetric", True))


def _modelopt(config: Mapping[str, Any]) -> tuple[str, float | None, str]:
    inner = config.get("quantization")
    source: Mapping[str, Any] = inner if isinstance(inner, Mapping) else config
    algorithm = str(source.get("quant_algo") or config.get("quant_method") or "").upper()
    if "FP4" in algorithm:
        group = _whole(source, "group_size", 16)
        return "nvfp4", 4 + 8 / group, f"4 bits and an 8-bit scale for {group} weights"
    if "FP8" in algorithm:
        return "fp8", 8.0, "fp8 by ModelOpt"
    if "W4A16" in algorithm or "AWQ" in algorithm:
        return "awq", *_grouped(4, {"group_size": source.get("group_size") or 128}, zeros=False)
    return "modelopt", None, f"{algorithm or 'no algorithm'} named"


def _excluded(kind: str, config: Mapping[str, Any], values: HfValues) -> bool:
    inner = config.get("quantization")
    sources = [config, inner] if isinstance(inner, Mapping) else [config]
    lists = [source.get(key) for source in sources for key in _EXCLUDED]
    entries = [str(entry) for stated in lists if isinstance(stated, list) for entry in stated]
    index = values.num_layers // 2  # one in the middle stands for its class
    names = [name.format(i=index) for name in _MODULES[kind]]
    return any(_fits(entry, name) for entry in entries for name in names)


def _fits(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        try:
            return re.match(entry[3:], name) is not None or re.search(entry[3:], name) is not None
        except re.error:
            return False
    if "*" in entry:
        pattern = ".*".join(re.escape(part) for part in entry.split("*"))
        return re.search(pattern, name) is not None
    tail = name.removeprefix("model.")
    return (
        name == entry or entry in (tail, f"model.{tail}") or name.startswith(f"{entry}.") or f".{entry}." in f".{name}."
    )
