"""A model without arithmetic: its "KV" says which tokens it stands for, so that aliasing shows as wrong content."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import pytest

from engine.block_pool import CACHED, FREE, SHARED, USED, BlockPool
from engine.cache_identity import CacheIdentity
from engine.config import EngineConfig
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler, SchedulerOutput

VOCAB_SIZE = 50


def identity_of(salt: str | None) -> CacheIdentity:
    """Who sends this salt and nothing else, in scope global."""
    return CacheIdentity(() if salt is None else (("cache_salt", salt),), owner=salt or "")


def prefix_states(token_ids: Sequence[int], identity: CacheIdentity) -> list[int]:
    """The fake KV of each token: a digest of the request's identity and of every token up to it.

    Real KV does not depend on the namespace; here it does, so that a hit across namespaces shows as wrong content.
    """
    state = zlib.crc32(repr((identity.namespace, identity.adapter, identity.images)).encode())
    states = []
    for token_id in token_ids:
        state = hash((state, token_id))
        states.append(state)
    return states


def expected_output(prompt: Sequence[int], salt: str | None, count: int) -> list[int]:
    """What the fake model generates for a prompt that is never interrupted."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(prefix_states(tokens, identity_of(salt))[-1] % VOCAB_SIZE)
    return tokens[len(prompt) :]


def check_pool(pool: BlockPool, tables: Sequence[Sequence[int]]) -> None:
    """Every block is free or referenced, as often as the block tables say; links and counts agree."""
    null, *blocks = pool.blocks
    assert null.ref_cnt == 0
    assert null.block_hash is None
    assert null.next_free is null
    free = list(pool.free_queue)
    assert len(free) == len(pool.free_queue) == pool.num_free_blocks == len({block.block_id for block in free})
    holders = [0] * pool.num_blocks
    for table in tables:
        assert len(set(table)) == len(table)
        for block_id in table:
            holders[block_id] += 1
    assert holders[0] == 0
    assert [block.ref_cnt for block in pool.blocks] == holders
    assert {block.block_id for block in free} == {block.block_id for block in blocks if block.ref_cnt == 0}
    for block in blocks:
        assert block.next_free.prev_free is block
        assert block.prev_free.next_free is block
        assert (block.next_free is block) == (block.ref_cnt > 0)
        if block.block_hash is not None:
            assert block in pool.index.copies(block.block_hash)
    num_cached = sum(block.block_hash is not None for block in blocks)
    assert len(pool.index) == num_cached
    named = [block.block_hash is not None for block in free]
    assert named == sorted(named), "empty blocks are reused before cached ones"
    assert pool.free_queue.oldest is next((block for block in free if block.block_hash is not None), None)
    snapshot = pool.snapshot()
    counts = {"free": FREE, "cached": CACHED, "used": USED, "shared": SHARED}
    assert pool.block_states() == {name: snapshot.count(state) for name, state in counts.items()}
    assert sum(pool.block_states().values()) == pool.num_usable_blocks
    assert pool.usage == pytest.approx(sum(block.ref_cnt > 0 for block in blocks) / len(blocks))


