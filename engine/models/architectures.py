"""What tells one dense decoder from another, as data.

`FAMILIES` says what is fixed by an architecture of Hugging Face; `decoder_spec` adds what a `config.json` sets.
`engine.models.decoder` runs any such specification. Head counts (MHA, GQA, MQA) are values of `ModelDims`.
Defaults are those of the configuration classes of `transformers`, for keys a `config.json` may leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import ModelDims
from engine.errors import ModelLoadError
from engine.models.config_values import optional_float, positive_float, positive_int
from engine.models.rope import rope_parameters
from engine.models.windows import FULL, SLIDING, WINDOWS, Windows, layer_windows
from kernels.attention import AttentionOptions

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class Family:
    """What an architecture fixes.

    norm_offset: the model multiplies by offset + weight. sandwich_norms: attention and MLP outputs are normed too,
    before they are added.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    scaled_embedding: bool = False
    tied_embedding: bool = False
    activation: str = "silu"
    query_pre_attn_scalar: int | None = None
    rope_theta: float = 10000.0


FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True),
    "Gemma3ForCausalLM": Family(
        qk_norm=True,
        norm_offset=1.0,
        sandwich_norms=True,
        scaled_embedding=True,
        tied_embedding=True,
        activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        rope_theta=1e6,
    ),
}


@dataclass(frozen=True)
class LayerSpec:
    """Attention of one layer. rope: index of its table in `DecoderSpec.ropes`."""

    attention: AttentionOptions
    rope: int


@dataclass(frozen=True)
class DecoderSpec:
    """A dense decoder; `ropes` are the parameters of its rotary tables."""

    family: Family
    layers: tuple[LayerSpec, ...]
    ropes: tuple[dict[str, Any], ...]
    norm_eps: float
    activation: str
    tied_embedding: bool
    original_context: int
    final_soft_cap: float | None


def decoder_spec(dims: ModelDims, config: Mapping[str, Any]) -> DecoderSpec:
    """The specification of a `config.json`; raises `ModelLoadError` for variants that are not supported."""
    family = FAMILIES[dims.architecture]
    refuse_unsupported(config)
    tied = config.get("tie_word_embeddings")
    ropes = [rope_parameters(config, FULL, family.rope_theta)]
    local_rope = WINDOWS.get(dims.architecture) is Windows.LOCAL
    if local_rope:
        ropes.append(_local_rope(config))
    return DecoderSpec(
        family=family,
        layers=tuple(
            LayerSpec(_attention(family, dims, config, window), rope=int(local_rope and window is not None))
            for window in layer_windows(dims.architecture, dims.num_layers, config)
        ),
        ropes=tuple(ropes),
        norm_eps=positive_float(config, "rms_norm_eps", 1e-6),
        activation=_activation(family, config),
        tied_embedding=family.tied_embedding if tied is None else bool(tied),
        original_context=positive_int(config, "max_position_embeddings"),
        final_soft_cap=optional_float(config, "final_logit_softcapping"),
    )


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raises `ModelLoadError` for what no model of ours does."""
    for key in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        if config.get(key):
            raise ModelLoadError(f"config.json: {key} is true; this engine does not support it")
    if _quantizes_weights(config.get("quantization_config")):
        raise ModelLoadError("config.json: quantization_config is set; this engine loads unquantized weights only")


def _quantizes_weights(quantization: Any) -> bool:
    """False for what llm-compressor writes when it only adds scales for an fp8 KV cache."""
    if not isinstance(quantization, Mapping):
        return bool(quantization)
    only_cache = quantization.get("quant_method") == "compressed-tensors" and quantization.get("kv_cache_scheme")
    return bool(quantization) and not (only_cache and not quantization.get("config_groups"))


def _attention(family: Family, dims: ModelDims, config: Mapping[str, Any], window: int | None) -> AttentionOptions:
    scalar = positive_float(config, "query_pre_attn_scalar", family.query_pre_attn_scalar or dims.head_dim)
    soft_cap = optional_float(config, "attn_logit_softcapping")
    return AttentionOptions(scale=scalar**-0.5, sliding_window=window, soft_cap=soft_cap)


def _local_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters of Gemma 3's local layers, which scaling of the global ones leaves alone."""
    if SLIDING in (config.get("rope_parameters") or {}):
        return rope_parameters(config, SLIDING)
    return {"rope_type": "default", "rope_theta": positive_float(config, "rope_local_base_freq", 10000.0)}


def _activation(family: Family, config: Mapping[str, Any]) -> str:
    for key in ("hidden_activation", "hidden_act"):
        name = config.get(key)
        if name is not None:
            if name not in ACTIVATIONS:
                raise ModelLoadError(f"config.json: {key} is {name!r}; this engine knows {', '.join(ACTIVATIONS)}")
            return str(name)
    return family.activation
