from __future__ import annotations

import hashlib
import struct
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.block_hash import ROOT_HASH, BlockHasher, hash_block
from engine.cache_identity import CacheIdentity
from engine.prefix_cache import RecentEvictions
from engine.request import Request, SamplingParams


def request_of(tokens: list[int], salt: str | None = None) -> Request:
    identity = CacheIdentity(() if salt is None else (("cache_salt", salt),))
    return Request("r", tokens, SamplingParams(), identity=identity)


def request_block_hashes(request: Request, block_size: int) -> list[bytes]:
    return BlockHasher(block_size).keys_of(request).hashes


def test_the_encoding_is_the_documented_one() -> None:
    data = ROOT_HASH + struct.pack("<4I", 3, 1, 2, 2**32 - 1)
    for text in ("cache_salt", "tenant-ä"):
        data += struct.pack("<I", len(text.encode())) + text.encode()
    assert hash_block(None, [1, 2, 2**32 - 1], [("cache_salt", "tenant-ä")]) == hashlib.sha256(data).digest()


def test_no_two_of_many_small_inputs_share_a_hash() -> None:
    parents = (None, b"\0" * 32)
    blocks = [block for size in range(4) for block in product(range(3), repeat=size)]
    pairs = list(product(["a", "ab", "b", ""], ["", "a", "b", "\ud800"]))
    extras = [extra for size in range(3) for extra in product(pairs, repeat=size)]
    inputs = list(product(parents, blocks, extras))
    assert len({hash_block(*each) for each in inputs}) == len(inputs) > 20_000


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_token_that_does_not_fit_is_refused(token_id: int) -> None:
    with pytest.raises(ValueError, match="32 bits"):
        hash_block(None, [token_id])


def test_same_block_after_another_prefix_has_another_hash() -> None:
    left = request_block_hashes(request_of([1, 1, 5, 6]), 2)
    right = request_block_hashes(request_of([2, 2, 5, 6]), 2)
    assert left[1] != right[1]


def test_only_full_blocks_have_a_hash() -> None:
    for length in (1, 3, 4, 5, 7, 8, 9):
        assert len(request_block_hashes(request_of([1] * length), 4)) == length // 4


def test_the_salt_separates_whole_chains() -> None:
    chains = [request_block_hashes(request_of([1] * 8, salt), 4) for salt in (None, "", "a", "b")]
    assert len({block_hash for chain in chains for block_hash in chain}) == 8
    assert chains[2] == request_block_hashes(request_of([1] * 8, "a"), 4)


def test_the_salt_is_in_the_first_block_only() -> None:
    first, second = request_block_hashes(request_of([1, 2, 3, 4], "s"), 2)
    assert first == hash_block(None, [1, 2], [("cache_salt", "s")])
    assert second == hash_block(first, [3, 4])


TOKENS = st.lists(st.integers(0, 9), max_size=20)


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(TOKENS.filter(bool), TOKENS, st.integers(1, 5))
def test_hashing_as_tokens_arrive_equals_hashing_at_once(prompt: list[int], output: list[int], block_size: int) -> None:
    growing = request_of(prompt, "s")
    for token_id in output:
        before = list(request_block_hashes(growing, block_size))
        growing.append_output_token(token_id)
        assert request_block_hashes(growing, block_size)[: len(before)] == before
    at_once = request_block_hashes(request_of(prompt + output, "s"), block_size)
    assert request_block_hashes(growing, block_size) == at_once


def test_recent_evictions_forget_the_oldest_and_count_once() -> None:
    recent = RecentEvictions(2)
    for name in (b"a", b"b", b"a", b"c"):  # a is evicted again, so b is the oldest
        recent.add(name)
    assert len(recent) == 2
    assert recent.take([b"a", b"b", b"c"]) == 2
    assert recent.take([b"a", b"b", b"c"]) == 0
    recent.add(b"a")
    recent.discard(b"a")
    assert recent.take([b"a"]) == 0
