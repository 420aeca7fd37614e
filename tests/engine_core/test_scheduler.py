from __future__ import annotations

import pytest

from engine.config import ConfigError, EngineConfig
from engine.request import Request, RequestStatus, SamplingParams
from engine.scheduler import QueueFull, Scheduler, SchedulerOutput


def parts(output: SchedulerOutput) -> list[tuple[str, int, int, bool]]:
    return [
        (entry.request.request_id, entry.num_computed_tokens, entry.num_scheduled_tokens, entry.samples)
        for entry in output.scheduled
    ]


def names(requests: object) -> list[str]:
    return [request.request_id for request in requests]  # type: ignore[attr-defined]


def test_prompts_are_chunked_to_the_budget_and_decodes_come_first(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=32, max_num_seqs=4, max_num_batched_tokens=8)
    engine.add("a", range(5))
    engine.add("b", range(10, 20))
    output = engine.schedule()
    assert parts(output) == [("a", 0, 5, True), ("b", 0, 3, False)]
    engine.update(output, engine.execute(output))
    output = engine.schedule()
    assert parts(output) == [("a", 5, 1, True), ("b", 3, 7, True)]
    engine.update(output, engine.execute(output))
    assert parts(engine.schedule()) == [("a", 6, 1, True), ("b", 10, 1, True)]


def test_decodes_are_listed_before_a_chunk_of_an_older_request(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=32, max_num_seqs=4, max_num_batched_tokens=8, long_prefill_token_threshold=3)
    engine.add("long", range(12))
    engine.add("short", [40, 41])
    engine.step()
    assert names(engine.scheduler.running) == ["long", "short"]
    assert parts(engine.schedule()) == [("short", 2, 1, True), ("long", 3, 3, False)]


def test_long_prefill_threshold_applies_only_when_others_want_the_step(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=32, long_prefill_token_threshold=3)
    engine.add("alone", range(12))
    assert parts(engine.schedule()) == [("alone", 0, 12, True)]


def test_without_chunked_prefill_a_prompt_is_scheduled_whole_or_not_at_all(make_engine) -> None:
    engine = make_engine(
        num_gpu_blocks=64,
        max_model_len=16,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        enable_chunked_prefill=False,
        long_prefill_token_threshold=2,
    )
    for index in range(3):
        engine.add(f"r{index}", [index] * 10)
    output = engine.schedule()
    assert parts(output) == [("r0", 0, 10, True)]
    engine.update(output, engine.execute(output))
    assert parts(engine.schedule()) == [("r0", 10, 1, True), ("r1", 0, 10, True)]


def test_without_chunked_prefill_the_budget_must_hold_the_longest_prompt() -> None:
    config = EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=64)
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens \(64\).*100"):
        Scheduler(config, num_gpu_blocks=64, max_model_len=100)


def test_max_num_seqs_bounds_the_running_requests(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=64, max_num_seqs=2)
    for index in range(5):
        engine.add(f"r{index}", [index])
    engine.step()
    assert names(engine.scheduler.running) == ["r0", "r1"]
    assert names(engine.scheduler.waiting) == ["r2", "r3", "r4"]
    assert names(engine.run()) == ["r0", "r1", "r2", "r3", "r4"]


def test_the_head_of_the_queue_is_not_overtaken(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=9)
    engine.add("first", range(20))
    engine.step()
    engine.add("big", range(30, 46))
    engine.add("small", [49])
    engine.step()
    assert names(engine.scheduler.running) == ["first"]
    assert names(engine.scheduler.waiting) == ["big", "small"]


def test_a_prompt_is_admitted_only_when_all_of_it_fits(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=9, max_num_batched_tokens=64, max_num_seqs=8)  # 8 usable blocks
    engine.add("first", range(17), max_tokens=3)  # 5 blocks
    engine.add("second", range(20, 36), max_tokens=1)  # 4 blocks: its first would fit, all of it does not
    engine.step()
    assert names(engine.scheduler.running) == ["first"]
    assert engine.scheduler.stats().preemptions_total == 0
    assert names(engine.run()) == ["first", "second"]


def test_watermark_keeps_blocks_free_at_admission_but_not_for_ever(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=11, watermark=0.5)
    engine.add("wide", range(36), max_tokens=1)  # 9 of 10 blocks: admitted because nothing runs
    engine.step()
    engine.add("a", range(12), max_tokens=8)
    engine.add("b", [40] * 16, max_tokens=1)
    engine.step()
    assert names(engine.scheduler.running) == ["a"]  # 3 + 4 blocks would leave fewer than 5
    assert names(engine.run()) == ["a", "b"]


