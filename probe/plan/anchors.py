"""Anchors: memory figures that public logs print, in the JSON format of `planner_anchors`, read leniently.

An anchor names a model by its dims, a server by engine, version and parallel sizes, what its log states (`inputs`)
and what follows from it (`reported`). Fields may be missing; what cannot be read is a note, never a guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.memory.deployment import Gpu
from engine.memory.engines import engine_name
from engine.memory.model_presets import gpu
from engine.memory.shape import LayerGroup, ModelShape

GIB = 1 << 30
_KINDS = ("full", "sliding", "chunked", "mla", "recurrent")
_UNITS = {"bytes": 1, "gib": GIB, "gb": 10**9, "mib": 1 << 20, "mb": 10**6}
_FORMATS = (
    "fp8_ds_mla|nvfp4_ds_mla|fp8_e4m3|fp8_e5m2|fp8_per_token_head|int8_per_token_head|int4_per_token_head|int8k_int4v|"
    "int4_kivi|turboquant_\\w+|octave_\\w+|ultraquant_4bit|nvfp4|fp8|int8|fp16|bf16|fp32|float16|bfloat16|float32|auto"
)


@dataclass(frozen=True)
class Anchor:
    """shape: None where the dims do not tell it. tolerance fields: see `check`."""

    name: str
    source: str
    engine: str
    offload: bool  # a cache of its own beside the engine, without an engine's rounding
    version: str
    model: str
    gpu_text: str
    gpu: Gpu | None
    tp: int
    pp: int
    shape: ModelShape | None
    kv_dtype: str
    block_size: int | None
    inputs: Mapping[str, Any]
    reported: Mapping[str, Any]
    verdict: str
    level: str
    extra_pct: float
    decimals: int | None
    bytes_per_token: float | None

    def size(self, base: str) -> int | None:
        """`inputs` of that name in whatever unit, in bytes; the least of a list, as engines take the minimum."""
        return size_of(self.inputs, base)

    def largest(self, base: str) -> int | None:
        """The same for what a rank spends: the rank that spends most decides."""
        return size_of(self.inputs, base, max)

    @property
    def max_model_len(self) -> int | None:
        value = self.inputs.get("max_model_len", self.inputs.get("max_seq_len", self.inputs.get("context_length")))
        return int(value) if isinstance(value, int | float) and value > 0 else None

    @property
    def utilization(self) -> float | None:
        for key in ("util", "gpu_memory_utilization", "mem_fraction_static", "free_gpu_memory_fraction"):
            if isinstance(self.inputs.get(key), int | float):
                return float(self.inputs[key])
        return None


def read_anchors(path: str | Path) -> list[dict[str, Any]]:
    """The anchors of a file: a list of them, or an object with `planner_anchors`. Raises `ConfigError`."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if isinstance(data, dict):
        data = data.get("planner_anchors", data.get("anchors"))
    if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
        raise ConfigError(f"{path} holds no anchors: expected a list, or an object with `planner_anchors`")
    return data


def anchor_of(raw: Mapping[str, Any], position: int) -> Anchor:
    """Raises `ConfigError` for dims that contradict themselves."""
    inputs, reported, dims = (_mapping(raw.get(key)) for key in ("inputs", "reported", "dims"))
    text = str(raw.get("engine") or "vllm")
    engine, offload = _engine(text)
    kv_dtype = re.search(_FORMATS, str(raw.get("kv_dtype") or "auto").lower())
    gpu_text = str(raw.get("gpu") or "")
    return Anchor(
        name=str(raw.get("pa") or raw.get("id") or f"#{position}"),
        source=str(raw.get("source") or ""),
        engine=engine,
        offload=offload,
        version=str(raw.get("version") or ""),
        model=str(raw.get("model") or ""),
        gpu_text=gpu_text,
        gpu=_gpu(inputs, gpu_text),
        tp=_whole(raw.get("tp"), 1),
        pp=_whole(raw.get("pp"), 1),
        shape=shape_of(dims, inputs, str(raw.get("model") or "")),
        kv_dtype=kv_dtype[0] if kv_dtype else "auto",
        block_size=_optional_whole(raw.get("block_size")),
        inputs=inputs,
        reported=reported,
        verdict=str(raw.get("verdict") or ""),
        level=str(raw.get("level") or ""),
        extra_pct=float(raw.get("extra_tol_pct") or 0.0),
        decimals=_optional_whole(raw.get("kv_gib_decimals")),
        bytes_per_token=_optional_float(raw.get("kv_bytes_per_token_per_gpu")),
    )


def size_of(values: Mapping[str, Any], base: str, of_ranks: Callable[[list[Any]], Any] = min) -> int | None:
    """`base`_gib, `base`_gb, `base`_mib or `base`_bytes in bytes; of a list, that of one rank."""
    for unit, factor in _UNITS.items():
        for ranks in ("", "_per_rank", "_by_rank", "_ranks"):
            value = values.get(f"{base}_{unit}{ranks}")
            if isinstance(value, list) and value:
                value = of_ranks(value)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return round(value * factor)
    return None


