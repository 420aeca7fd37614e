"""Who is served whose blocks: identities, public prefixes, verification, faults, and how all of it is counted."""

from __future__ import annotations

from typing import Any

import pytest

from engine.block_hash import hash_block
from engine.cache_identity import Adapter, CacheIdentity, ImageSpan
from engine.kv_cache_manager import KVCacheManager
from engine.request import Request, SamplingParams

BLOCK = 4
TOKENS = list(range(10, 27))  # four blocks and a token
A = CacheIdentity((("tenant", "a"),), "owner-a")
B = CacheIdentity((("tenant", "b"),), "owner-b")
NOBODY = CacheIdentity()


def make_manager(**options: Any) -> KVCacheManager:
    return KVCacheManager(64, BLOCK, **options)


def admit(manager: KVCacheManager, identity: CacheIdentity = NOBODY, tokens: list[int] = TOKENS) -> int:
    """Looks a prompt up, computes what is missing and gives it back; returns the tokens that were hit."""
    request = Request("r", tokens, SamplingParams(), identity=identity)
    hits = manager.get_computed_blocks(request)
    manager.record_first_admission(request, hits)
    num_hit = len(hits) * BLOCK
    assert manager.allocate_slots(request, len(tokens) - num_hit, hits)
    request.num_computed_tokens = len(tokens)
    manager.cache_computed_blocks(request)
    manager.free(request)
    return num_hit


def image(digest: str, offset: int = 5) -> CacheIdentity:
    return CacheIdentity(images=(ImageSpan(offset, 2, digest),))


def test_a_namespace_finds_its_own_blocks_only() -> None:
    manager = make_manager()
    assert [admit(manager, identity) for identity in (A, B, NOBODY, A, B, NOBODY)] == [0, 0, 0, 16, 16, 16]


@pytest.mark.parametrize(
    ("first", "second", "hit"),
    [
        (CacheIdentity(adapter=Adapter("x", 1)), NOBODY, 0),
        (CacheIdentity(adapter=Adapter("x", 1)), CacheIdentity(adapter=Adapter("x", 2)), 0),
        (CacheIdentity(adapter=Adapter("x", 1)), CacheIdentity(adapter=Adapter("x", 1)), 16),
        (image("aa"), image("bb"), 4),  # the block before the image is the same
        (image("aa"), image("aa", offset=6), 4),
        (image("aa"), image("aa"), 16),
        (image("aa", offset=3), NOBODY, 0),
    ],
)
def test_what_makes_the_kv_is_part_of_its_name(first: CacheIdentity, second: CacheIdentity, hit: int) -> None:
    manager = make_manager()
    admit(manager, first)
    assert admit(manager, second) == hit


def test_everybody_shares_the_blocks_of_a_public_prefix() -> None:
    manager = make_manager()
    manager.set_public_prefixes([[1, 2, 3], TOKENS[:10]])  # two whole blocks of it
    assert admit(manager, A) == 0
    assert admit(manager, B) == 2 * BLOCK
    assert admit(manager, NOBODY, [*TOKENS[:6], 99, 99, 99]) == BLOCK
    assert admit(manager, A) == 16
    assert manager.prefix_stats.hits_by_scope == {"own": 2 * BLOCK, "shared": 0, "public": 5 * BLOCK}


def test_the_namespace_enters_the_first_block_that_is_not_public() -> None:
    manager = make_manager()
    manager.set_public_prefixes([TOKENS[:BLOCK]])
    request = Request("r", TOKENS, SamplingParams(), identity=A)
    keys = manager.hasher.keys_of(request)
    first = hash_block(None, TOKENS[:4])
    second = hash_block(first, TOKENS[4:8], A.namespace)
    assert keys.hashes[:3] == [first, second, hash_block(second, TOKENS[8:12])]
    assert keys.content_hashes == manager.hasher.keys_of(Request("r", TOKENS, SamplingParams())).hashes


def test_no_block_with_an_image_is_public() -> None:
    manager = make_manager()
    manager.set_public_prefixes([TOKENS])
    with_image = (ImageSpan(5, 2, "aa"),)
    admit(manager, CacheIdentity(A.namespace, "owner-a", images=with_image))
    assert admit(manager, CacheIdentity(B.namespace, "owner-b", images=with_image)) == BLOCK


def test_public_prefixes_do_not_reach_what_was_named_before() -> None:
    manager = make_manager()
    admit(manager, A)
    manager.set_public_prefixes([TOKENS])
    assert admit(manager, B) == 0
    assert admit(manager, A) == 16  # of B's making by now
    manager.set_public_prefixes([])
    assert admit(manager, B) == 0


def test_hits_lost_are_those_that_sharing_with_everybody_would_have_brought() -> None:
    manager = make_manager()
    admit(manager, A)
    assert manager.prefix_stats.hits_lost == 0
    admit(manager, B, TOKENS[:11])
    assert manager.prefix_stats.hits_lost == 2 * BLOCK
    admit(manager, B)  # finds two of its own, and would have found four
    assert manager.prefix_stats.hits_lost == 4 * BLOCK
    admit(manager, B)
    admit(manager, A, [0, *TOKENS])
    assert manager.prefix_stats.hits_lost == 4 * BLOCK


