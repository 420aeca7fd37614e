from __future__ import annotations

import tracemalloc

import pytest

from engine.cache_identity import CacheIdentity
from engine.config import EngineConfig
from engine.kv_cache_manager import KVCacheManager
from engine.memory import bookkeeping_bytes_per_block
from engine.request import Request, SamplingParams


def request_of(tokens: list[int], salt: str | None = None, **params: object) -> Request:
    identity = CacheIdentity(() if salt is None else (("cache_salt", salt),))
    return Request("r", tokens, SamplingParams(**params), identity=identity)  # type: ignore[arg-type]


def compute(manager: KVCacheManager, request: Request, num_tokens: int | None = None) -> bool:
    """Admits or continues `request` by `num_tokens` (default: all that are left) and computes them."""
    hits = [] if request.block_ids else manager.get_computed_blocks(request)
    left = request.num_tokens - request.num_computed_tokens - len(hits) * manager.block_size
    count = left if num_tokens is None else num_tokens
    if not manager.allocate_slots(request, count, hits):
        return False
    request.num_computed_tokens += count
    manager.cache_computed_blocks(request)
    return True


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_block_boundaries_have_no_off_by_one(block_size: int) -> None:
    for length in {1, block_size - 1, block_size, block_size + 1, 3 * block_size} - {0}:
        manager = KVCacheManager(64, block_size)
        request = request_of([1] * length)
        assert compute(manager, request)
        assert len(request.block_ids) == -(-length // block_size)
        for _ in range(2 * block_size + 1):
            request.append_output_token(2)
            assert compute(manager, request)
            assert len(request.block_ids) == -(-request.num_tokens // block_size)
            assert request.num_indexed_blocks == request.num_tokens // block_size


def test_a_full_hit_recomputes_the_last_block_into_a_block_of_its_own() -> None:
    manager = KVCacheManager(16, 4)
    first = request_of(list(range(8)))
    compute(manager, first)
    second = request_of(list(range(8)))
    hits = manager.get_computed_blocks(second)
    assert [block.block_id for block in hits] == first.block_ids[:1]
    assert manager.allocate_slots(second, 4, hits)
    assert second.num_computed_tokens == 4
    assert second.block_ids[0] == first.block_ids[0]
    assert second.block_ids[1] != first.block_ids[1]


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 8)])
def test_the_longest_hit_leaves_one_token_to_compute(length: int, hit: int) -> None:
    manager = KVCacheManager(16, 4)
    compute(manager, request_of(list(range(9))))
    assert len(manager.get_computed_blocks(request_of(list(range(length))))) * 4 == hit


def test_a_hit_stops_at_the_first_block_that_is_missing() -> None:
    manager = KVCacheManager(16, 2)
    owner = request_of(list(range(7)))
    compute(manager, owner)
    assert len(manager.get_computed_blocks(request_of([0, 1, 9, 9, 4, 5, 6]))) == 1
    assert len(manager.get_computed_blocks(request_of([9, 9, 2, 3, 4, 5, 6]))) == 0


def test_a_block_whose_parent_is_gone_is_not_hit() -> None:
    manager = KVCacheManager(5, 2)
    owner = request_of(list(range(6)))
    compute(manager, owner)
    last = manager.block_pool.blocks[owner.block_ids[2]]
    manager.free(owner)
    manager.block_pool.touch([last])  # held on, while the block before it is evicted
    manager.block_pool.get_new_blocks(2)
    assert last.block_hash is not None
    assert len(manager.get_computed_blocks(request_of(list(range(7))))) == 1


def test_a_block_is_findable_only_once_it_is_full_and_computed() -> None:
    manager = KVCacheManager(16, 4)
    owner = request_of(list(range(12)))
    twin = request_of(list(range(12)))
    assert manager.allocate_slots(owner, 12, [])
    assert manager.get_computed_blocks(twin) == []  # allocated, not computed
    owner.num_computed_tokens = 7
    manager.cache_computed_blocks(owner)
    assert len(manager.get_computed_blocks(twin)) == 1  # the second block is computed in part
    owner.num_computed_tokens = 8
    manager.cache_computed_blocks(owner)
    assert len(manager.get_computed_blocks(twin)) == 2


