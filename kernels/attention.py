"""Entry points of the kernels: attention metadata and options, argument checks, choice of backend.

Write (`reshape_and_cache`) comes before read (`paged_attention`), and a chunk reads its own keys back from the cache as
they were stored, so prefill in chunks of any size sees the same values. The exception is int4_kivi: a query sees its
own block in full precision if the block was open when the step ended, quantized if the step filled it.

Backends: "triton" on CUDA, "torch" on the CPU; KVONCALL_KERNELS={triton,torch,oracle} overrides. Shapes, dtypes,
strides and devices are always checked; KVONCALL_DEBUG_KERNELS=1 also checks every index, at the price of a copy to the
host (the torch backend always does).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor

from kernels.checks import check_indices, expect_device, expect_float, expect_index, expect_tensor
from kernels.kv_cache import LayerKVCache

BACKENDS = ("triton", "torch", "oracle")


@dataclass
class AttentionMetadata:
    """Which tokens of a flat batch belong to which sequence, and where their keys and values lie.

    query_start_loc: int32 [num_seqs + 1]; the tokens of sequence i are rows [loc[i], loc[i+1]) of the batch.
        Rows from loc[-1] on are padding and get a zero output.
    seq_lens: int32 [num_seqs]; context plus query tokens. 0 marks a padding sequence: its output is zero.
    block_table: int32 [num_seqs, max_blocks]; physical blocks in order, padded with 0.
    slot_mapping: int64 [num_tokens]; where each token's key and value are written, -1 to skip (where blocks are kept
        open, all tokens of a sequence or none).
    max_query_len, max_seq_len: upper bounds over the batch.
    num_decodes: the first num_decodes sequences have exactly one query token; the rest are prefill chunks.
    open_rows: int32 [num_seqs], distinct; the row of `PagedVectors.open_blocks` that is sequence i's for as long as it
        runs. Only needed for formats that keep open blocks.

    Query i of a sequence stands at position seq_len - query_len + i and sees the keys at positions <= its own.
    Build one per step and share it between layers. The tensors must not be changed afterwards, nor the object used
    by two threads at once: backends keep what they derive from it, and scratch space, in `plans`.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    open_rows: Tensor | None = None
    plans: dict[tuple[object, ...], object] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        n, device = self.seq_lens.shape[0] if self.seq_lens.dim() else 0, self.seq_lens.device
        expect_index("seq_lens", self.seq_lens, torch.int32, (n,), device)
        expect_index("query_start_loc", self.query_start_loc, torch.int32, (n + 1,), device)
        expect_index("block_table", self.block_table, torch.int32, (n, None), device)
        expect_index("slot_mapping", self.slot_mapping, torch.int64, (None,), device)
        if self.open_rows is not None:
            expect_index("open_rows", self.open_rows, torch.int32, (n,), device)
        if not 0 <= self.num_decodes <= n:
            raise ValueError(f"num_decodes must lie between 0 and num_seqs = {n}, got {self.num_decodes}.")
        if self.max_query_len < 0 or self.max_seq_len < 0:
            raise ValueError("max_query_len and max_seq_len must not be negative.")

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]


@dataclass(frozen=True)
class AttentionOptions:
    """How scores are made; one object a layer.

    scale: of the dot products. sliding_window: a query at position p sees keys at positions > p - sliding_window, as in
    Hugging Face's models. sink_tokens: the first so many keys stay visible beside the window (StreamingLLM).
    soft_cap: scores become soft_cap * tanh(score / soft_cap) before masking (Gemma 2).
    """

    scale: float
    sliding_window: int | None = None
    sink_tokens: int = 0
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1 (or None), got {self.sliding_window}.")
        if self.sink_tokens < 0 or (self.sink_tokens and self.sliding_window is None):
            raise ValueError(f"sink_tokens needs a sliding_window and must not be negative, got {self.sink_tokens}.")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap must be positive (or None), got {self.soft_cap}.")


class Backend(Protocol):
    """What each of the backend modules offers; arguments are already checked."""

    def reshape_and_cache(
        self, key: Tensor, value: Tensor, cache: LayerKVCache, metadata: AttentionMetadata
    ) -> None: ...

    def paged_attention(
        self,
        query: Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        attention_mass: Tensor | None,
    ) -> Tensor: ...

    def write_latent(self, latent: Tensor, k_rope: Tensor, cache: Tensor, slot_mapping: Tensor) -> None: ...

    def mla_attention(
        self, q_latent: Tensor, q_rope: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor: ...


def backend_name(device: torch.device) -> str:
    """The backend that serves tensors on this device. ValueError when KVONCALL_KERNELS is unknown or unusable."""
    name = os.environ.get("KVONCALL_KERNELS", "")
    if not name:
        return "triton" if device.type == "cuda" else "torch"
    if name not in BACKENDS:
        raise ValueError(f"KVONCALL_KERNELS={name} is unknown; use one of: {', '.join(BACKENDS)}.")
    if name == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"The triton kernels need a CUDA device or TRITON_INTERPRET=1; the tensors are on {device}.")
    return name


