"""Twins differ in one fact and nothing else, and an answer is told by whose value it names."""

from __future__ import annotations

import pytest

from engine.testbed.tasks import split_tokens
from probe.isolation.twins import Kind, classify, make_twins

KINDS: tuple[Kind, ...] = ("testbed", "plain")


@pytest.mark.parametrize("kind", KINDS)
def test_twins_differ_in_one_fact_whose_place_walks(kind: Kind) -> None:
    places = set()
    for seed in range(40):
        twin = make_twins(kind, seed)
        a, b = (split_tokens(p) if kind == "testbed" else p.split() for p in (twin.prompt_a, twin.prompt_b))
        assert len(a) == len(b)
        differing = [index for index, (left, right) in enumerate(zip(a, b, strict=True)) if left != right]
        assert len(differing) == 1
        places.add(twin.place)
        assert twin.answer_a not in twin.prompt_b
        assert twin.answer_b not in twin.prompt_a
        assert twin.control_b[:12] != twin.prompt_b[:12]
        assert make_twins(kind, seed) == twin
        assert make_twins(kind, seed + 1000) != twin
    assert len(places) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_told_by_whose_value_it_names(kind: Kind) -> None:
    twin = make_twins(kind, 3)
    assert classify(f" {twin.answer_b}.", twin) == "own"
    assert classify(twin.answer_a, twin) == "leak"
    assert classify(f"{twin.answer_b}, or {twin.answer_a}", twin) == "leak"
    assert classify(twin.answer_a, twin, "a") == "own"
    assert classify(twin.answer_b, twin, "a") == "leak"
    assert classify("no idea", twin) == "other"
    assert classify(f"{twin.answer_a}{twin.answer_b}", twin) == "other"


def test_thousands_may_be_written_with_a_comma() -> None:
    twin = make_twins("plain", 3)
    assert classify(f"{twin.answer_b[:2]},{twin.answer_b[2:]}", twin) == "own"
