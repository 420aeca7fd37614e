"""Entry point of the kernels: attention metadata, argument checks, choice of backend.

Layout: k_cache and v_cache are [num_blocks, num_kv_heads, block_size, head_dim] (HND), one pair a layer.
Block 0 is the null block: it pads block tables and its content is never used. Slot s of the pool is offset
s % block_size of block s // block_size. Write (`reshape_and_cache`) comes before read (`paged_attention`), and
a chunk reads its own keys back from the cache, so prefill in chunks of any size sees the same values.

Backends: "triton" on CUDA, "torch" on the CPU; KVONCALL_KERNELS={triton,torch,oracle} overrides.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor

BACKENDS = ("triton", "torch", "oracle")
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass
class AttentionMetadata:
    """Which tokens of a flat batch belong to which sequence, and where their keys and values lie.

    query_start_loc: int32 [num_seqs + 1]; the tokens of sequence i are rows [loc[i], loc[i+1]) of the batch.
        Rows from loc[-1] on are padding and get a zero output.
    seq_lens: int32 [num_seqs]; context plus query tokens. 0 marks a padding sequence: its output is zero.
    block_table: int32 [num_seqs, max_blocks]; physical blocks in order, padded with 0.
    slot_mapping: int64 [num_tokens]; where each token's key and value are written, -1 to skip.
    max_query_len, max_seq_len: upper bounds over the batch.
    num_decodes: the first num_decodes sequences have exactly one query token; the rest are prefill chunks.

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
    plans: dict[tuple[object, ...], object] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _expect_index("query_start_loc", self.query_start_loc, torch.int32, 1)
        _expect_index("seq_lens", self.seq_lens, torch.int32, 1)
        _expect_index("block_table", self.block_table, torch.int32, 2)
        _expect_index("slot_mapping", self.slot_mapping, torch.int64, 1)
        n = self.seq_lens.shape[0]
        if self.query_start_loc.shape[0] != n + 1:
            got = self.query_start_loc.shape[0]
            raise ValueError(f"query_start_loc must have num_seqs + 1 = {n + 1} entries, got {got}.")
        if self.block_table.shape[0] != n:
            raise ValueError(f"block_table must have one row per sequence ({n}), got {self.block_table.shape[0]}.")
        if not 0 <= self.num_decodes <= n:
            raise ValueError(f"num_decodes must lie between 0 and num_seqs = {n}, got {self.num_decodes}.")
        if self.max_query_len < 0 or self.max_seq_len < 0:
            raise ValueError("max_query_len and max_seq_len must not be negative.")

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]


class Backend(Protocol):
    """What each of the backend modules offers; arguments are already checked."""

    def reshape_and_cache(
        self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None: ...

    def paged_attention(
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
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


def reshape_and_cache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write key and value [num_tokens, num_kv_heads, head_dim] to their slots, converting to the cache's dtype.

    slot_mapping: int64 [num_tokens]; -1 skips a token. Slots must be distinct. Raises ValueError on bad shapes.
    """
    _check_caches(k_cache, v_cache)
    num_tokens, (_, num_kv_heads, _, head_dim) = slot_mapping.shape[0], k_cache.shape
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape != (num_tokens, num_kv_heads, head_dim):
            want = [num_tokens, num_kv_heads, head_dim]
            raise ValueError(f"{name} must have shape {want}, got {list(tensor.shape)}.")
        _expect_device(name, tensor, k_cache)
    _expect_index("slot_mapping", slot_mapping, torch.int64, 1)
    if num_tokens:
        _backend(k_cache.device).reshape_and_cache(key, value, k_cache, v_cache, slot_mapping)


def paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, *, scale: float
) -> Tensor:
    """Causal attention of every query token over its sequence's cached keys and values, decodes and chunks alike.

    query: [num_tokens, num_q_heads, head_dim]; query head h reads KV head h // (num_q_heads // num_kv_heads).
    Returns [num_tokens, num_q_heads, head_dim] in the query's dtype; padding rows and queries that see no key
    are zero. Slots past a sequence's length are never used, whatever they hold. Inference only: no gradients.
    Raises ValueError on bad shapes.
    """
    _check_caches(k_cache, v_cache)
    if query.dim() != 3 or query.shape[2] != k_cache.shape[3] or query.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"query must be floating point [num_tokens, num_q_heads, head_dim={k_cache.shape[3]}], "
            f"got {query.dtype} {list(query.shape)}."
        )
    if query.shape[1] == 0 or query.shape[1] % k_cache.shape[1]:
        raise ValueError(
            f"num_q_heads ({query.shape[1]}) must be a positive multiple of num_kv_heads ({k_cache.shape[1]})."
        )
    _expect_device("query", query, k_cache)
    _expect_device("seq_lens", metadata.seq_lens, k_cache)
    capacity = metadata.block_table.shape[1] * k_cache.shape[2]
    if metadata.max_seq_len > capacity:
        raise ValueError(
            f"max_seq_len ({metadata.max_seq_len}) exceeds what the block table can address ({capacity} tokens)."
        )
    if query.shape[0] == 0:
        return torch.empty_like(query)
    return _backend(query.device).paged_attention(query, k_cache, v_cache, metadata, scale)


def copy_blocks(caches: list[Tensor], src: list[int], dst: list[int]) -> None:
    """Copy block src[i] to block dst[i] in every cache (copy on write). All reads come before all writes."""
    if len(src) != len(dst):
        raise ValueError(f"src and dst must have the same length, got {len(src)} and {len(dst)}.")
    if len(set(dst)) != len(dst):
        raise ValueError("dst names a block twice.")
    if not src:
        return
    for cache in caches:
        if min(*src, *dst) < 0 or max(*src, *dst) >= cache.shape[0]:
            raise ValueError(f"Block ids must lie between 0 and {cache.shape[0] - 1}.")
        source = torch.tensor(src, device=cache.device)
        target = torch.tensor(dst, device=cache.device)
        cache.index_copy_(0, target, cache.index_select(0, source))


def _backend(device: torch.device) -> Backend:
    name = backend_name(device)
    if name == "torch":
        from kernels import torch_backend

        return cast("Backend", torch_backend)
    if name == "oracle":
        from kernels import oracle

        return cast("Backend", oracle)
    from kernels import triton_backend

    return cast("Backend", triton_backend)


def _check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(
            "k_cache and v_cache must both be [num_blocks, num_kv_heads, block_size, head_dim], "
            f"got {list(k_cache.shape)} and {list(v_cache.shape)}."
        )
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in FLOAT_DTYPES:
        raise ValueError(f"k_cache and v_cache must share a float dtype, got {k_cache.dtype} and {v_cache.dtype}.")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous.")


def _expect_index(name: str, tensor: Tensor, dtype: torch.dtype, dim: int) -> None:
    if tensor.dtype != dtype or tensor.dim() != dim:
        raise ValueError(f"{name} must be {dtype} with {dim} dimension(s), got {tensor.dtype} {list(tensor.shape)}.")


def _expect_device(name: str, tensor: Tensor, cache: Tensor) -> None:
    if tensor.device != cache.device:
        raise ValueError(f"{name} is on {tensor.device} but the KV cache is on {cache.device}.")
