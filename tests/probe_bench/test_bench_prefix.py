"""The benchmark of prefix hashing hashes and finds what it says; its speeds are not for a test to judge."""

from __future__ import annotations

import hashlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from probe.bench.prefix import bench_prefix


@pytest.fixture(autouse=True)
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cbor2", "xxhash", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)


def test_what_is_not_installed_is_said() -> None:
    lines: list[str] = []
    found = bench_prefix(report=lines.append, num_tokens=1000, rounds=1)
    assert len(lines) == 1
    assert found["blocks"] == 62
    assert found["not_installed"] == ["sha256_cbor", "xxhash", "xxhash_cbor"]
    assert found["vllm"].startswith("not compared: vllm cannot be imported")
    assert {"hash_sha256_ms", "hash_and_lookup_ms", "lookup_again_ms"} <= found.keys()
    assert not [name for name in found if name.startswith("vllm_")]


def test_vllm_takes_part_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the functions of vLLM that are called."""
    hashed: list[Any] = []
    initialized: list[Any] = []

    def hash_block_tokens(function: Any, parent: bytes | None, tokens: list[int], extra_keys: None) -> bytes:
        hashed.append((parent, tokens))
        return function((parent, tuple(tokens), extra_keys))

    def by_name(name: str) -> Any:
        if name != "sha256":
            raise ValueError(name)
        return lambda value: hashlib.sha256(repr(value).encode()).digest()

    utils = SimpleNamespace(hash_block_tokens=hash_block_tokens, init_none_hash=initialized.append)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.v1.core.kv_cache_utils", utils)
    monkeypatch.setitem(sys.modules, "vllm.utils.hashing", SimpleNamespace(get_hash_fn_by_name=by_name))
    found = bench_prefix(report=lambda line: None, num_tokens=1000, rounds=1)
    assert found["vllm"] == "compared"
    assert found["vllm_sha256_to_ours"] > 0
    assert len(initialized) == 1
    assert len(hashed) == 3 * 62  # to see that it works, to warm up, and the round
    assert [parent is None for parent, _ in hashed[:62]] == [True] + [False] * 61
    assert all(len(tokens) == 16 for _, tokens in hashed)
