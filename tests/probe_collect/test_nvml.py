"""GPUs through a fake of `pynvml`: what they tell, what they cannot, and a machine without them."""

# ruff: noqa: N802, N815 (NVML's own names)
from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from probe.collect.nvml import GpuReader
from probe.store import Sample


class FakeError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeNvml:
    """Two GPUs; `broken` maps a function's name to the error it raises, `lost` holds GPUs that are gone."""

    NVMLError = FakeError
    NVML_ERROR_UNINITIALIZED, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST = 1, 3, 10, 15
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    nvmlEventTypeXidCriticalError = 8
    nvmlClocksEventReasonSwPowerCap = 4
    nvmlClocksEventReasonHwSlowdown = 8
    nvmlClocksEventReasonSyncBoost = 16
    nvmlClocksEventReasonSwThermalSlowdown = 32
    nvmlClocksEventReasonHwThermalSlowdown = 64
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 128

    def __init__(self) -> None:
        self.broken: dict[str, int] = {}
        self.lost: set[int] = set()
        self.events: list[tuple[int, int]] = []
        self.registered: list[int] = []
        self.running = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "broken"):
            raise FakeError(self.broken[name])
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        self.running += 1

    def nvmlShutdown(self) -> None:
        self.running -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise FakeError(self.NVML_ERROR_GPU_IS_LOST)
        return index

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:
        return SimpleNamespace(used=10 + handle, total=80)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> object:
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 412_500

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return 1 + 4 + 64

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 128

    def nvmlDeviceGetTotalEccErrors(self, handle: int, error_type: int, counter: int) -> int:
        assert (error_type, counter) == (1, 0)
        return 2

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlEventSetFree(self, events: str) -> None:
        self.registered.clear()

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:
        assert (kinds, events) == (8, "set")
        self.registered.append(handle)

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> object:
        assert timeout_ms == 0
        if not self.events:
            raise FakeError(self.NVML_ERROR_TIMEOUT)
        gpu, xid = self.events.pop(0)
        return SimpleNamespace(device=gpu, eventType=8, eventData=xid)


def of(found: list[Sample], metric: str, gpu: str = "0") -> dict[str, float]:
    return {s.labels.get("reason", ""): s.value for s in found if (s.metric, s.labels["gpu"]) == (metric, gpu)}


def test_what_a_gpu_tells_in_base_units() -> None:
    reader = GpuReader(FakeNvml())
    found = reader.read("t", 5.0)
    assert {(s.target, s.ts) for s in found} == {("t", 5.0)}
    assert of(found, "device_memory_used_bytes", "1") == {"": 11.0}
    assert of(found, "device_memory_total_bytes") == {"": 80.0}
    assert of(found, "device_utilization_ratio") == {"": 0.97}
    assert of(found, "device_power_watts") == {"": 412.5}
    assert of(found, "device_ecc_errors_total") == {"": 2.0}
    assert of(found, "device_xid_errors_total") == {"": 0.0}
    throttled = of(found, "device_throttled")
    assert {reason for reason, on in throttled.items() if on} == {"sw_power_cap", "hw_thermal"}
    assert len(throttled) == 6
    assert reader.absent is None


def test_xid_errors_are_counted_and_told_once() -> None:
    nvml = FakeNvml()
    reader = GpuReader(nvml)
    nvml.events = [(1, 79), (1, 48)]
    found = reader.read("t", 1.0)
    assert of(found, "device_xid_errors_total", "1") == {"": 2.0}
    assert of(found, "device_xid_errors_total", "0") == {"": 0.0}
    assert reader.new_xids() == [("1", 79), ("1", 48)]
    assert reader.new_xids() == []
    assert of(reader.read("t", 2.0), "device_xid_errors_total", "1") == {"": 2.0}


def test_what_a_gpu_does_not_support_is_left_out() -> None:
    nvml = FakeNvml()
    nvml.broken = {
        "nvmlDeviceGetTotalEccErrors": 3,
        "nvmlEventSetCreate": 3,
        "nvmlDeviceGetUtilizationRates": 3,
        "nvmlDeviceGetCurrentClocksEventReasons": 13,
    }
    found = GpuReader(nvml).read("t", 1.0)
    assert {s.metric for s in found if s.labels["gpu"] == "0"} == {
        "device_memory_used_bytes",
        "device_memory_total_bytes",
        "device_power_watts",
        "device_throttled",
    }
    assert of(found, "device_throttled")["hw_power_brake"] == 1.0  # by the name older drivers know


def test_a_lost_gpu_takes_no_other_with_it() -> None:
    nvml = FakeNvml()
    reader = GpuReader(nvml)
    reader.read("t", 1.0)
    nvml.lost = {0}
    assert {s.labels["gpu"] for s in reader.read("t", 2.0)} == {"1"}


def test_a_driver_that_goes_away_is_tried_again_later() -> None:
    nvml, now = FakeNvml(), [0.0]
    reader = GpuReader(nvml, monotonic=lambda: now[0])
    assert reader.read("t", 1.0)
    nvml.broken = {"nvmlDeviceGetCount": 1}
    assert reader.read("t", 2.0) == []
    assert "stopped answering" in (reader.absent or "")
    assert nvml.running == 0
    nvml.broken = {}
    assert reader.read("t", 3.0) == []
    now[0] = 301.0
    assert reader.read("t", 4.0)
    reader.close()
    assert nvml.running == 0


def test_no_driver_is_a_normal_state() -> None:
    nvml = FakeNvml()
    nvml.broken = {"nvmlInit": 12}
    reader = GpuReader(nvml)
    assert reader.read("t", 1.0) == []
    assert reader.absent == "No NVIDIA driver answers here (NVML error 12): GPUs are not read."
    reader.close()


def test_no_package_is_a_normal_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reader = GpuReader()
    assert reader.read("t", 1.0) == []
    assert "nvidia-ml-py is not installed" in (reader.absent or "")


def test_the_real_package_has_every_name_that_is_used() -> None:
    """The fake could otherwise hide a name that NVIDIA's package does not have."""
    import pynvml

    missing = [name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML")) and not hasattr(pynvml, name)]
    assert missing == []
