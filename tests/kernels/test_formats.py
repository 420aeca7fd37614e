from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kernels.formats import KV_CACHE_DTYPES, KV_FORMATS, Grouping, resolve_kv_format
from kernels.kv_cache import allocate_kv_cache

# Bytes of K and V of one block (16 tokens) of one KV head with head_dim 128, worked out by hand.
BYTES_OF_A_BLOCK = {
    "float32": 16 * 2 * 128 * 4,
    "float16": 16 * 2 * 128 * 2,
    "bfloat16": 16 * 2 * 128 * 2,
    "fp8_e4m3": 16 * 2 * 128,
    "fp8_e5m2": 16 * 2 * 128,
    "int8_per_token_head": 16 * 2 * (128 + 4),
    "int4_symmetric": 16 * 2 * (64 + 4),
    "int4_per_token_head": 16 * 2 * (64 + 4),
    "int4_kivi": (16 * 64 + 128 * 4) + 16 * (64 + 4),
    "int8k_int4v": 16 * (128 + 4) + 16 * (64 + 4),
}


@pytest.mark.parametrize("name", sorted(KV_FORMATS))
def test_bytes_are_those_worked_out_by_hand(name: str) -> None:
    assert KV_FORMATS[name].bytes_per_block_head(128, 16) == BYTES_OF_A_BLOCK[name]


@pytest.mark.parametrize("head_dim", [20, 32, 96, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("name", sorted(KV_FORMATS))
def test_bytes_are_those_of_the_tensors(name: str, block_size: int, head_dim: int) -> None:
    cache = allocate_kv_cache(KV_FORMATS[name], 5, 3, block_size, head_dim, num_open_rows=1)
    assert cache.nbytes == 5 * 3 * KV_FORMATS[name].bytes_per_block_head(head_dim, block_size)
    assert cache.nbytes == sum(tensor.nbytes for tensor in cache.tensors())


def test_auto_is_the_dtype_of_the_model() -> None:
    assert resolve_kv_format("auto", "bfloat16") is KV_FORMATS["bfloat16"]
    assert resolve_kv_format("float16", "bfloat16") is KV_FORMATS["float16"]


def test_fp8_is_e4m3_as_in_vllm() -> None:
    assert resolve_kv_format("fp8", "bfloat16") is KV_FORMATS["fp8_e4m3"]


def test_every_offered_name_resolves() -> None:
    assert {resolve_kv_format(name, "float16").name for name in KV_CACHE_DTYPES} == set(KV_FORMATS)


@pytest.mark.parametrize(("kv", "model"), [("int3", "float32"), ("auto", "complex64")])
def test_unknown_format_is_named_with_the_known_ones(kv: str, model: str) -> None:
    with pytest.raises(ValueError, match=f"{kv}.*use one of: auto, float32"):
        resolve_kv_format(kv, model)


@pytest.mark.parametrize(("name", "head_dim"), [("float16", 0), ("int4_kivi", 33), ("int4_symmetric", -2)])
def test_head_dim_that_cannot_be_packed(name: str, head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"needs a positive head_dim divisible by .*{head_dim}"):
        KV_FORMATS[name].bytes_per_block_head(head_dim, 16)


def test_only_per_channel_formats_keep_open_blocks() -> None:
    kept = {name for name, kv_format in KV_FORMATS.items() if kv_format.keeps_open_blocks}
    assert kept == {n for n, f in KV_FORMATS.items() if Grouping.CHANNEL in (f.key.grouping, f.value.grouping)}
    assert kept == {"int4_kivi"}


def test_storage_dtypes_exist_in_torch() -> None:
    for kv_format in KV_FORMATS.values():
        for part in (kv_format.key, kv_format.value):
            assert isinstance(getattr(torch, part.storage_dtype), torch.dtype)
            assert isinstance(getattr(torch, part.param_dtype), torch.dtype)


def test_formats_import_without_torch() -> None:
    code = "import sys, kernels.formats; assert not {'torch', 'triton', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
