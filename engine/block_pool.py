"""The pool of KV blocks: who holds which, which may be reused, and which cached content is dropped for room.

Every block but the null block is either referenced (`ref_cnt` > 0, in that many block tables) or in the free
queue. A free block may still be cached: it keeps its hash, and a hit takes it out of the queue again. Its
content is dropped only when the block is handed out for something new (evict on allocate), so cached blocks
count as free, and a referenced block is never evicted. Block 0 is the null block, padding for block tables;
it is never handed out and never freed.

With a time to live, a cached block that nobody references is found no more once `last_use + ttl` has come, and
`sweep_expired` makes it empty. Blocks in use do not expire.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from engine.prefix_cache import CachedPrefix, PrefixIndex, RecentEvictions

NULL_BLOCK_ID = 0

FREE, CACHED, USED, SHARED = range(4)  # values of BlockPool.snapshot


class Block:
    """One block of `block_size` KV slots. A block that is not in the free queue is linked to itself."""

    __slots__ = ("block_id", "cached", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.cached: CachedPrefix | None = None  # what it holds, while it is in the prefix cache
        self.prev_free: Block = self
        self.next_free: Block = self

    @property
    def block_hash(self) -> bytes | None:
        return None if self.cached is None else self.cached.block_hash

    def __repr__(self) -> str:
        name = self.block_hash.hex()[:8] if self.block_hash else None
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, hash={name})"


class FreeBlockQueue:
    """A doubly linked list through the blocks themselves: the head is reused first. All operations are O(1).

    Blocks are put at either end, never in between, so those appended stay together and in order behind those
    prepended; `oldest` is the first of them.
    """

    __slots__ = ("_num_blocks", "_oldest", "_sentinel")

    def __init__(self) -> None:
        self._sentinel = Block(-1)  # the list is circular: sentinel.next_free is the head, .prev_free the tail
        self._oldest = self._sentinel
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[Block]:
        block = self._sentinel.next_free
        while block is not self._sentinel:
            yield block
            block = block.next_free

    def popleft(self) -> Block:
        block = self._sentinel.next_free
        if block is self._sentinel:
            raise IndexError("the free queue is empty")
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        before, after = block.prev_free, block.next_free
        if after is block:
            raise ValueError(f"{block} is not in the free queue")
        if block is self._oldest:
            self._oldest = after
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = block
        self._num_blocks -= 1

    def append(self, block: Block) -> None:
        """Puts `block` at the tail: reused last."""
        self._insert_before(self._sentinel, block)
        if self._oldest is self._sentinel:
            self._oldest = block

    def prepend(self, block: Block) -> None:
        """Puts `block` at the head: reused first."""
        self._insert_before(self._sentinel.next_free, block)

    @property
    def oldest(self) -> Block | None:
        """Of the blocks that were appended, the one that was first."""
        return None if self._oldest is self._sentinel else self._oldest

    def _insert_before(self, after: Block, block: Block) -> None:
        if block.next_free is not block:
            raise ValueError(f"{block} is already in the free queue")
        before = after.prev_free
        before.next_free = after.prev_free = block
        block.prev_free = before
        block.next_free = after
        self._num_blocks += 1


class BlockPool:
    """All blocks of one KV cache, their reference counts, and the index of the cached ones."""

    def __init__(
        self,
        num_blocks: int,
        enable_caching: bool = True,
        *,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_blocks` includes the null block. Raises `ValueError` when there is no block besides it."""
        if num_blocks < 2:
            raise ValueError(f"a KV cache needs at least 2 blocks (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free_queue = FreeBlockQueue()
        for block in reversed(self.blocks[NULL_BLOCK_ID + 1 :]):
            self.free_queue.prepend(block)
        self.index = PrefixIndex()
        self.ttl = ttl
        self.clock = clock
        self.evictions_total = 0  # cached blocks dropped for a new one
        self.expired_total = 0
        self.recent_evictions = RecentEvictions(num_blocks - 1)
        self._num_free_cached = 0
        self._num_shared = 0

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self.free_queue)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0..1."""
        return 1 - len(self.free_queue) / self.num_usable_blocks

    def get_new_blocks(self, count: int) -> list[Block]:
        """Hands out `count` blocks with `ref_cnt` 1, dropping the content of those that were cached.

        Raises `ValueError` and changes nothing when fewer are free.
        """
        queue = self.free_queue
        if count > len(queue):
            raise ValueError(f"{count} blocks asked for, {len(queue)} are free")
        new_blocks = []
        for _ in range(count):
            block = queue.popleft()
            if block.cached is not None:
                self._evict(block)
            block.ref_cnt = 1
            new_blocks.append(block)
        return new_blocks

    def touch(self, blocks: Iterable[Block]) -> None:
        """Takes one more reference to each block; a free one leaves the queue, safe from eviction."""
        for block in blocks:
            if block.block_id == NULL_BLOCK_ID:
                raise ValueError("the null block cannot be referenced")
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
                if block.cached is not None:
                    self._num_free_cached -= 1
            elif block.ref_cnt == 1:
                self._num_shared += 1
            block.ref_cnt += 1

    def free_blocks(self, ordered: Iterable[Block]) -> None:
        """Gives back one reference to each block, in the order in which they should be reused.

        A request passes its blocks last first, so that a prefix outlives its continuations: without its parent
        a cached block cannot be found. Cached blocks go to the tail of the queue (LRU), the others to its head.
        Raises `ValueError` on the null block and on a block nobody holds (a double free).
        """
        now = self.clock()
        for block in ordered:
            if block.ref_cnt <= 0:
                raise ValueError(f"{block} is freed, but nobody holds it")
            block.ref_cnt -= 1
            if block.ref_cnt == 1:
                self._num_shared -= 1
            elif block.ref_cnt == 0:
                if block.cached is None:
                    self.free_queue.prepend(block)
                else:
                    block.cached.last_use = now
                    self.free_queue.append(block)
                    self._num_free_cached += 1

    def get_cached_block(self, block_hash: bytes) -> Block | None:
        """A block that holds the KV named `block_hash`, or `None`. Takes no reference: see `touch`."""
        if self.ttl is None:
            return self.index.first(block_hash)
        return next((block for block in self.index.copies(block_hash) if not self.is_expired(block)), None)

    def is_expired(self, block: Block) -> bool:
        """Whether a cached block has been unused for the time to live."""
        cached = block.cached
        if self.ttl is None or block.ref_cnt or cached is None:
            return False
        return self.clock() >= cached.last_use + self.ttl

    def sweep_expired(self) -> int:
        """Empties the blocks that have expired, which are then reused first; returns how many. O(that many)."""
        count = 0
        while self.ttl is not None and (block := self.free_queue.oldest) is not None and self.is_expired(block):
            self._forget(block)
            self.free_queue.remove(block)
            self.free_queue.prepend(block)
            count += 1
        self.expired_total += count
        return count

    def cache_full_block(self, block: Block, cached: CachedPrefix) -> None:
        """Puts a referenced block into the index. The caller vouches that its KV is complete and computed.

        Raises `ValueError` when caching is off, when nobody holds the block or when it has a hash already.
        """
        if not self.enable_caching or block.ref_cnt <= 0 or block.cached is not None:
            raise ValueError(f"{block} cannot enter the prefix cache")
        block.cached = cached
        self.index.add(block, cached)
        self.recent_evictions.discard(cached.block_hash)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content. Does nothing and returns False while requests hold blocks, as in vLLM."""
        if len(self.free_queue) != self.num_usable_blocks:
            return False
        self.drop_cached_content()
        return True

    def drop_cached_content(self) -> None:
        """Forgets all cached content, also of blocks in use, which their holders keep: nobody else finds them."""
        while (block := self.free_queue.oldest) is not None:
            self.free_queue.remove(block)
            self.free_queue.prepend(block)
        for block in self.blocks:
            block.cached = None
        self.index.clear()
        self._num_free_cached = 0
        self.recent_evictions.clear()

    def block_states(self) -> dict[str, int]:
        """Numbers of usable blocks: free (empty), cached (free, reusable), used (one holder), shared (more)."""
        free = len(self.free_queue)
        return {
            "free": free - self._num_free_cached,
            "cached": self._num_free_cached,
            "used": self.num_usable_blocks - free - self._num_shared,
            "shared": self._num_shared,
        }

    def snapshot(self) -> list[int]:
        """The state of each usable block, FREE, CACHED, USED or SHARED; entry `i` is block `i + 1`."""
        return [_state(block) for block in self.blocks[NULL_BLOCK_ID + 1 :]]

    def get_blocks(self, block_ids: Iterable[int]) -> Sequence[Block]:
        blocks = self.blocks
        return [blocks[block_id] for block_id in block_ids]

    def _evict(self, block: Block) -> None:
        """Drops the content of a cached block that is about to be reused."""
        block_hash = self._forget(block)
        if not self.index.copies(block_hash):
            self.recent_evictions.add(block_hash)
        self.evictions_total += 1

    def _forget(self, block: Block) -> bytes:
        """Makes a cached block in the free queue an empty one; returns its hash."""
        cached = block.cached
        assert cached is not None
        self.index.remove(block, cached)
        block.cached = None
        self._num_free_cached -= 1
        return cached.block_hash


def _state(block: Block) -> int:
    if block.ref_cnt == 0:
        return FREE if block.cached is None else CACHED
    return USED if block.ref_cnt == 1 else SHARED
