"""Bad arguments end in one clear ValueError; good ones reach the backend that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.attention import AttentionMetadata, backend_name, copy_blocks, paged_attention, reshape_and_cache


def metadata(**changes: Any) -> AttentionMetadata:
    values: dict[str, Any] = {
        "query_start_loc": torch.tensor([0, 1, 3], dtype=torch.int32),
        "seq_lens": torch.tensor([4, 2], dtype=torch.int32),
        "block_table": torch.tensor([[1], [2]], dtype=torch.int32),
        "slot_mapping": torch.tensor([7, 8, 9]),
        "max_query_len": 2,
        "max_seq_len": 4,
        "num_decodes": 1,
    }
    return AttentionMetadata(**values | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_lens": torch.tensor([4, 2])}, "seq_lens must be torch.int32"),
        ({"slot_mapping": torch.tensor([7], dtype=torch.int32)}, "slot_mapping must be torch.int64"),
        ({"block_table": torch.tensor([1, 2], dtype=torch.int32)}, "block_table must be torch.int32 with 2"),
        ({"block_table": torch.tensor([[1]], dtype=torch.int32)}, "one row per sequence"),
        ({"query_start_loc": torch.tensor([0, 3], dtype=torch.int32)}, r"num_seqs \+ 1 = 3 entries, got 2"),
        ({"num_decodes": 3}, "num_decodes must lie between 0 and num_seqs = 2, got 3"),
        ({"max_seq_len": -1}, "must not be negative"),
    ],
)
def test_bad_metadata(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metadata(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_loc": torch.tensor([0, 2, 1], dtype=torch.int32)}, "query_start_loc must rise"),
        ({"query_start_loc": torch.tensor([0, 1, 9], dtype=torch.int32)}, "at most num_tokens = 3"),
        ({"max_query_len": 1}, "2 query tokens, more than max_query_len"),
        ({"num_decodes": 2}, "num_decodes = 2 sequences must have one query token"),
        ({"seq_lens": torch.tensor([4, 5], dtype=torch.int32)}, "between 0 and max_seq_len = 4"),
        ({"seq_lens": torch.tensor([4, -1], dtype=torch.int32)}, "between 0 and max_seq_len = 4"),
        ({"max_seq_len": 5}, r"max_seq_len \(5\) exceeds .* \(4 tokens\)"),
        ({"block_table": torch.tensor([[3], [2]], dtype=torch.int32)}, "outside the pool of 3 blocks"),
        ({"block_table": torch.tensor([[1], [-1]], dtype=torch.int32)}, "outside the pool of 3 blocks"),
    ],
)
def test_contradictions_found_by_the_torch_backend(changes: dict[str, Any], message: str) -> None:
    cache = torch.zeros((3, 2, 4, 8))
    with pytest.raises(ValueError, match=message):
        paged_attention(torch.zeros((3, 2, 8)), cache, cache, metadata(**changes), scale=1.0)


@pytest.mark.parametrize(
    ("query", "k_cache", "v_cache", "message"),
    [
        (torch.zeros(3, 2, 4), torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8), "head_dim=8"),
        (torch.zeros(3, 2, 8).int(), torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8), "must be floating point"),
        (torch.zeros(3, 3, 8), torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8), r"num_q_heads \(3\)"),
        (torch.zeros(3, 2, 8), torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 4), "must both be"),
        (torch.zeros(3, 2, 8), torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8).half(), "share a float dtype"),
        (torch.zeros(3, 2, 8), *[torch.zeros(3, 4, 2, 8).transpose(1, 2)] * 2, "must be contiguous"),
        (torch.zeros(3, 2, 8, device="meta"), *[torch.zeros(3, 2, 4, 8)] * 2, "query is on meta"),
    ],
)
def test_bad_attention_tensors(query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention(query, k_cache, v_cache, metadata(), scale=1.0)


@pytest.mark.parametrize(
    ("key", "slots", "message"),
    [
        (torch.zeros(2, 2, 8), torch.tensor([4]), r"key must have shape \[1, 2, 8\], got \[2, 2, 8\]"),
        (torch.zeros(1, 2, 8), torch.tensor([4], dtype=torch.int32), "slot_mapping must be torch.int64"),
        (torch.zeros(1, 2, 8), torch.tensor([12]), "outside the pool of 12 slots"),
    ],
)
def test_bad_writes(key: torch.Tensor, slots: torch.Tensor, message: str) -> None:
    caches = [torch.zeros((3, 2, 4, 8)) for _ in "kv"]
    with pytest.raises(ValueError, match=message):
        reshape_and_cache(key, key, *caches, slots)


def test_copy_blocks_reads_before_it_writes() -> None:
    caches = [torch.arange(4.0).repeat_interleave(8).view(4, 1, 2, 4).clone() for _ in range(2)]
    copy_blocks(caches, [1, 2], [2, 1])
    for cache in caches:
        assert cache[:, 0, 0, 0].tolist() == [0.0, 2.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [([1], [1, 2], "same length"), ([1, 2], [3, 3], "twice"), ([4], [1], "between 0 and 3"), ([1], [-1], "between")],
)
def test_copy_blocks_refuses(src: list[int], dst: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        copy_blocks([torch.zeros(4, 1, 2, 4)], src, dst)


def test_backend_follows_device_and_environment(monkeypatch: pytest.MonkeyPatch, make_case: Callable[..., Any]) -> None:
    monkeypatch.delenv("KVONCALL_KERNELS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert backend_name(torch.device("cpu")) == "torch"
    assert backend_name(torch.device("cuda")) == "triton"
    monkeypatch.setenv("KVONCALL_KERNELS", "triton")
    with pytest.raises(ValueError, match="need a CUDA device"):
        backend_name(torch.device("cpu"))
    monkeypatch.setenv("KVONCALL_KERNELS", "tritone")
    with pytest.raises(ValueError, match="tritone is unknown; use one of: triton, torch, oracle"):
        backend_name(torch.device("cpu"))
    monkeypatch.setenv("KVONCALL_KERNELS", "oracle")
    case = make_case([5], [1], 1)
    result = paged_attention(case.query, case.k_cache, case.v_cache, case.metadata, scale=case.scale)
    assert torch.equal(result, case.expected().float())


def test_no_tokens_is_no_work() -> None:
    caches = [torch.zeros((3, 2, 4, 8)) for _ in "kv"]
    empty = torch.zeros((0, 2, 8))
    reshape_and_cache(empty, empty, *caches, torch.zeros(0, dtype=torch.int64))
    nobody = metadata(
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.zeros(0, dtype=torch.int32),
        block_table=torch.zeros((0, 1), dtype=torch.int32),
        num_decodes=0,
    )
    assert paged_attention(empty, *caches, nobody, scale=1.0).shape == (0, 2, 8)
    assert paged_attention(torch.ones((2, 2, 8)), *caches, nobody, scale=1.0).eq(0).all()
