"""Llama: forward over a flat batch of tokens on the paged KV cache.

The batch has no padding and no batch dimension: T tokens of any mix of sequences, told apart by the attention
metadata. At the sizes the embedded engine serves, an operator's overhead is its cost, so projections that read
the same input are one matrix (q, k, v; gate, up) and residual additions are part of a matrix product.
Weights are plain tensors; the model never trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.config import ModelDims
from engine.models.checkpoint import Checkpoint, ModelLoadError
from engine.models.norm import RMSNorm
from engine.models.rope import RotaryTable, inverse_frequencies
from kernels.attention import AttentionMetadata, AttentionOptions, paged_attention, reshape_and_cache
from kernels.kv_cache import LayerKVCache


@dataclass(frozen=True)
class LlamaLayer:
    """Weights of one decoder layer. Matrices are contiguous [in, out], which is what BLAS multiplies fastest."""

    input_norm: RMSNorm
    qkv: Tensor  # [hidden, (num_q_heads + 2 * num_kv_heads) * head_dim]
    o: Tensor  # [num_q_heads * head_dim, hidden]
    post_attention_norm: RMSNorm
    gate_up: Tensor  # [hidden, 2 * intermediate]
    down: Tensor  # [intermediate, hidden]


class LlamaModel:
    """`LlamaForCausalLM` of Hugging Face; raises `ModelLoadError` for variants that are not supported."""

    def __init__(self, dims: ModelDims, hf_config: Mapping[str, Any], checkpoint: Checkpoint) -> None:
        _refuse_unsupported(hf_config)
        self.dims = dims
        self.dtype, self.device = checkpoint.dtype, checkpoint.device
        self.attention_options = AttentionOptions(scale=dims.head_dim**-0.5)
        eps = float(hf_config.get("rms_norm_eps", 1e-6))
        hidden, vocab = dims.hidden_size, dims.vocab_size
        self.embedding = checkpoint.take("model.embed_tokens.weight", vocab, hidden)
        self.layers = [_take_layer(checkpoint, dims, eps, i) for i in range(dims.num_layers)]
        self.final_norm = RMSNorm(checkpoint.take("model.norm.weight", hidden), eps)
        tied = bool(hf_config.get("tie_word_embeddings", False))
        self.lm_head = self.embedding if tied else checkpoint.take("lm_head.weight", vocab, hidden)
        self.rope = RotaryTable(
            inverse_frequencies(hf_config, dims.head_dim), dims.max_position_embeddings, self.dtype, self.device
        )

    @property
    def weights_bytes(self) -> int:
        """Bytes of all tensors the model holds, the rotary table included; a tied embedding counts once."""
        tensors = [self.embedding, self.lm_head, self.final_norm.weight, self.rope.cos, self.rope.signed_sin]
        for layer in self.layers:
            tensors += [layer.input_norm.weight, layer.qkv, layer.o]
            tensors += [layer.post_attention_norm.weight, layer.gate_up, layer.down]
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[LayerKVCache], metadata: AttentionMetadata
    ) -> Tensor:
        """Final hidden states [T, hidden] of input_ids int64 [T] at positions int64 [T]; writes their K and V."""
        cos, signed_sin = self.rope.at(positions)
        hidden = self.embedding.index_select(0, input_ids)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            attended = self._attend(layer, layer.input_norm(hidden), cos, signed_sin, kv_cache, metadata)
            hidden.addmm_(attended, layer.o)
            gate, up = torch.mm(layer.post_attention_norm(hidden), layer.gate_up).chunk(2, dim=-1)
            hidden.addmm_(functional.silu(gate).mul_(up), layer.down)
        return self.final_norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] of final hidden states [N, hidden]."""
        return functional.linear(hidden, self.lm_head)

    def _attend(
        self,
        layer: LlamaLayer,
        normed: Tensor,
        cos: Tensor,
        signed_sin: Tensor,
        kv_cache: LayerKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        num_q, num_kv, head_dim = self.dims.num_q_heads, self.dims.num_kv_heads, self.dims.head_dim
        heads = torch.mm(normed, layer.qkv).view(-1, num_q + 2 * num_kv, head_dim)
        rotated = self.rope.rotate(heads[:, : num_q + num_kv], cos, signed_sin)
        reshape_and_cache(rotated[:, num_q:], heads[:, num_q + num_kv :], kv_cache, metadata)
        attended = paged_attention(rotated[:, :num_q], kv_cache, metadata, self.attention_options)
        return attended.view(-1, num_q * head_dim)


def _take_layer(checkpoint: Checkpoint, dims: ModelDims, eps: float, index: int) -> LlamaLayer:
    def name(part: str) -> str:
        return f"model.layers.{index}.{part}.weight"

    hidden, inter = dims.hidden_size, dims.intermediate_size
    q_size, kv_size = dims.num_q_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    qkv = {name("self_attn.q_proj"): q_size, name("self_attn.k_proj"): kv_size, name("self_attn.v_proj"): kv_size}
    gate_up = {name("mlp.gate_proj"): inter, name("mlp.up_proj"): inter}
    return LlamaLayer(
        input_norm=RMSNorm(checkpoint.take(name("input_layernorm"), hidden), eps),
        qkv=checkpoint.take_transposed(qkv, hidden),
        o=checkpoint.take_transposed({name("self_attn.o_proj"): hidden}, q_size),
        post_attention_norm=RMSNorm(checkpoint.take(name("post_attention_layernorm"), hidden), eps),
        gate_up=checkpoint.take_transposed(gate_up, hidden),
        down=checkpoint.take_transposed({name("mlp.down_proj"): hidden}, inter),
    )


def _refuse_unsupported(hf_config: Mapping[str, Any]) -> None:
    for key in ("attention_bias", "mlp_bias"):
        if hf_config.get(key):
            raise ModelLoadError(f"config.json: {key} is true; this engine's Llama has no biases")
    activation = hf_config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(f"config.json: hidden_act is {activation!r}; this engine's Llama knows only 'silu'")
    if hf_config.get("quantization_config"):
        raise ModelLoadError("config.json: quantization_config is set; this engine loads unquantized weights only")
