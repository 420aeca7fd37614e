"""What the machine of `kv_machine` is worth: each of these errors, put into the allocator, makes it fail.

The histories are short, so an error that only a long one shows would not count as found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.block_hash import BlockHasher
from engine.block_pool import Block, BlockPool, FreeBlockQueue
from engine.cache_identity import Adapter, CacheIdentity, ImageSpan, extra_keys
from engine.kv_cache_manager import KVCacheManager
from engine.request import Request
from tests.engine_core.kv_histories import machine_with, run_histories
from tests.engine_core.kv_machine import KVCacheMachine

EXAMPLES, STEPS = 40, 250
Mutate = Callable[[pytest.MonkeyPatch], None]
ONE, TWO = (("tenant", "1"),), (("tenant", "2"),)
CLIENTS = (CacheIdentity(ONE), CacheIdentity(TWO))
SALTED = (CacheIdentity((*ONE, ("cache_salt", "a"))), CacheIdentity((*ONE, ("cache_salt", "b"))))
ADAPTERS = (CacheIdentity(adapter=Adapter("lora", 1)), CacheIdentity(adapter=Adapter("lora", 2)))
IMAGES = (CacheIdentity(images=(ImageSpan(1, 3, "aa"),)), CacheIdentity(images=(ImageSpan(1, 3, "bb"),)))
PLACES = (CacheIdentity(images=(ImageSpan(1, 3, "aa"),)), CacheIdentity(images=(ImageSpan(2, 3, "aa"),)))


def fails(machine: type[KVCacheMachine]) -> bool:
    """Whether a machine notices something within the budget."""
    try:
        run_histories(machine, examples=EXAMPLES, steps=STEPS, start=0)
    except (AssertionError, ValueError):  # the pool itself refuses a double free
        return True
    return False


def test_the_budget_passes_without_an_error_put_in() -> None:
    assert not fails(machine_with())


FAULTS: dict[str, dict[str, Any]] = {
    "copy_on_write": {}, "adapter_key": {"crowd": ADAPTERS}, "image_key": {"crowd": IMAGES}, "weights_key": {},
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_the_operator_may_ask_for_are_found(fault: str) -> None:
    assert fails(machine_with(fault=fault, verify=False, **FAULTS[fault]))


def copies_are_never_made(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheManager, "take_block_copies", lambda self: [])


def copies_of_freed_requests_are_made(patch: pytest.MonkeyPatch) -> None:
    free = KVCacheManager.free

    def keep(self: KVCacheManager, request: Request) -> None:
        copies = self._block_copies
        free(self, request)
        self._block_copies = copies

    patch.setattr(KVCacheManager, "free", keep)


def a_fork_trusts_any_identity(patch: pytest.MonkeyPatch) -> None:
    fork = KVCacheManager.fork

    def trust(self: KVCacheManager, leader: Request, child: Request) -> Any:
        own, child.identity = child.identity, leader.identity
        try:
            return fork(self, leader, child)
        finally:
            child.identity = own

    patch.setattr(KVCacheManager, "fork", trust)


def a_fork_compares_no_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("engine.kv_cache_manager.common_length", lambda left, right, limit: limit)


def touch_counts_only_the_first_holder(patch: pytest.MonkeyPatch) -> None:
    touch = BlockPool.touch
    patch.setattr(BlockPool, "touch", lambda self, blocks: touch(self, [b for b in blocks if b.ref_cnt == 0]))


def touch_leaves_blocks_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    def count(self: BlockPool, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    patch.setattr(BlockPool, "touch", count)


def free_forgets_a_block(patch: pytest.MonkeyPatch) -> None:
    free_blocks = BlockPool.free_blocks
    patch.setattr(BlockPool, "free_blocks", lambda self, ordered: free_blocks(self, list(ordered)[1:]))


def free_gives_a_shared_block_back_twice(patch: pytest.MonkeyPatch) -> None:
    free_blocks = BlockPool.free_blocks

    def free(self: BlockPool, ordered: Iterable[Block]) -> None:
        blocks = list(ordered)
        free_blocks(self, [*blocks, *(block for block in blocks if block.ref_cnt > 1)])

    patch.setattr(BlockPool, "free_blocks", free)


def free_starts_with_the_first_block(patch: pytest.MonkeyPatch) -> None:
    free_blocks = BlockPool.free_blocks
    patch.setattr(BlockPool, "free_blocks", lambda self, ordered: free_blocks(self, list(ordered)[::-1]))


def the_newest_content_is_dropped_first(patch: pytest.MonkeyPatch) -> None:
    def pop(self: FreeBlockQueue) -> Block:
        block = self._sentinel.prev_free
        if block is self._sentinel:
            raise IndexError
        self.remove(block)
        return block

    patch.setattr(FreeBlockQueue, "popleft", pop)


def eviction_takes_a_referenced_block(patch: pytest.MonkeyPatch) -> None:
    get_new_blocks = BlockPool.get_new_blocks

    def take(self: BlockPool, count: int) -> list[Block]:
        used = [block for block in self.blocks if block.ref_cnt == 1 and block.block_hash is not None]
        if count != 1 or not used or self.free_queue.oldest is None:
            return get_new_blocks(self, count)
        assert used[0].cached is not None
        self.index.remove(used[0], used[0].cached)
        used[0].cached = None
        return [used[0]]

    patch.setattr(BlockPool, "get_new_blocks", take)


def a_reused_block_keeps_its_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "_evict", lambda self, block: None)


def blocks_are_named_when_they_are_allocated(patch: pytest.MonkeyPatch) -> None:
    allocate_slots = KVCacheManager.allocate_slots

    def name_early(self: KVCacheManager, request: Request, count: int, *rest: Any) -> bool:
        done = allocate_slots(self, request, count, *rest)
        if done:
            request.num_computed_tokens += count
            self.cache_computed_blocks(request)
            request.num_computed_tokens -= count
        return done

    patch.setattr(KVCacheManager, "allocate_slots", name_early)


def time_to_live_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "is_expired", lambda self, block: False)


def blocks_in_use_expire(patch: pytest.MonkeyPatch) -> None:
    def is_expired(self: BlockPool, block: Block) -> bool:
        return self.ttl is not None and block.cached is not None and self.clock() > block.cached.last_use + self.ttl

    patch.setattr(BlockPool, "is_expired", is_expired)


def reset_ignores_running_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "reset_prefix_cache", lambda self: self.drop_cached_content() or True)


def new_weights_leave_names_to_blocks_in_use(patch: pytest.MonkeyPatch) -> None:
    drop = BlockPool.drop_cached_content

    def drop_free(self: BlockPool) -> None:
        used = [(block, block.cached) for block in self.blocks if block.ref_cnt and block.cached is not None]
        drop(self)
        for block, cached in used:
            block.cached = cached
            self.index.add(block, cached)

    patch.setattr(BlockPool, "drop_cached_content", drop_free)


def the_parent_is_not_in_the_key(patch: pytest.MonkeyPatch) -> None:
    chain = BlockHasher._canonical_chain

    def unchained(self: BlockHasher, start: Any, blocks: Sequence[bytes], extra: dict[int, Any]) -> list[bytes]:
        return [chain(self, [], [block], {0: extra.get(place, ())})[0] for place, block in enumerate(blocks)]

    patch.setattr(BlockHasher, "_canonical_chain", unchained)


def in_the_key(change: Callable[[CacheIdentity], CacheIdentity]) -> Mutate:
    """The keys of blocks are made of a changed identity."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        def changed(identity: CacheIdentity, *rest: Any, **options: Any) -> tuple[tuple[str, str], ...]:
            return extra_keys(change(identity), *rest, **options)

        patch.setattr("engine.block_hash.extra_keys", changed)

    return mutate


