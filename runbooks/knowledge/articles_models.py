"""The models and cards the articles speak of, and the planner asked about them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from engine.memory.capacity import CapacityPlan
from engine.memory.deployment import Deployment
from engine.memory.hf_config import model_shape
from engine.memory.model_presets import gpu, model_preset
from engine.memory.plan import plan
from engine.memory.shape import ModelShape
from runbooks.knowledge.text import data

# Llama 3.1 has the dimensions of Llama 3 and the 128K context that the articles give it; Qwen2.5 those of Qwen2.
LLAMA_8B, LLAMA_70B = "Llama-3.1-8B", "Llama-3.1-70B"
LLAMA2_70B, QWEN2_72B = "Llama-2-70B", "Qwen2.5-72B"
DEEPSEEK_V2 = "DeepSeek-V2"
A100, H100 = "A100-80GB", "H100-80GB"
VERSION = "0.20.0"  # the version the articles name
GB = 1e9
_AMPLE = 1 << 44


@functools.cache
def shape(name: str) -> ModelShape:
    """The shape of a preset, or of a model that only the articles need."""
    configs = data("claims")["models"]
    return model_shape(configs[name]["config"], name) if name in configs else model_preset(name)


@functools.cache
def per_token(name: str, kv_dtype: str = "auto", *, skip_layers: tuple[str, ...] = ()) -> int:
    """KV bytes of one token over all layers, unsharded."""
    return shape_per_token(shape(name), kv_dtype, skip_layers=skip_layers)


def shape_per_token(model: ModelShape, kv_dtype: str = "auto", *, skip_layers: tuple[str, ...] = ()) -> int:
    """KV bytes of one token over all layers of a shape, unsharded; 0 where no layer grows with the context."""
    deployment = Deployment(
        model,
        version="0.33.0",
        kv_cache_bytes=_AMPLE,
        max_model_len=4096,
        max_num_seqs=1,
        max_num_batched_tokens=4096,
        kv_cache_dtype=kv_dtype,
        kv_cache_dtype_skip_layers=skip_layers,
    )
    return plan(deployment).kv_bytes_per_token or 0


def heads_as(model: ModelShape, kv_heads: int) -> ModelShape:
    """The same model as if every layer kept `kv_heads` key and value heads."""
    layers = tuple(dataclasses.replace(group, num_kv_heads=kv_heads) for group in model.layers)
    return dataclasses.replace(model, layers=layers)


@functools.cache
def planned(name: str, card: str, **settings: Any) -> CapacityPlan:
    """The plan of a preset on cards of one kind; the number of cards follows from tp x pp."""
    cards = settings.get("tp", 1) * settings.get("pp", 1)
    settings = {"version": VERSION, **settings}
    return plan(Deployment(shape(name), gpu=gpu(card), num_gpus=cards, **settings))
