"""Paged-attention cases on a poisoned pool of any format, and a process in which Triton interprets its kernels."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import oracle
from kernels.attention import AttentionMetadata, AttentionOptions
from kernels.formats import KV_FORMATS
from kernels.kv_cache import LayerKVCache, allocate_kv_cache


@dataclass
class Case:
    query: Tensor
    cache: LayerKVCache
    metadata: AttentionMetadata
    options: AttentionOptions

    def expected(self) -> Tensor:
        return oracle.paged_attention_float64(self.query, self.cache, self.metadata, self.options)[0]

    def expected_mass(self) -> Tensor:
        return oracle.paged_attention_float64(self.query, self.cache, self.metadata, self.options)[1]

    def fresh_metadata(self, **changes: Any) -> AttentionMetadata:
        return replace(self.metadata, **changes)


def poison(cache: LayerKVCache, seed: int = 0) -> None:
    """Fill every slot with what must never reach a result: NaN where the dtype has it, garbage codes elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    for part in (cache.key, cache.value):
        for tensor in (part.codes, part.params, part.open_blocks):
            if tensor is None:
                continue
            if tensor.dtype.is_floating_point:
                tensor.copy_(torch.full(tensor.shape, torch.nan))
            else:
                tensor.copy_(torch.randint(0, 127, tensor.shape, generator=generator))


def make_case(
    seq_lens: list[int],
    query_lens: list[int],
    num_decodes: int,
    *,
    kv_format: str | None = None,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    shared_blocks: int = 0,
    padding_rows: int = 0,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Random blocks in random order; the first `shared_blocks` full blocks of all sequences are the same.

    Every slot that holds no token, the null block included, is poisoned. kv_format: that of dtype if None.
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = 1 + sum(-(-length // block_size) for length in seq_lens) + 2
    free = random.Random(seed).sample(range(1, num_blocks), num_blocks - 1)
    width = max(-(-length // block_size) for length in seq_lens) + 1
    table = torch.full((len(seq_lens), width + 3), -7, dtype=torch.int32)[:, :width]  # rows of a wider table
    table.zero_()
    shared = [free.pop() for _ in range(shared_blocks)] if shared_blocks < len(free) else []
    fmt = KV_FORMATS[kv_format or str(dtype).removeprefix("torch.")]
    cache = allocate_kv_cache(
        fmt, num_blocks, num_kv_heads, block_size, head_dim, open_dtype=dtype, num_open_rows=len(seq_lens) + 1,
        k_scale=0.25 if fmt.name.startswith("fp8") else 1.0, v_scale=0.5 if fmt.name.startswith("fp8") else 1.0,
    )  # fmt: skip
    poison(cache, seed)
    for row, length in zip(table, seq_lens, strict=True):
        for i in range(-(-length // block_size)):
            row[i] = shared[i] if i < len(shared) and (i + 1) * block_size <= length else free.pop()
    metadata = _metadata(seq_lens, query_lens, num_decodes, table, block_size, padding_rows, seed)
    _fill(cache, seq_lens, metadata, shared, dtype, generator)
    num_tokens = metadata.slot_mapping.shape[0]
    query = 2 * torch.randn((num_tokens, num_kv_heads * group, head_dim), generator=generator)
    return Case(query.to(dtype), cache, metadata, AttentionOptions(**{"scale": 0.5, **options}))


def _metadata(
    seq_lens: list[int],
    query_lens: list[int],
    num_decodes: int,
    table: Tensor,
    block_size: int,
    padding: int,
    seed: int,
) -> AttentionMetadata:
    """The slots are those of the query tokens, -1 where a query stands before position 0 and for padding rows."""
    slots = []
    for row, length, query_len in zip(table.tolist(), seq_lens, query_lens, strict=True):
        positions = range(length - query_len, length)
        slots += [row[p // block_size] * block_size + p % block_size if p >= 0 else -1 for p in positions]
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    rows = random.Random(seed).sample(range(len(seq_lens) + 1), len(seq_lens))
    return AttentionMetadata(
        query_start_loc=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        num_decodes=num_decodes,
        open_rows=torch.tensor(rows, dtype=torch.int32),
    )


def _fill(
    cache: LayerKVCache,
    seq_lens: list[int],
    metadata: AttentionMetadata,
    shared: list[int],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    """Random keys and values for every token of every sequence; blocks that sequences share are written once."""
    whole = torch.tensor([0, *seq_lens]).cumsum(0).int()
    slots, seen = [], set[int]()
    for row, length in zip(metadata.block_table.tolist(), seq_lens, strict=True):
        for p in range(length):
            block = row[p // cache.block_size]
            slots.append(-1 if block in seen else block * cache.block_size + p % cache.block_size)
        seen.update(block for block in row if block in shared)
    everything = replace(
        metadata, query_start_loc=whole, slot_mapping=torch.tensor(slots, dtype=torch.int64), num_decodes=0
    )
    shape = (len(slots), cache.num_kv_heads, cache.head_dim)
    key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in "kv")
    oracle.reshape_and_cache(key, value, cache, everything)


@pytest.fixture(scope="session", name="make_case")
def make_case_fixture() -> Callable[..., Case]:
    return make_case


@pytest.fixture(scope="session", name="poison")
def poison_fixture() -> Callable[..., None]:
    return poison


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Call a function of kernels/ in a process where Triton is interpreted; tensors are shared with it.

    A process of its own because Triton decides at import, and other tests may have imported it already. There, memory
    that torch leaves uninitialized is filled with NaN.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("TRITON_INTERPRET", "1"), ("KVONCALL_KERNELS", "triton"), ("OMP_NUM_THREADS", "1")):
                patch.setenv(name, value)
            pool.submit(torch.use_deterministic_algorithms, True).result(timeout=600)

        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return pool.submit(function, *args, **kwargs).result(timeout=600)

        yield call
