"""A machine of random histories over the real KV cache manager, checked against `kv_shadow` after every rule.

It plays what the scheduler, the runner and the operator can do to the cache: admit, compute, decode, preempt, end,
fork, offload, let time pass, sweep, reset, publish prefixes, load other weights.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.block_pool import Block
from engine.cache_identity import ANONYMOUS, Adapter, CacheIdentity, ImageSpan
from engine.forks import Fork
from engine.kv_cache_manager import KVCacheManager
from engine.request import Request, SamplingParams
from tests.engine_core.kv_shadow import MAX_TOKENS, Shadow, Tracked

MAX_REQUESTS = 6  # at a time
STEMS = ([1] * 14, [1, 2] * 7, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 1, 1])  # equal, diverging and shifted prefixes
PUBLIC: Any = ([], [STEMS[0]], [STEMS[1][:5], STEMS[2][:9]], [STEMS[2][:3], [9, 9, 9]])
ONE, TWO = (("tenant", "1"),), (("tenant", "2"),)
IDENTITIES = (  # neighbours meet in a history, and differ in one thing
    ANONYMOUS,
    CacheIdentity(ONE, "one"),
    CacheIdentity((*ONE, ("cache_salt", "1")), "one"),
    CacheIdentity((("tenant", "11"),), "eleven"),
    CacheIdentity(TWO, "two"),
    ANONYMOUS,
    CacheIdentity(adapter=Adapter("lora", 1)),
    CacheIdentity(adapter=Adapter("lora", 2)),
    CacheIdentity(ONE, "one", adapter=Adapter("lora", 1)),
    CacheIdentity(ONE, "one"),
    CacheIdentity(ONE, "one", images=(ImageSpan(1, 3, "aa"),)),
    CacheIdentity(ONE, "one", images=(ImageSpan(2, 3, "aa"),)),
    CacheIdentity(ONE, "one", images=(ImageSpan(2, 3, "bb"),)),
    CacheIdentity(images=(ImageSpan(2, 3, "bb"), ImageSpan(6, 2, "aa"))),
)
INTERRUPTIONS = ["preempt", "preempt_and_offload", "end", "fork", "fork", "fork"]
OPERATIONS = ["tick"] * 4 + ["sweep"] * 2 + ["reset", "publish", "load_weights", "free_twice"]
BYTE = st.integers(0, 255)
WORD = st.integers(0, 2**22 - 1)  # one draw for several choices: draws are most of the time of a history


class KVCacheMachine(RuleBasedStateMachine):
    """`waiting` requests hold no blocks; `held` ones do, in the order of their admission."""

    caching: ClassVar[bool] = True
    options: ClassVar[dict[str, Any]] = {}
    block_sizes: ClassVar[list[int]] = [1, 2, 3, 4]
    ttls: ClassVar[list[float | None]] = [None, 4.5]
    crowds: ClassVar[list[list[CacheIdentity]]] = [
        [IDENTITIES[first - number] for number in range(3)] for first in range(len(IDENTITIES))
    ]
    steps_of_histories: ClassVar[list[int]] = []
    seen: ClassVar[Counter[str]] = Counter()  # what happened in them

    @initialize(num_blocks=st.integers(2, 32), word=WORD)
    def start(self, num_blocks: int, word: int) -> None:
        word, size = divmod(word, len(self.block_sizes))
        word, ttl = divmod(word, len(self.ttls))
        word, crowd = divmod(word, len(self.crowds))
        self.crowd = self.crowds[crowd]
        options = {
            "ttl": self.ttls[ttl], "verify": bool(word & 1), "keeps_open_blocks": bool(word & 2), "fault": "none",
        } | self.options  # fmt: skip
        self.block_size = block_size = self.block_sizes[size]
        self.manager = KVCacheManager(num_blocks, block_size, self.caching, clock=lambda: self.shadow.now, **options)
        self.pool = self.manager.block_pool
        self.keeps_open_blocks = options["keeps_open_blocks"]
        self.max_tokens = min(MAX_TOKENS, block_size * (num_blocks - 1))  # so that each request fits alone
        self.shadow = Shadow(self.pool, block_size, options["ttl"])
        self.waiting: list[Tracked] = []
        self.held: list[Tracked] = []
        self.host: dict[Any, list[Any]] = {}  # offloaded blocks by name
        self.queries = self.hits = self.lost = self.forks = self.copies = self.expired = 0
        self.steps = 0
        self.numbers = itertools.count()

    def pick(self, index: int) -> Tracked:
        return self.held[index % len(self.held)]

    @rule(word=WORD)
    def live(self, word: int) -> None:
        """The next thing in the life of a request: it comes, is admitted, computed, given more slots, or ends."""
        index, amount, choice = word % MAX_REQUESTS, word // MAX_REQUESTS % 256, word // MAX_REQUESTS // 256
        if index < len(self.held):
            self.get_on(self.held[index], 1 + amount % 20, 1 + choice % 3)
        elif index < len(self.held) + len(self.waiting):
            self.admit(self.waiting[index - len(self.held)], amount, whole=choice % 2 == 0)
        else:
            self.arrive(amount, choice)

    @precondition(lambda self: self.held)
    @rule(choice=BYTE)
    def step(self, choice: int) -> None:
        """All requests that hold blocks get on, one after the other."""
        for tracked in list(self.held):
            if tracked in self.held:  # not preempted for one before it
                self.get_on(tracked, 1 + choice // 3 % 4, 1 + choice % 3)

    def get_on(self, tracked: Tracked, chunk: int, token_id: int) -> None:
        if tracked.pending:
            self.compute(tracked, token_id)
        else:
            self.advance(tracked, chunk)

    def arrive(self, amount: int, choice: int) -> None:
        """A new prompt, or the next turn of a conversation, mostly by the same client."""
        tail = [9] * (choice // 4 % 3)
        if choice % 4 == 3 and self.held:
            last = self.pick(amount)
            identity = last.identity if amount % 4 else CacheIdentity(TWO, "two", images=last.identity.images)
            prompt = (last.request.all_token_ids + tail)[: self.max_tokens]
        else:
            identity = self.crowd[choice // 12 % len(self.crowd)]
            prompt = (STEMS[amount % 3][: 1 + amount // 3 % 14] + tail)[: self.max_tokens]
            if any(span.offset + span.num_tokens > len(prompt) for span in identity.images):
                identity = CacheIdentity(identity.namespace, identity.owner)
        self.enqueue(prompt, identity, None, wants_logprobs=choice // 36 % 8 == 1)

    def enqueue(
        self, prompt: list[int], identity: CacheIdentity, leader: Tracked | None, wants_logprobs: bool = False
    ) -> None:
        params = SamplingParams(max_tokens=99, prompt_logprobs=0 if wants_logprobs else None)
        fork_of = None if leader is None else leader.request
        request = Request(f"r{next(self.numbers)}", prompt, params, identity=identity, fork_of=fork_of)
        self.waiting.insert(0 if leader else len(self.waiting), Tracked(request, leader))
        note(f"  {request} of {identity} comes, from {fork_of}")

    def admit(self, tracked: Tracked, amount: int, whole: bool) -> None:
        """From its leader's blocks if those hold more than the prefix cache, as the scheduler has it, or anyway."""
        request, size = tracked.request, self.block_size
        hits, fork = self.look_up(tracked), self.find_fork(tracked)
        if fork is not None and (amount % 2 or fork.num_tokens > len(hits) * size):
            start, kept, room = fork.num_tokens, fork.num_tokens // size, 0
        else:
            fork, start, kept, room = None, len(hits) * size, len(hits), sum(block.ref_cnt == 0 for block in hits)
        needed = -(-request.num_tokens // size) - kept + room
        left = request.num_tokens - start
        count = left if whole else min(1 + amount % 20, left)
        note(f"  {request} starts from {start} tokens, {'forked' if fork else 'hit'}, and computes {count}")
        admitted = self.manager.can_admit(request, hits, 0, fork)
        assert admitted == (needed <= self.pool.num_free_blocks), "room is misjudged"
        if not admitted:
            assert self.held, "a request that fits the empty pool is not admitted"
            return
        self.count_admission(tracked, hits, fork)
        assert self.manager.allocate_slots(request, count, () if fork else hits, fork)
        assert request.num_computed_tokens == start
        self.shadow.settle_public(tracked)
        self.copies += fork is not None and start % size != 0
        self.shadow.handed_out(request.block_ids[kept:])
        leader = tracked.leader if fork else None
        tracked.rooted = leader is None or (leader.rooted and leader.num_public == tracked.num_public)
        tracked.inherited = 0 if leader is None else max(leader.num_public or 0, leader.inherited)
        tracked.pending, tracked.forked, tracked.leader = count, leader is not None, None
        self.waiting.remove(tracked)
        self.held.append(tracked)

    def look_up(self, tracked: Tracked) -> list[Block]:
        request, shadow = tracked.request, self.shadow
        asks = self.caching and request.params.prompt_logprobs is None
        hits = self.manager.get_computed_blocks(request)
        shadow.settle_public(tracked)
        assert len(hits) * self.block_size < request.num_tokens
        shadow.check_content(tracked, [block.block_id for block in hits], len(hits) * self.block_size)
        expected = shadow.expected_hits(tracked) if asks else 0
        assert len(hits) == expected, f"{request}: a lookup found {len(hits)} blocks, not {expected}"
        return hits

    def find_fork(self, tracked: Tracked) -> Fork | None:
        leader = tracked.leader
        if leader not in self.held:
            return None
        assert leader is not None
        self.copy_blocks()  # a leader has computed, so its own copies are done
        fork = self.manager.fork(leader.request, tracked.request)
        expected = self.shadow.expected_fork(leader, tracked, self.keeps_open_blocks)
        assert (fork.num_tokens if fork else 0) == (expected if self.manager.fork_sharing else 0)
        if fork is not None:
            block_ids = [block.block_id for block in fork.blocks]
            assert block_ids == leader.request.block_ids[: -(-fork.num_tokens // self.block_size)]
        return fork

    def count_admission(self, tracked: Tracked, hits: list[Block], fork: Fork | None) -> None:
        request = tracked.request
        if request.num_cached_tokens >= 0:
            return
        if fork is not None:
            self.forks += 1
            self.manager.record_fork(request, fork)
            return
        if self.caching and request.params.prompt_logprobs is None:
            num_hit = len(hits) * self.block_size
            self.queries += request.num_prompt_tokens
            self.hits += num_hit
            if tracked.namespace:  # who has none shares already; that others do not is not its loss
                self.lost += self.shadow.expected_without_isolation(tracked) * self.block_size - num_hit
        self.manager.record_first_admission(request, hits)

    def copy_blocks(self) -> None:
        """What the runner does before it computes a step."""
        copies = self.manager.take_block_copies()
        for copy in copies:
            assert copy.request.block_ids[copy.index :][:1] == [copy.target], "a copy into a block its request has not"
        self.shadow.copy([(copy.source, copy.target) for copy in copies])

    def compute(self, tracked: Tracked, token_id: int) -> None:
        """The model's step for one request. Offloaded blocks are loaded, not computed."""
        request, shadow = tracked.request, self.shadow
        start, end = request.num_computed_tokens, request.num_computed_tokens + tracked.pending
        note(f"  {request} computes up to {end}")
        self.copy_blocks()
        shadow.write(tracked, start, end)
        self.load_offloaded(tracked, start, end)
        shadow.check_content(tracked, request.block_ids, end)
        tracked.pending = 0
        request.num_computed_tokens = end
        self.manager.cache_computed_blocks(request)
        if self.caching:
            shadow.settle_public(tracked)
            shadow.name_computed(tracked)
        if end == request.num_tokens and end < self.max_tokens:
            request.append_output_token(token_id)

    def advance(self, tracked: Tracked, chunk: int) -> None:
        request = tracked.request
        count = min(chunk, request.num_tokens - request.num_computed_tokens)
        if not count:
            self.end(tracked)
            return
        before, free = list(request.block_ids), self.pool.num_free_blocks
        needed = -(-(request.num_computed_tokens + count) // self.block_size) - len(before)
        note(f"  {request} asks for {count} tokens, {needed} blocks")
        assert self.manager.allocate_slots(request, count) == (needed <= free)
        assert request.block_ids[: len(before)] == before, "a block table only grows at its end"
        if needed <= free:
            assert len(request.block_ids) == len(before) + max(needed, 0)
            self.shadow.handed_out(request.block_ids[len(before) :])
            tracked.pending = count
        else:
            assert request.block_ids == before
            self.preempt(self.held[-1])  # as the scheduler does

    @precondition(lambda self: self.held)
    @rule(what=st.sampled_from(INTERRUPTIONS), index=BYTE, amount=BYTE)
    def interrupt(self, what: str, index: int, amount: int) -> None:
        """Of any request, but mostly of the last, as the scheduler preempts it first."""
        getattr(self, what)(self.held[-1] if index % 2 else self.pick(index // 2), amount)

    def fork(self, leader: Tracked, amount: int) -> None:
        """Another choice for the same prompt, a beam that goes on from the answer so far, or somebody else."""
        if len(self.held) + len(self.waiting) >= MAX_REQUESTS + 2:
            return
        request = leader.request
        tokens = request.prompt_token_ids if amount % 2 else request.all_token_ids[: 1 + amount // 8]
        tail = [9] * (amount // 2 % 3)
        identity = leader.identity if amount % 8 < 5 else self.crowd[amount // 8 % len(self.crowd)]
        if any(span.offset + span.num_tokens > len(tokens) for span in identity.images):
            return
        self.enqueue((tokens + tail)[: self.max_tokens], identity, leader)

    def preempt(self, tracked: Tracked, amount: int = 0) -> None:
        """Also a victim that was scheduled in this step, whose slots are never written."""
        self.release(tracked)
        tracked.request.num_computed_tokens = 0
        self.waiting.insert(0, tracked)

    def preempt_and_offload(self, tracked: Tracked, amount: int) -> None:
        self.offload(tracked)
        self.preempt(tracked)

    def end(self, tracked: Tracked, amount: int = 0) -> None:
        """Finished or aborted. Freeing a request twice is harmless, as an abort may come late."""
        self.release(tracked)
        self.manager.free(tracked.request)

    def release(self, tracked: Tracked) -> None:
        note(f"  {tracked.request} is freed")
        self.held.remove(tracked)
        tracked.pending = 0
        block_ids = list(tracked.request.block_ids)
        self.manager.free(tracked.request)
        assert not tracked.request.block_ids
        self.shadow.given_back(block_ids)

    def offload(self, tracked: Tracked) -> None:
        """Copies a victim's cached blocks out, as a connector to host memory does."""
        size, names = self.block_size, self.shadow.names
        for block_id in tracked.request.block_ids:
            if block_id in names:
                self.host[names[block_id]] = self.shadow.slots[block_id * size : (block_id + 1) * size]
        while len(self.host) > 16:
            del self.host[next(iter(self.host))]

    def load_offloaded(self, tracked: Tracked, start: int, end: int) -> None:
        size = self.block_size
        for index in range(-(-start // size), end // size):
            content = self.host.get(self.shadow.key(tracked, index))
            if content is not None:
                block_id = tracked.request.block_ids[index]
                self.shadow.slots[block_id * size : (block_id + 1) * size] = content

    @precondition(lambda self: self.held or self.waiting)
    @rule(what=st.sampled_from(OPERATIONS), amount=BYTE)
    def operate(self, what: str, amount: int) -> None:
        getattr(self, what)(amount)

    def free_twice(self, amount: int) -> None:
        block = self.pool.blocks[amount % self.pool.num_blocks]
        if not block.ref_cnt:
            with pytest.raises(ValueError, match="nobody holds it"):
                self.pool.free_blocks([block])

    def reset(self, amount: int) -> None:
        assert self.manager.reset_prefix_cache() == (not self.held)
        if not self.held:
            self.shadow.names.clear()
            assert self.pool.block_states()["free"] == self.pool.num_usable_blocks

    def tick(self, amount: int) -> None:
        self.shadow.now += 1 + amount % 3

    def sweep(self, amount: int) -> None:
        gone = self.shadow.sweep()
        self.expired += gone
        assert self.manager.sweep_expired() == gone

    def publish(self, amount: int) -> None:
        self.shadow.public = PUBLIC[amount % len(PUBLIC)]
        self.manager.set_public_prefixes(self.shadow.public)

    def load_weights(self, amount: int) -> None:
        """Everybody is preempted, before or after the cache is told."""
        preempted = self.held[::-1]  # the first comes back first
        for told in (amount % 2, 1 - amount % 2):
            if told:
                self.manager.new_weights()
                self.shadow.names.clear()
                continue
            for tracked in preempted:
                self.preempt(tracked)
        self.shadow.weights_version += 1
        for tracked in self.waiting:
            tracked.states.clear()
            tracked.num_public = None

    @invariant()
    def all_is_well(self) -> None:
        if not hasattr(self, "held"):
            return
        self.steps += 1
        self.shadow.check_pool([tracked.request.block_ids for tracked in self.held])
        for tracked in self.held:
            count = tracked.request.num_computed_tokens
            if tracked.pending and tracked.forked:
                count -= count % self.block_size  # the rest is copied by the step that has not run
            self.shadow.check_content(tracked, tracked.request.block_ids, count)
        if self.steps % 8 == 0:
            self.shadow.check_details()
            self.check_totals()

    def check_totals(self) -> None:
        manager, stats = self.manager, self.manager.prefix_stats
        assert (stats.queries, stats.hits, stats.hits_lost) == (self.queries, self.hits, self.lost)
        assert stats.hits_by_scope.total() == stats.hits
        assert (stats.breaches.total(), stats.refused.total()) == (0, 0)
        assert (manager.forks_total, manager.fork_copies_total) == (self.forks, self.copies)
        assert (self.pool.expired_total, self.pool.evictions_total) == (self.expired, self.shadow.evictions)

    def teardown(self) -> None:
        if not hasattr(self, "held"):
            return
        self.steps_of_histories.append(self.steps)
        self.seen.update(
            hits=self.hits, lost=self.lost, forks=self.forks, copies=self.copies, expired=self.expired,
            evictions=self.shadow.evictions, weights=self.shadow.weights_version,
        )  # fmt: skip
        if sys.exc_info()[0] is not None:
            return  # what failed is to be seen, not what it left behind
        for tracked in list(self.held):
            self.release(tracked)
        self.shadow.check_pool([])
        self.shadow.check_details()
        assert self.pool.num_free_blocks == self.pool.num_usable_blocks, "blocks are lost when all requests are gone"
        assert self.manager.reset_prefix_cache()