def test_a_full_hit_computes_the_last_block_again(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=32)
    engine.add("a", range(8))
    engine.run()
    again = engine.add("b", range(8))
    assert parts(engine.schedule()) == [("b", 4, 4, True)]
    assert again.num_cached_tokens == 4
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries_total, stats.prefix_hits_total) == (16, 4)


def test_requests_of_one_step_do_not_hit_each_other(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=32)
    engine.add("a", range(9))
    engine.add("b", range(9))
    assert parts(engine.schedule()) == [("a", 0, 9, True), ("b", 0, 9, True)]


def test_reuse_across_turns_and_salts(make_engine, fake_output) -> None:
    engine = make_engine(num_gpu_blocks=32)
    first = engine.add("turn-1", range(10), max_tokens=6, salt="tenant")
    engine.run()
    history = first.all_token_ids
    second = engine.add("turn-2", [*history, 7], salt="tenant")
    other = engine.add("other", [*history, 7], salt="another tenant")
    engine.run()
    assert second.num_cached_tokens == 12  # 15 of its 16 tokens were computed: three full blocks
    assert other.num_cached_tokens == 0
    assert second.output_token_ids == fake_output(second.prompt_token_ids, "tenant", 4)


def test_a_preempted_request_finding_its_own_blocks_is_no_hit(make_engine) -> None:
    """vLLM #25780: unshared prompts showed a 32% hit rate because recomputation was counted."""
    engine = make_engine(num_gpu_blocks=6, max_num_seqs=8)
    engine.add("a", [1] * 8, max_tokens=9)
    b = engine.add("b", [2] * 8, max_tokens=9)
    engine.step()
    output = engine.schedule()
    assert names(output.preempted) == ["b"]
    engine.scheduler.abort("a")
    engine.update(output, engine.execute(output))
    assert parts(engine.schedule()) == [("b", 8, 1, True)]  # its two full blocks were still there
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries_total, stats.prefix_hits_total, b.num_cached_tokens) == (16, 0, 0)


def test_eviction_under_preemption_is_not_evicted_before_reuse(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=13, max_num_seqs=8)
    for index in range(8):
        engine.add(f"r{index}", [index] * 8, max_tokens=12)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.preemptions_total > 0
    assert stats.evictions_total > 0
    assert stats.prefix_queries_total == 64
    assert stats.prefix_hits_total == stats.evicted_before_reuse_total == 0


def test_a_request_that_waits_for_room_is_counted_once(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=6)
    engine.add("a", range(16), max_tokens=4)
    engine.step()
    engine.add("b", range(16), max_tokens=1)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.stats().prefix_queries_total in (16, 32)
    engine.run()
    assert engine.scheduler.stats().prefix_queries_total == 32


def test_reset_prefix_cache(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=32)
    engine.add("a", range(9))
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    assert engine.add("b", range(9)).num_cached_tokens == -1
    engine.run()
    assert engine.scheduler.stats().prefix_hits_total == 0


def test_the_last_running_request_is_preempted_and_comes_back_first(make_engine, fake_output) -> None:
    engine = make_engine(num_gpu_blocks=6, max_num_seqs=8)  # 5 usable blocks of 4
    for name in "abc":
        engine.add(name, [ord(name) % 50] * 4, max_tokens=9)
    engine.step()
    assert names(engine.scheduler.running) == ["a", "b", "c"]
    output = engine.schedule()  # a and b take the last two blocks, c finds none
    assert names(output.preempted) == ["c"]
    assert names(engine.scheduler.waiting) == ["c"]
    c = output.preempted[0]
    assert (c.status, c.num_computed_tokens, c.block_ids) == (RequestStatus.PREEMPTED, 0, [])
    assert len(c.output_token_ids) == 1
    engine.update(output, engine.execute(output))
    engine.add("newer", [2], max_tokens=1)
    assert names(engine.scheduler.waiting) == ["c", "newer"]
    engine.run()
    assert c.output_token_ids == fake_output([ord("c") % 50] * 4, None, 9)


def test_nobody_is_admitted_in_a_step_that_preempted(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=6, max_num_seqs=8)
    for name in ("a", "b"):
        engine.add(name, range(8), max_tokens=9)
    engine.step()
    engine.add("tiny", [3], max_tokens=1)
    output = engine.schedule()
    assert names(output.preempted) == ["b"]
    assert [entry.request.request_id for entry in output.scheduled] == ["a"]  # though a block is free for tiny
    assert engine.pool.num_free_blocks >= 1
    assert names(engine.scheduler.waiting) == ["b", "tiny"]


