"""The dense decoder: forward over a flat batch of tokens on the paged KV cache, for every family of `architectures`.

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
from engine.models.architectures import DecoderSpec, LayerSpec, decoder_spec
from engine.models.checkpoint import Checkpoint
from engine.models.kv_scales import read_kv_scales
from engine.models.lora import LoRABatch
from engine.models.norm import RMSNorm
from engine.models.rope import RotaryTable, rotary_frequencies
from kernels.attention import AttentionMetadata, paged_attention, reshape_and_cache
from kernels.kv_cache import LayerKVCache

# Of Llama 3.1 and later in GGUF files: what each inverse frequency is divided by, instead of parameters of a rule.
ROPE_DIVISORS = "rope_freqs.weight"


@dataclass
class DecoderLayer:
    """Weights of one decoder layer. Matrices are contiguous [in, out], which is what BLAS multiplies fastest."""

    index: int
    spec: LayerSpec
    input_norm: RMSNorm
    qkv: Tensor  # [hidden, (num_q_heads + 2 * num_kv_heads) * head_dim]
    qkv_bias: Tensor | None
    qk_norm: RMSNorm | None  # weights [num_q_heads + num_kv_heads, head_dim]
    o: Tensor  # [num_q_heads * head_dim, hidden]
    attention_out_norm: RMSNorm | None
    mlp_norm: RMSNorm
    gate_up: Tensor  # [hidden, 2 * intermediate]
    down: Tensor  # [intermediate, hidden]
    mlp_out_norm: RMSNorm | None

    def project(self, x: Tensor, part: str, lora: LoRABatch | None) -> Tensor:
        """x [T, in] @ the matrix of `part` (`engine.models.lora.PARTS`), with what adapters add."""
        product = torch.mm(x, getattr(self, part))
        if lora is not None:
            lora.add(product, x, self.index, part)
        return product

    def add_projected(self, hidden: Tensor, x: Tensor, part: str, norm: RMSNorm | None, lora: LoRABatch | None) -> None:
        """hidden += x @ the matrix of `part`, the product normed first where the family does so."""
        if norm is not None:
            hidden.add_(norm(self.project(x, part, lora)))
            return
        hidden.addmm_(x, getattr(self, part))
        if lora is not None:
            lora.add(hidden, x, self.index, part)


class DenseDecoder:
    """Llama, Mistral, Qwen 2 and 3, Gemma 3; raises `ModelLoadError` for variants that are not supported.

    max_model_len: how many positions are ever computed, at most what the model allows.
    """

    def __init__(
        self, dims: ModelDims, hf_config: Mapping[str, Any], checkpoint: Checkpoint, max_model_len: int
    ) -> None:
        self.dims = dims
        self.spec = spec = decoder_spec(dims, hf_config)
        self.dtype, self.device = checkpoint.dtype, checkpoint.device
        hidden, vocab = dims.hidden_size, dims.vocab_size
        self.embedding = checkpoint.take("model.embed_tokens.weight", vocab, hidden)
        self.layers = [_LayerLoader(checkpoint, dims, spec, i).load() for i in range(dims.num_layers)]
        norm_weight = checkpoint.take("model.norm.weight", hidden)
        self.final_norm = RMSNorm(norm_weight, spec.norm_eps, spec.family.norm_offset)
        self.lm_head = self.embedding if spec.tied_embedding else checkpoint.take("lm_head.weight", vocab, hidden)
        self.ropes = [self._rotary_table(parameters, checkpoint, max_model_len) for parameters in spec.ropes]
        self.kv_scales = read_kv_scales(checkpoint, dims.num_layers)
        self.weights_bytes = checkpoint.bytes_taken + sum(table.nbytes for table in self.ropes)
        # Rounded to the model's dtype, as Gemma was trained: sqrt(640) is 25.25 in bfloat16.
        scale = torch.tensor(hidden**0.5, dtype=self.dtype).item()
        self._embedding_scale = scale if spec.family.scaled_embedding else None

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[LayerKVCache],
        metadata: AttentionMetadata,
        lora: LoRABatch | None = None,
    ) -> Tensor:
        """Final hidden states [T, hidden] of input_ids int64 [T] at positions int64 [T]; writes their K and V."""
        angles = [table.at(positions) for table in self.ropes]
        hidden = self.embedding.index_select(0, input_ids)
        if self._embedding_scale is not None:
            hidden.mul_(self._embedding_scale)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            attended = self._attend(layer, layer.input_norm(hidden), angles[layer.spec.rope], kv_cache, metadata, lora)
            layer.add_projected(hidden, attended, "o", layer.attention_out_norm, lora)
            gate, up = layer.project(layer.mlp_norm(hidden), "gate_up", lora).chunk(2, dim=-1)
            layer.add_projected(hidden, self._activate(gate).mul_(up), "down", layer.mlp_out_norm, lora)
        return self.final_norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] of final hidden states [N, hidden]."""
        logits = functional.linear(hidden, self.lm_head)
        cap = self.spec.final_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _attend(
        self,
        layer: DecoderLayer,
        normed: Tensor,
        angles: tuple[Tensor, Tensor],
        kv_cache: LayerKVCache,
        metadata: AttentionMetadata,
        lora: LoRABatch | None,
    ) -> Tensor:
        num_q, num_kv, head_dim = self.dims.num_q_heads, self.dims.num_kv_heads, self.dims.head_dim
        if layer.qkv_bias is None:
            projected = layer.project(normed, "qkv", lora)
        else:
            projected = torch.addmm(layer.qkv_bias, normed, layer.qkv)
            if lora is not None:
                lora.add(projected, normed, layer.index, "qkv")
        heads = projected.view(-1, num_q + 2 * num_kv, head_dim)
        queries_and_keys = heads[:, : num_q + num_kv]
        if layer.qk_norm is not None:
            queries_and_keys = layer.qk_norm(queries_and_keys)
        rotated = self.ropes[layer.spec.rope].rotate(queries_and_keys, *angles)
        reshape_and_cache(rotated[:, num_q:], heads[:, num_q + num_kv :], kv_cache, metadata)
        attended = paged_attention(rotated[:, :num_q], kv_cache, metadata, layer.spec.attention)
        return attended.view(-1, num_q * head_dim)

    def _activate(self, gate: Tensor) -> Tensor:
        if self.spec.activation == "silu":
            return functional.silu(gate)
        return functional.gelu(gate, approximate="tanh")

    def _rotary_table(self, parameters: Mapping[str, Any], checkpoint: Checkpoint, max_model_len: int) -> RotaryTable:
        head_dim = self.dims.head_dim
        frequencies, factor = rotary_frequencies(parameters, head_dim, self.spec.original_context, max_model_len)
        if ROPE_DIVISORS in checkpoint:
            frequencies = frequencies / checkpoint.take(ROPE_DIVISORS, head_dim // 2).to("cpu", torch.float32)
        return RotaryTable(frequencies, max_model_len, self.dtype, self.device, factor)


class _LayerLoader:
    """Takes the weights of one layer out of the checkpoint, under the names of Hugging Face."""

    def __init__(self, checkpoint: Checkpoint, dims: ModelDims, spec: DecoderSpec, index: int) -> None:
        self.checkpoint, self.dims, self.spec, self.index = checkpoint, dims, spec, index

    def load(self) -> DecoderLayer:
        dims, family = self.dims, self.spec.family
        hidden, inter, head_dim = dims.hidden_size, dims.intermediate_size, dims.head_dim
        q_size, kv_size = dims.num_q_heads * head_dim, dims.num_kv_heads * head_dim
        qkv = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
        take = self.checkpoint.take_transposed
        before_mlp = "pre_feedforward_layernorm" if family.sandwich_norms else "post_attention_layernorm"
        return DecoderLayer(
            index=self.index,
            spec=self.spec.layers[self.index],
            input_norm=self._norm("input_layernorm"),
            qkv=take(self._named(qkv), hidden),
            qkv_bias=self.checkpoint.take_stacked(self._named(qkv, "bias")) if family.qkv_bias else None,
            qk_norm=self._head_norms() if family.qk_norm else None,
            o=take(self._named({"self_attn.o_proj": hidden}), q_size),
            attention_out_norm=self._norm("post_attention_layernorm") if family.sandwich_norms else None,
            mlp_norm=self._norm(before_mlp),
            gate_up=take(self._named({"mlp.gate_proj": inter, "mlp.up_proj": inter}), hidden),
            down=take(self._named({"mlp.down_proj": hidden}), inter),
            mlp_out_norm=self._norm("post_feedforward_layernorm") if family.sandwich_norms else None,
        )

    def _named(self, rows: Mapping[str, int], kind: str = "weight") -> dict[str, int]:
        return {f"model.layers.{self.index}.{part}.{kind}": size for part, size in rows.items()}

    def _norm(self, part: str) -> RMSNorm:
        (name,) = self._named({part: 1})
        weight = self.checkpoint.take(name, self.dims.hidden_size)
        return RMSNorm(weight, self.spec.norm_eps, self.spec.family.norm_offset)

    def _head_norms(self) -> RMSNorm:
        """One norm over query and key heads: each row of its weights is that of a head."""
        dims = self.dims
        rows = []
        for name, heads in (("self_attn.q_norm", dims.num_q_heads), ("self_attn.k_norm", dims.num_kv_heads)):
            (full_name,) = self._named({name: 1})
            rows.append(self.checkpoint.take(full_name, dims.head_dim).expand(heads, -1))
        return RMSNorm(torch.cat(rows), self.spec.norm_eps, self.spec.family.norm_offset)