def shape_of(dims: Mapping[str, Any], inputs: Mapping[str, Any], name: str) -> ModelShape | None:
    """The model by its dims; None where they do not tell what a layer keeps."""
    groups: list[LayerGroup] = []
    for key in _KINDS:
        own = dims.get(key)
        if isinstance(own, int) and not isinstance(own, bool):
            own = {"layers": own}
        if not isinstance(own, Mapping):
            continue
        group = _group({**{name: value for name, value in dims.items() if name not in _KINDS}, **own}, key)
        if group is None:
            return None
        groups.append(group)
    if not groups:
        groups = _plain_groups(dims)
    if not groups:
        return None
    missing = _whole(dims.get("layers"), 0) - sum(group.count for group in groups)
    if missing > 0:
        groups.append(LayerGroup(missing, "recurrent", state_bytes=_whole(dims.get("state_bytes"), 0)))
    return ModelShape(
        name=name,
        layers=tuple(groups),
        hidden_size=_optional_whole(dims.get("hidden", dims.get("hidden_size"))),
        intermediate_size=_optional_whole(dims.get("intermediate", dims.get("intermediate_size"))),
        num_q_heads=_optional_whole(dims.get("q_heads", dims.get("num_q_heads"))),
        vocab_size=_optional_whole(dims.get("vocab", dims.get("vocab_size"))),
        dtype=str(inputs.get("dtype") or "bfloat16"),
    )


def _plain_groups(dims: Mapping[str, Any]) -> list[LayerGroup]:
    layers = _whole(dims.get("layers", dims.get("num_layers")), 0)
    whole = _whole(dims.get("full_attention_layers", dims.get("full_layers")), 0)
    windowed = _whole(dims.get("sliding_layers"), 0)
    if windowed and not whole:
        whole = layers - windowed
    full = _group({**dims, "layers": whole or layers}, "mla" if _latent(dims) else "full")
    if full is None or not full.count:
        return []
    if not windowed:
        return [full]
    window = _optional_whole(dims.get("window", dims.get("sliding_window")))
    return [full, LayerGroup(windowed, "sliding", full.num_kv_heads, full.head_dim, window=window)]


def _group(dims: Mapping[str, Any], kind: str) -> LayerGroup | None:
    count = _whole(dims.get("layers", dims.get("num_layers")), 0)
    if kind == "recurrent":
        return LayerGroup(count, "recurrent", state_bytes=_whole(dims.get("state_bytes"), 0))
    index = _whole(dims.get("index_width"), 0)
    if kind == "mla" or (kind == "full" and _latent(dims)):
        return LayerGroup(count, "latent", latent_width=_latent(dims), index_width=index)
    heads = _whole(dims.get("kv_heads", dims.get("num_kv_heads")), 0)
    width = _whole(dims.get("head_dim", dims.get("head_size")), 0)
    if not (count and heads and width):
        return None
    window = _optional_whole(dims.get("window", dims.get("chunk")))
    if kind in ("sliding", "chunked") and window:
        attention: Any = kind
    else:
        attention, window = "full", None
    values = _optional_whole(dims.get("v_head_dim"))
    return LayerGroup(count, attention, heads, width, values, window=window, index_width=index)


def _latent(dims: Mapping[str, Any]) -> int:
    rank = _whole(dims.get("kv_lora_rank"), 0)
    rope = _whole(dims.get("rope", dims.get("qk_rope_head_dim")), 0)
    return _whole(dims.get("mla_latent", dims.get("latent")), rank + rope if rank else 0)


def _engine(text: str) -> tuple[str, bool]:
    """(engine, whether it is an offload cache). A cache beside an engine counts tokens one by one."""
    try:
        return engine_name(text), False
    except ConfigError:
        return "vllm", True


def _gpu(inputs: Mapping[str, Any], text: str) -> Gpu | None:
    total = next((size for base in ("total", "gpu") if (size := size_of(inputs, base))), None)
    total = total or size_of({"total_gib": inputs.get("total_gib_assumed")}, "total")
    if total is None and (stated := re.search(r"([\d.]+)\s*GiB", text)):
        total = round(float(stated[1]) * GIB)
    found = _named_gpu(text)
    if total is None:
        return found
    return Gpu(text or "GPU", total, found.compute_capability if found else _capability(text))


def _capability(text: str) -> tuple[int, int] | None:
    return (7, 0) if "v100" in text.lower() else None


def _named_gpu(text: str) -> Gpu | None:
    name = re.sub(r"\([^)]*\)|\b\d+\s*x\s|\bclass\b|\bNVIDIA\b|\bRTX\b", " ", text, flags=re.IGNORECASE).strip()
    words = name.split()
    for candidate in (text, name, "-".join(words), words[0] if words else "", f"RTX{''.join(words)}"):
        try:
            return gpu(candidate)
        except ConfigError:
            continue
    return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _optional_whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: Any, default: int) -> int:
    found = _optional_whole(value)
    return default if found is None else found


def _optional_float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