def backend_for(device: torch.device) -> Backend:
    """The module that `backend_name` chooses."""
    name = backend_name(device)
    if name == "torch":
        from kernels import torch_backend

        return cast("Backend", torch_backend)
    if name == "oracle":
        from kernels import oracle

        return cast("Backend", oracle)
    from kernels import triton_backend

    return cast("Backend", triton_backend)


def reshape_and_cache(key: Tensor, value: Tensor, cache: LayerKVCache, metadata: AttentionMetadata) -> None:
    """Write key and value [num_tokens, num_kv_heads, head_dim] to their slots, in the cache's format.

    Slots must be distinct; -1 skips a token. What other slots hold, parameters included, is not changed.
    Raises ValueError on bad arguments.
    """
    num_tokens = metadata.slot_mapping.shape[0]
    shape = (num_tokens, cache.num_kv_heads, cache.head_dim)
    for name, tensor in (("key", key), ("value", value)):
        expect_float(name, tensor, shape)
        expect_device(name, tensor, cache.device)
    _check_metadata(cache, metadata, num_tokens)
    if cache.awaits_scales:
        stored = metadata.slot_mapping >= 0
        if stored.any():
            cache.take_scales(key[stored], value[stored])
    if num_tokens:
        backend_for(cache.device).reshape_and_cache(key, value, cache, metadata)


def paged_attention(
    query: Tensor,
    cache: LayerKVCache,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    attention_mass: Tensor | None = None,
) -> Tensor:
    """Causal attention of every query token over its sequence's cached keys and values, decodes and chunks alike.

    query: [num_tokens, num_q_heads, head_dim]; query head h reads KV head h // (num_q_heads // num_kv_heads).
    attention_mass: float32 [num_seqs, num_kv_heads, at least max_seq_len]; entry [i, h, pos] is increased by the
        softmax weights that sequence i's key at pos got from this call's queries, summed over queries and the group's
        query heads (the score of H2O, arXiv 2306.14048).
    Returns [num_tokens, num_q_heads, head_dim] in the query's dtype; padding rows and queries that see no key
    are zero. Slots past a sequence's length are never used, whatever they hold. Inference only: no gradients.
    Raises ValueError on bad arguments.
    """
    expect_float("query", query, (None, None, cache.head_dim))
    num_tokens, num_q_heads, _ = query.shape
    if num_q_heads == 0 or num_q_heads % cache.num_kv_heads:
        raise ValueError(
            f"num_q_heads ({num_q_heads}) must be a positive multiple of num_kv_heads ({cache.num_kv_heads})."
        )
    expect_device("query", query, cache.device)
    _check_metadata(cache, metadata, num_tokens)
    if attention_mass is not None:
        expect_tensor("attention_mass", attention_mass, torch.float32, (metadata.num_seqs, cache.num_kv_heads, None))
        expect_device("attention_mass", attention_mass, cache.device)
        if attention_mass.shape[2] < metadata.max_seq_len:
            raise ValueError(f"attention_mass must have room for max_seq_len = {metadata.max_seq_len} keys.")
    if num_tokens == 0:
        return torch.empty_like(query)
    return backend_for(cache.device).paged_attention(query, cache, metadata, options, attention_mass)


def _check_metadata(cache: LayerKVCache, metadata: AttentionMetadata, num_tokens: int) -> None:
    num_open_rows = 0
    if cache.key.open_blocks is not None:
        num_open_rows = cache.key.open_blocks.shape[0]
        if metadata.open_rows is None:
            raise ValueError(f"{cache.kv_format.name} keeps open blocks: metadata.open_rows is missing.")
        if metadata.num_seqs > num_open_rows:
            raise ValueError(f"{metadata.num_seqs} sequences share {num_open_rows} rows of open blocks.")
    check_metadata(metadata, cache.block_size, cache.num_blocks, num_tokens, cache.device, num_open_rows)


def check_metadata(
    metadata: AttentionMetadata,
    block_size: int,
    num_blocks: int,
    num_tokens: int,
    device: torch.device,
    num_open_rows: int = 0,
) -> None:
    """ValueError when the metadata cannot belong to this pool; every index is looked at in debug mode."""
    expect_device("seq_lens", metadata.seq_lens, device)
    capacity = metadata.block_table.shape[1] * block_size
    if metadata.max_seq_len > capacity:
        raise ValueError(
            f"max_seq_len ({metadata.max_seq_len}) exceeds what the block table can address ({capacity} tokens)."
        )
    if os.environ.get("KVONCALL_DEBUG_KERNELS") == "1":
        check_indices(metadata, block_size, num_blocks, num_tokens, num_open_rows)
