"""The kernel variants that the ahead-of-time report compiles: data, and how each is launched.

Every KV format at the shape of Llama-3-8B's heads, and every other axis (head dim, block size, group, dtype, cap)
varied from there; strides, splits and specializations are those of the launchers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest import mock

import torch

from kernels import triton_backend
from kernels.attention import AttentionMetadata, AttentionOptions
from kernels.formats import KV_FORMATS
from kernels.kv_cache import allocate_kv_cache

MAX_SEQ_LEN = 4096
CHUNK = 64


@dataclass(frozen=True)
class Variant:
    """One way to launch. what: decode, prefill, write, mass, mla_decode, mla_prefill or mla_write."""

    what: str
    kv_format: str = "bfloat16"
    dtype: str = "bfloat16"
    head_dim: int = 128
    group: int = 4
    block_size: int = 16
    soft_cap: float | None = None

    @property
    def name(self) -> str:
        if self.what.startswith("mla"):
            return f"{self.what} {self.dtype}, {self.group} heads, 512 + 64"
        extra = ", soft cap" if self.soft_cap else ""
        query = "" if self.kv_format == self.dtype else f" under {self.dtype}"
        shape = f"D{self.head_dim} G{self.group} B{self.block_size}"
        return f"{self.what} {self.kv_format}{query}, {shape}{extra}"


def _variants() -> list[Variant]:
    quantized = [name for name, kv_format in KV_FORMATS.items() if kv_format.quantized]
    found = []
    for what in ("decode", "prefill"):
        base = Variant(what)
        found += [base, replace(base, kv_format="float16", dtype="float16")]
        found += [replace(base, kv_format="float32", dtype="float32")]
        found += [replace(base, kv_format=name) for name in quantized]
        found += [replace(base, kv_format="int4_kivi", block_size=32)]
        found += [replace(base, head_dim=dim) for dim in (32, 64, 96, 192, 256)]
        largest = ("fp8_e4m3", "int8_per_token_head", "int4_per_token_head", "int4_kivi")
        found += [replace(base, kv_format=name, head_dim=256) for name in largest]
        found += [replace(base, group=7, block_size=8), replace(base, soft_cap=50.0, head_dim=256, group=2)]
    found += [Variant("write", kv_format=name) for name in ("bfloat16", *quantized)]
    found += [Variant("mass", kv_format=name) for name in ("bfloat16", "fp8_e4m3", "int8_per_token_head")]
    found += [Variant("mass", kv_format=name) for name in ("int4_symmetric", "int4_per_token_head", "int4_kivi")]
    for heads in (16, 128):
        found += [Variant("mla_decode", group=heads), Variant("mla_prefill", group=heads)]
    found += [Variant("mla_decode", kv_format="float32", dtype="float32", group=16), Variant("mla_write")]
    return found


VARIANTS = _variants()


def run_variant(variant: Variant, *, native_e4m3: bool) -> None:
    """Call the launchers on small tensors; meant to run while the kernels are being recorded."""
    with mock.patch.object(triton_backend, "native_e4m3", return_value=native_e4m3):
        if variant.what.startswith("mla"):
            _run_mla(variant)
        else:
            _run_paged(variant)


def _metadata(query_len: int, block_size: int) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, query_len], dtype=torch.int32),
        seq_lens=torch.tensor([MAX_SEQ_LEN], dtype=torch.int32),
        block_table=torch.zeros((1, MAX_SEQ_LEN // block_size), dtype=torch.int32),
        slot_mapping=torch.zeros(query_len, dtype=torch.int64),
        max_query_len=query_len,
        max_seq_len=MAX_SEQ_LEN,
        num_decodes=int(query_len == 1),
        open_rows=torch.zeros(1, dtype=torch.int32),
    )


def _run_paged(variant: Variant) -> None:
    num_kv_heads, dtype = 8, getattr(torch, variant.dtype)
    cache = allocate_kv_cache(
        KV_FORMATS[variant.kv_format], 2, num_kv_heads, variant.block_size, variant.head_dim,
        open_dtype=dtype, num_open_rows=1,
    )  # fmt: skip
    metadata = _metadata(CHUNK if variant.what == "prefill" else 1, variant.block_size)
    num_tokens = metadata.slot_mapping.shape[0]
    if variant.what == "write":
        new = torch.zeros((num_tokens, num_kv_heads, variant.head_dim), dtype=dtype)
        triton_backend.reshape_and_cache(new, new, cache, metadata)
        return
    query = torch.zeros((num_tokens, num_kv_heads * variant.group, variant.head_dim), dtype=dtype)
    mass = torch.zeros((1, num_kv_heads, MAX_SEQ_LEN)) if variant.what == "mass" else None
    options = AttentionOptions(scale=variant.head_dim**-0.5, soft_cap=variant.soft_cap)
    triton_backend.paged_attention(query, cache, metadata, options, mass)


def _run_mla(variant: Variant) -> None:
    dtype = getattr(torch, variant.dtype)
    cache = torch.zeros((2, variant.block_size, 576), dtype=getattr(torch, variant.kv_format))
    metadata = _metadata(CHUNK if variant.what == "mla_prefill" else 1, variant.block_size)
    num_tokens = metadata.slot_mapping.shape[0]
    if variant.what == "mla_write":
        latent, rope = torch.zeros((num_tokens, 512), dtype=dtype), torch.zeros((num_tokens, 64), dtype=dtype)
        triton_backend.write_latent(latent, rope, cache, metadata.slot_mapping)
        return
    q_latent = torch.zeros((num_tokens, variant.group, 512), dtype=dtype)
    q_rope = torch.zeros((num_tokens, variant.group, 64), dtype=dtype)
    triton_backend.mla_attention(q_latent, q_rope, cache, metadata, 192**-0.5)
