"""Random histories of the KV cache against a model of plain dicts and a shadow array of fake KV."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.block_pool import BlockPool
from engine.kv_cache_manager import KVCacheManager
from engine.cache_identity import CacheIdentity
from engine.request import Request, SamplingParams

SALTS = st.sampled_from([None, "", "a", "b"])
STEMS = ([1] * 12, [1, 2] * 6, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])  # equal, diverging and shifted prefixes
TokenLists = Sequence[Sequence[int]]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_kv_cache_histories(
    enable_prefix_caching: bool,
    fake_kv: Callable[[Sequence[int], CacheIdentity], list[int]],
    salted: Callable[[str | None], CacheIdentity],
    check_integrity: Callable[[BlockPool, TokenLists], None],
) -> None:
    class KVCacheMachine(RuleBasedStateMachine):
        """Holds requests by id: `tokens` is the model of what each one's blocks must contain."""

        @initialize(num_blocks=st.integers(2, 12), block_size=st.integers(1, 4))
        def start(self, num_blocks: int, block_size: int) -> None:
            self.manager = KVCacheManager(num_blocks, block_size, enable_prefix_caching)
            self.pool = self.manager.block_pool
            self.block_size = block_size
            self.kv: list[int | None] = [None] * (num_blocks * block_size)
            self.names = itertools.count()
            self.waiting: dict[int, Request] = {}
            self.held: dict[int, Request] = {}
            self.tokens: dict[int, list[int]] = {}  # of waiting and held requests
            self.uncomputed: dict[int, int] = {}  # slots allocated for a step that has not run
            self.queries = self.hits = 0

        def pick(self, among: dict[int, Request], index: int) -> int:
            return sorted(among)[index % len(among)]

        @rule(stem=st.sampled_from(STEMS), length=st.integers(1, 12), tail=st.integers(0, 2), salt=SALTS)
        def add(self, stem: list[int], length: int, tail: int, salt: str | None) -> None:
            prompt = stem[:length] + [9] * tail
            name = next(self.names)
            self.waiting[name] = Request(str(name), prompt, SamplingParams(max_tokens=99), identity=salted(salt))
            self.tokens[name] = list(prompt)

        @precondition(lambda self: self.waiting)
        @rule(index=st.integers(0, 99), chunk=st.integers(1, 20), whole=st.booleans())
        def admit(self, index: int, chunk: int, whole: bool) -> None:
            name = self.pick(self.waiting, index)
            request = self.waiting[name]
            hits = self.manager.get_computed_blocks(request)
            num_hit = len(hits) * self.block_size
            assert num_hit < request.num_tokens
            states = fake_kv(self.tokens[name], request.identity)
            found = [self.kv[b.block_id * self.block_size + i] for b in hits for i in range(self.block_size)]
            assert found == states[:num_hit], "a hit on other content, another prefix or another salt"
            left = request.num_tokens - num_hit
            count = left if whole else min(chunk, left)
            if not self.manager.can_admit(request, hits, 0):
                return
            if request.num_cached_tokens < 0:
                self.queries += request.num_prompt_tokens * enable_prefix_caching
                self.hits += num_hit
                self.manager.record_first_admission(request, hits)
            assert self.manager.allocate_slots(request, count, hits)
            assert request.num_computed_tokens == num_hit
            self.held[name] = self.waiting.pop(name)
            self.uncomputed[name] = count

        @precondition(lambda self: self.uncomputed)
        @rule(index=st.integers(0, 99), token_id=st.integers(1, 3))
        def compute(self, index: int, token_id: int) -> None:
            name = sorted(self.uncomputed)[index % len(self.uncomputed)]
            request, count = self.held[name], self.uncomputed.pop(name)
            states = fake_kv(self.tokens[name], request.identity)
            for position in range(request.num_computed_tokens, request.num_computed_tokens + count):
                block = self.pool.blocks[request.block_ids[position // self.block_size]]
                assert (block.ref_cnt, block.block_hash) == (1, None), "a block that others can read is written"
                self.kv[block.block_id * self.block_size + position % self.block_size] = states[position]
            request.num_computed_tokens += count
            self.manager.cache_computed_blocks(request)
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token(token_id)
                self.tokens[name].append(token_id)

        @precondition(lambda self: self.held.keys() - self.uncomputed.keys())
        @rule(index=st.integers(0, 99), chunk=st.integers(1, 20))
        def advance(self, index: int, chunk: int) -> None:
            idle = {name: request for name, request in self.held.items() if name not in self.uncomputed}
            name = self.pick(idle, index)
            request = idle[name]
            count = min(chunk, request.num_tokens - request.num_computed_tokens)
            before, free = list(request.block_ids), self.pool.num_free_blocks
            needed = -(-(request.num_computed_tokens + count) // self.block_size) - len(before)
            assert self.manager.allocate_slots(request, count) == (needed <= free)
            assert request.block_ids[: len(before)] == before, "a block table only grows at its end"
            if needed <= free:
                assert len(request.block_ids) == len(before) + max(needed, 0)
                self.uncomputed[name] = count
            else:
                assert request.block_ids == before

        @precondition(lambda self: self.held)
        @rule(index=st.integers(0, 99))
        def preempt(self, index: int) -> None:
            """Also a victim that was scheduled in this step, whose slots are never written."""
            name = self.pick(self.held, index)
            request = self.held.pop(name)
            self.uncomputed.pop(name, None)
            self.manager.free(request)
            request.num_computed_tokens = 0
            self.waiting[name] = request

        @precondition(lambda self: self.held)
        @rule(index=st.integers(0, 99), again=st.booleans())
        def finish_or_abort(self, index: int, again: bool) -> None:
            name = self.pick(self.held, index)
            request = self.held.pop(name)
            self.uncomputed.pop(name, None)
            del self.tokens[name]
            self.manager.free(request)
            if again:
                self.manager.free(request)

        @rule()
        def reset(self) -> None:
            assert self.manager.reset_prefix_cache() == (not self.held)
            if not self.held:
                assert self.pool.block_states()["free"] == self.pool.num_usable_blocks

        @invariant()
        def pool_is_whole(self) -> None:
            check_integrity(self.pool, [request.block_ids for request in self.held.values()])

        @invariant()
        def blocks_hold_what_their_owners_think(self) -> None:
            for name, request in self.held.items():
                states = fake_kv(self.tokens[name], request.identity)[: request.num_computed_tokens]
                slots = [
                    request.block_ids[i // self.block_size] * self.block_size + i % self.block_size
                    for i in range(request.num_computed_tokens)
                ]
                assert [self.kv[slot] for slot in slots] == states
                num_indexed = request.num_computed_tokens // self.block_size * enable_prefix_caching
                for index, block_id in enumerate(request.block_ids):
                    named = self.pool.blocks[block_id].block_hash is not None
                    assert named == (index < num_indexed), "named exactly when full and computed"

        @invariant()
        def prefix_totals_agree(self) -> None:
            assert (self.manager.prefix_stats.queries, self.manager.prefix_stats.hits) == (self.queries, self.hits)

        def teardown(self) -> None:
            if not hasattr(self, "pool"):
                return
            for request in self.held.values():
                self.manager.free(request)
            check_integrity(self.pool, [])
            assert self.pool.num_free_blocks == self.pool.num_usable_blocks
            assert self.manager.reset_prefix_cache()

    run_state_machine_as_test(
        KVCacheMachine,
        settings=settings(
            max_examples=100 if enable_prefix_caching else 25,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