def without_versions(identity: CacheIdentity) -> CacheIdentity:
    return replace(identity, adapter=identity.adapter and replace(identity.adapter, version=1))


def with_images_anywhere(identity: CacheIdentity) -> CacheIdentity:
    return replace(identity, images=tuple(replace(span, offset=0, num_tokens=99) for span in identity.images))


def public_prefixes_end_a_block_late(patch: pytest.MonkeyPatch) -> None:
    count = BlockHasher._num_public_blocks
    patch.setattr(BlockHasher, "_num_public_blocks", lambda self, request: count(self, request) + bool(self._public))


def isolation_seems_to_cost_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("engine.prefix_audit._run_of_others", lambda pool, content_hashes: 0)


MUTANTS: dict[str, tuple[Mutate, dict[str, Any]]] = {
    "copies are never made": (copies_are_never_made, {"caching": False}),
    "copies of freed requests are made": (
        copies_of_freed_requests_are_made,
        {"caching": False, "block_size": 4, "crowd": CLIENTS[:1], "keeps_open_blocks": False},
    ),
    "a fork trusts any identity": (a_fork_trusts_any_identity, {"caching": False, "crowd": CLIENTS}),
    "a fork compares no tokens": (a_fork_compares_no_tokens, {"caching": False}),
    "touch counts only the first holder": (touch_counts_only_the_first_holder, {}),
    "touch leaves blocks in the queue": (touch_leaves_blocks_in_the_queue, {}),
    "free forgets a block": (free_forgets_a_block, {}),
    "free gives a shared block back twice": (free_gives_a_shared_block_back_twice, {}),
    "free starts with the first block": (free_starts_with_the_first_block, {}),
    "the newest content is dropped first": (the_newest_content_is_dropped_first, {}),
    "eviction takes a referenced block": (eviction_takes_a_referenced_block, {}),
    "a reused block keeps its name": (a_reused_block_keeps_its_name, {}),
    "blocks are named when they are allocated": (blocks_are_named_when_they_are_allocated, {}),
    "the time to live is ignored": (time_to_live_is_ignored, {"ttl": 2.5}),
    "blocks in use expire": (blocks_in_use_expire, {"ttl": 2.5}),
    "a reset ignores running requests": (reset_ignores_running_requests, {}),
    "new weights leave names to blocks in use": (new_weights_leave_names_to_blocks_in_use, {}),
    "the parent is not in the key": (the_parent_is_not_in_the_key, {}),
    "public prefixes end a block late": (public_prefixes_end_a_block_late, {"crowd": CLIENTS}),
    "isolation seems to cost nothing": (isolation_seems_to_cost_nothing, {"crowd": CLIENTS}),
    "namespaces are not in the key": (in_the_key(lambda who: replace(who, namespace=())), {"crowd": CLIENTS}),
    "salts are not in the key": (in_the_key(lambda who: replace(who, namespace=who.namespace[:1])), {"crowd": SALTED}),
    "adapters are not in the key": (in_the_key(lambda who: replace(who, adapter=None)), {"crowd": ADAPTERS}),
    "versions of adapters are not in the key": (in_the_key(without_versions), {"crowd": ADAPTERS}),
    "images are not in the key": (in_the_key(lambda who: replace(who, images=())), {"crowd": IMAGES}),
    "places of images are not in the key": (in_the_key(with_images_anywhere), {"crowd": PLACES}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_an_error_put_in_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, options = MUTANTS[name]
    mutate(monkeypatch)
    assert fails(machine_with(verify=False, **options)), "the machine would not have noticed"
