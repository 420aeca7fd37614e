from __future__ import annotations

import pytest

from engine.block_pool import CACHED, FREE, SHARED, USED, Block, BlockPool, FreeBlockQueue
from engine.prefix_cache import CachedPrefix

HASH = [bytes([i]) * 32 for i in range(16)]


def ids(blocks: object) -> list[int]:
    return [block.block_id for block in blocks]  # type: ignore[attr-defined]


def test_free_queue_order_and_links() -> None:
    queue = FreeBlockQueue()
    blocks = [Block(i) for i in range(5)]
    for block in blocks[1:4]:
        queue.append(block)
    queue.prepend(blocks[0])
    queue.append(blocks[4])
    assert ids(queue) == [0, 1, 2, 3, 4]
    queue.remove(blocks[2])
    queue.remove(blocks[4])
    assert (ids(queue), len(queue)) == ([0, 1, 3], 3)
    assert ids([queue.popleft(), queue.popleft(), queue.popleft()]) == [0, 1, 3]
    with pytest.raises(IndexError):
        queue.popleft()


def test_free_queue_refuses_a_block_twice_and_a_block_it_lacks() -> None:
    queue = FreeBlockQueue()
    block = Block(1)
    queue.append(block)
    with pytest.raises(ValueError, match="already"):
        queue.prepend(block)
    queue.remove(block)
    with pytest.raises(ValueError, match="not in"):
        queue.remove(block)
    assert len(queue) == 0


def test_the_null_block_is_never_handed_out_freed_or_referenced() -> None:
    pool = BlockPool(4)
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
    with pytest.raises(ValueError, match="asked for"):
        pool.get_new_blocks(1)
    with pytest.raises(ValueError, match="nobody holds"):
        pool.free_blocks([pool.blocks[0]])
    with pytest.raises(ValueError, match="null block"):
        pool.touch([pool.blocks[0]])


def test_a_pool_needs_a_block_besides_the_null_block() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)


def test_double_free_raises() -> None:
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    pool.free_blocks([block])
    with pytest.raises(ValueError, match="nobody holds"):
        pool.free_blocks([block])
    assert pool.num_free_blocks == 2


def test_failed_allocation_changes_nothing() -> None:
    pool = BlockPool(4)
    (block,) = pool.get_new_blocks(1)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 are free"):
        pool.get_new_blocks(3)
    assert (pool.num_free_blocks, block.ref_cnt) == (2, 1)


def test_freed_cached_blocks_go_to_the_tail_and_empty_ones_to_the_head() -> None:
    pool = BlockPool(6)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_block(blocks[0], CachedPrefix(HASH[0]))
    pool.cache_full_block(blocks[1], CachedPrefix(HASH[1]))
    pool.free_blocks(reversed(blocks))
    assert ids(pool.free_queue) == [3, 4, 5, 2, 1]  # the empty one first, then children before parents
    assert pool.snapshot() == [CACHED, CACHED, FREE, FREE, FREE]


def test_evict_on_allocate_and_no_stale_hash_on_a_reused_block() -> None:
    pool = BlockPool(3)
    first, second = pool.get_new_blocks(2)
    pool.cache_full_block(first, CachedPrefix(HASH[0]))
    pool.cache_full_block(second, CachedPrefix(HASH[1]))
    pool.free_blocks([second, first])
    assert pool.get_cached_block(HASH[1]) is second
    assert pool.evictions_total == 0  # a cached block that is free is not evicted yet
    (reused,) = pool.get_new_blocks(1)
    assert reused is second
    assert reused.block_hash is None
    assert pool.get_cached_block(HASH[1]) is None
    assert pool.get_cached_block(HASH[0]) is first
    assert pool.evictions_total == 1
    assert len(pool.recent_evictions) == 1
    pool.cache_full_block(reused, CachedPrefix(HASH[1]))  # computed again: nothing is missing any more
    assert len(pool.recent_evictions) == 0


def test_a_referenced_block_is_never_evicted() -> None:
    pool = BlockPool(4)
    (kept,) = pool.get_new_blocks(1)
    pool.cache_full_block(kept, CachedPrefix(HASH[0]))
    for _ in range(3):
        pool.free_blocks(pool.get_new_blocks(2))
    assert pool.get_cached_block(HASH[0]) is kept
    with pytest.raises(ValueError, match="asked for"):
        pool.get_new_blocks(3)


def test_touch_takes_a_free_block_out_of_the_queue_and_counts_holders() -> None:
    pool = BlockPool(4)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_block(block, CachedPrefix(HASH[0]))
    pool.free_blocks([block])
    assert pool.usage == 0
    pool.touch([block])
    assert (block.ref_cnt, pool.num_free_blocks) == (1, 2)
    assert pool.usage == pytest.approx(1 / 3)
    pool.touch([block])
    assert pool.snapshot() == [SHARED, FREE, FREE]
    assert pool.block_states() == {"free": 2, "cached": 0, "used": 0, "shared": 1}
    pool.free_blocks([block])
    assert pool.snapshot() == [USED, FREE, FREE]
    pool.free_blocks([block])
    assert pool.snapshot() == [CACHED, FREE, FREE]


def test_copies_of_one_content_are_evicted_one_by_one() -> None:
    pool = BlockPool(3)
    first, second = pool.get_new_blocks(2)
    pool.cache_full_block(first, CachedPrefix(HASH[0]))
    pool.cache_full_block(second, CachedPrefix(HASH[0]))
    pool.free_blocks([first, second])
    assert pool.get_new_blocks(1) == [first]
    assert pool.get_cached_block(HASH[0]) is second
    assert len(pool.recent_evictions) == 0  # the content is still there
    assert pool.get_new_blocks(1) == [second]
    assert pool.get_cached_block(HASH[0]) is None
    assert len(pool.recent_evictions) == 1
    assert pool.evictions_total == 2


def test_only_a_held_and_unnamed_block_can_be_cached() -> None:
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_block(block, CachedPrefix(HASH[0]))
    with pytest.raises(ValueError, match="cannot enter"):
        pool.cache_full_block(block, CachedPrefix(HASH[1]))
    with pytest.raises(ValueError, match="cannot enter"):
        pool.cache_full_block(pool.blocks[2], CachedPrefix(HASH[1]))
    uncached = BlockPool(3, enable_caching=False)
    with pytest.raises(ValueError, match="cannot enter"):
        uncached.cache_full_block(uncached.get_new_blocks(1)[0], CachedPrefix(HASH[0]))


def test_reset_waits_until_nobody_holds_a_block() -> None:
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_block(block, CachedPrefix(HASH[0]))
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(HASH[0]) is block
    pool.free_blocks([block])
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(HASH[0]) is None
    assert pool.block_states() == {"free": 2, "cached": 0, "used": 0, "shared": 0}
    pool.get_new_blocks(2)
    assert pool.evictions_total == 0
