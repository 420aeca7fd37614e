"""The dimensions of a decoder that decide its KV cache, read from a Hugging Face `config.json`. Pure Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.models.windows import layer_windows


@dataclass(frozen=True)
class ModelDims:
    """The dimensions of a decoder that decide its KV cache, read from a Hugging Face `config.json`.

    kv_lora_rank, qk_rope_head_dim: of multi-head latent attention, 0 for models without it; they alone decide its
    KV bytes. sliding_window_layers: indices of the layers that see only a window; they too keep all blocks of a
    sequence for now, so they matter only to `--kv-cache-dtype-skip-layers`.
    """

    architecture: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    sliding_window_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sliding_window_layers", tuple(self.sliding_window_layers))  # JSON has lists

    @property
    def latent_width(self) -> int:
        """Values that multi-head latent attention caches of a token in a layer; 0 for models with K and V heads."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelDims:
        """Reads the dict of a `config.json`; raises `ConfigError` naming the key that is missing or wrong."""

        def integer(key: str, default: int | None = None) -> int:
            value = config.get(key)
            value = default if value is None else value
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ConfigError(f"config.json: {key} must be a positive integer, found {value!r}")
            return value

        architectures = config.get("architectures")
        if not isinstance(architectures, list) or not architectures:
            raise ConfigError("config.json: architectures is missing; it names the model class to load")
        num_q_heads = integer("num_attention_heads")
        num_kv_heads = integer("num_key_value_heads", num_q_heads)
        if num_q_heads % num_kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads ({num_q_heads}) is not a multiple of "
                f"num_key_value_heads ({num_kv_heads})"
            )
        architecture, num_layers = str(architectures[0]), integer("num_hidden_layers")
        hidden_size = integer("hidden_size")
        windows = layer_windows(architecture, num_layers, config)
        return cls(
            architecture=architecture,
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=integer("head_dim", hidden_size // num_q_heads),
            hidden_size=hidden_size,
            intermediate_size=integer("intermediate_size"),
            vocab_size=integer("vocab_size"),
            max_position_embeddings=_stretched(config, integer("max_position_embeddings")),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            sliding_window_layers=tuple(i for i, window in enumerate(windows) if window is not None),
            **{key: integer(key) for key in ("kv_lora_rank", "qk_rope_head_dim") if config.get("kv_lora_rank")},
        )

    @classmethod
    def from_model_dir(cls, path: str | Path) -> ModelDims:
        """Reads `config.json` of a model directory; raises `ConfigError` when there is none to read."""
        return cls.from_hf_config(read_hf_config(path))


def _stretched(config: Mapping[str, Any], positions: int) -> int:
    """Positions a model can serve: with dynamic rope scaling `factor` times its original context, as in vLLM."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"config.json: rope_parameters and rope_scaling are objects, found {scaling!r}")
    factor = scaling.get("factor")
    if "dynamic" not in (scaling.get("rope_type"), scaling.get("type")) or not isinstance(factor, (int, float)):
        return positions
    return int(positions * max(factor, 1))


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """The dict of a model directory's `config.json`, or what a GGUF file says in its place.

    Raises `ConfigError` when it cannot be read.
    """
    directory = Path(path)
    if directory.suffix.lower() == ".gguf":
        from engine.gguf_config import gguf_hf_config

        return gguf_hf_config(directory)
    if not directory.is_dir():
        raise ConfigError(
            f"model directory {str(directory)!r} does not exist; give --model a directory or a .gguf file"
        )
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{str(directory)!r} holds no config.json; it is not a Hugging Face model directory"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{str(file)!r} is not a JSON object")
    return config
