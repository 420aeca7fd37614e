"""The overview of a target in trouble, and of nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app.runtime import Runtime
from probe.store import Store


def metrics(page: Any) -> dict[str, tuple[str, str]]:
    return {m.label: (m.value, m.delta) for m in page.at.metric}


def test_firing_alert_comes_first_with_links(
    seeded: Store, use: Callable[..., Runtime], open_page: Callable[..., Any]
) -> None:
    use(seeded)
    page = open_page("overview")
    page.assert_calm()
    assert "■ firing: eviction-storm" in page.errors[0]
    assert "62% of requests in service were preempted" in page.errors[0]
    shown = page.text
    assert "alert=1" in shown
    assert "runbook=eviction-storm" in shown


def test_tiles_hold_the_seeded_figures(
    seeded: Store, use: Callable[..., Runtime], open_page: Callable[..., Any]
) -> None:
    use(seeded)
    page = open_page("overview")
    tiles = metrics(page)
    assert tiles["KV usage (hottest)"][0] == "97.0%"  # of the two engines, not their mean
    assert tiles["Requests running"][0] == "8"
    assert tiles["Requests waiting"][0] == "3"
    assert tiles["Eviction rate"] == ("62.0%", "computed 62 / 100 in 1 min")
    assert tiles["Preempted at least once"] == ("no data", "computed, over 1 min")  # not exposed in the seed
    # Two engines, 100 tokens every 2 s each; what no sample covers yet counts for half a scrape at most.
    assert 80 < float(tiles["Tokens/s"][0]) <= 100
    assert tiles["Prefix hit rate"][0] == "25.0%"
    assert tiles["TTFT p95"][0] == "910 ms"  # half below 0.1 s, the rest evenly up to 1 s
    for tile in page.at.metric:
        assert tile.proto.help
        assert tile.delta.split()[0].strip(",") in {"measured", "computed"}
        assert f"**{tile.delta.split()[0].strip(',')}**" in tile.proto.help
        assert (len(tile.proto.chart_data) > 10) == (tile.value != "no data")


def test_target_table_names_state_in_words(
    seeded: Store, use: Callable[..., Runtime], open_page: Callable[..., Any]
) -> None:
    use(seeded)
    table = open_page("overview").at.dataframe[0].value
    assert list(table["state"]) == ["● up"]
    assert list(table["target"]) == ["embedded"]


def test_empty_store_says_what_to_do(store: Store, use: Callable[..., Runtime], open_page: Callable[..., Any]) -> None:
    use(store)
    page = open_page("overview")
    page.assert_calm()
    assert "No target is watched yet" in page.at.info[0].value
    assert "No alert is firing or pending" in page.at.success[0].value
    assert not page.at.metric


def test_target_without_data_shows_no_invented_numbers(
    store: Store, use: Callable[..., Runtime], open_page: Callable[..., Any]
) -> None:
    store.targets.upsert("prod", url="http://127.0.0.1:1", kind="external")
    use(store)
    page = open_page("overview")
    page.assert_calm()
    assert {value for value, _ in metrics(page).values()} == {"no data"}
    assert list(page.at.dataframe[0].value["state"]) == ["◌ no data"]


def test_store_that_cannot_be_opened_is_one_sentence(
    use: Callable[..., Runtime], open_page: Callable[..., Any]
) -> None:
    use(None, problem="The database /x/kvoncall.db is read-only; make it writable.")
    page = open_page("overview")
    page.assert_calm()
    assert set(page.errors) == {"The database /x/kvoncall.db is read-only; make it writable."}


def test_runtime_not_started_is_one_sentence(open_page: Callable[..., Any]) -> None:
    page = open_page("overview")
    page.assert_calm()
    assert "streamlit run app" in page.errors[0]


def test_events_show_their_whole_message(
    seeded: Store, use: Callable[..., Runtime], open_page: Callable[..., Any]
) -> None:
    message = "engine died: out of memory: tried to allocate 103219200 bytes (device memory 268435456 bytes)"
    seeded.events.add("embedded", "engine_exit", message, severity="critical")
    use(seeded)
    events = next(t for t in open_page("overview").tables if "what happened" in t.columns)
    assert events["what happened"].tolist() == [message, "the app started"]
    assert events["event"].tolist() == ["engine exit", "engine start"]
