"""Tensors of a benchmark case, on any device: a pool of random blocks, block tables in random order, poison.

Every slot of a block table that holds no token holds NaN (in the codes, or in the parameters where codes are integers):
the null block that pads the table, and the slots behind a sequence's last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import AttentionMetadata, AttentionOptions, paged_attention, reshape_and_cache
from kernels.bench.cases import BenchCase
from kernels.formats import Grouping
from kernels.kv_cache import LayerKVCache, PagedVectors, allocate_kv_cache
from kernels.mla import mla_attention, write_latent
from kernels.quantize import quantize, rotate

# Random blocks made once and repeated through the pool. A prime, so that an index that wraps at a power of two does
# not find the same content by chance.
TEMPLATE_BLOCKS = 2039


@dataclass(frozen=True)
class Pool:
    """Blocks of one layer: block 0 is the null block, the next num_tails are for sequences' partly filled blocks.

    cache: LayerKVCache, or for MLA the latent cache [num_blocks, block_size, rank + rope].
    """

    cache: LayerKVCache | Tensor
    num_tails: int

    @property
    def num_blocks(self) -> int:
        return self.cache.num_blocks if isinstance(self.cache, LayerKVCache) else self.cache.shape[0]

    def parts(self) -> list[PagedVectors]:
        return [self.cache.key, self.cache.value] if isinstance(self.cache, LayerKVCache) else []


def make_pool(cases: Sequence[BenchCase], device: torch.device, seed: int = 0) -> Pool:
    """A pool that each of the cases fits into, one at a time; they must agree in shape, format and dtype."""
    case = cases[0]
    tails = max(c.batch for c in cases)
    num_blocks = 1 + tails + max(c.num_blocks() for c in cases)
    generator = torch.Generator(device).manual_seed(seed)
    template = min(TEMPLATE_BLOCKS, num_blocks)
    if case.shape.is_mla:
        dtype = getattr(torch, case.kv_format)
        cache = torch.empty((num_blocks, case.block_size, case.shape.head_dim), dtype=dtype, device=device)
        _repeat(cache, torch.randn((template, *cache.shape[1:]), device=device, generator=generator))
        cache[0] = torch.nan
        return Pool(cache, tails)
    layer = allocate_kv_cache(
        case.format, num_blocks, case.shape.num_kv_heads, case.block_size, case.shape.head_dim, device=device,
        open_dtype=getattr(torch, case.dtype), num_open_rows=tails,
    )  # fmt: skip
    pool = Pool(layer, tails)
    for part in pool.parts():
        shape = (template, case.shape.num_kv_heads, case.block_size, case.shape.head_dim)
        vectors = torch.randn(shape, device=device, generator=generator)
        codes, params = quantize(rotate(vectors) if part.fmt.rotated else vectors, part.fmt, part.scale)
        _repeat(part.codes, codes)
        if params is not None and part.params is not None:
            _repeat(part.params, params)
        _poison(part, 0, 0)
    return pool


def _repeat(target: Tensor, template: Tensor) -> None:
    for start in range(0, target.shape[0], template.shape[0]):
        rows = target[start : start + template.shape[0]]
        rows.copy_(template[: rows.shape[0]])


def _poison(part: PagedVectors, block: int, first_slot: int) -> None:
    """NaN for what slots first_slot.. of a block hold; for the whole block where parameters are per channel."""
    if part.params is None:
        slots = part.codes[block, :, first_slot:]
        slots.copy_(torch.full(slots.shape, torch.nan, device=slots.device))
    elif part.fmt.grouping is Grouping.CHANNEL:
        part.params[block] = torch.nan
    else:
        part.params[block, :, :, first_slot:] = torch.nan


@dataclass
class Inputs:
    """A case with its tensors.

    For attention, query [num_tokens, num_q_heads, head_dim]. For "write", key and value [num_tokens, num_kv_heads,
    head_dim]. For MLA, query_parts and key_parts are the same cut into latent and RoPE part, each contiguous, and key
    is [num_tokens, rank + rope].
    """

    case: BenchCase
    pool: Pool
    metadata: AttentionMetadata
    query: Tensor
    key: Tensor
    value: Tensor
    query_parts: tuple[Tensor, Tensor]
    key_parts: tuple[Tensor, Tensor]

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.case.shape.scale, self.case.shape.sliding_window)

    def run(self) -> Tensor:
        """The call that is measured: attention, or the cache write (which returns the keys it was given)."""
        cache = self.pool.cache
        if self.case.kind == "write":
            if isinstance(cache, LayerKVCache):
                reshape_and_cache(self.key, self.value, cache, self.metadata)
            else:
                write_latent(*self.key_parts, cache, self.metadata.slot_mapping)
            return self.key
        if isinstance(cache, LayerKVCache):
            return paged_attention(self.query, cache, self.metadata, self.options)
        return mla_attention(*self.query_parts, cache, self.metadata, scale=self.case.shape.scale)


def make_inputs(case: BenchCase, pool: Pool, seed: int = 0) -> Inputs:
    """Queries and block tables; rewrites the pool's partly filled blocks and open rows for this case's lengths."""
    device = pool.cache.device
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    tokens, shape = case.batch * case.query_len, case.shape

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    def cut(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., : shape.value_dim].contiguous(), x[..., shape.value_dim :].contiguous()

    metadata = _metadata(case, pool, seed)
    _set_tails(case, pool, generator)
    write = case.kind == "write"
    query = randn(0 if write else tokens, shape.num_q_heads, shape.head_dim)
    size = (tokens if write else 0, *(() if shape.is_mla else (shape.num_kv_heads,)), shape.head_dim)
    key, value = randn(*size), randn(*size)
    return Inputs(case, pool, metadata, query, key, value, cut(query), cut(key))


def _metadata(case: BenchCase, pool: Pool, seed: int) -> AttentionMetadata:
    device, block_size = pool.cache.device, case.block_size
    lens, q = case.seq_lens(), case.query_len
    body = torch.randperm(pool.num_blocks - 1 - pool.num_tails, generator=torch.Generator().manual_seed(seed))
    body += 1 + pool.num_tails
    table = torch.zeros((case.batch, max(lens) // block_size + 2), dtype=torch.int32)
    used = 0
    for i, length in enumerate(lens):
        full, rest = divmod(length, block_size)
        table[i, :full] = body[used : used + full]
        used += full
        if rest:
            table[i, full] = 1 + i
    seq_lens = torch.tensor(lens)
    positions = seq_lens[:, None] - q + torch.arange(q)
    slots = table.gather(1, positions // block_size).long() * block_size + positions % block_size
    return AttentionMetadata(
        query_start_loc=(torch.arange(case.batch + 1) * q).int().to(device),
        seq_lens=seq_lens.int().to(device),
        block_table=table.to(device),
        slot_mapping=slots.flatten().to(device),
        max_query_len=q,
        max_seq_len=max(lens),
        num_decodes=case.batch if q == 1 else 0,
        open_rows=torch.arange(case.batch, dtype=torch.int32).flip(0).to(device),
    )


def _set_tails(case: BenchCase, pool: Pool, generator: torch.Generator) -> None:
    """Fresh content in the partly filled blocks (copied from full ones), NaN behind the last token."""
    rests = [length % case.block_size for length in case.seq_lens()]
    source = slice(1 + pool.num_tails, 1 + pool.num_tails + 1)
    if isinstance(pool.cache, Tensor):
        for i, rest in enumerate(rests):
            pool.cache[1 + i] = pool.cache[source][0]
            pool.cache[1 + i, rest:] = torch.nan
        return
    for part in pool.parts():
        if part.open_blocks is not None:
            part.open_blocks.copy_(torch.randn(part.open_blocks.shape, generator=generator, device=part.codes.device))
        for i, rest in enumerate(rests):
            part.codes[1 + i].copy_(part.codes[source][0])
            if part.params is not None:
                part.params[1 + i].copy_(part.params[source][0])
            _poison(part, 1 + i, rest)
            if part.open_blocks is not None:
                part.open_blocks[case.batch - 1 - i, :, rest:] = torch.nan
