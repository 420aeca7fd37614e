"""Figures from stored samples: increases over resets, rates with their denominator, peaks that are never sums."""

from __future__ import annotations

from typing import Any

import pytest

from probe.load.report import LoadReport, RequestRecord
from probe.replay.drill import allocation_bytes
from probe.replay.evidence import observed_traffic, peak_in_flight, token_pace, traffic, window_metrics
from probe.store import Sample, Store

T0 = 1_700_000_000.0


@pytest.fixture
def target(store: Store) -> str:
    store.targets.upsert("t", url="http://127.0.0.1:1", kind="drill")
    return "t"


def write(store: Store, metric: str, values: list[float], **labels: str) -> None:
    store.samples.write(Sample("t", metric, labels, T0 + n, value) for n, value in enumerate(values))


def test_rate_is_preemptions_over_requests_in_service(store: Store, target: str) -> None:
    write(store, "preemptions_total", [100, 101, 104, 104], engine="0")
    write(store, "requests_finished_total", [50, 60, 80, 90], engine="0", finished_reason="length")
    write(store, "requests_finished_total", [5, 5, 5, 7], engine="0", finished_reason="stop")
    write(store, "requests_running", [3, 9, 6, 4], engine="0")
    write(store, "requests_waiting", [0, 2, 1, 0], engine="0")
    write(store, "kv_usage_ratio", [0.2, 0.97, 0.5, 0.1], engine="0")
    write(store, "kv_usage_ratio", [0.4, 0.4, 0.4, 0.4], engine="1")
    got = window_metrics(store, "t", T0, T0 + 3)
    assert got["preemptions"] == 4
    assert got["finished"] == 42
    assert got["eviction_rate"] == pytest.approx(4 / (42 + 4), abs=1e-4)
    assert (got["running_peak"], got["waiting_peak"]) == (9, 2)
    assert got["kv_usage_peak"] == 0.97  # the hottest engine, not 1.37
    assert window_metrics(store, "t", T0 + 2, T0 + 3)["preemptions"] == 0  # old storms do not count


def test_a_restart_in_the_window_loses_nothing(store: Store, target: str) -> None:
    write(store, "preemptions_total", [10, 13, 2, 5], engine="0")
    assert window_metrics(store, "t", T0, T0 + 3)["preemptions"] == 3 + 2 + 3


def test_no_samples_are_none_not_zero(store: Store, target: str) -> None:
    got = window_metrics(store, "t", T0, T0 + 3)
    assert set(got.values()) == {None}


def test_peak_in_flight_counts_overlap() -> None:
    records = [RequestRecord(str(n), start, e2e_s=length) for n, (start, length) in enumerate([(0, 2), (1, 2), (2, 1)])]
    assert peak_in_flight(records) == 2
    assert peak_in_flight([]) == 0


def test_traffic_prefers_the_engines_gauge_and_fills_the_queue_from_the_client() -> None:
    records = tuple(
        RequestRecord(str(n), 0.0, status=200, e2e_s=5.0, prompt_tokens=100, output_tokens=20) for n in range(10)
    )
    load = LoadReport(T0, 5.0, 10, records)
    got = traffic({"running_peak": 6.0}, load, 300)
    assert (got["peak_running"], got["peak_waiting"]) == (6, 4)
    assert (got["prompt_tokens_mean"], got["output_tokens_mean"], got["tokens_per_request_peak"]) == (100, 20, 300)
    unseen = traffic({"running_peak": None}, load, 300)
    assert (unseen["peak_running"], unseen["peak_waiting"]) == (10, 0)


def test_observed_traffic_of_any_target(store: Store, target: str) -> None:
    write(store, "requests_running", [1, 8, 2], engine="0")
    write(store, "request_prompt_tokens_sum", [1000, 1600, 2200], engine="0")
    write(store, "request_prompt_tokens_count", [10, 12, 14], engine="0")
    assert observed_traffic(store, "t", T0) == {"peak_running": 8, "prompt_tokens_mean": 300.0}


def test_gaps_between_tokens_are_a_quantile_of_all_engines_beside_their_objective(store: Store, target: str) -> None:
    """Of 200 gaps, 196 within 0.1 s and 4 within 1 s: the 198th is half-way through the last bucket."""
    assert token_pace(store, "t", T0) == {}
    for engine in ("0", "1"):
        for le, count in (("0.1", 98.0), ("1.0", 100.0), ("+Inf", 100.0)):
            write(store, "itl_seconds_bucket", [7.0, 7.0 + count], engine=engine, le=le)
    write(store, "prompt_tokens_total", [0.0, 900.0, 1800.0], engine="0")
    write(store, "prompt_tokens_total", [50.0, 150.0, 250.0], engine="1")
    store.samples.flush()
    found = token_pace(store, "t", T0, T0 + 3)
    assert found["prompt_tokens_per_s"] == 1_000.0
    assert found["itl_bound_s"] == 0.1
    assert found["itl_s_p99"] == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1554432 bytes. Error code 12", 1554432),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB", 2 << 30),
        ("tried to allocate 20 MiB", 20 << 20),
        ("MemoryError", None),
    ],
)
def test_allocation_size_in_the_last_words(message: str, size: Any) -> None:
    assert allocation_bytes(message) == size
