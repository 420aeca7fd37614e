"""Block tables: gives requests the blocks their tokens need, shares full ones, takes them back.

A request's table is its cache hits, or the blocks of the request it forks from, then blocks of its own; it only grows
at the end. Blocks become findable when they are full *and* computed, that is after the step that wrote them, not at
allocation as in vLLM. Two requests that meet in one step then do not share, but a step that is cut short (a victim
preempted after it was scheduled, an abort, an exception in the model) can leave no name in the index for KV that was
never written. Who writes into a block is its only holder, and it has no name: a fork gets a copy of the block it and
its leader would both go on with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.block_hash import BlockHasher, BlockKeys, common_length
from engine.block_pool import Block, BlockPool
from engine.forks import BlockCopy, Fork
from engine.prefix_audit import PrefixCacheStats, breach_kind
from engine.prefix_cache import CachedPrefix
from engine.prefix_tree import prefix_tree
from engine.request import Request


class KVCacheManager:
    """Allocation and prefix lookup over one `BlockPool`. Sizes are in tokens unless a name says blocks.

    hash_algo, verify, ttl (seconds, of `clock`), fault, fork_sharing: the flags of the prefix cache.
    keeps_open_blocks: some layer's format keeps the block a request is filling apart from the pool, in a row.
    """

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
        self.fork_sharing = fork_sharing
        self.block_pool = BlockPool(num_blocks, enable_prefix_caching, ttl=ttl, clock=clock)
        # Of a truncated hash collisions are expected: the audit must see them even if nothing is refused.
        compares_tokens = verify or hash_algo == "unsafe_truncated"
        self.hasher = BlockHasher(block_size, hash_algo, fault=fault, compares_tokens=compares_tokens)
        self.prefix_stats = PrefixCacheStats()
        self.evicted_before_reuse_total = 0
        self.forks_total = 0
        self.fork_copies_total = 0
        self._verify = verify
        self._fault = fault
        self._keeps_open_blocks = keeps_open_blocks
        self._block_copies: list[BlockCopy] = []

    @property
    def weights_version(self) -> int:
        return self.hasher.weights_version

    def get_computed_blocks(self, request: Request) -> list[Block]:
        """The longest run of cached blocks from the start of a request that holds no blocks yet.

        At most `num_tokens - 1` tokens are hit: the last one must be computed to have logits, so on a full hit
        the whole last block is recomputed, into a block of the request's own. A lookup changes nothing; the
        hits are safe only once `allocate_slots` has taken references. A request that wants `prompt_logprobs`
        needs every position computed and finds nothing.
        """
        if not self.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return []
        keys = self.hasher.keys_of(request)
        find = self.block_pool.get_cached_block
        hits: list[Block] = []
        for index in range((request.num_tokens - 1) // self.block_size):
            block = self._verified(keys, index) if self._verify else find(keys.hashes[index])
            if block is None:
                break
            hits.append(block)
        return hits

    def _verified(self, keys: BlockKeys, index: int) -> Block | None:
        """A cached block that truly is block `index` of a request, tokens included."""
        pool = self.block_pool
        for block in pool.index.copies(keys.hashes[index]):
            if not pool.is_expired(block) and breach_kind(block, keys, index) is None:
                return block
        return None

    def fork(self, leader: Request, child: Request) -> Fork | None:
        """What a child without blocks may start from while `leader` holds blocks; `None`: nothing. Changes nothing.

        Shared are the blocks with the leader's computed tokens that the child has too, all but the child's last
        token, which it computes for its logits. To admit the child, pass the fork to `can_admit` and
        `allocate_slots`, which copies the block the child writes into: the last one, unless the tokens end with it.
        Formats with open blocks can copy only the block the leader has open now; tokens in an earlier one are
        left out, down to the start of that block. Not shared: another identity or other weights.
        """
        if (
            not self.fork_sharing
            or child.block_ids
            or child.params.prompt_logprobs is not None
            or child.identity != leader.identity
            or leader.weights_version != self.weights_version
        ):
            return None
        limit = min(leader.num_computed_tokens, child.num_tokens - 1)
        num_tokens = common_length(leader.all_token_ids, child.all_token_ids, limit)
        block_size = self.block_size
        in_open_block = num_tokens // block_size == leader.num_computed_tokens // block_size
        if self._keeps_open_blocks and not in_open_block:
            num_tokens -= num_tokens % block_size
        if num_tokens == 0:
            return None
        blocks = self.block_pool.get_blocks(leader.block_ids[: self._num_blocks_for(num_tokens)])
        return Fork(leader, blocks, num_tokens)

    def can_admit(
        self, request: Request, computed_blocks: Sequence[Block], reserved_blocks: int, fork: Fork | None = None
    ) -> bool:
        """Whether all present tokens of a waiting request fit, leaving `reserved_blocks` free.

        It starts from `computed_blocks`, its hits, or from a fork. The whole sequence is asked for even when its first
        chunk is small (vLLM's reserve-full-isl, its default): a prompt admitted by its first chunk alone would soon
        preempt or be preempted.
        """
        blocks = computed_blocks if fork is None else fork.blocks
        needed = self._num_blocks_for(request.num_tokens) - len(blocks)
        if fork is not None and self._must_copy(fork):
            needed += 1
        return needed + _num_free(blocks) + reserved_blocks <= self.block_pool.num_free_blocks

    def allocate_slots(
        self, request: Request, num_new_tokens: int, computed_blocks: Sequence[Block] = (), fork: Fork | None = None
    ) -> bool:
        """Makes room for the next `num_new_tokens` of a request; False, and nothing changed, if there is none.

        `computed_blocks` are the hits of a request that is being admitted, or `fork` what it takes from its leader:
        they become the start of its table, and `num_computed_tokens` is set to what they hold. Hits in the free queue
        are taken out of it before any block is handed out, and are not counted as room. Of a fork's last block, if the
        child is to write into it, the child gets a copy at once: see `take_block_copies`.
        """
        block_ids = request.block_ids
        if not block_ids:
            return self._admit(request, num_new_tokens, computed_blocks, fork)
        if computed_blocks or fork is not None:
            raise ValueError(f"{request} holds blocks already; hits can only start a block table")
        missing = request.num_computed_tokens + num_new_tokens - len(block_ids) * self.block_size
        if missing <= 0:
            return True  # the usual decode: the token goes into the last block
        num_new_blocks = self._num_blocks_for(missing)
        if num_new_blocks > self.block_pool.num_free_blocks:
            return False
        block_ids.extend(block.block_id for block in self.block_pool.get_new_blocks(num_new_blocks))
        return True

    def _admit(
        self, request: Request, num_new_tokens: int, computed_blocks: Sequence[Block], fork: Fork | None
    ) -> bool:
        """`allocate_slots` for a request without blocks."""
        pool = self.block_pool
        if fork is not None:
            computed_blocks = fork.blocks
        start = len(computed_blocks) * self.block_size if fork is None else fork.num_tokens
        copies = fork is not None and self._must_copy(fork)
        num_new_blocks = self._num_blocks_for(start + num_new_tokens) - len(computed_blocks)
        if num_new_blocks + copies + _num_free(computed_blocks) > pool.num_free_blocks:
            return False
        pool.touch(computed_blocks)
        request.block_ids.extend(block.block_id for block in computed_blocks)
        request.num_indexed_blocks = start // self.block_size if self.enable_prefix_caching else 0
        request.num_computed_tokens = start
        request.weights_version = self.weights_version
        if copies and fork is not None:
            self._copy_last_block(request, fork.leader)
        request.block_ids.extend(block.block_id for block in pool.get_new_blocks(num_new_blocks))
        return True

    def _must_copy(self, fork: Fork) -> bool:
        """Whether the child of this fork writes into the last of the leader's blocks."""
        return fork.num_tokens % self.block_size != 0 and self._fault != "copy_on_write"

    def _copy_last_block(self, request: Request, leader: Request) -> None:
        """Puts a block of the request's own in the place of the last one, which is the leader's.

        It happens as the fork is made, so that nobody else, the leader included, ever has to copy before writing.
        """
        pool = self.block_pool
        shared = pool.blocks[request.block_ids[-1]]
        (own,) = pool.get_new_blocks(1)
        pool.free_blocks([shared])
        source_row_of = leader if self._keeps_open_blocks else None
        index = len(request.block_ids) - 1
        request.block_ids[index] = own.block_id
        self._block_copies.append(BlockCopy(request, index, shared.block_id, own.block_id, source_row_of))
        self.fork_copies_total += 1

    def take_block_copies(self) -> list[BlockCopy]:
        """The copies to make before the next forward pass; they are due once."""
        copies, self._block_copies = self._block_copies, []
        return copies

    def record_first_admission(self, request: Request, computed_blocks: Sequence[Block]) -> None:
        """Counts the lookup of a request about to be admitted for the first time (not back from preemption).

        `evicted_before_reuse_total` grows by the number of full prompt blocks that missed although they had been
        cached and were evicted lately: among the last N evictions, N being the number of usable blocks, not
        computed again since, and not counted before.
        """
        request.num_cached_tokens = len(computed_blocks) * self.block_size
        if not self.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return
        keys = self.hasher.keys_of(request)
        self.prefix_stats.record(self.block_pool, request, keys, computed_blocks, self.block_size)
        num_asked_blocks = (request.num_prompt_tokens - 1) // self.block_size
        missed = keys.hashes[len(computed_blocks) : num_asked_blocks]
        self.evicted_before_reuse_total += self.block_pool.recent_evictions.take(missed)

    def record_fork(self, request: Request, fork: Fork) -> None:
        """Counts a child about to be admitted from its leader's blocks. It has not asked the prefix cache."""
        request.num_cached_tokens = fork.num_tokens
        self.forks_total += 1

    def cache_computed_blocks(self, request: Request) -> None:
        """Enters the blocks of a request that have become full and computed into the prefix cache.

        Not those of a request that began under other weights: its KV is a mixture.
        """
        if not self.enable_prefix_caching or request.weights_version != self.weights_version:
            return
        num_full_blocks = request.num_computed_tokens // self.block_size
        if num_full_blocks <= request.num_indexed_blocks:
            return
        keys = self.hasher.keys_of(request)
        pool = self.block_pool
        now = pool.clock()
        for index in range(request.num_indexed_blocks, num_full_blocks):
            block = pool.blocks[request.block_ids[index]]
            if block.cached is None:  # else two have written it, under the fault copy_on_write
                pool.cache_full_block(block, CachedPrefix.of(request, keys, index, now))
        request.num_indexed_blocks = num_full_blocks

    def free(self, request: Request) -> None:
        """Gives a request's blocks back, last block first. A request without blocks is left alone."""
        self.block_pool.free_blocks(self.block_pool.get_blocks(reversed(request.block_ids)))
        request.block_ids.clear()
        request.num_indexed_blocks = 0
        if self._block_copies:  # a target that is handed out again must not be written
            self._block_copies = [copy for copy in self._block_copies if copy.request is not request]

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False, and nothing done, while requests hold blocks."""
        return self.block_pool.reset_prefix_cache()

    def sweep_expired(self) -> int:
        """Empties cached blocks whose time to live is over; returns how many."""
        return self.block_pool.sweep_expired()

    def set_public_prefixes(self, prefixes: Sequence[Sequence[int]]) -> None:
        """Token lists everybody shares: whole blocks of a prompt that starts as one of them carry no namespace.

        Replaces the former ones. Holds for requests that have not been looked up yet; what is cached stays as it is.
        """
        self.hasher.set_public_prefixes(prefixes)

    def new_weights(self) -> None:
        """Makes all cached content unfindable, as another model computed it, and the version part of new hashes.

        Blocks in use stay with their holders but lose their names; whoever holds blocks of the former weights, and
        should have been preempted, caches nothing more. The fault `weights_key` forgets both the drop and the version
        in the hash.
        """
        self.hasher.weights_version += 1
        if self._fault != "weights_key":
            self.block_pool.drop_cached_content()

    def prefix_tree(self, now: float | None = None, *, bytes_per_block: int = 0) -> dict[str, Any]:
        """The prefix cache as a tree of runs of blocks: see `engine.prefix_tree`."""
        pool = self.block_pool
        pool.sweep_expired()
        now = pool.clock() if now is None else now
        return prefix_tree(pool.blocks, now, self.block_size, bytes_per_block)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _num_free(blocks: Sequence[Block]) -> int:
    """How many of `blocks` sit in the free queue, where they would wrongly count as room."""
    return sum(block.ref_cnt == 0 for block in blocks)
