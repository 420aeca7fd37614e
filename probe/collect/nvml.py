"""What the GPUs of this machine say of themselves, through NVML: memory, load, power, throttling, ECC and XID errors.

A machine without a driver is a normal one: there are no samples, and `absent` says why. What a GPU does not support is
left out. XID errors are counted from when the reader began, since NVML only tells them as they happen.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from probe.store import Sample

RETRY_S = 300.0  # a driver may be loaded later
_MAX_EVENTS = 100

# Reasons that take clocks away; idling and clocks set by the user are no throttling.
_REASONS = {
    "sw_power_cap": "nvmlClocksEventReasonSwPowerCap",
    "hw_slowdown": "nvmlClocksEventReasonHwSlowdown",
    "sync_boost": "nvmlClocksEventReasonSyncBoost",
    "sw_thermal": "nvmlClocksEventReasonSwThermalSlowdown",
    "hw_thermal": "nvmlClocksEventReasonHwThermalSlowdown",
    "hw_power_brake": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
}


class GpuReader:
    """Reads all GPUs; blocking, from one thread at a time. `nvml` is the module `pynvml` or what acts like it."""

    def __init__(self, nvml: Any = None, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._given = nvml
        self._nvml: Any = None  # set while the library is initialized
        self._monotonic = monotonic
        self._retry_at = float("-inf")
        self._events: Any = None
        self._xids: dict[str, int] = {}
        self._new_xids: list[tuple[str, int]] = []
        self._lock = threading.Lock()
        self.absent: str | None = None

    def read(self, target: str, ts: float) -> list[Sample]:
        """Samples of every GPU, label `gpu` (its index), as samples of `target` at `ts`; none without a driver."""
        with self._lock:
            if not self._begin():
                return []
            nvml, found = self._nvml, []
            try:
                self._read_events()
                for index in range(nvml.nvmlDeviceGetCount()):
                    gpu = str(index)
                    with contextlib.suppress(nvml.NVMLError):  # lost, or of another user: the others still count
                        handle = nvml.nvmlDeviceGetHandleByIndex(index)
                        values = self._values(handle, gpu)
                        found += [Sample(target, m, {"gpu": gpu, **labels}, ts, v) for m, labels, v in values]
            except nvml.NVMLError as error:
                self._give_up(f"NVML stopped answering ({error}).")
            return found

    def new_xids(self) -> list[tuple[str, int]]:
        """(GPU, XID) reported since this was last asked."""
        with self._lock:
            found, self._new_xids = self._new_xids, []
            return found

    def close(self) -> None:
        """Let go of the library."""
        with self._lock:
            if self._nvml is not None:
                self._give_up("The reader was closed.")

    def _begin(self) -> bool:
        if self._nvml is not None:
            return True
        if self._monotonic() < self._retry_at:
            return False
        self._retry_at = self._monotonic() + RETRY_S
        try:
            nvml = self._given or importlib.import_module("pynvml")
        except ImportError:
            self.absent = "The package nvidia-ml-py is not installed: GPUs are not read."
            return False
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self.absent = f"No NVIDIA driver answers here ({error}): GPUs are not read."
            return False
        self._nvml, self.absent = nvml, None
        self._watch_xids()
        return True

    def _give_up(self, why: str) -> None:
        nvml, self._nvml = self._nvml, None
        self.absent = why
        if self._events is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(self._events)
            self._events = None
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()

    def _values(self, handle: Any, gpu: str) -> Iterator[tuple[str, dict[str, str], float]]:
        """(canonical metric, labels, value) of what the GPU supports."""
        nvml = self._nvml
        if memory := self._ask("nvmlDeviceGetMemoryInfo", handle):
            yield "device_memory_used_bytes", {}, float(memory.used)
            yield "device_memory_total_bytes", {}, float(memory.total)
        if rates := self._ask("nvmlDeviceGetUtilizationRates", handle):
            yield "device_utilization_ratio", {}, rates.gpu / 100
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
        if milliwatts is not None:
            yield "device_power_watts", {}, milliwatts / 1000
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if bits is None:  # drivers before 535 know it by its old name
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if bits is not None:
            for reason, constant in _REASONS.items():
                yield "device_throttled", {"reason": reason}, float(bool(bits & getattr(nvml, constant)))
        uncorrected = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        errors = self._ask("nvmlDeviceGetTotalEccErrors", handle, *uncorrected)
        if errors is not None:
            yield "device_ecc_errors_total", {}, float(errors)
        if gpu in self._xids:
            yield "device_xid_errors_total", {}, float(self._xids[gpu])

    def _ask(self, function: str, *args: object) -> Any:
        """What NVML answers, or None where the GPU or the driver does not know it."""
        try:
            return getattr(self._nvml, function)(*args)
        except self._nvml.NVMLError as error:
            lost = (self._nvml.NVML_ERROR_GPU_IS_LOST, self._nvml.NVML_ERROR_UNINITIALIZED)
            if getattr(error, "value", None) in lost:
                raise
            return None

    def _watch_xids(self) -> None:
        """Ask for XID events of the GPUs that tell them."""
        nvml = self._nvml
        try:
            self._events = nvml.nvmlEventSetCreate()
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError:
            return  # not under this driver (Windows, some virtual GPUs)
        for index in range(count):
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
                self._xids.setdefault(str(index), 0)

    def _read_events(self) -> None:
        nvml = self._nvml
        if self._events is None:
            return
        for _ in range(_MAX_EVENTS):
            try:
                data = nvml.nvmlEventSetWait_v2(self._events, 0)
                gpu = str(nvml.nvmlDeviceGetIndex(data.device))
            except nvml.NVMLError:  # nothing (more) happened
                return
            self._xids[gpu] = self._xids.get(gpu, 0) + 1
            self._new_xids.append((gpu, int(data.eventData)))
