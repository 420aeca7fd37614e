"""Any decoder, by what decides its memory: layers in groups that keep the same KV, and its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Attention = Literal["full", "sliding", "chunked", "latent", "recurrent", "none"]


@dataclass(frozen=True)
class LayerGroup:
    """`count` layers that keep the same of every token.

    "full" keeps K and V of all tokens, "sliding" and "chunked" of `window` tokens, "latent" one vector of
    `latent_width` values a token for K and V and all heads (multi-head latent attention), "recurrent" `state_bytes`
    a sequence and nothing a token (and `state_row_bytes` for each speculated token, an input more of its convolution),
    "none" nothing (it reads another layer's KV, or has no attention).
    `head_dim` is the width of a key; a value has `v_head_dim`, or the same. `index_width`: bytes a token that an
    indexer of sparse attention keeps besides.
    """

    count: int
    attention: Attention = "full"
    num_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int | None = None
    latent_width: int = 0
    window: int | None = None
    state_bytes: int = 0
    index_width: int = 0
    state_row_bytes: int = 0


@dataclass(frozen=True)
class ModelShape:
    """One decoder. Sizes in elements; None where the source does not say and no plan may guess.

    parameters: all weights counted once. weights_bytes: what they take in memory over all ranks, by dtype and
    quantization; `weights_how` is the arithmetic. quantization: "fp8", "awq", "gptq", "mxfp4", ... or None.
    embedding_bytes, head_bytes (0 when tied), replicated_bytes (every tensor-parallel rank holds them whole) and
    kv_projection_bytes are parts of weights_bytes, 0 where only the total is known.
    num_experts, experts_per_token, moe_intermediate_size: of layers with experts, all experts' ranks together.
    assumptions: what was filled in, in sentences a reader can check.
    """

    name: str
    layers: tuple[LayerGroup, ...]
    architecture: str = ""
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_q_heads: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    dtype: str = "bfloat16"
    parameters: int | None = None
    active_parameters: int | None = None
    embedding_parameters: int | None = None
    weights_bytes: int | None = None
    weights_how: str = ""
    quantization: str | None = None
    embedding_bytes: int = 0
    head_bytes: int = 0
    replicated_bytes: int = 0
    kv_projection_bytes: int = 0
    num_experts: int | None = None
    experts_per_token: int | None = None
    moe_intermediate_size: int | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """All layers, those without KV included."""
        return sum(group.count for group in self.layers)
