"""Decodes over a float32 cache in place, without gathering: a sparse matrix says which cache rows a query reads.

Row (tile, query head) of the matrix has one entry a token of the tile, its column being the token's row in the cache
viewed as [num_blocks * num_kv_heads * block_size, head_dim]. `torch.sparse.sampled_addmm` takes exactly those dot
products (only where torch has MKL, only in float32), `embedding_bag` sums those rows by weight.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.kv_cache import PagedVectors
from kernels.torch_plan import DecodePlan

with warnings.catch_warnings():  # torch announces once per process that its CSR support is in beta
    warnings.simplefilter("ignore", UserWarning)
    torch.sparse_csr_tensor([0, 1], [0], [0.0], (1, 1), check_invariants=False)


@dataclass(frozen=True)
class TileMatrix:
    """crow, cols: the indices. scores: the CSR matrix; its values are scratch that every layer overwrites."""

    crow: Tensor
    cols: Tensor
    scores: Tensor


def serves(part: PagedVectors) -> bool:
    """Whether this cache can be read in place."""
    return part.codes.dtype == torch.float32 and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


def scores_in_place(queries: Tensor, part: PagedVectors, plan: DecodePlan) -> Tensor:
    """Scores [tiles * num_kv_heads, group, tile_tokens] of queries [tiles * num_kv_heads, group, head_dim]."""
    matrix = _matrix(part, plan, queries.shape[1])
    keys = part.codes.view(-1, queries.shape[2]).t()
    flat = queries.view(-1, queries.shape[2])
    torch.sparse.sampled_addmm(matrix.scores, flat, keys, beta=0.0, out=matrix.scores)
    return matrix.scores.values().view(queries.shape[0], queries.shape[1], -1)


def weighted_sum_in_place(weights: Tensor, part: PagedVectors, plan: DecodePlan) -> Tensor:
    """[tiles * num_kv_heads, group, head_dim] of weights [tiles * num_kv_heads, group, tile_tokens]."""
    matrix = _matrix(part, plan, weights.shape[1])
    attended = functional.embedding_bag(
        matrix.cols,
        part.codes.view(-1, part.codes.shape[3]),
        matrix.crow,
        mode="sum",
        per_sample_weights=weights.view(-1),
        include_last_offset=True,
    )
    return attended.view(*weights.shape[:2], -1)


def _matrix(part: PagedVectors, plan: DecodePlan, group: int) -> TileMatrix:
    matrix = plan.matrices.get(group)
    if not isinstance(matrix, TileMatrix):
        matrix = plan.matrices[group] = _build(part, plan, group)
    return matrix


def _build(part: PagedVectors, plan: DecodePlan, group: int) -> TileMatrix:
    num_tiles, num_kv_heads, tile_blocks = plan.block_rows.shape
    block_size = part.codes.shape[2]
    num_rows = part.codes.shape[0] * num_kv_heads * block_size
    tokens = tile_blocks * block_size
    num_entries = num_tiles * num_kv_heads * group * tokens
    dtype = torch.int32 if max(num_rows, num_entries) < 2**31 else torch.int64
    starts = (plan.block_rows * block_size).to(dtype)
    cols = (starts[..., None] + torch.arange(block_size, dtype=dtype)).view(num_tiles, num_kv_heads, tokens)
    if plan.hidden is not None:  # what a slot without a token holds may be NaN: read a visible one in its place
        visible = cols.gather(2, plan.hidden.byte().argmin(1)[:, None, None].expand(-1, num_kv_heads, 1))
        cols = torch.where(plan.hidden[:, None], visible, cols)
    cols = cols[:, :, None].expand(-1, -1, group, -1).reshape(-1)
    crow = torch.arange(0, num_entries + 1, tokens, dtype=dtype)
    size = (crow.numel() - 1, num_rows)
    scores = torch.sparse_csr_tensor(crow, cols, torch.zeros(num_entries), size, check_invariants=False)
    return TileMatrix(crow, cols, scores)