def test_preemptions_are_counted_by_event_and_by_request(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=9, max_num_seqs=8)
    requests = [engine.add(f"r{i}", [i] * 6, max_tokens=20) for i in range(4)]
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.preemptions_total == sum(request.num_preemptions for request in requests)
    assert stats.preempted_requests_total == sum(request.num_preemptions > 0 for request in requests)
    assert stats.preemptions_total > stats.preempted_requests_total > 0


def test_by_priority_a_victim_scheduled_already_gives_its_tokens_back(make_engine) -> None:
    engine = make_engine(
        num_gpu_blocks=6, max_num_seqs=3, max_num_batched_tokens=5, long_prefill_token_threshold=2,
        scheduling_policy="priority",
    )  # fmt: skip
    engine.add("low", [1] * 11, max_tokens=9, priority=5)
    engine.step()
    engine.add("high", [2] * 6, max_tokens=9, priority=0)
    engine.add("mid", [3] * 8, max_tokens=9, priority=1)
    engine.step()
    engine.step()
    assert names(engine.scheduler.running) == ["low", "high", "mid"]
    output = engine.schedule()
    # low took 2 of 5 tokens before high found no block; with them back, mid has 3 and takes its 2.
    assert names(output.preempted) == ["low"]
    assert [(name, count) for name, _, count, _ in parts(output)] == [("high", 2), ("mid", 2)]
    engine.update(output, engine.execute(output))
    engine.run()


def test_among_equals_the_last_is_preempted_and_comes_back_before_newcomers(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=6, max_num_seqs=8, scheduling_policy="priority")
    for name in ("a", "b"):
        engine.add(name, range(8), max_tokens=9)
    engine.step()
    engine.add("new", range(8), max_tokens=9)
    assert names(engine.schedule().preempted) == ["b"]
    assert names(engine.scheduler.waiting) == ["b", "new"]


def test_waiting_by_priority_then_arrival(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=32, scheduling_policy="priority")
    for name, priority, arrival in (("d", 1, 2.0), ("b", 0, 5.0), ("c", 1, 1.0), ("a", -1, 9.0), ("e", 1, 2.0)):
        engine.add(name, [1], priority=priority, arrival_time=arrival)
    assert names(engine.scheduler.waiting) == ["a", "b", "c", "d", "e"]


def test_fcfs_ignores_priority(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=32)
    engine.add("a", [1], priority=5)
    engine.add("b", [1], priority=0)
    assert names(engine.scheduler.waiting) == ["a", "b"]


def test_a_request_larger_than_the_pool_is_rejected_and_blocks_nobody(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=4)  # 12 slots
    with pytest.raises(ValueError, match="may grow to 13 tokens but the whole KV cache holds 12"):
        engine.add("big", range(10), max_tokens=4)
    engine.add("fits", range(10), max_tokens=3)
    assert names(engine.run()) == ["fits"]


def test_a_prompt_that_leaves_no_room_in_the_context_is_rejected(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=32, max_model_len=8)
    with pytest.raises(ValueError, match="8 tokens; with a context limit of 8 it may have at most 7"):
        engine.add("long", range(8))


def test_a_full_queue_refuses(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=32, max_num_queued_reqs=2)
    engine.add("a", [1])
    engine.add("b", [1])
    with pytest.raises(QueueFull, match="the limit is 2"):
        engine.add("c", [1])
    engine.step()
    engine.add("c", [1])


def test_an_id_in_use_is_refused(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=32)
    engine.add("a", [1])
    with pytest.raises(ValueError, match="'a' is already in use"):
        engine.add("a", [2])
    engine.run()
    engine.add("a", [2])


def test_stops_at_max_tokens_and_at_the_context_limit(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=32, max_model_len=10)
    short = engine.add("short", range(4), max_tokens=3)
    long = engine.add("long", range(4), max_tokens=30)
    engine.run()
    assert (short.num_output_tokens, short.status.finish_reason) == (3, "length")
    assert (long.num_tokens, long.status.finish_reason) == (10, "length")


def test_stops_at_eos_and_stop_tokens(make_engine, fake_output) -> None:
    tokens = fake_output(range(4), None, 12)
    stop = tokens[4]
    first = tokens.index(stop) + 1
    engine = make_engine(num_gpu_blocks=32)
    at_eos = engine.add("eos", range(4), max_tokens=12, eos_token_id=stop)
    at_stop = engine.add("stop", range(4), max_tokens=12, stop_token_ids=[stop])
    ignoring = engine.add("ignore", range(4), max_tokens=12, eos_token_id=stop, ignore_eos=True)
    engine.run()
    assert at_eos.output_token_ids == at_stop.output_token_ids == tokens[:first]
    assert (at_eos.status.finish_reason, at_eos.stop_reason) == ("stop", None)
    assert (at_stop.status.finish_reason, at_stop.stop_reason) == ("stop", stop)
    assert ignoring.output_token_ids == tokens
    assert (ignoring.status.finish_reason, ignoring.stop_reason) == ("length", None)


