"""Figures that public logs print, against the planner; and the usual mistakes, each of which some anchor catches."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import engine.memory.activation as activation
import engine.memory.pages as pages
import engine.memory.plan as plan_module
import engine.memory.pools as pools
from probe.plan.check import CheckRow, check, check_anchor, text, to_json

ANCHORS_FILE = Path(__file__).parent / "data" / "anchors.json"
ANCHORS: dict[str, dict[str, Any]] = {
    anchor["pa"]: anchor for anchor in json.loads(ANCHORS_FILE.read_text(encoding="utf-8"))
}


@pytest.mark.parametrize("name", ANCHORS)
def test_an_anchor_is_reproduced(name: str) -> None:
    rows = check_anchor(ANCHORS[name])
    assert [row for row in rows if row.status == "miss"] == []
    assert any(row.status == "pass" for row in rows)


def test_every_reported_figure_is_checked() -> None:
    """All but one: the memory left after a pool, of a GPU and weights that the log does not name."""
    unchecked = [(row.anchor, row.quantity) for row in check(ANCHORS_FILE) if row.status == "not checkable"]
    assert unchecked == [("PA-22", "avail_after_pool_gib")]


def _misses(name: str) -> set[str]:
    return {row.quantity for row in check_anchor(ANCHORS[name]) if row.status == "miss"}


def _patch(target: Any, attribute: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(target, attribute, value)


def _latent_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pages.page_bytes

    def divided(kind: pages.LayerKind, block_size: int, rank: pages.Rank) -> int:
        share = rank.tp if kind.group.attention == "latent" else 1
        return whole(kind, block_size, rank) // share

    for module in (pages, pools):
        monkeypatch.setattr(module, "page_bytes", divided)


def _heads_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "heads_per_rank", lambda num_kv_heads, tp: num_kv_heads)


def _most_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "min", max, raising=False)


def _one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    right = pools.shared_pool
    monkeypatch.setattr(pools, "shared_pool", lambda *args, **more: right(*args, **{**more, "state_blocks": 1}))


def _without_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pools, "shared_pool", lambda kinds, held, block, rank, **more: pages.single_table(held, block, rank)
    )


MISTAKES: list[tuple[str, Callable[[pytest.MonkeyPatch], None], str, str]] = [
    ("latent divided by TP", _latent_divided, "PA-09", "tokens"),
    ("latent divided by TP", _latent_divided, "PA-33", "derived_kv_gib"),
    ("KV heads of all ranks", _heads_not_divided, "PA-06", "tokens"),
    ("KV heads of all ranks", _heads_not_divided, "PA-17a", "needed_gib"),
    ("the largest stage decides", _most_of_stages, "PA-09", "tokens"),
    ("one state a recurrent layer", _one_state, "X-03", "tokens"),
    ("hybrid billed as attention alone", _without_windows, "X-03", "tokens"),
    ("windows billed in full", _without_windows, "PA-27a", "verdict"),
    (
        "no memory held by collectives",
        _patch(activation, "_held_by_collectives", lambda *args: 0),
        "PA-25b",
        "blocks",
    ),
]


@pytest.mark.parametrize(("mistake", "apply", "anchor", "figure"), MISTAKES)
def test_a_mistake_misses_an_anchor(
    monkeypatch: pytest.MonkeyPatch,
    mistake: str,
    apply: Callable[[pytest.MonkeyPatch], None],
    anchor: str,
    figure: str,
) -> None:
    assert figure not in _misses(anchor), mistake
    apply(monkeypatch)
    assert figure in _misses(anchor), mistake


@pytest.mark.parametrize(
    ("name", "path", "wrong", "figure"),
    [
        ("PA-08", ("reported", "tokens"), 660000, "tokens"),
        ("PA-03", ("inputs", "weights_gib"), 7.6, "kv_gib (divided)"),
        ("PA-26", ("dims", "kv_heads"), 8, "tokens"),
        ("PA-19", ("verdict",), "fits", "verdict"),
        ("PA-11", ("verdict",), "fits", "verdict"),
        ("PA-17b", ("inputs", "max_model_len"), 262144, "verdict"),
        ("PA-20", ("reported", "est_max_model_len"), 900000, "est_max_model_len"),
        ("PA-32", ("reported", "cpu_gib_by_tp"), {"2": 50}, "cpu_gib_by_tp 2"),
        ("PA-30", ("reported", "conc_0731"), 1.3, "max_concurrency 0731"),
    ],
)
def test_a_wrong_figure_is_a_miss(name: str, path: tuple[str, ...], wrong: Any, figure: str) -> None:
    anchor = json.loads(json.dumps(ANCHORS[name]))
    place = anchor
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = wrong
    assert figure in {row.quantity for row in check_anchor(anchor) if row.status == "miss"}


def test_reported_figures_are_never_the_source_of_the_answer() -> None:
    """The answers stay as they are when what the log reports is changed."""
    for name in ("PA-06", "PA-09", "PA-12", "PA-17a", "PA-24", "PA-25b", "PA-34"):
        anchor = json.loads(json.dumps(ANCHORS[name]))
        before = {row.quantity: row.got for row in check_anchor(anchor) if not row.quantity.startswith("derived")}
        anchor["reported"] = {key: _doubled(value) for key, value in anchor["reported"].items()}
        after = {row.quantity: row.got for row in check_anchor(anchor) if row.quantity in before}
        assert after == {key: value for key, value in before.items() if key in after}


def _doubled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _doubled(item) for key, item in value.items()}
    return value * 2


@pytest.fixture(params=["empty", "no dims", "odd tp", "words", "list dims", "strings", "other engine"])
def broken(request: pytest.FixtureRequest) -> dict[str, Any]:
    anchors: dict[str, dict[str, Any]] = {
        "empty": {},
        "no dims": {"pa": "Z", "reported": {"tokens": 5}, "verdict": "fits"},
        "odd tp": {**ANCHORS["PA-06"], "tp": 3},
        "words": {**ANCHORS["PA-06"], "inputs": {"kv_gib": "a lot"}, "level": "L9"},
        "list dims": {**ANCHORS["PA-06"], "dims": [80, 8, 128]},
        "strings": {**ANCHORS["PA-06"], "reported": {"tokens": "many", "colour": "red"}},
        "other engine": {**ANCHORS["PA-06"], "engine": "MLC", "version": "nightly"},
    }
    return anchors[request.param]


def test_what_an_anchor_lacks_is_not_checkable_and_no_miss(broken: dict[str, Any]) -> None:
    rows = check_anchor(broken)
    assert rows
    assert not [row for row in rows if row.status == "miss"]
    assert all(row.explained for row in rows if row.status == "not checkable")


@pytest.mark.parametrize("seed", range(40))
def test_damaged_anchors_never_raise(seed: int) -> None:
    """One field of each of several anchors gone, or of another kind: rows come back, and they print."""
    choice = random.Random(seed)
    for name in choice.sample(sorted(ANCHORS), 3):
        anchor = json.loads(json.dumps(ANCHORS[name]))
        place = anchor
        if choice.random() < 0.5:
            place = anchor[choice.choice(("inputs", "reported", "dims"))] or anchor
        key = choice.choice(sorted(place))
        if choice.random() < 0.4:
            del place[key]
        else:
            place[key] = choice.choice([None, "x", -1, 0, [], {}, "12", 1e30, True, [1, "a"], {"layers": "x"}])
        rows = check_anchor(anchor)
        assert text(rows)
        json.dumps(to_json(rows))


def test_other_units_and_spellings_are_read() -> None:
    """GB are decimal; a list of ranks counts by its least; an era is a version."""
    base = ANCHORS["PA-08"]
    decimal = {
        **base,
        "inputs": {"kv_gb": round(69.66 * 2**30 / 1e9, 3), "max_model_len": 4096},
        "version": "0.10.x V1",
    }
    ranks = {**base, "inputs": {"kv_gib": [71.0, 69.66, 70.2], "max_model_len": 4096}}
    sliding = {
        **base,
        "dims": {"layers": 36, "kv_heads": 8, "head_dim": 64, "sliding_layers": 18, "window": 128},
        "kv_bytes_per_token_per_gpu": 73728,
        "inputs": {"kv_gib": 5.38},
        "reported": {"kv_tokens": 78384},
        "version": "0.20.0",
    }
    spent = {
        **ANCHORS["PA-23a"],
        "inputs": {**ANCHORS["PA-23a"]["inputs"], "activation_gib": [1.08, 8.27], "kv_gib": [17.72, 10.53]},
    }
    for anchor in (decimal, ranks, sliding, spent):
        rows = check_anchor(anchor)
        assert [row.status for row in rows] == ["pass"] * len(rows), rows


def test_a_deviation_that_only_the_anchors_extra_allows_is_explained() -> None:
    rows = {(row.anchor, row.quantity): row for row in check(ANCHORS_FILE)}
    explained = {key for key, row in rows.items() if row.explained.startswith("beyond the level's tolerance")}
    assert explained == {("PA-07a", "tokens"), ("PA-17b", "tokens"), ("PA-17b", "max_concurrency")}
    assert all("the least of all ranks" in rows[key].explained for key in explained)


def test_the_table_and_the_json_count_alike() -> None:
    rows = [*check(ANCHORS_FILE), CheckRow("Z", "", "tokens", "1", "2", "+100%", "0.3%", "miss", "why")]
    data = to_json(rows)
    assert data["passed"] + data["missed"] + data["not_checkable"] == len(rows)
    assert (data["missed"], data["anchors"]) == (1, len(ANCHORS) + 1)
    last = text(rows).splitlines()[-1]
    assert last.startswith(f"{len(ANCHORS)} of {len(ANCHORS) + 1} anchors reproduced")
    json.dumps(data)