def test_output_tokens_are_hit_too() -> None:
    manager = KVCacheManager(16, 4)
    owner = request_of([1, 2, 3])
    compute(manager, owner)
    for token_id in (4, 5):
        owner.append_output_token(token_id)
        compute(manager, owner)
    assert len(manager.get_computed_blocks(request_of([1, 2, 3, 4, 5, 6]))) == 1


def test_another_salt_finds_nothing() -> None:
    manager = KVCacheManager(32, 2)
    for salt in (None, "a"):
        compute(manager, request_of(list(range(9)), salt))
    assert len(manager.get_computed_blocks(request_of(list(range(9)), "a"))) == 4
    assert len(manager.get_computed_blocks(request_of(list(range(9))))) == 4
    assert manager.get_computed_blocks(request_of(list(range(9)), "b")) == []
    assert manager.get_computed_blocks(request_of(list(range(9)), "")) == []


def test_frees_in_reverse_order_so_that_the_tail_is_evicted_before_the_head() -> None:
    manager = KVCacheManager(5, 2)
    owner = request_of(list(range(8)))
    compute(manager, owner)
    manager.free(owner)
    assert owner.block_ids == []
    other = request_of([7, 7])
    compute(manager, other)
    assert len(manager.get_computed_blocks(request_of([*range(8), 9]))) == 3


def test_hits_in_the_free_queue_are_not_counted_as_room() -> None:
    manager = KVCacheManager(5, 2)  # 4 usable blocks
    owner = request_of(list(range(4)))
    compute(manager, owner)
    manager.free(owner)
    assert manager.block_pool.num_free_blocks == 4
    needy = request_of([*range(4), 9, 9, 9, 9, 9])  # 5 blocks: 2 hits + 3 new, but only 2 besides the hits
    hits = manager.get_computed_blocks(needy)
    assert len(hits) == 2
    assert not manager.can_admit(needy, hits, 0)
    assert not manager.allocate_slots(needy, 5, hits)
    assert needy.block_ids == []
    assert all(block.ref_cnt == 0 for block in hits)
    assert manager.allocate_slots(needy, 4, hits)  # 2 hits + 2 new fit exactly; no hit was evicted for them
    assert [manager.block_pool.blocks[i] for i in needy.block_ids[:2]] == hits
    assert len(set(needy.block_ids)) == 4


def test_hits_that_others_hold_cost_no_room() -> None:
    manager = KVCacheManager(5, 2)
    owner = request_of(list(range(6)))
    compute(manager, owner)
    twin = request_of([*range(6), 7])
    hits = manager.get_computed_blocks(twin)
    assert manager.can_admit(twin, hits, 0)
    assert not manager.can_admit(twin, hits, 1)
    assert manager.allocate_slots(twin, 1, hits)
    assert manager.block_pool.block_states() == {"free": 0, "cached": 0, "used": 1, "shared": 3}


def test_a_refused_allocation_changes_nothing() -> None:
    manager = KVCacheManager(4, 2)
    owner = request_of([1, 2, 3, 4, 5])
    compute(manager, owner, 4)
    before = list(owner.block_ids)
    owner.all_token_ids.extend(range(9))
    assert not manager.allocate_slots(owner, 10)
    assert owner.block_ids == before
    assert owner.num_computed_tokens == 4
    assert manager.block_pool.num_free_blocks == 1


def test_hits_cannot_be_put_behind_blocks() -> None:
    manager = KVCacheManager(8, 2)
    owner = request_of([1, 2, 3])
    compute(manager, owner)
    with pytest.raises(ValueError, match="start a block table"):
        manager.allocate_slots(owner, 1, [manager.block_pool.blocks[owner.block_ids[0]]])


def test_freeing_a_request_twice_is_harmless_and_keeps_shared_blocks() -> None:
    manager = KVCacheManager(8, 2)
    owner, twin = request_of([1, 2, 3]), request_of([1, 2, 3])
    compute(manager, owner)
    compute(manager, twin)
    shared = manager.block_pool.blocks[owner.block_ids[0]]
    assert shared.ref_cnt == 2
    manager.free(owner)
    manager.free(owner)
    assert shared.ref_cnt == 1
    assert manager.block_pool.num_free_blocks == 5


