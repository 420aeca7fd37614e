"""MLA's Triton kernels under the interpreter against the oracle, and the oracle against expanded projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import mla_attention as kernel
from kernels import oracle
from kernels.attention import AttentionMetadata
from kernels.mla import mla_attention, write_latent

Call = Callable[..., Any]


@pytest.fixture
def latent_case(make_case: Call) -> Callable[..., tuple[Tensor, Tensor, Tensor, AttentionMetadata]]:
    """q_latent, q_rope, cache (unused slots are NaN) and metadata."""

    def make(
        seq_lens: list[int], query_lens: list[int], num_decodes: int, *, rank: int = 24, rope_dim: int = 8,
        num_heads: int = 3, dtype: torch.dtype = torch.float32, **arguments: Any,
    ) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:  # fmt: skip
        case = make_case(
            seq_lens, query_lens, num_decodes, num_kv_heads=1, head_dim=rank + rope_dim, dtype=dtype, **arguments
        )
        num_tokens = case.query.shape[0]
        query = torch.randn((num_tokens, num_heads, rank + rope_dim), generator=torch.Generator().manual_seed(1)).to(
            dtype
        )
        return query[..., :rank], query[..., rank:], case.cache.key.codes[:, 0], case.metadata

    return make


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 2e-3)])
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("num_heads", [1, 5, 20])
def test_ragged_batches(
    num_heads: int, block_size: int, dtype: torch.dtype, tolerance: float, latent_case: Call, interpreted: Call
) -> None:
    q_latent, q_rope, cache, metadata = latent_case(
        [5, 0, 33, 40, 7, 3],
        [1, 1, 1, 21, 7, 5],
        3,
        num_heads=num_heads,
        block_size=block_size,
        dtype=dtype,
        padding_rows=1,
    )
    out = interpreted(mla_attention, q_latent, q_rope, cache.contiguous(), metadata, scale=0.3)
    expected = oracle.mla_attention_float64(q_latent, q_rope, cache, metadata, 0.3)
    assert relative_error(out, expected) <= tolerance
    assert out[expected.eq(0).all(dim=(1, 2))].eq(0).all()


@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_any_number_of_splits(num_splits: int, latent_case: Call, interpreted: Call) -> None:
    q_latent, q_rope, cache, metadata = latent_case([100, 3, 0, 64], [1] * 4, 4, block_size=16)
    out = torch.full(q_latent.shape, torch.nan)
    interpreted(
        kernel.mla_attention, q_latent, q_rope, cache.contiguous(), metadata, 0.3, out,
        first_seq=0, num_seqs=4, max_query_len=1, num_splits=num_splits,
    )  # fmt: skip
    assert relative_error(out, oracle.mla_attention_float64(q_latent, q_rope, cache, metadata, 0.3)) <= 2e-6


def test_the_real_widths(latent_case: Call, interpreted: Call) -> None:
    q_latent, q_rope, cache, metadata = latent_case([20, 9], [1, 4], 1, rank=512, rope_dim=64, block_size=16)
    out = interpreted(mla_attention, q_latent, q_rope, cache.contiguous(), metadata, scale=192**-0.5)
    assert relative_error(out, oracle.mla_attention_float64(q_latent, q_rope, cache, metadata, 192**-0.5)) <= 2e-6


def test_writes_land_in_their_slots_and_nowhere_else(interpreted: Call) -> None:
    cache = torch.full((5, 4, 12), torch.nan, dtype=torch.float16)
    expected = cache.clone()
    latent, rope = torch.randn(4, 8), torch.randn(4, 6)[:, :4]
    slots = torch.tensor([9, -1, 4, 19])
    interpreted(write_latent, latent, rope, cache, slots)
    oracle.write_latent(latent, rope, expected, slots)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)
    assert cache.isnan().all(dim=2).sum() == 17


def test_absorbed_equals_expanded_attention() -> None:
    """The oracle against DeepSeek-V2's definition: expand K and V from the latent, with RoPE's part in the score."""
    generator = torch.Generator().manual_seed(0)
    length, heads, rank, nope, rope, v_dim = 9, 4, 16, 6, 4, 5
    latent, k_rope = (torch.randn((length, n), generator=generator).double() for n in (rank, rope))
    w_uk, w_uv = (torch.randn((heads, n, rank), generator=generator).double() for n in (nope, v_dim))
    q_nope, q_rope = (torch.randn((length, heads, n), generator=generator).double() for n in (nope, rope))
    scale = (nope + rope) ** -0.5
    keys = torch.cat([torch.einsum("hdr,tr->thd", w_uk, latent), k_rope[:, None].expand(-1, heads, -1)], dim=-1)
    values = torch.einsum("hdr,tr->thd", w_uv, latent)
    scores = torch.einsum("qhd,khd->hqk", torch.cat([q_nope, q_rope], dim=-1), keys) * scale
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)

    cache = torch.zeros((3, 8, rank + rope), dtype=torch.float64)
    oracle.write_latent(latent, k_rope, cache, torch.arange(8, 8 + length))
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_table=torch.tensor([[1, 2]], dtype=torch.int32),
        slot_mapping=torch.arange(8, 8 + length),
        max_query_len=length,
        max_seq_len=length,
        num_decodes=0,
    )
    q_latent = torch.einsum("qhd,hdr->qhr", q_nope, w_uk)
    attended = oracle.mla_attention_float64(q_latent, q_rope, cache, metadata, scale)
    torch.testing.assert_close(torch.einsum("qhr,hdr->qhd", attended, w_uv), expected)
