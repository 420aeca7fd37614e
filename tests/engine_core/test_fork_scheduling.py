"""When children of a fork wait, when they come, and what they take from their leader."""

from __future__ import annotations

from typing import Any

import pytest

from engine.cache_identity import CacheIdentity
from engine.kv_cache_manager import KVCacheManager
from engine.request import Request, RequestStatus, SamplingParams
from engine.scheduler import QueueFull

PROMPT = list(range(10))  # two blocks of four and a half


def ids(requests: Any) -> list[str]:
    return [request.request_id for request in requests]


def add_family(engine: Any, num_children: int = 2, **options: Any) -> tuple[Request, list[Request]]:
    leader = engine.add("leader", PROMPT, 6)
    return leader, [engine.add(f"child{n}", PROMPT, 6, fork_of=leader, **options) for n in range(num_children)]


def test_children_wait_for_the_leaders_first_token_and_come_before_everybody_else(make_engine: Any) -> None:
    engine = make_engine(num_gpu_blocks=32, max_num_seqs=3, max_num_batched_tokens=6)  # the prompt takes two steps
    leader, children = add_family(engine)
    assert ids(engine.scheduler.parked) == ids(children)
    engine.step()
    assert leader.num_output_tokens == 0
    assert engine.scheduler.num_waiting == 2
    engine.step()
    assert leader.num_output_tokens == 1
    engine.add("stranger", [30, 31])
    assert ids(engine.scheduler.waiting) == [*ids(children), "stranger"]
    engine.step()
    assert ids(engine.scheduler.running) == ["leader", *ids(children)]
    assert [child.num_cached_tokens for child in children] == [9, 9]
    assert engine.scheduler.stats().forks_total == engine.scheduler.stats().fork_copies_total == 2
    engine.run()


def test_children_share_whole_blocks_and_copy_the_one_they_write_into(make_engine: Any) -> None:
    engine = make_engine(num_gpu_blocks=32)
    leader, (child,) = add_family(engine, 1)
    engine.step()
    output = engine.schedule()
    (copy,) = output.block_copies
    assert (copy.request, copy.index, copy.source) == (child, 2, leader.block_ids[2])
    assert child.block_ids == [*leader.block_ids[:2], copy.target]
    assert copy.source_row_of is None
    engine.update(output, engine.execute(output))
    engine.run()
    assert child.output_token_ids == leader.output_token_ids


def test_a_token_that_begins_a_block_needs_no_copy(make_engine: Any) -> None:
    engine = make_engine(num_gpu_blocks=32)
    leader = engine.add("leader", PROMPT[:9])
    child = engine.add("child", PROMPT[:9], fork_of=leader)
    engine.step()
    assert engine.schedule().block_copies == []
    assert child.num_cached_tokens == 8
    assert child.block_ids[:2] == leader.block_ids[:2]
    assert child.block_ids[2] != leader.block_ids[2]


def test_without_sharing_children_are_requests_like_others(make_engine: Any) -> None:
    engine = make_engine(num_gpu_blocks=32, enable_fork_sharing=False, enable_prefix_caching=False)
    _, children = add_family(engine)
    engine.step()
    assert [child.num_cached_tokens for child in children] == [0, 0]
    assert engine.scheduler.stats().forks_total == 0


@pytest.mark.parametrize("ending", ["abort", "finish"])
def test_children_of_a_leader_that_is_gone_come_alone(make_engine: Any, ending: str) -> None:
    chunk = 64 if ending == "finish" else 6  # aborted before its first token
    engine = make_engine(num_gpu_blocks=32, max_num_seqs=6, max_num_batched_tokens=chunk)
    leader = engine.add("leader", PROMPT, 1)
    children = [engine.add(f"child{n}", PROMPT, 3, fork_of=leader) for n in range(2)]
    engine.add("stranger", [40, 41])
    engine.step()
    if ending == "abort":
        engine.scheduler.abort("leader")
    assert leader.status.is_finished
    assert ids(engine.scheduler.waiting)[:2] == ids(children)
    engine.run()
    assert engine.scheduler.stats().forks_total == 0
    assert [child.status for child in children] == [RequestStatus.FINISHED_LENGTH] * 2


def test_a_parked_child_can_be_aborted(make_engine: Any) -> None:
    engine = make_engine(num_gpu_blocks=32)
    _, (first, second) = add_family(engine)
    assert engine.scheduler.abort("child0") is first
    engine.check()
    engine.run()
    assert (first.num_output_tokens, second.num_output_tokens) == (0, 6)
    assert len(engine.scheduler.parked) == 0


def test_parked_children_count_as_waiting(make_engine: Any) -> None:
    engine = make_engine(num_gpu_blocks=32, max_num_queued_reqs=2)
    leader, _ = add_family(engine, 1)
    assert engine.scheduler.stats().waiting == 2
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        engine.add("more", PROMPT, fork_of=leader)


