"""The faults behind --engine-fault, and what --disable-log-stats leaves on /metrics."""

from __future__ import annotations

from typing import Any

import pytest

from engine import faults
from engine.config import ConfigError, EngineConfig
from engine.faults import StepFaults
from engine.metrics import EngineMetrics
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler


def run_requests(fault: str, count: int) -> Scheduler:
    config = EngineConfig(block_size=4, engine_fault=fault, allow_unsafe_replay=fault != "none")
    scheduler = Scheduler(config, num_gpu_blocks=33, max_model_len=64)
    for n in range(count):
        scheduler.add_request(Request(str(n), [n, 1, 2, 3, 4, 5], SamplingParams(max_tokens=3)))
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            scheduler.update_from_output(output, [7 if entry.samples else None for entry in output.scheduled])
    return scheduler


def test_a_leak_keeps_one_block_of_each_ended_request() -> None:
    pool = run_requests("block_leak", 5).kv_cache_manager.block_pool
    assert pool.num_usable_blocks - pool.num_free_blocks == 5
    sound = run_requests("none", 5).kv_cache_manager.block_pool
    assert sound.num_free_blocks == sound.num_usable_blocks


def test_a_stall_begins_after_some_steps_and_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "STALL_AFTER_STEPS", 2)
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 5:
            raise TimeoutError("the test has seen enough")

    monkeypatch.setattr(faults.time, "sleep", sleep)
    step = StepFaults("stall")
    step.before_step()
    step.before_step()
    assert naps == []
    with pytest.raises(TimeoutError):
        step.before_step()


@pytest.mark.parametrize(("fault", "kept"), [("memory_creep", 3), ("none", 0)])
def test_a_creep_keeps_memory_at_every_step(fault: str, kept: int) -> None:
    step = StepFaults(fault)
    for _ in range(3):
        step.before_step()
    assert [len(part) for part in step._kept] == [faults.CREEP_BYTES] * kept


def test_a_fault_needs_its_lock_opened() -> None:
    with pytest.raises(ConfigError, match=r"--engine-fault stall breaks the engine on purpose.*--allow-unsafe-replay"):
        EngineConfig(engine_fault="stall")


@pytest.mark.parametrize("quiet", [False, True])
def test_without_statistics_only_the_process_is_on_metrics(quiet: bool) -> None:
    stats: Any = run_requests("none", 1).stats()
    text = EngineMetrics(EngineConfig(disable_log_stats=quiet), lambda: stats).exposition().decode()
    assert "process_start_time_seconds" in text
    assert ("vllm:num_requests_running" in text) is not quiet
    assert ("kvoncall:kv_blocks" in text) is not quiet
