"""What every KV block must hold, kept in plain Python beside the real allocator.

The shadow of a token's KV is a digest of all that makes it: weights, adapter, images and every token up to it; beside
it stands the namespace of whoever computed it. What a cold run would compute is therefore known without a model, and
so is every hit: names of blocks, last uses and lost hits are recomputed here by brute force.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.block_pool import CACHED, FREE, SHARED, USED, BlockPool
from engine.cache_identity import CacheIdentity, Namespace
from engine.request import Request

MAX_TOKENS = 22  # of a request

Slot = tuple[int, Namespace | None]
"""State of a token, and the namespace it was computed in; `None` in a block named as public."""

BlockKey = tuple[object, int]
"""Who may find a block, and the state of its last token."""


@dataclass(eq=False)
class Tracked:
    """A request and what the model knows of it.

    leader: the request it may fork from. pending: slots allocated for a step that has not run. forked: it
    started, this time, from a leader's blocks. rooted: not from blocks named otherwise than its own would be, because
    other prefixes were public then. inherited: tokens that were public for its leader. num_public: tokens of
    the prompt everybody may share, settled when its blocks are first named.
    """

    request: Request
    leader: Tracked | None = None
    pending: int = 0
    forked: bool = False
    rooted: bool = True
    inherited: int = 0
    num_public: int | None = None
    states: list[int] = field(default_factory=list)

    @property
    def identity(self) -> CacheIdentity:
        return self.request.identity

    @property
    def namespace(self) -> Namespace:
        return self.request.identity.namespace


class Shadow:
    """Slots of the pool, names of its cached blocks, and their last uses."""

    def __init__(self, pool: BlockPool, block_size: int, ttl: float | None) -> None:
        self.pool = pool
        self.block_size = block_size
        self.ttl = ttl
        self.now = 0.0
        self.weights_version = 0
        self.public: list[list[int]] = []
        self.slots: list[Slot | None] = [None] * (pool.num_blocks * block_size)
        self.names: dict[int, BlockKey] = {}  # of cached blocks, in use or not
        self.rooted: dict[int, bool] = {}
        self.evictions = 0
        self.released: dict[int, tuple[int, float]] = {}  # free blocks: in which order, and when, given back
        self._order = itertools.count()

    def states(self, tracked: Tracked) -> list[int]:
        """The state of each token of a request, as a run without any cache computes it."""
        states, tokens, identity = tracked.states, tracked.request.all_token_ids, tracked.identity
        state = states[-1] if states else hash((self.weights_version, identity.adapter))
        for position in range(len(states), len(tokens)):
            image = tuple(
                (span.digest, position - span.offset)
                for span in identity.images
                if span.offset <= position < span.offset + span.num_tokens
            )
            state = hash((state, tokens[position], image))
            states.append(state)
        return states

    def settle_public(self, tracked: Tracked) -> None:
        """Public is the longest common start of a prompt and a registered prefix, up to the first image.

        Which prefixes are registered counts when the request's blocks get their names, once for given weights.
        """
        keys = tracked.request.block_keys
        if tracked.num_public is None and keys is not None and keys.weights_version == self.weights_version:
            common = (common_length(tracked.request.prompt_token_ids, prefix) for prefix in self.public)
            offsets = [span.offset for span in tracked.identity.images]
            tracked.num_public = min(max(common, default=0), *offsets, MAX_TOKENS)

    def key(self, tracked: Tracked, index: int) -> BlockKey:
        """The name of block `index`: private blocks are told apart by namespace and by where it entered the chain."""
        size = self.block_size
        first_private = (tracked.num_public or 0) // size
        shared = index < first_private or not tracked.namespace
        return (() if shared else (tracked.namespace, first_private), self.states(tracked)[(index + 1) * size - 1])

    def read(self, block_ids: Sequence[int], count: int) -> list[Slot | None]:
        """The first `count` slots of a block table."""
        size = self.block_size
        return [self.slots[block_ids[i // size] * size + i % size] for i in range(count)]

    def check_content(self, tracked: Tracked, block_ids: Sequence[int], count: int) -> None:
        """The first `count` tokens are what a cold run computes, and nobody else's unless they are public."""
        size, namespace = self.block_size, tracked.namespace
        num_public = max(tracked.num_public or 0, tracked.inherited) // size * size
        states = self.states(tracked)
        for position, slot in enumerate(self.read(block_ids, count)):
            assert slot is not None, f"token {position}: a slot nobody has written"
            assert slot[0] == states[position], f"token {position}: not what a cold run computes"
            mine = slot[1] is None or slot[1] == namespace or (slot[1] == () and position < num_public)
            assert mine, f"token {position}: KV of another namespace"

    def expired(self, block_id: int) -> bool:
        return (
            self.ttl is not None
            and self.pool.blocks[block_id].ref_cnt == 0
            and self.now > self.released[block_id][1] + self.ttl
        )

    def expected_hits(self, tracked: Tracked) -> int:
        """How many blocks a lookup must find: the longest run of names, short of the last token."""
        found = {name for block_id, name in self.names.items() if not self.expired(block_id)}
        keys = (self.key(tracked, index) for index in range((tracked.request.num_tokens - 1) // self.block_size))
        return sum(1 for _ in itertools.takewhile(found.__contains__, keys))

    def expected_without_isolation(self, tracked: Tracked) -> int:
        """The same if every namespace were one."""
        found = {name[1] for block_id, name in self.names.items() if not self.expired(block_id)}
        keys = (self.key(tracked, index)[1] for index in range((tracked.request.num_tokens - 1) // self.block_size))
        return sum(1 for _ in itertools.takewhile(found.__contains__, keys))

    def sweep(self) -> int:
        """Forgets the names of expired blocks; returns how many."""
        gone = [block_id for block_id in self.names if self.expired(block_id)]
        for block_id in gone:
            del self.names[block_id]
        return len(gone)

    def expected_fork(self, leader: Tracked, child: Tracked, keeps_open_blocks: bool) -> int:
        """How many tokens a child may start with from a leader that holds blocks."""
        if leader.identity != child.identity or child.request.params.prompt_logprobs is not None:
            return 0
        computed, size = leader.request.num_computed_tokens, self.block_size
        count = common_length(leader.request.all_token_ids[:computed], child.request.all_token_ids[:-1])
        if keeps_open_blocks and count // size != computed // size:
            count -= count % size
        return count

    def write(self, tracked: Tracked, start: int, end: int) -> None:
        """Computes tokens [start, end); every block written must be the request's own and unknown to the cache."""
        size, states, block_ids = self.block_size, self.states(tracked), tracked.request.block_ids
        for position in range(start, end):
            block = self.pool.blocks[block_ids[position // size]]
            assert block.ref_cnt == 1, "a block that others hold is written"
            assert block.block_hash is None, "a block that others can find is written"
            self.slots[block.block_id * size + position % size] = (states[position], tracked.namespace)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks as a kernel does: all sources are read before any target is written."""
        size = self.block_size
        content = [self.slots[source * size : (source + 1) * size] for source, _ in pairs]
        assert len({target for _, target in pairs}) == len(pairs), "two copies into one block"
        for (_, target), slots in zip(pairs, content, strict=True):
            self.slots[target * size : (target + 1) * size] = slots

    def name_computed(self, tracked: Tracked) -> None:
        """Full and computed blocks can be found from now on."""
        size = self.block_size
        for index in range(tracked.request.num_computed_tokens // size):
            block_id = tracked.request.block_ids[index]
            if block_id not in self.names:
                self.names[block_id] = self.key(tracked, index)
                self.rooted[block_id] = tracked.rooted
                if index < (tracked.num_public or 0) // size:
                    slots = slice(block_id * size, (block_id + 1) * size)
                    self.slots[slots] = [slot and (slot[0], None) for slot in self.slots[slots]]

    def handed_out(self, block_ids: Sequence[int]) -> None:
        """New blocks: nobody finds what they held. It stays there until the step that writes them."""
        evicted = [block_id for block_id in block_ids if self.names.pop(block_id, None) is not None]
        self.evictions += len(evicted)
        if evicted:
            assert self.released.keys() >= set(evicted), "the content of a block in use is dropped"
            newest = max(self.released[block_id] for block_id in evicted)
            for block_id, last_use in self.released.items():
                if self.pool.blocks[block_id].ref_cnt == 0:
                    assert block_id in self.names, "content is dropped although an empty block is free"
                    assert last_use > newest, "content is dropped that was used after other content"

    def given_back(self, block_ids: Sequence[int]) -> None:
        """A table was freed, last block first; those nobody holds any more were last used now."""
        for block_id in reversed(block_ids):
            if self.pool.blocks[block_id].ref_cnt == 0:
                self.released[block_id] = (next(self._order), self.now)

    def check_pool(self, tables: Sequence[Sequence[int]]) -> None:
        """Every block is free or referenced, as often as the tables say; the queue is whole and in order."""
        pool, blocks = self.pool, self.pool.blocks
        holders = [0] * pool.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), "a block stands twice in a table"
            for block_id in table:
                holders[block_id] += 1
        assert holders[0] == 0, "the null block is in a table"
        assert [block.ref_cnt for block in blocks] == holders, "reference counts are not what the tables say"
        free = [block.block_id for block in pool.free_queue]
        assert sorted(free) == [i for i in range(1, pool.num_blocks) if not holders[i]], "free blocks and queue differ"
        assert len(free) == pool.num_free_blocks
        named = [block.block_id for block in blocks if block.block_hash is not None]
        assert set(named) == self.names.keys(), "cached blocks are not those that hold a known, computed prefix"
        num_empty = sum(block_id not in self.names for block_id in free)
        assert all(block_id not in self.names for block_id in free[:num_empty]), "content is dropped before it must be"
        order = [self.released[block_id][0] for block_id in free[num_empty:]]
        assert order == sorted(order), "cached blocks are not in the order of their last use"
        num_shared = sum(count > 1 for count in holders)
        states = {
            "free": num_empty, "cached": len(free) - num_empty,
            "used": pool.num_usable_blocks - len(free) - num_shared, "shared": num_shared,
        }  # fmt: skip
        assert pool.block_states() == states
        assert sum(states.values()) == pool.num_usable_blocks

    def check_details(self) -> None:
        """Links, snapshot and parents: dearer than `check_pool`, hence not after every step.

        Whoever finds a block finds the blocks before it: content is dropped, and expires, from the end of a prefix.
        """
        pool, blocks = self.pool, self.pool.blocks
        for block in blocks:
            assert block.next_free.prev_free is block
            assert block.prev_free.next_free is block
            assert (block.next_free is block) == (block.ref_cnt > 0 or block.block_id == 0)
        expected = []
        for block in blocks[1:]:
            free = CACHED if block.block_id in self.names else FREE
            expected.append((free, USED, SHARED)[min(block.ref_cnt, 2)])
        assert pool.snapshot() == expected
        for block_id in self.names:
            cached = blocks[block_id].cached
            assert cached is not None
            if self.rooted[block_id] and cached.parent_hash is not None and not self.expired(block_id):
                assert pool.get_cached_block(cached.parent_hash) is not None, "a block outlives the one before it"


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
