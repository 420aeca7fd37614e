"""Memory is real: the measured peak, the pool that is there, the limit that kills."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import device as device_module
from engine.config import ConfigError, EngineConfig
from engine.device import is_out_of_memory, measure_activation_peak, resolve_device
from engine.engine import LLMEngine
from engine.runner import prompt_logprobs_rows

MIB = 1024**2
CPU = torch.device("cpu")

SERVE = """
import sys
import torch
from engine.config import EngineConfig
from engine.device import apply_memory_limit, is_out_of_memory
from engine.engine import LLMEngine
from engine.request import SamplingParams

torch.set_num_threads(1)
config = EngineConfig.from_args(sys.argv[1:])
apply_memory_limit(config.device_memory)
try:
    engine = LLMEngine(config)
    print("started", engine.plan.num_gpu_blocks, flush=True)
    for i in range(3):
        engine.add_request(str(i), [5 + i] * 2000, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                print("finished", output.request_id, flush=True)
except Exception as error:
    print(type(error).__name__, error, flush=True)
    sys.exit(12 if is_out_of_memory(error) else 1)
"""


@pytest.fixture(scope="module")
def wide_model(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose activations outweigh its weights: 2,048 tokens need 48 MiB in the MLP alone."""
    return Path(
        lab.make_llama(
            tmp_path_factory.mktemp("wide"), num_hidden_layers=1, intermediate_size=2048, max_position_embeddings=2048
        )
    )


def serve(model: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs SERVE in a process of its own that lives under --device-memory."""
    command = [sys.executable, "-c", SERVE, "--model", str(model), "--device-memory", "192MiB", *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(device_module.__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8_per_token_head", "int4_symmetric", "int4_kivi"])
def test_a_pool_sized_by_profile_serves_the_load(wide_model: Path, kv_cache_dtype: str) -> None:
    result = serve(wide_model, "--max-num-seqs", "4", "--kv-cache-dtype", kv_cache_dtype)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("finished") == 3


def test_a_pool_that_leaves_no_room_dies_of_a_genuine_allocation_failure_under_load(wide_model: Path) -> None:
    result = serve(wide_model, "--max-num-seqs", "4", "--kv-cache-memory-bytes", "165MiB")
    assert result.returncode == 12, result.stdout + result.stderr
    assert result.stdout.startswith("started")
    assert "can't allocate memory" in result.stdout
    assert "finished 2" not in result.stdout


def test_smaller_steps_are_a_remedy_for_the_same_pool(wide_model: Path) -> None:
    flags = ("--max-num-seqs", "4", "--kv-cache-memory-bytes", "165MiB", "--max-num-batched-tokens", "256")
    result = serve(wide_model, *flags)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("finished") == 3


def test_a_pool_larger_than_the_device_dies_at_start(wide_model: Path) -> None:
    result = serve(wide_model, "--num-gpu-blocks-override", str(400 * MIB // (16 * 256)))
    assert result.returncode == 12, result.stdout + result.stderr
    assert "started" not in result.stdout


def test_the_peak_of_a_known_allocation() -> None:
    peak = measure_activation_peak(lambda: torch.ones(64 * MIB // 4).sum(), CPU)
    assert 62 * MIB < peak < 72 * MIB


def test_memory_the_allocator_has_kept_does_not_hide_the_peak() -> None:
    kept = [torch.ones(3 * 1024) for _ in range(5000)]  # 60 MB in pieces small enough to stay in the heap
    last = torch.ones(1024)
    del kept
    peak = measure_activation_peak(lambda: [torch.ones(3 * 1024) for _ in range(4000)], CPU)
    assert 44 * MIB < peak < 60 * MIB
    assert last.sum() == 1024


def test_the_measured_peak_follows_the_token_budget(wide_model: Path, lab: Any) -> None:
    peaks = [
        lab.make_engine(
            wide_model, max_num_batched_tokens=budget, max_num_seqs=4, num_gpu_blocks_override=1000
        ).plan.activation_peak_bytes
        for budget in (512, 2048)
    ]
    assert peaks[0] > 512 * 3 * 2048 * 4  # gate, up and their product, float32
    assert peaks[1] > 2048 * 3 * 2048 * 4
    assert peaks[1] > 2 * peaks[0]


def test_the_plan_adds_up_and_the_pool_is_resident(wide_model: Path, lab: Any) -> None:
    before = device_module._status_bytes("RssAnon")
    engine: LLMEngine = lab.make_engine(wide_model, device_memory=256 * MIB, max_num_batched_tokens=512, block_size=16)
    plan = engine.plan
    pool = sum(cache.nbytes for cache in engine.runner.kv_caches)
    assert plan.source == "profile"
    assert pool == plan.kv_cache_bytes > 128 * MIB
    assert plan.weights_bytes == engine.runner.model.weights_bytes > 0
    budget = 256 * MIB * engine.config.gpu_memory_utilization
    spent = plan.weights_bytes + plan.activation_peak_bytes + pool + plan.bookkeeping_bytes
    assert 0 <= budget - spent < (pool + plan.bookkeeping_bytes) / plan.num_gpu_blocks
    assert device_module._status_bytes("RssAnon") - before > 0.9 * pool


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("std::bad_alloc"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_is_recognized_also_as_a_cause(error: Exception) -> None:
    assert is_out_of_memory(error)
    wrapped = ValueError("step failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


def test_a_real_refusal_of_the_allocator_is_recognized() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", [None, ValueError("memory"), RuntimeError("shape mismatch"), OSError(2, "no file")])
def test_other_errors_are_not_out_of_memory(error: Exception | None) -> None:
    assert not is_out_of_memory(error)


def test_cuda_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(EngineConfig(device="auto")) == CPU
    with pytest.raises(ConfigError, match=r"--device cuda: torch sees no CUDA device"):
        resolve_device(EngineConfig(device="cuda"))


def test_a_limit_above_the_hard_one_is_refused_in_words() -> None:
    code = (
        "import resource\n"
        "from engine.device import apply_memory_limit\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (1 << 33, 1 << 33))\n"
        "apply_memory_limit(1 << 40)\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(device_module.__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert result.returncode == 1
    assert "ulimit -d" in result.stderr


@pytest.mark.parametrize("vocab_size", [1_046, 262_144, 2**30])
def test_judging_a_prompt_holds_few_logits_whatever_the_vocabulary(vocab_size: int) -> None:
    rows = prompt_logprobs_rows(vocab_size)
    assert 1 <= rows <= 256
    assert rows == 1 or rows * vocab_size <= 2**23
