"""Metadata of a GGUF file as the `config.json` that Hugging Face would have written. No torch.

Keys are llama.cpp's, `<architecture>.<key>`. What it does not write down but computes with is added here: Gemma 3's
rhythm of local layers, its local rotary base, and the scale of its queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config import ConfigError
from engine.gguf_file import GGUFHeader, read_gguf_header

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
GEMMA3_27B_LAYERS = 62  # the size whose queries are scaled by hidden_size / heads instead of head_dim
GEMMA3_PERIOD = 6  # every sixth layer is global
DTYPE = "float32"  # of dequantized weights, unless --dtype says otherwise: a quantized file has none of its own


def gguf_hf_config(path: str | Path) -> dict[str, Any]:
    """The dict of a `config.json` for the file; raises `ConfigError` when it cannot be read or is not supported."""
    return hf_config_of(read_gguf_header(path))


def hf_config_of(header: GGUFHeader) -> dict[str, Any]:
    """As `gguf_hf_config`, of a header that is read already."""
    name = header.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"GGUF architecture {name!r} in {str(header.path)!r} is not supported; the engine runs: "
            f"{', '.join(ARCHITECTURES)}"
        )
    read = _Metadata(header, name)
    if read.get("expert_count"):
        raise ConfigError(f"{str(header.path)!r} is a mixture of experts, which is not supported in GGUF files")
    hidden, heads = read.integer("embedding_length"), read.integer("attention.head_count")
    head_dim = read.integer("attention.key_length", hidden // heads)
    if read.integer("attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"{str(header.path)!r}: keys and values of different lengths are not supported")
    if read.integer("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(f"{str(header.path)!r}: rotating a part of each head is not supported")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[name]],
        "num_hidden_layers": read.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": read.integer("feed_forward_length"),
        "vocab_size": _vocab_size(header),
        "max_position_embeddings": read.integer("context_length"),
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope(read, 1e6 if name == "gemma3" else 10000.0),
        "dtype": DTYPE,
    }
    if name == "gemma3":
        config |= _gemma3(read, config)
    return config


class _Metadata:
    """Numbers under an architecture's keys; raises `ConfigError` naming what is missing or of the wrong kind."""

    def __init__(self, header: GGUFHeader, architecture: str) -> None:
        self.header, self.architecture = header, architecture

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._wrong(key, "a positive integer", value)
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, "a number", value)
        return float(value)

    def _wrong(self, key: str, kind: str, value: object) -> ConfigError:
        return ConfigError(f"{str(self.header.path)!r}: {self.architecture}.{key} must be {kind}, found {value!r}")


def _vocab_size(header: GGUFHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{str(header.path)!r} holds no token_embd.weight; the file is incomplete")
    return embedding.shape[0]


def _rope(read: _Metadata, default_theta: float) -> dict[str, Any]:
    kind = read.get("rope.scaling.type") or "none"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": read.number("rope.freq_base", default_theta)}
    if kind != "none":
        rope |= {"rope_type": str(kind), "factor": read.number("rope.scaling.factor", 1.0)}
        original = read.get("rope.scaling.original_context_length")
        if original is not None:
            rope["original_max_position_embeddings"] = read.integer("rope.scaling.original_context_length")
    return rope


def _gemma3(read: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    local = {"rope_type": "default", "rope_theta": read.number("rope.freq_base_swa", 10000.0)}
    return {
        "sliding_window": read.integer("attention.sliding_window"),
        "sliding_window_pattern": read.integer("attention.sliding_window_pattern", GEMMA3_PERIOD),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "query_pre_attn_scalar": config["hidden_size"] // heads if layers == GEMMA3_27B_LAYERS else config["head_dim"],
        "final_logit_softcapping": read.get("final_logit_softcapping"),
        "hidden_activation": "gelu_pytorch_tanh",
    }
