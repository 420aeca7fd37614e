"""DeepSeek-V2 (arXiv 2405.04434): multi-head latent attention and mixtures of experts.

What is cached of a token is its normed latent and one rotated key for all heads. The expansion of keys is absorbed
into the query and that of values into the output, in prefill and decode alike, so that every head attends to the
latents themselves (`kernels.mla`) and nothing is ever expanded for cached tokens.

DeepSeek rotates neighbouring pairs (2i, 2i + 1), as complex numbers. Scores do not change when query and key are
reordered alike, so rows of the projections are reordered once, to (i, i + dim / 2), and the table of the dense
decoders serves here as well.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.config import ModelDims
from engine.errors import ModelLoadError
from engine.models.architectures import refuse_unsupported
from engine.models.checkpoint import Checkpoint
from engine.models.config_values import non_negative_int, positive_float, positive_int
from engine.models.experts import DenseMLP, Mixture, Router, load_experts
from engine.models.kv_scales import read_kv_scales
from engine.models.lora import LoRABatch
from engine.models.norm import RMSNorm
from engine.models.rope import RotaryTable, rope_parameters, rotary_frequencies, yarn_mscale
from kernels.attention import AttentionMetadata
from kernels.mla import mla_attention, write_latent

LATENT_NORM_EPS = 1e-6  # of the norms inside attention, whatever rms_norm_eps is, as in transformers


@dataclass(frozen=True)
class LatentShape:
    """Sizes of latent attention; q_lora_rank is None where queries come from the hidden state directly."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope: int  # channels of a head's query and key without position
    rope: int  # channels with position
    value: int

    @classmethod
    def of(cls, dims: ModelDims, config: Mapping[str, Any]) -> LatentShape:
        """From a `config.json`; raises `ModelLoadError` naming the key that is missing or wrong."""
        return cls(
            num_heads=dims.num_q_heads,
            q_lora_rank=None if config.get("q_lora_rank") is None else positive_int(config, "q_lora_rank"),
            kv_lora_rank=dims.kv_lora_rank,
            nope=positive_int(config, "qk_nope_head_dim"),
            rope=dims.qk_rope_head_dim,
            value=positive_int(config, "v_head_dim"),
        )


@dataclass
class LatentAttention:
    """Weights of one layer's attention. Matrices are contiguous [in, out]."""

    q_a: Tensor | None  # [hidden, q_lora_rank]
    q_a_norm: RMSNorm | None
    q_b: Tensor  # [q_lora_rank or hidden, num_heads * (nope + rope)]
    kv_a: Tensor  # [hidden, kv_lora_rank + rope]
    kv_a_norm: RMSNorm
    key_up: Tensor  # W_UK: [num_heads, nope, kv_lora_rank]
    value_up: Tensor  # W_UV: [num_heads, kv_lora_rank, value]
    o: Tensor  # [num_heads * value, hidden]


@dataclass
class DeepseekLayer:
    """One decoder layer."""

    input_norm: RMSNorm
    attention: LatentAttention
    mlp_norm: RMSNorm
    mlp: DenseMLP | Mixture


class DeepseekV2:
    """`DeepseekV2ForCausalLM` of Hugging Face; raises `ModelLoadError` for variants that are not supported."""

    def __init__(
        self, dims: ModelDims, hf_config: Mapping[str, Any], checkpoint: Checkpoint, max_model_len: int
    ) -> None:
        refuse_unsupported(hf_config)
        if not dims.latent_width:
            raise ModelLoadError("config.json: kv_lora_rank is missing; DeepSeek-V2 caches latents of that size")
        if hf_config.get("hidden_act", "silu") != "silu":
            raise ModelLoadError(f"config.json: hidden_act is {hf_config['hidden_act']!r}; DeepSeek here knows 'silu'")
        self.dims, self.shape = dims, LatentShape.of(dims, hf_config)
        self.dtype, self.device = checkpoint.dtype, checkpoint.device
        hidden, vocab = dims.hidden_size, dims.vocab_size
        eps = positive_float(hf_config, "rms_norm_eps", 1e-6)
        parameters = rope_parameters(hf_config)
        self.scale = attention_scale(self.shape, parameters)
        self.embedding = checkpoint.take("model.embed_tokens.weight", vocab, hidden)
        router = Router.of(hf_config)
        load = functools.partial(_load_layer, checkpoint, dims, self.shape, hf_config, router, eps)
        self.layers = [load(index) for index in range(dims.num_layers)]
        self.final_norm = RMSNorm(checkpoint.take("model.norm.weight", hidden), eps)
        tied = bool(hf_config.get("tie_word_embeddings", False))
        self.lm_head = self.embedding if tied else checkpoint.take("lm_head.weight", vocab, hidden)
        frequencies, factor = rotary_frequencies(
            parameters, self.shape.rope, positive_int(hf_config, "max_position_embeddings"), max_model_len
        )
        self.rope = RotaryTable(frequencies, max_model_len, self.dtype, self.device, factor)
        self.kv_scales = read_kv_scales(checkpoint, dims.num_layers)  # latents are never kept in fp8
        self.weights_bytes = checkpoint.bytes_taken + self.rope.nbytes

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        metadata: AttentionMetadata,
        lora: LoRABatch | None = None,
    ) -> Tensor:
        """Final hidden states [T, hidden] of input_ids int64 [T] at positions int64 [T]; writes their latents.

        kv_caches: one a layer, [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]. lora: always `None`.
        """
        assert lora is None, "adapters of this architecture are refused when they are loaded"
        angles = self.rope.at(positions)
        hidden = self.embedding.index_select(0, input_ids)
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            attended = self._attend(layer.attention, layer.input_norm(hidden), angles, cache, metadata)
            hidden.addmm_(attended, layer.attention.o)
            hidden.add_(layer.mlp(layer.mlp_norm(hidden)))
        return self.final_norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] of final hidden states [N, hidden]."""
        return functional.linear(hidden, self.lm_head)

    def _attend(
        self,
        weights: LatentAttention,
        normed: Tensor,
        angles: tuple[Tensor, Tensor],
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        shape = self.shape
        compressed = normed
        if weights.q_a is not None and weights.q_a_norm is not None:
            compressed = weights.q_a_norm(torch.mm(normed, weights.q_a))
        query = torch.mm(compressed, weights.q_b).view(-1, shape.num_heads, shape.nope + shape.rope)
        q_nope, q_rope = torch.split(query, [shape.nope, shape.rope], dim=-1)
        latent, k_rope = torch.split(torch.mm(normed, weights.kv_a), [shape.kv_lora_rank, shape.rope], dim=-1)
        # The one key of all heads is rotated as a further head of the query.
        rotated = self.rope.rotate(torch.cat((q_rope, k_rope.unsqueeze(1)), dim=1), *angles)
        write_latent(weights.kv_a_norm(latent), rotated[:, -1], cache, metadata.slot_mapping)
        q_latent = torch.bmm(q_nope.transpose(0, 1), weights.key_up).transpose(0, 1)
        attended = mla_attention(q_latent, rotated[:, :-1], cache, metadata, scale=self.scale)
        values = torch.bmm(attended.transpose(0, 1), weights.value_up).transpose(0, 1)
        return values.reshape(-1, shape.num_heads * shape.value)


def attention_scale(shape: LatentShape, parameters: Mapping[str, Any]) -> float:
    """1 / sqrt(channels of a query), times the square of YaRN's temperature where rope is scaled."""
    scale = float((shape.nope + shape.rope) ** -0.5)
    if parameters["rope_type"] != "default" and parameters.get("mscale_all_dim"):
        all_dim = positive_float(parameters, "mscale_all_dim")
        scale *= yarn_mscale(positive_float(parameters, "factor"), all_dim) ** 2
    return scale


