"""Reads GPU, parallelism, model and checkpoint from a dict of facts and from the flags in force."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from engine.memory.deployment import Gpu
from engine.memory.hf_config import model_shape
from engine.memory.model_presets import gpu, model_preset
from engine.memory.shape import ModelShape
from runbooks.cache_config_info import whole
from runbooks.hardware import capability_of

_TP_FLAGS = ("--tensor-parallel-size", "--tp-size", "--tp_size", "--num-shard")
_PP_FLAGS = ("--pipeline-parallel-size", "--pp-size", "--pp_size")


def read_hardware(facts: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `TargetFacts` that say where the engine runs and what it serves; None where nothing says so."""
    device, shape = _gpu(facts.get("gpu")), _shape(facts)
    tp = _first(facts.get("tp"), *(flags.get(flag) for flag in _TP_FLAGS))
    pp = _first(facts.get("pp"), *(flags.get(flag) for flag in _PP_FLAGS))
    num_gpus = whole(facts.get("num_gpus"))
    if num_gpus is None and tp is not None:
        num_gpus = tp * (pp or 1)
    quantization = facts.get("checkpoint_quantization") or flags.get("--quantization")
    capability = capability_of(facts.get("compute_capability"))
    return {
        "gpu": device,
        "num_gpus": num_gpus,
        "tp": tp,
        "pp": pp,
        "shape": shape,
        "checkpoint_quantization": quantization or (shape.quantization if shape is not None else None),
        "attention_backend": facts.get("attention_backend") or flags.get("--attention-backend"),
        "compute_capability": capability or (device.compute_capability if device is not None else None),
    }


def _first(*values: Any) -> int | None:
    return next((number for value in values if (number := whole(value)) is not None), None)


def _gpu(entry: Any) -> Gpu | None:
    """A `Gpu`, its fields, or the name of a preset; raises `ConfigError` for a name that is none."""
    if entry is None or isinstance(entry, Gpu):
        return entry
    if isinstance(entry, Mapping):
        fields = {key: entry[key] for key in ("name", "memory_bytes", "memory_bandwidth", "unified") if key in entry}
        return Gpu(compute_capability=capability_of(entry.get("compute_capability")), **fields)
    return gpu(str(entry))


def _shape(facts: Mapping[str, Any]) -> ModelShape | None:
    """A `ModelShape`, one read from the model's own configuration, or the preset of the model's name."""
    shape, name = facts.get("shape"), str(facts.get("model") or "")
    if isinstance(shape, ModelShape):
        return shape
    config = facts.get("model_config")
    if isinstance(config, Mapping):
        return model_shape(config, name)
    try:
        return model_preset(name) if name else None
    except ConfigError:
        return None  # a name of the server's own: it need not be a model's
