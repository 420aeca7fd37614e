"""From a target's samples to what the runbook must know of a breach."""

from __future__ import annotations

import time

import pytest

from probe.collect.isolation import observed_isolation
from probe.store import Sample, Store

AGO = 100.0
UNMEASURED = {"lost_hit_rate": None}


@pytest.fixture
def now(store: Store) -> float:
    store.targets.upsert("t", url="http://h", kind="embedded", engine="kvoncall", scrape_interval_s=1.0)
    return time.time()


def scrape(store: Store, ts: float, finished: float, **breaches: float) -> None:
    store.samples.write(
        [
            Sample("t", "up", {}, ts, 1.0),
            Sample("t", "requests_finished_total", {"finished_reason": "stop"}, ts, finished),
            *(Sample("t", "isolation_breaches_total", {"kind": k}, ts, v) for k, v in breaches.items()),
        ]
    )


def probe(store: Store, ts: float, check: str, probes: int, leaks: int) -> None:
    for name, value in (("isolation_probes", probes), ("isolation_leaks", leaks)):
        store.samples.write([Sample("t", name, {"check": check}, ts, float(value))])


def test_breaches_of_one_kind_are_that_kind(store: Store, now: float) -> None:
    scrape(store, now - 20, 10, namespace=1, adapter=0)
    scrape(store, now - 10, 50, namespace=4, adapter=0)
    assert observed_isolation(store, "t", now - AGO) == {
        "kind": "collision",
        "breaches": 3,
        "requests": 40,
        **UNMEASURED,
    }


def test_breaches_of_two_kinds_have_no_one_kind(store: Store, now: float) -> None:
    scrape(store, now - 20, 10)
    scrape(store, now - 10, 50, weights=4, adapter=2)  # labels born with their first breach
    assert observed_isolation(store, "t", now - AGO) == {"kind": None, "breaches": 6, "requests": 40, **UNMEASURED}


def test_a_side_channel_alone_is_timing_and_counts_the_probe(store: Store, now: float) -> None:
    scrape(store, now - 20, 10, namespace=2)
    scrape(store, now - 10, 50, namespace=2)
    probe(store, now - 5_000, "side-channel-ttft", 60, 1)
    probe(store, now - 5_000, "cache-salt", 10, 0)
    assert observed_isolation(store, "t", now - AGO) == {"kind": "timing", "breaches": 1, "requests": 60, **UNMEASURED}


def test_without_a_breach_nothing_is_known(store: Store, now: float) -> None:
    assert observed_isolation(store, "t", now - AGO) is None
    scrape(store, now - 10, 50, namespace=2)
    probe(store, now - 60, "leak-canary", 20, 2)
    probe(store, now - 30, "leak-canary", 20, 0)
    assert observed_isolation(store, "t", now - AGO) is None
    assert observed_isolation(store, "t", now - AGO, now - 40) == {
        "kind": None,
        "breaches": 2,
        "requests": 20,
        **UNMEASURED,
    }


def test_what_isolation_costs_is_part_of_it(store: Store, now: float) -> None:
    for ts, asked, lost in ((now - 20, 1_000.0, 100.0), (now - 10, 3_000.0, 350.0)):
        store.samples.write(
            [Sample("t", "prefix_queries_total", {}, ts, asked), Sample("t", "prefix_hits_lost_total", {}, ts, lost)]
        )
    scrape(store, now - 20, 10, image=1)
    scrape(store, now - 10, 50, image=4)
    seen = observed_isolation(store, "t", now - AGO)
    assert seen == {"kind": "image", "breaches": 3, "requests": 40, "lost_hit_rate": 0.125}
