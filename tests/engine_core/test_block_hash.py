"""Names of blocks: the encoding, the chain, and the algorithms."""

from __future__ import annotations

import hashlib
import struct
import sys
from itertools import product

import cbor2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.block_hash import ROOT_HASH, BlockHasher, hash_block
from engine.cache_identity import Adapter, CacheIdentity, ImageSpan, extra_keys
from engine.errors import ConfigError
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


def test_cbor_encodes_what_vllm_encodes() -> None:
    first, second, _ = BlockHasher(2, "sha256_cbor").keys_of(request_of([1, 2, 3, 4, 5, 6], "s")).hashes
    salted = (("cache_salt", "s"),)
    assert first == hashlib.sha256(cbor2.dumps((ROOT_HASH, (1, 2), salted), canonical=True)).digest()
    assert second == hashlib.sha256(cbor2.dumps((first, (3, 4), None), canonical=True)).digest()


@pytest.mark.parametrize("algo", ["xxhash", "xxhash_cbor"])
def test_xxhash_is_seeded_anew_in_every_process(algo: str) -> None:
    one, other = BlockHasher(2, algo), BlockHasher(2, algo)
    hashes = one.keys_of(request_of([1, 2, 3, 4])).hashes
    assert [len(block_hash) for block_hash in hashes] == [16, 16]
    assert one.keys_of(request_of([1, 2, 3, 4])).hashes == hashes
    assert other.keys_of(request_of([1, 2, 3, 4])).hashes != hashes


@pytest.mark.parametrize(
    ("algo", "package"), [("sha256_cbor", "cbor2"), ("xxhash", "xxhash"), ("xxhash_cbor", "cbor2")]
)
def test_a_missing_package_is_named(algo: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{algo} needs the package {package}: pip install 'kvoncall\[hashes\]'"):
        BlockHasher(2, algo)


def test_truncated_names_are_the_start_of_a_sha256() -> None:
    first, second = BlockHasher(2, "unsafe_truncated").keys_of(request_of([1, 2, 3, 4])).hashes
    assert first == hash_block(None, [1, 2])[:2]
    assert second == hashlib.sha256(first + struct.pack("<3I", 2, 3, 4)).digest()[:2]


SPANS = st.lists(st.tuples(st.integers(0, 18), st.integers(1, 4), st.sampled_from("ab")), max_size=2)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
    output=st.lists(st.integers(0, 1), max_size=8),
    spans=SPANS,
    salt=st.sampled_from([None, "s"]),
    public=st.integers(0, 12),
    weights_version=st.integers(0, 1),
    block_size=st.integers(1, 4),
)
def test_each_name_covers_what_the_rules_say(
    prompt: list[int], output: list[int], spans: list[tuple[int, int, str]], salt: str | None, public: int,
    weights_version: int, block_size: int,
) -> None:  # fmt: skip
    """Against the chain written out block by block, with `extra_keys` asked for each."""
    images = tuple(ImageSpan(*span) for span in sorted(spans))
    identity = CacheIdentity(() if salt is None else (("cache_salt", salt),), adapter=Adapter("x", 2), images=images)
    hasher = BlockHasher(block_size)
    hasher.weights_version = weights_version
    hasher.set_public_prefixes([prompt[:public]])
    request = Request("r", prompt, SamplingParams(), identity=identity)
    hasher.keys_of(request)
    for token_id in output:
        request.append_output_token(token_id)
        keys = hasher.keys_of(request)
    keys = hasher.keys_of(request)
    num_public = min([public, len(prompt), *(image.offset for image in images)]) // block_size
    parents: list[bytes | None] = [None, None]
    for index in range(len(request.all_token_ids) // block_size):
        start, names = index * block_size, []
        for parent, private in zip(parents, (index == num_public, False), strict=True):
            extra = extra_keys(
                identity, start, block_size, root=index == 0, private=private, weights_version=weights_version
            )
            names.append(hash_block(parent, request.all_token_ids[start : start + block_size], extra))
        assert [keys.hashes[index], keys.content_hashes[index]] == names
        true = keys.identity_of(index)
        assert true.namespace == (identity.namespace if index >= num_public else ())
        assert true.images == tuple(image for image in images if image.offset < start + block_size)
        assert (true.adapter, true.weights_version) == (identity.adapter, weights_version)
        parents = list(names)
    assert len(keys.hashes) == len(request.all_token_ids) // block_size
