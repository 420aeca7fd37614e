"""Figures of a model over targets and engines: nothing averaged, nobody dropped in silence."""

from __future__ import annotations

import math

import pytest

from probe.alerts.aggregate import METRICS, ModelFigures, by_model
from probe.alerts.arithmetic import Moment
from probe.alerts.window import Window
from probe.store import Sample

T0 = 1_800_000_000.0
WINDOW_S = 100.0


def moment(engines: dict[str, dict[str, float]], *, dies_at: float = math.inf, model: str = "m") -> Moment:
    """Ten scrapes, 10 s apart. Engine -> gauges, and counters' growth per second; TTFT 0.5 s or 3 s by `slow`."""
    window = Window(dict.fromkeys(METRICS, 1_000.0))
    for i in range(11):
        ts = T0 + 10 * i
        up = ts < T0 + dies_at
        window.add([Sample("t", "up", {}, ts, float(up))])
        for engine, values in engines.items() if up else ():
            labels = {"model_name": model, "engine": engine}
            rows = {
                "requests_running": values["running"],
                "requests_waiting": values.get("waiting", 0.0),
                "kv_usage_ratio": values["usage"],
                "preemptions_total": 1_000 + values.get("preempted", 0.0) * 10 * i,
                "requests_finished_total": 500 + values["finished"] * 10 * i,
                "generation_tokens_total": 100 * values["finished"] * 10 * i,
            }
            window.add([Sample("t", name, labels, ts, value) for name, value in rows.items()])
            slow = values.get("slow", 0.0)
            count = values["finished"] * 10 * i
            for le, share in (("1.0", 1 - slow), ("+Inf", 1.0)):
                window.add([Sample("t", "ttft_seconds_bucket", {**labels, "le": le}, ts, share * count)])
    return Moment(window, T0 + 100, 40.0)


def one(*moments: Moment) -> ModelFigures:
    (found,) = by_model({f"gpu-{i}": at for i, at in enumerate(moments)}, WINDOW_S)
    return found


def test_two_targets_of_two_engines_add_up() -> None:
    """Running 3 + 5 + 2 + 2; the hottest is one engine of the first target; 10 preemptions a second at one engine."""
    first = moment(
        {
            "0": {"running": 3, "waiting": 2, "usage": 0.97, "finished": 1.0, "preempted": 0.5},
            "1": {"running": 5, "waiting": 1, "usage": 0.2, "finished": 3.0},
        }
    )
    found = one(first, moment({e: {"running": 2, "usage": 0.5, "finished": 3.0} for e in ("0", "1")}))
    assert (found.running, found.waiting) == (12.0, 3.0)
    assert found.hottest == (0.97, "gpu-0", "0")
    assert found.eviction == pytest.approx((50.0, 1_000.0 + 12))
    assert found.eviction_rate == pytest.approx(50 / 1_012)
    assert found.tokens_per_s == pytest.approx(1_000.0)
    assert found.stamp == "4 of 4 engines, up to 0 s old"
    assert found.targets == ("gpu-0", "gpu-1")


def test_a_quantile_is_of_the_merged_buckets() -> None:
    """One engine of ten requests in a hundred is slow: 8 of 100 are above 1 s, so the 95th percentile is, too."""
    fast = {"running": 1, "usage": 0.1, "finished": 9.0}
    slow = {"running": 1, "usage": 0.1, "finished": 1.0, "slow": 0.8}
    found = one(moment({"0": fast}), moment({"0": slow}))
    assert found.ttft_p95 is not None
    assert (found.ttft_p95.value, found.ttft_p95.above_last) == (1.0, True)
    rarely = one(moment({"0": fast}), moment({"0": {**slow, "slow": 0.2}}))
    assert rarely.ttft_p95 is not None
    assert not rarely.ttft_p95.above_last
    assert rarely.ttft_p95.value == pytest.approx(0.95 / 0.98)


def test_a_dead_replica_is_missing_and_said_to_be() -> None:
    alive = {"0": {"running": 4, "usage": 0.3, "finished": 1.0}}
    found = one(moment(alive), moment({"0": {"running": 9, "usage": 0.99, "finished": 1.0}}, dies_at=50))
    assert found.running == 4.0
    assert found.hottest == (0.3, "gpu-0", "0")
    assert found.stamp.startswith("1 of 2 engines")


def test_models_are_kept_apart_and_nothing_is_made_up() -> None:
    values = {"0": {"running": 1, "usage": 0.1, "finished": 1.0}}
    found = by_model({"a": moment(values), "b": moment(values, model="n")}, WINDOW_S)
    assert [(one.model, one.targets, one.engines_known) for one in found] == [("m", ("a",), 1), ("n", ("b",), 1)]
    assert found[0].hit_rate is None
    assert by_model({"a": Moment(Window({}), T0, 40.0)}, WINDOW_S) == []