def test_blocks_by_owner_are_bounded() -> None:
    manager = make_manager()
    for number in range(22):
        admit(manager, CacheIdentity((("tenant", str(number)),), f"owner-{number:02}"), TOKENS[: 5 + 4 * (number == 7)])
    admit(manager, NOBODY, TOKENS[:5])
    counts = manager.block_pool.index.num_blocks_by_owner()
    assert len(counts) == 22
    assert counts["owner-07"] == 2
    assert (counts["unnamed"], counts["other"]) == (1, 2)


FAULTS = {
    "adapter_key": ("adapter", CacheIdentity(adapter=Adapter("x", 1)), NOBODY),
    "image_key": ("image", image("aa"), image("bb")),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("verify", [False, True])
def test_a_part_left_out_of_the_key_is_a_breach_or_a_refused_hit(fault: str, verify: bool) -> None:
    kind, first, second = FAULTS[fault]
    manager = make_manager(fault=fault, verify=verify)
    admit(manager, first)
    safe = BLOCK if kind == "image" else 0
    assert admit(manager, second) == (safe if verify else 16)
    stats = manager.prefix_stats
    assert stats.breaches.total() == stats.breaches[kind] == (0 if verify else (16 - safe) // BLOCK)
    assert stats.refused.total() == stats.refused[kind] == verify
    assert admit(manager, second) == 16
    assert manager.prefix_stats.refused.total() == verify  # by now it has blocks of its own


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("forgets", [False, True])
def test_blocks_of_former_weights(verify: bool, forgets: bool) -> None:
    manager = make_manager(fault="weights_key" if forgets else "none", verify=verify)
    admit(manager)
    manager.new_weights()
    assert manager.weights_version == 1
    stats = manager.prefix_stats
    assert admit(manager) == (16 if forgets and not verify else 0)
    assert stats.breaches["weights"] == stats.breaches.total() == (4 if forgets and not verify else 0)
    assert stats.refused["weights"] == stats.refused.total() == (forgets and verify)


def test_who_began_under_other_weights_names_nothing_more() -> None:
    manager = make_manager()
    request = Request("r", TOKENS, SamplingParams())
    assert manager.allocate_slots(request, len(TOKENS))
    request.num_computed_tokens = 8
    manager.cache_computed_blocks(request)
    manager.new_weights()
    request.num_computed_tokens = len(TOKENS)
    manager.cache_computed_blocks(request)
    manager.free(request)
    assert len(manager.block_pool.index) == 0
    request.num_computed_tokens = 0
    assert manager.get_computed_blocks(request) == []
    assert admit(manager) == 0
    assert len(manager.get_computed_blocks(request)) == 4  # named again, for the weights of now


def test_who_comes_back_without_a_lookup_is_named_for_the_weights_of_now() -> None:
    manager = make_manager()
    request = Request("r", TOKENS, SamplingParams(prompt_logprobs=0))  # computes every position, so finds nothing
    for _ in range(2):
        assert manager.get_computed_blocks(request) == []
        assert manager.allocate_slots(request, len(TOKENS))
        request.num_computed_tokens = len(TOKENS)
        manager.cache_computed_blocks(request)
        manager.free(request)
        request.num_computed_tokens = 0
        assert len(manager.get_computed_blocks(Request("other", TOKENS, SamplingParams()))) == 4
        manager.new_weights()


def colliding_prompts() -> tuple[list[int], list[int]]:
    """Two prompts whose first blocks have the same 16 bits."""
    seen: dict[bytes, int] = {}
    for token_id in range(2**17):
        name = hash_block(None, [token_id, 0, 0, 0])[:2]
        if name in seen:
            return [seen[name], 0, 0, 0, 7], [token_id, 0, 0, 0, 7]
        seen[name] = token_id
    raise AssertionError("there are more tokens than names")


@pytest.mark.parametrize("verify", [False, True])
def test_truncated_names_collide(verify: bool) -> None:
    manager = make_manager(hash_algo="unsafe_truncated", verify=verify)
    victim, attacker = colliding_prompts()
    admit(manager, NOBODY, victim)
    assert admit(manager, NOBODY, attacker) == (0 if verify else BLOCK)
    stats = manager.prefix_stats
    assert stats.breaches.total() == stats.breaches["tokens"] == (not verify)
    assert stats.refused.total() == stats.refused["tokens"] == verify
    if verify:  # both are cached under one name now, and each finds its own
        assert admit(manager, NOBODY, victim) == admit(manager, NOBODY, attacker) == BLOCK
        assert (stats.breaches.total(), stats.refused.total()) == (0, 1)


def test_verification_looks_at_the_whole_prefix_not_at_one_block() -> None:
    manager = make_manager(hash_algo="unsafe_truncated", verify=True)
    victim, attacker = colliding_prompts()
    tail = [7, 7, 7, 7, 8]
    admit(manager, NOBODY, [*victim[:4], *tail])
    # The second block has the same tokens and the same name, but another prefix.
    assert admit(manager, NOBODY, [*attacker[:4], *tail]) == 0
    assert admit(manager, NOBODY, [*attacker[:4], *tail]) == 2 * BLOCK
    assert manager.prefix_stats.breaches.total() == 0