def test_blocks_computed_again_after_preemption_and_eviction_are_cached_again() -> None:
    manager = KVCacheManager(3, 2)
    victim = request_of([1, 2, 3])
    compute(manager, victim)
    manager.free(victim)
    victim.num_computed_tokens = 0
    compute(manager, intruder := request_of([7, 7, 8, 8]))
    manager.free(intruder)
    compute(manager, victim)
    assert len(manager.get_computed_blocks(request_of([1, 2, 3]))) == 1


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("salt", [None, "a"])  # with a namespace there is a second index
def test_bookkeeping_of_a_full_and_much_used_pool_stays_within_its_plan(salt: str | None, verify: bool) -> None:
    num_blocks = 3000
    planned = bookkeeping_bytes_per_block(EngineConfig(block_size=4, prefix_cache_verify=verify))
    tracemalloc.start()
    try:
        manager = KVCacheManager(num_blocks, 4, verify=verify)
        for turn in range(5 * num_blocks // 100):
            request = request_of([turn] * 400, salt)
            assert compute(manager, request)
            manager.free(request)
        del request
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert planned / 2 < used / num_blocks < planned


def test_prompt_logprobs_need_every_position_and_skip_the_cache() -> None:
    manager = KVCacheManager(16, 2)
    compute(manager, request_of(list(range(6))))
    reader = request_of(list(range(6)), prompt_logprobs=0)
    assert manager.get_computed_blocks(reader) == []
    manager.record_first_admission(reader, [])
    compute(manager, reader)
    assert manager.prefix_stats.queries == 0
    later = request_of(list(range(6)))
    assert len(manager.get_computed_blocks(later)) == 2


def test_without_prefix_caching_nothing_is_hashed_or_found() -> None:
    manager = KVCacheManager(16, 2, enable_prefix_caching=False)
    owner = request_of(list(range(6)))
    manager.record_first_admission(owner, manager.get_computed_blocks(owner))
    compute(manager, owner)
    manager.free(owner)
    assert owner.block_keys is None
    assert manager.get_computed_blocks(request_of(list(range(6)))) == []
    assert manager.block_pool.block_states()["cached"] == 0
    assert manager.prefix_stats.queries == 0


def admit(manager: KVCacheManager, tokens: list[int]) -> Request:
    request = request_of(tokens)
    manager.record_first_admission(request, manager.get_computed_blocks(request))
    assert compute(manager, request)
    return request


def test_evicted_before_reuse_counts_blocks_asked_for_again() -> None:
    manager = KVCacheManager(5, 2)
    manager.free(admit(manager, [1, 2, 3, 4, 5]))
    manager.free(admit(manager, [7, 7, 8, 8, 9, 9, 0, 0]))  # takes all four blocks, evicts two cached ones
    assert manager.block_pool.evictions_total == 2
    assert manager.evicted_before_reuse_total == 0
    manager.free(admit(manager, [1, 2, 3, 4, 5]))
    assert manager.evicted_before_reuse_total == 2
    manager.free(admit(manager, [1, 2, 3, 4, 5]))  # found again: nothing more is missing
    assert manager.evicted_before_reuse_total == 2


def test_evicted_before_reuse_does_not_count_a_last_block_that_is_never_looked_up() -> None:
    manager = KVCacheManager(3, 2)
    manager.free(admit(manager, [1, 2, 3, 4]))
    manager.free(admit(manager, [7, 7, 8, 8]))
    manager.free(admit(manager, [1, 2, 3, 4]))
    assert manager.evicted_before_reuse_total == 1


def test_evicted_before_reuse_forgets_old_evictions() -> None:
    manager = KVCacheManager(3, 2)  # remembers 2 evictions
    manager.free(admit(manager, [1, 2, 3]))
    for token_id in range(10, 16):
        manager.free(admit(manager, [token_id] * 4))
    manager.free(admit(manager, [1, 2, 3]))
    assert manager.evicted_before_reuse_total == 0
