"""Latent attention and latent writes of the torch backend against the oracle."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import oracle, torch_mla
from kernels.attention import AttentionMetadata
from kernels.mla import mla_attention, write_latent

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVONCALL_KERNELS", "torch")


@dataclass
class Case:
    q_latent: Tensor
    q_rope: Tensor
    cache: Tensor
    metadata: AttentionMetadata
    scale: float = 0.3

    def attend(self, **changes: Any) -> Tensor:
        metadata = replace(self.metadata, **changes)
        return mla_attention(self.q_latent, self.q_rope, self.cache, metadata, scale=self.scale)

    def matches_oracle(self) -> bool:
        expected = oracle.mla_attention_float64(self.q_latent, self.q_rope, self.cache, self.metadata, self.scale)
        difference = self.attend().double() - expected
        return bool(difference.norm() <= TOLERANCE[self.q_latent.dtype] * expected.norm())


def make_latents(
    seq_lens: list[int],
    query_lens: list[int],
    num_decodes: int,
    *,
    num_heads: int = 3,
    rank: int = 8,
    rope: int = 4,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    padding_rows: int = 0,
    seed: int = 0,
) -> Case:
    """Blocks in random order; every slot without a token is NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = 2 + sum(-(-length // block_size) for length in seq_lens)
    free = random.Random(seed).sample(range(1, num_blocks), num_blocks - 1)
    table = torch.zeros((len(seq_lens), 1 + max(-(-length // block_size) for length in seq_lens)), dtype=torch.int32)
    cache = torch.full((num_blocks, block_size, rank + rope), torch.nan, dtype=dtype)
    for row, length in zip(table, seq_lens, strict=True):
        for start in range(0, length, block_size):
            row[start // block_size] = block = free.pop()
            n = min(block_size, length - start)
            cache[block, :n] = torch.randn((n, rank + rope), generator=generator).to(dtype)
    num_tokens = sum(query_lens) + padding_rows
    query = (2 * torch.randn((num_tokens, num_heads, rank + rope), generator=generator)).to(dtype)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.full((num_tokens,), -1),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        num_decodes=num_decodes,
    )
    return Case(query[..., :rank], query[..., rank:], cache, metadata)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), workspace=st.sampled_from([1 << 18, 1 << 8, 1]))
def test_any_batch_matches_the_oracle(data: st.DataObject, workspace: int) -> None:
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    length = st.integers(0, 40) | st.sampled_from([block_size, block_size + 1])
    decodes = data.draw(st.lists(length, max_size=4))
    chunks = data.draw(st.lists(length, min_size=0 if decodes else 1, max_size=2))
    case = make_latents(
        decodes + chunks,
        [1] * len(decodes) + [data.draw(st.integers(0, n + 1)) for n in chunks],
        len(decodes),
        num_heads=data.draw(st.sampled_from([1, 3, 16])),
        rank=data.draw(st.sampled_from([8, 20])),
        rope=data.draw(st.sampled_from([2, 4])),
        block_size=block_size,
        dtype=data.draw(st.sampled_from(list(TOLERANCE))),
        padding_rows=data.draw(st.integers(0, 2)),
        seed=data.draw(st.integers(0, 1000)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_mla, "WORKSPACE_ELEMENTS", workspace)
        patch.setattr(torch_mla, "SCORE_ELEMENTS", workspace)
        assert case.matches_oracle()


def test_widths_of_deepseek_and_a_long_context() -> None:
    assert make_latents([700, 3, 300], [1, 1, 200], 2, num_heads=16, rank=512, rope=64, block_size=16).matches_oracle()


def test_rows_without_a_key_are_zero() -> None:
    case = make_latents([0, 7, 3], [1, 1, 5], 2, padding_rows=2)
    result = case.attend()
    assert result[[0, 2, 3, 7, 8]].eq(0).all()
    assert result[[1, 4, 5, 6]].ne(0).all()


def test_the_rope_part_counts() -> None:
    case = make_latents([20, 9], [1, 4], 1)
    assert not torch.allclose(case.attend(), replace(case, q_rope=torch.zeros_like(case.q_rope)).attend(), atol=0.01)


def test_decode_equals_a_chunk_of_one_token() -> None:
    case = make_latents([5, 16, 17, 40], [1] * 4, 4)
    torch.testing.assert_close(case.attend(), case.attend(num_decodes=0), rtol=1e-5, atol=1e-5)


def test_chunks_equal_the_whole() -> None:
    case = make_latents([21], [21], 0)
    whole = case.attend()
    for start in range(0, 21, 4):
        end = min(start + 4, 21)
        rows = {"q_latent": case.q_latent[start:end], "q_rope": case.q_rope[start:end]}
        piece = replace(case, **rows).attend(
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
        )
        torch.testing.assert_close(piece, whole[start:end], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_writes_equal_the_oracles(dtype: torch.dtype) -> None:
    ours, theirs = (torch.full((5, 4, 12), torch.nan, dtype=dtype) for _ in range(2))
    latent, k_rope = torch.randn((5, 8)), torch.randn((5, 4))
    for slots in ([9, -1, 4, 19, -1], [-1] * 5, [0, 1, 2, 3, 7]):
        write_latent(latent, k_rope, ours, torch.tensor(slots))
        oracle.write_latent(latent, k_rope, theirs, torch.tensor(slots))
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_a_slot_outside_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="outside the pool of 20 slots"):
        write_latent(torch.zeros(1, 8), torch.zeros(1, 4), torch.zeros((5, 4, 12)), torch.tensor([20]))
    case = make_latents([9, 6], [1, 2], 1)
    with pytest.raises(ValueError, match="block_table names a block outside the pool"):
        case.attend(block_table=case.metadata.block_table + 100)
