"""Time to live: when cached blocks stop being found, what a sweep does, and that blocks in use stay."""

from __future__ import annotations

from engine.kv_cache_manager import KVCacheManager
from engine.request import Request, SamplingParams

BLOCK = 2
TTL = 10.0
TOKENS = [1, 2, 3, 4, 5]


class Timed:
    """A manager with a clock set by hand."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.now = 100.0
        self.manager = KVCacheManager(num_blocks, BLOCK, ttl=TTL, clock=lambda: self.now)
        self.pool = self.manager.block_pool

    def admit(self, tokens: list[int] = TOKENS) -> Request:
        request = Request("r", tokens, SamplingParams())
        hits = self.manager.get_computed_blocks(request)
        assert self.manager.allocate_slots(request, len(tokens) - len(hits) * BLOCK, hits)
        request.num_computed_tokens = len(tokens)
        self.manager.cache_computed_blocks(request)
        return request

    def num_hits(self, tokens: list[int] = TOKENS) -> int:
        return len(self.manager.get_computed_blocks(Request("r", tokens, SamplingParams())))


def test_unused_blocks_are_found_until_their_time_has_come() -> None:
    timed = Timed()
    timed.manager.free(timed.admit())
    timed.now += TTL - 0.1
    assert timed.num_hits() == 2
    assert timed.manager.sweep_expired() == 0
    timed.now += 0.1
    assert timed.num_hits() == 0  # a lookup does not wait for the sweep
    assert timed.pool.block_states()["cached"] == 2
    assert timed.manager.sweep_expired() == timed.pool.expired_total == 2
    assert timed.pool.block_states() == {"free": 15, "cached": 0, "used": 0, "shared": 0}
    assert timed.pool.evictions_total == 0


def test_blocks_in_use_do_not_expire_and_their_time_starts_when_they_are_given_back() -> None:
    timed = Timed()
    request = timed.admit()
    timed.now += 5 * TTL
    assert timed.manager.sweep_expired() == 0
    assert timed.num_hits() == 2
    timed.manager.free(request)
    timed.now += TTL - 0.1
    assert timed.num_hits() == 2


def test_a_hit_gives_new_time_to_what_was_hit_only() -> None:
    timed = Timed()
    timed.manager.free(timed.admit())
    timed.now += TTL / 2
    timed.manager.free(timed.admit([1, 2, 9]))
    timed.now += TTL / 2
    assert timed.manager.sweep_expired() == 1
    assert timed.num_hits() == 1
    timed.now += TTL / 2
    assert timed.manager.sweep_expired() == 1


def test_expired_blocks_are_reused_before_cached_ones() -> None:
    timed = Timed(num_blocks=6)
    timed.manager.free(timed.admit([1, 2, 3]))
    timed.now += TTL / 2
    timed.manager.free(timed.admit([7, 7, 8]))
    timed.now += TTL / 2
    assert timed.manager.sweep_expired() == 1
    timed.pool.free_blocks(timed.pool.get_new_blocks(4))
    assert timed.num_hits([7, 7, 8]) == 1
    assert timed.pool.evictions_total == 0


def test_a_block_computed_again_stands_for_its_expired_copy() -> None:
    timed = Timed()
    timed.manager.free(timed.admit())
    timed.now += TTL
    again = timed.admit()
    assert again.num_indexed_blocks == 2
    assert timed.num_hits() == 2  # though the expired copies are still indexed, and before it
    assert timed.manager.sweep_expired() == 2
    assert timed.num_hits() == 2


def test_what_expired_was_not_evicted_before_reuse() -> None:
    timed = Timed()
    timed.manager.free(timed.admit())
    timed.now += TTL
    timed.manager.sweep_expired()
    request = Request("r", TOKENS, SamplingParams())
    timed.manager.record_first_admission(request, timed.manager.get_computed_blocks(request))
    assert timed.manager.evicted_before_reuse_total == 0
