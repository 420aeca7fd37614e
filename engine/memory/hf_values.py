"""The values of a `config.json` under their many names: aliases, nested text models, defaults of `transformers`.

A key that a plan needs and nothing gives is a `ConfigError` that names it and the flag that gives it instead. What
was filled in is noted in `assumptions`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from engine.errors import ConfigError

ALIASES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "model_dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "kv_n_heads"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "intermediate_size": (
        "intermediate_size",
        "n_inner",
        "ffn_dim",
        "ffn_hidden_size",
        "d_ff",
        "block_ff_dim",
        "hidden_dim",
    ),
    "vocab_size": ("vocab_size", "padded_vocab_size", "n_vocab"),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "max_sequence_length",
        "max_seq_len",
        "seq_length",
        "model_max_length",
        "n_ctx",
    ),
    "sliding_window": ("sliding_window", "sliding_window_size", "attention_window_size"),
    "num_experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "top_k_experts",
        "moe_k",
        "moe_topk",
        "moe_top_k",
        "num_selected_experts",
    ),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_ffn_hidden_size", "expert_dim"),
    "n_shared_experts": ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "layer_types": ("layer_types", "layers_block_type", "block_types"),
}
FLAGS = {
    "num_hidden_layers": "--layers",
    "num_key_value_heads": "--kv-heads",
    "num_attention_heads": "--query-heads",
    "head_dim": "--head-dim",
    "kv_lora_rank": "--mla-latent",
}
NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "language_model", "decoder")
_IDENTITY = ("num_hidden_layers", "hidden_size", "num_attention_heads")  # of a model's own size: never guessed

_MOST_LAYERS, _MOST = 100_000, 10**12


class HfValues:
    """One text model of a config. `config` is the whole, `text` the part that describes the decoder."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.text = _text_part(config)
        self.nested = self.text is not config
        named = config.get("architectures") or self.text.get("architectures")
        self._class = str(named[0]) if isinstance(named, list) and named else ""
        stated = str(self.text.get("model_type") or config.get("model_type") or "").lower()
        self.model_type = stated or _type_of_class(self._class)
        self.defaults: Mapping[str, Any] = _defaults_of(self.model_type)
        self.known = bool(self.defaults)
        self.assumptions: list[str] = []
        parts = (self.text.get(key) for key in ("attn_config", "ffn_config"))  # DBRX and MPT keep sizes in these
        self._parts = [part for part in parts if isinstance(part, Mapping)]

    @property
    def architecture(self) -> str:
        """The first of `architectures`, or the model type."""
        return self._class or self.model_type

    def raw(self, key: str, default: Any = None) -> Any:
        """The value under any of its names, as it stands; a default of the model's class, else `default`."""
        names = ALIASES.get(key, (key,))
        for part in (self.text, *self._parts):
            for name in names:
                if part.get(name) is not None:
                    return part[name]
        if any(name in self.text for name in names):
            return default  # null is a value: no window, as many KV heads as query heads
        for name in names:
            if self.defaults.get(name) is not None and (self.nested or key not in _IDENTITY):
                if key in _IDENTITY or key in ("num_key_value_heads", "head_dim"):
                    self.assume(f"{key} is missing; {self.defaults[name]} is the default of {self.model_type}")
                return self.defaults[name]
        return default

    def whole(self, key: str) -> int:
        """A positive integer that must be there; raises `ConfigError` naming the key and the flag that gives it."""
        value = self.optional(key)
        if value is None:
            raise ConfigError(self._missing(key))
        return value

    @property
    def num_layers(self) -> int:
        """Layers of the decoder: stated, or as many as the config names one by one."""
        types = self.raw("layer_types") or self.raw("hybrid_override_pattern")
        stated = self.optional("num_hidden_layers")
        if stated is None and isinstance(types, (list, str)) and types:
            return len(types)
        return self.whole("num_hidden_layers")

    def optional(self, key: str, default: int | None = None) -> int | None:
        """A positive integer, or `default` where it is missing, null or 0."""
        value = self.raw(key)
        if value is None or value == 0:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            flag = f"; give {FLAGS[key]}" if key in FLAGS else ""
            raise ConfigError(f"config.json: {key} must be a positive integer, found {value!r}{flag}")
        if value > (_MOST_LAYERS if key == "num_hidden_layers" else _MOST):
            raise ConfigError(f"config.json: {key} {value} is no size of a model; correct it")
        return value

    def switch(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.raw(key)
        return default if value is None else bool(value)

    def entry(self, group: Mapping[str, Any], key: str, default: int | None = None) -> int:
        """A positive integer of a nested object; raises `ConfigError` naming the key."""
        value = default if group.get(key) is None else group[key]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST:
            raise ConfigError(f"config.json: {key} must be a positive integer, found {value!r}")
        return value

    def assume(self, sentence: str) -> None:
        """Notes what was filled in, once."""
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)

    def _missing(self, key: str) -> str:
        names = [name for name in ALIASES.get(key, (key,)) if name != key]
        also = f" (also looked for {', '.join(names)})" if names else ""
        subject = f"config.json of {self.architecture or 'an unnamed architecture'}"
        if key in FLAGS:
            return (
                f"{subject}: {key} is missing{also}; give {FLAGS[key]}, or describe the model by --layers, --kv-heads "
                "and --head-dim (--mla-latent for multi-head latent attention)"
            )
        return f"{subject}: {key} is missing{also}; add it, or give --head-dim or --weights-gib, which it is needed for"


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The nested text model of a multimodal config; the config itself where it describes the decoder."""
    for key in NESTED:
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            return _text_part(inner)
    return config


@functools.cache
def _all_defaults() -> dict[str, dict[str, Any]]:
    text = resources.files("engine.memory").joinpath("presets/defaults.json").read_text(encoding="utf-8")
    loaded: dict[str, dict[str, Any]] = json.loads(text)
    return loaded


_SAME = {
    "kimi_k2": "deepseek_v3",
    "deepseek_vl_v2": "deepseek_v2",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified_text": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "llama4": "llama4_text",
    "refinedweb": "falcon",
    "refinedwebmodel": "falcon",
}


def _defaults_of(model_type: str) -> Mapping[str, Any]:
    return _all_defaults().get(_SAME.get(model_type, model_type), {})


def _type_of_class(architecture: str) -> str:
    """ "Gemma3ForCausalLM" -> "gemma3": the model type of a config that names only its class."""
    name = architecture.split("For", 1)[0].lower()
    types = (*_all_defaults(), *_SAME)
    return next((known for known in types if known.replace("_", "") == name), "")


def family_of(model_type: str) -> str:
    """The model type whose class reads the same config."""
    return _SAME.get(model_type, model_type)