def _load_layer(
    checkpoint: Checkpoint,
    dims: ModelDims,
    shape: LatentShape,
    config: Mapping[str, Any],
    router: Router,
    eps: float,
    index: int,
) -> DeepseekLayer:
    prefix = f"model.layers.{index}"
    hidden = dims.hidden_size
    mlp: DenseMLP | Mixture
    if index < non_negative_int(config, "first_k_dense_replace"):
        mlp = DenseMLP.load(checkpoint, f"{prefix}.mlp", hidden, dims.intermediate_size)
    else:
        mlp = load_experts(checkpoint, f"{prefix}.mlp", hidden, config, router)
    return DeepseekLayer(
        input_norm=RMSNorm(checkpoint.take(f"{prefix}.input_layernorm.weight", hidden), eps),
        attention=_load_attention(checkpoint, f"{prefix}.self_attn", hidden, shape),
        mlp_norm=RMSNorm(checkpoint.take(f"{prefix}.post_attention_layernorm.weight", hidden), eps),
        mlp=mlp,
    )


def _load_attention(checkpoint: Checkpoint, prefix: str, hidden: int, shape: LatentShape) -> LatentAttention:
    def matrix(name: str, rows: int, columns: int) -> Tensor:
        return checkpoint.take_transposed({f"{prefix}.{name}.weight": rows}, columns)

    heads, rank, q_rank = shape.num_heads, shape.kv_lora_rank, shape.q_lora_rank
    q_size = heads * (shape.nope + shape.rope)
    q_a = q_a_norm = None
    if q_rank is None:
        q_b = matrix("q_proj", q_size, hidden)
    else:
        q_a = matrix("q_a_proj", q_rank, hidden)
        q_a_norm = RMSNorm(checkpoint.take(f"{prefix}.q_a_layernorm.weight", q_rank), LATENT_NORM_EPS)
        q_b = matrix("q_b_proj", q_size, q_rank)
    for query in q_b.view(-1, heads, shape.nope + shape.rope).unbind(1):
        _separate_pairs(query[:, shape.nope :])
    kv_a = matrix("kv_a_proj_with_mqa", rank + shape.rope, hidden)
    _separate_pairs(kv_a[:, rank:])
    expansion = checkpoint.take(f"{prefix}.kv_b_proj.weight", heads * (shape.nope + shape.value), rank)
    key_up, value_up = torch.split(expansion.view(heads, -1, rank), [shape.nope, shape.value], dim=1)
    return LatentAttention(
        q_a=q_a,
        q_a_norm=q_a_norm,
        q_b=q_b,
        kv_a=kv_a,
        kv_a_norm=RMSNorm(checkpoint.take(f"{prefix}.kv_a_layernorm.weight", rank), LATENT_NORM_EPS),
        key_up=key_up.contiguous(),
        value_up=value_up.transpose(1, 2).contiguous(),
        o=matrix("o_proj", hidden, heads * shape.value),
    )


def _separate_pairs(columns: Tensor) -> None:
    """Reorders columns in place from pairs (2i, 2i + 1) to (i, i + half)."""
    columns.copy_(torch.cat((columns[:, 0::2], columns[:, 1::2]), dim=1))
