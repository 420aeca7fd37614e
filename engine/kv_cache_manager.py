"""Block tables: gives requests the blocks their tokens need, shares full ones, takes them back.

A request's table is its cache hits, then blocks of its own; it only grows at the end. Blocks become findable
when they are full *and* computed, that is after the step that wrote them, not at allocation as in vLLM. Two
requests that meet in one step then do not share, but a step that is cut short (a victim preempted after it was
scheduled, an abort, an exception in the model) can leave no name in the index for KV that was never written.
Partly filled blocks are never shared, so nobody writes into a block that somebody else reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engine.block_pool import Block, BlockPool
from engine.prefix_cache import PrefixCacheStats, request_block_hashes
from engine.request import Request


class KVCacheManager:
    """Allocation and prefix lookup over one `BlockPool`. Sizes are in tokens unless a name says blocks."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        hash_algo: str = "sha256",
        verify: bool = False,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        fault: str = "none",
        fork_sharing: bool = True,
        keeps_open_blocks: bool = False,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.block_pool = BlockPool(num_blocks, enable_prefix_caching)
        self.prefix_stats = PrefixCacheStats()
        self.evicted_before_reuse_total = 0

    def get_computed_blocks(self, request: Request) -> list[Block]:
        """The longest run of cached blocks from the start of a request that holds no blocks yet.

        At most `num_tokens - 1` tokens are hit: the last one must be computed to have logits, so on a full hit
        the whole last block is recomputed, into a block of the request's own. A lookup changes nothing; the
        hits are safe only once `allocate_slots` has taken references. A request that wants `prompt_logprobs`
        needs every position computed and finds nothing.
        """
        if not self.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return []
        hashes = request_block_hashes(request, self.block_size)
        hits: list[Block] = []
        for block_hash in hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def can_admit(self, request: Request, computed_blocks: Sequence[Block], reserved_blocks: int) -> bool:
        """Whether all present tokens of a waiting request fit, leaving `reserved_blocks` free.

        The whole sequence is asked for even when its first chunk is small (vLLM's reserve-full-isl, its
        default): a prompt admitted by its first chunk alone would soon preempt or be preempted.
        """
        needed = self._num_blocks_for(request.num_tokens) - len(computed_blocks)
        return needed + _num_free(computed_blocks) + reserved_blocks <= self.block_pool.num_free_blocks

    def allocate_slots(self, request: Request, num_new_tokens: int, computed_blocks: Sequence[Block] = ()) -> bool:
        """Makes room for the next `num_new_tokens` of a request; False, and nothing changed, if there is none.

        `computed_blocks` are the hits of a request that is being admitted: they become the start of its table,
        and `num_computed_tokens` is set to what they hold. Hits in the free queue are taken out of it before any
        block is handed out, and are not counted as room.
        """
        block_ids = request.block_ids
        num_hit_tokens = len(computed_blocks) * self.block_size
        num_slots = (len(block_ids) + len(computed_blocks)) * self.block_size
        missing = request.num_computed_tokens + num_hit_tokens + num_new_tokens - num_slots
        if missing <= 0 and not computed_blocks:
            return True  # the usual decode: the token goes into the last block
        pool = self.block_pool
        num_new_blocks = self._num_blocks_for(missing) if missing > 0 else 0
        if num_new_blocks + _num_free(computed_blocks) > pool.num_free_blocks:
            return False
        if computed_blocks:
            if block_ids:
                raise ValueError(f"{request} holds blocks already; hits can only start a block table")
            pool.touch(computed_blocks)
            block_ids.extend(block.block_id for block in computed_blocks)
            request.num_indexed_blocks = len(computed_blocks)
            request.num_computed_tokens = num_hit_tokens
        block_ids.extend(block.block_id for block in pool.get_new_blocks(num_new_blocks))
        return True

    def record_first_admission(self, request: Request, computed_blocks: Sequence[Block]) -> None:
        """Counts the lookup of a request about to be admitted for the first time (not back from preemption).

        `evicted_before_reuse_total` grows by the number of full prompt blocks that missed although they had been
        cached and were evicted lately: among the last N evictions, N being the number of usable blocks, not
        computed again since, and not counted before.
        """
        request.num_cached_tokens = len(computed_blocks) * self.block_size
        if not self.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return
        self.prefix_stats.queries += request.num_prompt_tokens
        self.prefix_stats.hits += request.num_cached_tokens
        num_asked_blocks = (request.num_prompt_tokens - 1) // self.block_size
        missed = request.block_hashes[len(computed_blocks) : num_asked_blocks]
        self.evicted_before_reuse_total += self.block_pool.recent_evictions.take(missed)

    def cache_computed_blocks(self, request: Request) -> None:
        """Enters the blocks of a request that have become full and computed into the prefix cache."""
        if not self.enable_prefix_caching:
            return
        num_full_blocks = request.num_computed_tokens // self.block_size
        if num_full_blocks <= request.num_indexed_blocks:
            return
        hashes = request_block_hashes(request, self.block_size)
        blocks = self.block_pool.blocks
        for index in range(request.num_indexed_blocks, num_full_blocks):
            self.block_pool.cache_full_block(blocks[request.block_ids[index]], hashes[index])
        request.num_indexed_blocks = num_full_blocks

    def free(self, request: Request) -> None:
        """Gives a request's blocks back, last block first. A request without blocks is left alone."""
        self.block_pool.free_blocks(self.block_pool.get_blocks(reversed(request.block_ids)))
        request.block_ids.clear()
        request.num_indexed_blocks = 0

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False, and nothing done, while requests hold blocks."""
        return self.block_pool.reset_prefix_cache()

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _num_free(blocks: Sequence[Block]) -> int:
    """How many of `blocks` sit in the free queue, where they would wrongly count as room."""
    return sum(block.ref_cnt == 0 for block in blocks)