class FakeEngine:
    """Runs a scheduler: writes and reads fake KV through the block tables and checks all of it at every step.

    `now` is the scheduler's clock.
    """

    def __init__(self, *, num_gpu_blocks: int, max_model_len: int = 64, **flags: object) -> None:
        self.config = EngineConfig(**{"block_size": 4, "max_num_batched_tokens": 64} | flags)
        self.now = 0.0
        self.scheduler = Scheduler(
            self.config, num_gpu_blocks=num_gpu_blocks, max_model_len=max_model_len, clock=lambda: self.now
        )
        manager = self.scheduler.kv_cache_manager
        self.pool = manager.block_pool
        self.forked: set[str] = set()  # ids of the requests that started from a leader's blocks
        record_fork = manager.record_fork
        manager.record_fork = lambda request, fork: (  # type: ignore[method-assign]
            self.forked.add(request.request_id),
            record_fork(request, fork),
        )[1]
        self.kv: list[int | None] = [None] * (num_gpu_blocks * self.config.block_size)
        self.computed: dict[str, int] = {}  # tokens computed for each request
        self.next_position: dict[str, int] = {}  # of each request that holds blocks, once it was in a step
        self.log: list[object] = []

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        salt: str | None = None,
        identity: CacheIdentity | None = None,
        fork_of: Request | None = None,
        priority: int = 0,
        arrival_time: float = 0.0,
        eos_token_id: int | None = None,
        **params: object,
    ) -> Request:
        request = Request(
            request_id,
            prompt,
            SamplingParams(max_tokens=max_tokens, **params),
            identity=identity or identity_of(salt),
            fork_of=fork_of,
            priority=priority,
            arrival_time=arrival_time,
            eos_token_id=eos_token_id,
        )
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self._check_output(output)
        for request in output.preempted:
            self.next_position.pop(request.request_id, None)
        return output

    def execute(self, output: SchedulerOutput) -> list[int | None]:
        """The model's step: copy blocks, write the new tokens' KV, then read all of the context."""
        block_size = self.config.block_size
        self._copy_blocks(output)
        for entry in output.scheduled:
            request = entry.request
            start = entry.num_computed_tokens
            end = start + entry.num_scheduled_tokens
            # Formats that keep a request's open block apart rely on it.
            forked = any(copy.request is request for copy in output.block_copies)
            came_from = self.next_position.get(request.request_id, start if forked else start - start % block_size)
            assert start == came_from, "computing starts in the middle of a block"
            self.next_position[request.request_id] = end
            states = prefix_states(request.all_token_ids[:end], request.identity)
            for position in range(start, end):
                block = self.pool.blocks[request.block_ids[position // block_size]]
                assert block.ref_cnt == 1, "a shared block is written"
                assert block.block_hash is None, "a block others may hit is written"
                self.kv[block.block_id * block_size + position % block_size] = states[position]
            count = self.computed.get(request.request_id, 0) + entry.num_scheduled_tokens
            self.computed[request.request_id] = count
        sampled: list[int | None] = []
        for entry in output.scheduled:
            request = entry.request
            end = entry.num_computed_tokens + entry.num_scheduled_tokens
            slots = [request.block_ids[i // block_size] * block_size + i % block_size for i in range(end)]
            states = [self.kv[slot] for slot in slots]
            assert states == prefix_states(request.all_token_ids[:end], request.identity)
            sampled.append(states[-1] % VOCAB_SIZE if entry.samples else None)
        return sampled

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        size = self.config.block_size
        content = [self.kv[copy.source * size : (copy.source + 1) * size] for copy in output.block_copies]
        for copy, copied in zip(output.block_copies, content, strict=True):
            assert copy.request.block_ids[copy.index] == copy.target
            self.kv[copy.target * size : (copy.target + 1) * size] = copied

    def update(self, output: SchedulerOutput, sampled: list[int | None]) -> list[Request]:
        finished = self.scheduler.update_from_output(output, sampled)
        self.log.append(
            (
                [(e.request.request_id, e.num_computed_tokens, e.num_scheduled_tokens) for e in output.scheduled],
                [request.request_id for request in output.preempted],
                [(request.request_id, request.status.name) for request in finished],
                [list(request.block_ids) for request in self.scheduler.running],
            )
        )
        self.check()
        return finished

    def step(self) -> list[Request]:
        output = self.schedule()
        assert output.scheduled, "unfinished requests, but nothing is scheduled"
        return self.update(output, self.execute(output))

    def run(self, max_steps: int = 1000) -> list[Request]:
        finished = []
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                return finished
            finished += self.step()
        raise AssertionError(f"unfinished after {max_steps} steps: {list(self.scheduler.requests.values())}")

    def check(self) -> None:
        scheduler = self.scheduler
        assert {id(request) for request in scheduler.requests.values()} == {
            id(request) for request in [*scheduler.running, *scheduler.waiting, *scheduler.parked]
        }
        assert scheduler.num_waiting == len([*scheduler.waiting, *scheduler.parked])
        assert not any(request.block_ids for request in [*scheduler.waiting, *scheduler.parked])
        for request in scheduler.running:
            num_full_blocks = request.num_computed_tokens // self.config.block_size
            assert request.num_indexed_blocks == num_full_blocks * self.config.enable_prefix_caching
        check_pool(self.pool, [request.block_ids for request in scheduler.running])

    def _check_output(self, output: SchedulerOutput) -> None:
        entries = output.scheduled
        total = sum(entry.num_scheduled_tokens for entry in entries)
        assert total == output.num_scheduled_tokens <= self.config.max_num_batched_tokens
        assert len(entries) <= len(self.scheduler.running) <= self.config.max_num_seqs
        assert len({id(entry.request) for entry in entries}) == len(entries)
        assert not {id(entry.request) for entry in entries} & {id(request) for request in output.preempted}
        decodes = [entry.num_scheduled_tokens == 1 for entry in entries]
        assert decodes == sorted(decodes, reverse=True), "decodes come first"
        for entry in entries:
            end = entry.num_computed_tokens + entry.num_scheduled_tokens
            assert entry.num_scheduled_tokens > 0
            assert end <= entry.request.num_tokens
            assert entry.samples == (end == entry.request.num_tokens)
            assert end <= len(entry.request.block_ids) * self.config.block_size


@pytest.fixture(scope="session")
def make_engine() -> type[FakeEngine]:
    return FakeEngine


@pytest.fixture(scope="session")
def fake_output() -> Callable[[Sequence[int], str | None, int], list[int]]:
    return expected_output


@pytest.fixture(scope="session")
def fake_kv() -> Callable[[Sequence[int], CacheIdentity], list[int]]:
    return prefix_states


@pytest.fixture(scope="session")
def salted() -> Callable[[str | None], CacheIdentity]:
    return identity_of


@pytest.fixture(scope="session")
def check_integrity() -> Callable[[BlockPool, Sequence[Sequence[int]]], None]:
    return check_pool
