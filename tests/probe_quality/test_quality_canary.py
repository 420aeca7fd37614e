"""The canary: what a round leaves in the store, in which order, and what a failed one does not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from probe.quality.canary import Canary, canary_spec
from probe.quality.suite import QualityError, SuiteSpec
from probe.store import Store

SPEC = SuiteSpec(turns=5, conversations=2, text_windows=0)


@pytest.fixture
def canary(store: Store, server: Any) -> Canary:
    server.debug = {"engine": "kvoncall", "memory_plan": {"kv_cache_dtype": "int4_kivi"}}
    store.targets.upsert("t", url=server.url, kind="external")
    return Canary(store, "t", server.url, SPEC)


def test_a_round_becomes_samples_of_one_time_and_an_event(store: Store, server: Any, canary: Canary) -> None:
    first = canary.round()
    server.answer = lambda prompt, right: "?" if prompt.count("<eos>") == 4 else right
    second = canary.round()
    assert (first.baseline_id, second.baseline_id, second.label) == (None, first.id, "canary")
    latest = store.samples.latest("t")
    values = {name: [(s.labels, s.value) for s in samples] for name, samples in latest.items()}
    dtype = {"dtype": "int4_kivi"}
    assert values["quality_items"] == [(dtype, 10.0)]
    assert values["quality_lost"] == [(dtype, 2.0)]
    assert values["quality_gained"] == [(dtype, 0.0)]
    assert values["quality_invalid"] == [(dtype, 2.0)]
    scores = {(labels["task"], labels["turn"]): value for labels, value in values["quality_score"]}
    assert scores["all", "all"] == pytest.approx(0.8)
    assert (scores["all", "4"], scores["all", "5"]) == (1, 0)
    assert len({sample.ts for samples in latest.values() for sample in samples}) == 1
    newest, oldest = store.events.recent(kinds=["quality_round"])
    assert newest.data == {
        "run_id": second.id, "baseline_id": first.id, "items": 10, "lost": 2, "gained": 0, "invalid": 2,
        "dtype": "int4_kivi",
    }  # fmt: skip
    assert oldest.data["baseline_id"] == first.id
    assert "this round is the baseline" in oldest.message
    assert "2 lost" in newest.message


def test_the_samples_are_on_disk_when_the_event_is(
    store: Store, canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    add = store.events.add

    def watched(*args: Any, **more: Any) -> Any:
        found.append(len(store.samples.latest("t").get("quality_items", [])))
        return add(*args, **more)

    monkeypatch.setattr(store.events, "add", watched)
    canary.round()
    assert found == [1]


def test_a_failed_round_leaves_no_samples(store: Store, server: Any, canary: Canary) -> None:
    server.fault = lambda n: 404 if n == 3 else 0
    with pytest.raises(QualityError):
        canary.round()
    assert store.samples.latest("t") == {}
    assert store.events.recent(kinds=["quality_round"]) == []
    assert canary.baseline is None  # an incomplete round is no baseline


def test_rounds_go_on_after_a_failure_until_stopped(store: Store, server: Any) -> None:
    store.targets.upsert("t", url=server.url, kind="external")
    server.fault = lambda n: 404 if n == 3 else 0
    outcomes = list(itertools.islice(Canary(store, "t", server.url, SPEC).rounds(0.05), 3))
    assert len(store.events.recent(kinds=["quality_round"])) >= 2
    assert len([outcome for outcome in outcomes if isinstance(outcome, QualityError)]) == 1


def test_a_canary_asks_little() -> None:
    spec = canary_spec()
    assert (spec.conversations, spec.turns, spec.text_windows) == (6, 20, 0)
