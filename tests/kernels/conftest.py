"""Paged-attention cases on a NaN-poisoned pool, and a process in which Triton interprets its kernels."""

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

from kernels.attention import AttentionMetadata
from kernels.oracle import paged_attention_float64


@dataclass
class Case:
    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttentionMetadata
    scale: float = 0.5

    def expected(self) -> Tensor:
        return paged_attention_float64(self.query, self.k_cache, self.v_cache, self.metadata, self.scale)

    def fresh_metadata(self, **changes: Any) -> AttentionMetadata:
        return replace(self.metadata, **changes)


def make_case(
    seq_lens: list[int],
    query_lens: list[int],
    num_decodes: int,
    *,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    shared_blocks: int = 0,
    padding_rows: int = 0,
    seed: int = 0,
) -> Case:
    """Random blocks in random order; the first `shared_blocks` full blocks of all sequences are the same.

    Every slot that holds no token, the null block included, is NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = 1 + sum(-(-length // block_size) for length in seq_lens) + 2
    free = random.Random(seed).sample(range(1, num_blocks), num_blocks - 1)
    width = max(-(-length // block_size) for length in seq_lens) + 1
    table = torch.zeros((len(seq_lens), width), dtype=torch.int32)
    caches = [torch.full((num_blocks, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype) for _ in "kv"]
    shared = [free.pop() for _ in range(shared_blocks)] if shared_blocks < len(free) else []
    for row, length in zip(table, seq_lens, strict=True):
        for i in range(-(-length // block_size)):
            full = (i + 1) * block_size <= length
            row[i] = shared[i] if i < len(shared) and full else free.pop()
            used = min(length - i * block_size, block_size)
            for cache in caches:
                content = torch.randn((num_kv_heads, used, head_dim), generator=generator)
                if cache[row[i]].isnan().any():
                    cache[row[i], :, :used] = content.to(dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    num_tokens = int(starts[-1]) + padding_rows
    metadata = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.full((num_tokens,), -1),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        num_decodes=num_decodes,
    )
    query = 2 * torch.randn((num_tokens, num_kv_heads * group, head_dim), generator=generator)
    return Case(query.to(dtype), caches[0], caches[1], metadata)


@pytest.fixture(scope="session", name="make_case")
def make_case_fixture() -> Callable[..., Case]:
    return make_case


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Call a function of kernels/ in a process where Triton is interpreted; tensors are shared with it.

    A process of its own because Triton decides at import, and other tests may have imported it already.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("TRITON_INTERPRET", "1"), ("KVONCALL_KERNELS", "triton"), ("OMP_NUM_THREADS", "1")):
                patch.setenv(name, value)
            pool.submit(int).result(timeout=600)

        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return pool.submit(function, *args, **kwargs).result(timeout=600)

        yield call