def test_room_for_the_copy_is_part_of_admission(make_engine: Any) -> None:
    engine = make_engine(num_gpu_blocks=4)  # the leader's three blocks are all there are
    leader = engine.add("leader", PROMPT, 2)
    child = engine.add("child", PROMPT, 2, fork_of=leader)
    engine.step()
    output = engine.schedule()
    assert [entry.request for entry in output.scheduled] == [leader]
    assert output.block_copies == child.block_ids == []
    engine.update(output, engine.execute(output))
    engine.run()
    assert child.output_token_ids == leader.output_token_ids


def test_a_beam_takes_what_it_has_in_common(make_engine: Any) -> None:
    engine = make_engine(num_gpu_blocks=32, enable_prefix_caching=False)
    leader = engine.add("leader", PROMPT, 12)
    for _ in range(6):
        engine.step()
    said = leader.all_token_ids
    beam = engine.add("beam", [*said[:13], 49 - said[13], 3], fork_of=leader)
    engine.step()
    assert beam.num_cached_tokens == 13
    assert beam.fork_of is None
    engine.run()


def test_a_choice_for_every_position_takes_nothing(make_engine: Any) -> None:
    engine = make_engine(num_gpu_blocks=32)
    leader = engine.add("leader", PROMPT)
    child = engine.add("child", PROMPT, fork_of=leader, prompt_logprobs=0)
    engine.run()
    assert child.num_cached_tokens == 0


def computed(manager: KVCacheManager, tokens: list[int], num_computed: int) -> Request:
    request = Request("leader", tokens, SamplingParams())
    assert manager.allocate_slots(request, num_computed)
    request.num_computed_tokens = num_computed
    manager.cache_computed_blocks(request)
    return request


@pytest.mark.parametrize(
    ("num_computed", "num_tokens", "shared"),
    [(10, 11, 10), (10, 10, 9), (10, 8, 4), (8, 8, 4), (8, 9, 8), (9, 9, 8), (5, 30, 5), (3, 4, 3), (4, 4, 0)],
)
def test_open_blocks_are_copied_only_while_the_leader_has_them_open(
    num_computed: int, num_tokens: int, shared: int
) -> None:
    manager = KVCacheManager(32, 4, keeps_open_blocks=True)
    leader = computed(manager, list(range(30)), num_computed)
    child = Request("child", list(range(num_tokens)), SamplingParams())
    fork = manager.fork(leader, child)
    assert (0 if fork is None else fork.num_tokens) == shared
    if fork is not None:
        assert manager.allocate_slots(child, 1, (), fork)
        copies = manager.take_block_copies()
        assert [copy.source_row_of for copy in copies] == [leader] * (shared % 4 > 0)
        assert manager.take_block_copies() == []


def test_nothing_is_shared_with_another_identity_or_other_weights() -> None:
    manager = KVCacheManager(32, 4)
    leader = computed(manager, PROMPT, 10)
    stranger = Request("child", PROMPT, SamplingParams(), identity=CacheIdentity((("tenant", "b"),)))
    child = Request("child", PROMPT, SamplingParams())
    assert manager.fork(leader, stranger) is None
    assert manager.fork(leader, child) is not None
    manager.new_weights()
    assert manager.fork(leader, child) is None


def test_a_fork_that_does_not_fit_changes_nothing() -> None:
    manager = KVCacheManager(4, 4)
    leader = computed(manager, PROMPT, 10)
    child = Request("child", PROMPT, SamplingParams())
    fork = manager.fork(leader, child)
    assert fork is not None
    assert not manager.can_admit(child, (), 0, fork)
    assert not manager.allocate_slots(child, 1, (), fork)
    assert child.block_ids == manager.take_block_copies() == []
    assert manager.block_pool.block_states()["shared"] == 0


def test_the_copy_of_a_child_that_is_gone_is_not_made() -> None:
    manager = KVCacheManager(32, 4)
    leader = computed(manager, PROMPT, 10)
    child = Request("child", PROMPT, SamplingParams())
    assert manager.allocate_slots(child, 1, (), manager.fork(leader, child))
    manager.free(child)
    assert manager.take_block_copies() == []
    assert manager.block_pool.num_free_blocks == 31 - 3


def test_new_weights_preempt_everybody_in_order(make_engine: Any) -> None:
    engine = make_engine(num_gpu_blocks=32)
    for name in ("a", "b", "c"):
        engine.add(name, PROMPT, 4)
    engine.step()
    assert ids(engine.scheduler.new_weights()) == ["c", "b", "a"]
    engine.next_position.clear()
    assert ids(engine.scheduler.waiting) == ["a", "b", "c"]
    assert engine.scheduler.stats().weights_version == 1
    engine.check()
    engine.run()


def test_new_weights_wait_for_the_step_in_flight(make_engine: Any) -> None:
    engine = make_engine(num_gpu_blocks=32)
    engine.add("a", PROMPT)
    engine.schedule()
    with pytest.raises(RuntimeError, match="in flight"):
        engine.scheduler.new_weights()