def test_min_tokens_hold_back_every_stop_token(make_engine, fake_output) -> None:
    tokens = fake_output(range(4), None, 6)
    engine = make_engine(num_gpu_blocks=32)
    request = engine.add(
        "r", range(4), max_tokens=6, min_tokens=4, eos_token_id=tokens[0], stop_token_ids=[tokens[1], tokens[3]]
    )
    engine.run()
    assert request.output_token_ids == tokens[:4]
    assert request.stop_reason == tokens[3]


def test_abort_of_a_waiting_a_running_and_an_unknown_request(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=32, max_num_seqs=1)
    running = engine.add("running", range(6))
    waiting = engine.add("waiting", range(6))
    engine.step()
    assert engine.scheduler.abort("waiting") is waiting
    assert engine.scheduler.abort("running") is running
    assert engine.scheduler.abort("running") is None
    assert engine.scheduler.abort("unknown") is None
    assert {running.status.finish_reason, waiting.status.finish_reason} == {"abort"}
    assert not engine.scheduler.has_unfinished_requests()
    assert engine.pool.num_free_blocks == engine.pool.num_usable_blocks


def test_an_aborted_scheduled_request_keeps_its_blocks_until_the_step_is_over(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=32)
    gone = engine.add("gone", range(9))
    stays = engine.add("stays", range(20, 29))
    output = engine.schedule()
    engine.scheduler.abort("gone")
    assert len(gone.block_ids) == 3
    sampled = engine.execute(output)  # the model still writes and reads through its table
    assert engine.update(output, sampled) == []
    assert gone.block_ids == gone.output_token_ids == []
    assert engine.pool.get_cached_block(gone.block_hashes[0]) is None
    assert names(engine.scheduler.running) == ["stays"]
    assert len(stays.output_token_ids) == 1


def test_abort_of_a_request_preempted_in_the_same_step(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=6, max_num_seqs=8)
    for name in ("a", "b"):
        engine.add(name, range(8), max_tokens=9)
    engine.step()
    output = engine.schedule()
    assert names(output.preempted) == ["b"]
    engine.scheduler.abort("b")
    engine.update(output, engine.execute(output))
    assert names(engine.run()) == ["a"]


def test_finish_from_outside_after_the_step(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=32)
    request = engine.add("r", range(4), max_tokens=9)
    engine.step()
    assert engine.scheduler.finish("r", RequestStatus.FINISHED_STOPPED) is request
    assert request.status.finish_reason == "stop"
    assert engine.pool.num_free_blocks == engine.pool.num_usable_blocks


def test_schedule_twice_without_update_is_refused(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=32)
    engine.add("a", range(4))
    engine.schedule()
    with pytest.raises(RuntimeError, match="update_from_output"):
        engine.schedule()


def test_update_must_match_the_step_in_flight(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=32)
    empty = engine.schedule()
    assert empty.num_scheduled_tokens == 0
    assert engine.scheduler.update_from_output(empty, []) == []
    engine.add("a", range(4))
    output = engine.schedule()
    with pytest.raises(ValueError, match="1 requests were scheduled, got 2"):
        engine.scheduler.update_from_output(output, [1, 2])
    with pytest.raises(RuntimeError, match="not the step in flight"):
        engine.scheduler.update_from_output(SchedulerOutput(output.scheduled, 4, []), [1])
    engine.update(output, engine.execute(output))
    with pytest.raises(RuntimeError, match="not the step in flight"):
        engine.scheduler.update_from_output(output, [1])


def test_first_scheduled_time_is_the_first_admission() -> None:
    times = iter([10.0, 20.0])
    scheduler = Scheduler(EngineConfig(), num_gpu_blocks=8, max_model_len=32, clock=lambda: next(times))
    request = Request("a", [1, 2], SamplingParams())
    scheduler.add_request(request)
    scheduler.schedule()
    assert request.first_scheduled_time == 10.0


def test_stats_of_an_idle_scheduler(make_engine) -> None:
    engine = make_engine(num_gpu_blocks=8)
    stats = engine.scheduler.stats()
    assert (stats.running, stats.waiting, stats.kv_usage, stats.preemptions_total) == (0, 0, 0, 0)
    assert stats.block_states == {"free": 7, "cached": 0, "used": 0, "shared": 0}
