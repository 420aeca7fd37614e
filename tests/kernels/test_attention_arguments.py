"""Bad arguments end in one clear ValueError; good ones reach the backend that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import oracle
from kernels.attention import AttentionMetadata, AttentionOptions, backend_name, paged_attention, reshape_and_cache
from kernels.formats import KV_FORMATS
from kernels.kv_cache import LayerKVCache, allocate_kv_cache
from kernels.mla import mla_attention, write_latent

OPTIONS = AttentionOptions(scale=1.0)


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


def pool(kv_format: str = "float32", num_blocks: int = 3) -> LayerKVCache:
    return allocate_kv_cache(KV_FORMATS[kv_format], num_blocks, 2, 4, 8, num_open_rows=2)


def attend(cache: LayerKVCache, batch: AttentionMetadata, query: Tensor | None = None) -> Tensor:
    return paged_attention(torch.zeros(3, 2, 8) if query is None else query, cache, batch, OPTIONS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_lens": torch.tensor([4, 2])}, "seq_lens must be torch.int32"),
        ({"seq_lens": torch.tensor(4, dtype=torch.int32)}, "seq_lens must be torch.int32"),
        ({"slot_mapping": torch.tensor([7], dtype=torch.int32)}, "slot_mapping must be torch.int64"),
        ({"block_table": torch.tensor([1, 2], dtype=torch.int32)}, r"block_table must be torch.int32 \[2, any\]"),
        ({"block_table": torch.tensor([[1]], dtype=torch.int32)}, r"block_table must be torch.int32 \[2, any\]"),
        ({"query_start_loc": torch.tensor([0, 3], dtype=torch.int32)}, r"query_start_loc must be .*\[3\].*\[2\]"),
        ({"open_rows": torch.tensor([1], dtype=torch.int32)}, r"open_rows must be .*\[2\].*\[1\]"),
        ({"seq_lens": torch.tensor([4, 9, 2, 9], dtype=torch.int32)[::2]}, "seq_lens must be contiguous"),
        (
            {"block_table": torch.tensor([[1, 2], [3, 0]], dtype=torch.int32).t()},
            "block_table must be contiguous",
        ),
        ({"slot_mapping": torch.tensor([7, 8], device="meta")}, "slot_mapping is on meta but seq_lens is on cpu"),
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
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
        ({"sink_tokens": 4}, "sink_tokens needs a sliding_window"),
        ({"sliding_window": 8, "sink_tokens": -1}, "sink_tokens needs .* got -1"),
        ({"soft_cap": 0.0}, "soft_cap must be positive"),
        ({"soft_cap": float("nan")}, "soft_cap must be positive"),
    ],
)
def test_bad_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionOptions(scale=1.0, **changes)


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"query_start_loc": torch.tensor([0, 2, 1], dtype=torch.int32)}, "query_start_loc must rise"),
    ({"query_start_loc": torch.tensor([0, 1, 9], dtype=torch.int32)}, "at most num_tokens = 3"),
    ({"max_query_len": 1}, "2 query tokens, more than max_query_len"),
    ({"num_decodes": 2}, "num_decodes = 2 sequences must have one query token"),
    ({"seq_lens": torch.tensor([4, 5], dtype=torch.int32)}, "between 0 and max_seq_len = 4"),
    ({"seq_lens": torch.tensor([4, -1], dtype=torch.int32)}, "between 0 and max_seq_len = 4"),
    ({"block_table": torch.tensor([[3], [2]], dtype=torch.int32)}, "outside the pool of 3 blocks"),
    ({"block_table": torch.tensor([[1], [-1]], dtype=torch.int32)}, "outside the pool of 3 blocks"),
    ({"slot_mapping": torch.tensor([4, 5, 12])}, "outside the pool of 12 slots"),
]


@pytest.mark.parametrize(("changes", "message"), CONTRADICTIONS)
def test_contradictions_are_always_found_by_the_torch_backend(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(pool(), metadata(**changes))


@pytest.mark.parametrize(("changes", "message"), CONTRADICTIONS)
def test_contradictions_are_found_in_debug_mode_before_any_backend(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVONCALL_KERNELS", "oracle")
    monkeypatch.setenv("KVONCALL_DEBUG_KERNELS", "1")
    cache, new = pool(), torch.zeros(3, 2, 8)
    with pytest.raises(ValueError, match=message):
        attend(cache, metadata(**changes))
    with pytest.raises(ValueError, match=message):
        reshape_and_cache(new, new, cache, metadata(**changes))


@pytest.mark.parametrize("rows", [[0, 2], [0, -1], [1, 1]])
def test_open_rows_are_looked_at_in_debug_mode(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVONCALL_KERNELS", "oracle")
    monkeypatch.setenv("KVONCALL_DEBUG_KERNELS", "1")
    batch = metadata(open_rows=torch.tensor(rows, dtype=torch.int32))
    with pytest.raises(ValueError, match="open_rows"):
        attend(pool("int4_kivi"), batch)
    attend(pool(), batch)  # a format that keeps no open blocks does not care


def test_block_table_too_narrow_for_the_longest_sequence() -> None:
    with pytest.raises(ValueError, match=r"max_seq_len \(5\) exceeds .* \(4 tokens\)"):
        attend(pool(), metadata(max_seq_len=5))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "int4_kivi keeps open blocks: metadata.open_rows is missing"),
        ([1, 1], "open_rows must be distinct"),
        ([0, 2], "open_rows names a row outside the 2 rows"),
    ],
)
def test_open_rows(rows: list[int] | None, message: str) -> None:
    open_rows = None if rows is None else torch.tensor(rows, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        attend(pool("int4_kivi"), metadata(open_rows=open_rows))


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (torch.zeros(3, 2, 4), r"query must be floating point \[any, any, 8\]"),
        (torch.zeros(3, 2, 8).int(), "query must be floating point"),
        (torch.zeros(3, 3, 8), r"num_q_heads \(3\) must be a positive multiple of num_kv_heads \(2\)"),
        (torch.zeros(3, 2, 8, device="meta"), "query is on meta"),
    ],
)
def test_bad_queries(query: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(pool(), metadata(), query)


@pytest.mark.parametrize(
    ("mass", "message"),
    [
        (torch.zeros(2, 2, 3), "room for max_seq_len = 4"),
        (torch.zeros(2, 1, 4), r"attention_mass must be torch.float32 \[2, 2, any\]"),
        (torch.zeros(2, 2, 4).half(), "attention_mass must be torch.float32"),
    ],
)
def test_bad_attention_mass(mass: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention(torch.zeros(3, 2, 8), pool(), metadata(), OPTIONS, mass)


@pytest.mark.parametrize(
    ("key", "slots", "message"),
    [
        (torch.zeros(2, 2, 8), torch.tensor([4]), r"key must be floating point \[1, 2, 8\], got .*\[2, 2, 8\]"),
        (torch.zeros(1, 2, 8).int(), torch.tensor([4]), "key must be floating point"),
        (torch.zeros(1, 2, 8, device="meta"), torch.tensor([4]), "key is on meta"),
        (torch.zeros(1, 2, 8), torch.tensor([12]), "outside the pool of 12 slots"),
    ],
)
def test_bad_writes(key: Tensor, slots: Tensor, message: str) -> None:
    batch = metadata(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([1], dtype=torch.int32),
        block_table=torch.tensor([[1]], dtype=torch.int32),
        slot_mapping=slots,
    )
    with pytest.raises(ValueError, match=message):
        reshape_and_cache(key, key, pool(), batch)


@pytest.mark.parametrize(
    ("q_rope", "cache", "message"),
    [
        (torch.zeros(3, 2, 3), torch.zeros(3, 4, 10), r"q_rope must be floating point \[3, 2, 2\]"),
        (torch.zeros(3, 2, 2), torch.zeros(3, 4, 10).int(), "latent cache must be floating point"),
        (torch.zeros(3, 2, 2), torch.zeros(3, 10, 4).transpose(1, 2), "latent cache must be contiguous"),
        (torch.zeros(3, 2, 2, device="meta"), torch.zeros(3, 4, 10), "q_rope is on meta"),
    ],
)
def test_bad_latent_queries(q_rope: Tensor, cache: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mla_attention(torch.zeros(3, 2, 8), q_rope, cache, metadata(), scale=1.0)


@pytest.mark.parametrize(
    ("k_rope", "slots", "message"),
    [
        (torch.zeros(2, 3), torch.tensor([4, 5]), r"k_rope must be floating point \[2, 2\]"),
        (torch.zeros(2, 2), torch.tensor([4, 5]).int(), "slot_mapping must be torch.int64"),
        (torch.zeros(2, 2), torch.tensor([4, 12]), "outside the pool of 12 slots"),
    ],
)
def test_bad_latent_writes(k_rope: Tensor, slots: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_latent(torch.zeros(2, 8), k_rope, torch.zeros(3, 4, 10), slots)


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
    monkeypatch.setattr(oracle, "paged_attention", lambda *_: "the oracle's")
    case = make_case([5], [1], 1)
    assert paged_attention(case.query, case.cache, case.metadata, case.options) == "the oracle's"


def test_no_tokens_is_no_work() -> None:
    cache, empty = pool(), torch.zeros((0, 2, 8))
    nobody = metadata(
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.zeros(0, dtype=torch.int32),
        block_table=torch.zeros((0, 1), dtype=torch.int32),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        num_decodes=0,
    )
    reshape_and_cache(empty, empty, cache, nobody)
    assert attend(cache, nobody, empty).shape == (0, 2, 8)
    assert attend(cache, nobody, torch.ones((2, 2, 8))).eq(0).all()
