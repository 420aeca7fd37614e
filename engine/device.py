"""The device an engine runs on and its memory: the hard limit, the measured peak, what counts as running out.

A CPU has no memory of its own, so the process itself is the device: `RLIMIT_DATA` caps its private writable
memory at what it holds when the limit is applied plus `--device-memory`. Beyond it the kernel refuses, torch's
allocator raises, and the engine dies of a genuine allocation failure.
"""

from __future__ import annotations

import ctypes
import errno
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from engine.config import ConfigError, EngineConfig, ModelDims

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK_RSS = "5"  # proc(5): resets VmHWM to the present VmRSS
_M_MMAP_THRESHOLD = -3  # mallopt(3)
_MMAP_THRESHOLD_BYTES = 256 * 1024
_OOM_MESSAGES = ("can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc", "out of memory")


def resolve_device(config: EngineConfig) -> torch.device:
    """`--device` as torch has it; `ConfigError` when CUDA is asked for and there is none."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("--device cuda: torch sees no CUDA device; use --device cpu or install a CUDA build of torch")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def resolve_dtype(config: EngineConfig, dims: ModelDims) -> torch.dtype:
    """The dtype of weights and activations as torch has it; raises as `config.resolved_dtype`."""
    dtype: torch.dtype = getattr(torch, config.resolved_dtype(dims))
    return dtype


def device_memory_bytes(config: EngineConfig, device: torch.device) -> int:
    """Memory to plan with: what a GPU has, or `--device-memory` when the device is a CPU."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total
    return config.device_memory


def apply_memory_limit(device_memory: int) -> int:
    """Caps this process at its present private memory plus `device_memory` bytes; returns the limit in bytes.

    Call it after the imports and before loading the model: what is there already does not count against the
    device. Raises `ConfigError` where the system cannot enforce the limit.
    """
    if not sys.platform.startswith("linux") or not _STATUS.exists():
        raise ConfigError(
            "the CPU device needs Linux: only there does RLIMIT_DATA limit the memory a process can allocate"
        )
    limit = _status_bytes("VmData") + device_memory
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY and limit > hard:
        raise ConfigError(
            f"--device-memory {device_memory} needs a data limit of {limit} bytes, but this process may have at most "
            f"{hard} (ulimit -d); lower --device-memory or raise the limit"
        )
    _return_large_allocations_at_once()
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return limit


def measure_activation_peak(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that `run` needs at its worst moment beyond what is held before it; calls `run` twice.

    On the CPU this is resident memory, as the kernel counts it (VmHWM). The first call pages in code and lets
    libraries set up the buffers they keep; only those buffers count from it. Memory that the allocator has kept
    from earlier work would hide what `run` allocates, so it is handed back first.
    """
    if device.type == "cuda":
        run()
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - held
    _release_free_memory()
    anonymous = _status_bytes("RssAnon")
    run()
    _release_free_memory()
    kept = max(0, _status_bytes("RssAnon") - anonymous)
    _CLEAR_REFS.write_text(_RESET_PEAK_RSS)
    resident = _status_bytes("VmRSS")
    run()
    peak = _status_bytes("VmHWM") - resident
    _release_free_memory()
    return kept + max(0, peak)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or the one it was raised from, means that memory could not be allocated."""
    if error is None:
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OOM_MESSAGES):
        return True
    return is_out_of_memory(error.__cause__)


def _return_large_allocations_at_once() -> None:
    """Keeps freed activations from staying in the heap as holes, which the limit would go on counting.

    glibc raises its mmap threshold up to 32 MiB as blocks are freed; setting it switches that off. The holes of a
    load of long prompts were seen to fill what the profile had left: the peak it measures is of live memory.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


def _release_free_memory() -> None:
    """Returns memory that is free inside the process to the system, so that using it again shows."""
    ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(field: str) -> int:
    """A memory field of /proc/self/status, in bytes."""
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ConfigError(f"/proc/self/status has no field {field}; the CPU device cannot measure its memory here")
