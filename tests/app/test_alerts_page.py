"""The alerts page: what is active, one alert with its timeline, and links that carry its id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app.runtime import Runtime
from probe.store import Store

Open = Callable[..., Any]
Use = Callable[..., Runtime]


def test_active_alert_shows_value_threshold_and_parts(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    page = open_page("alerts")
    page.assert_calm()
    assert "■ firing" in page.text
    assert "value **0.62** against threshold **0.05**, 62 / 100, window 1 min, hold 30 s" in page.text


def test_link_to_the_runbook_carries_the_alert(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    alert = seeded.alerts.active()[0]
    page = open_page("alerts")
    link = next(line for line in page.text.splitlines() if line.startswith("Open runbook"))
    assert link == f"Open runbook eviction-storm -> runbooks?runbook=eviction-storm&alert={alert.id}"


def test_one_alert_with_its_timeline(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    alert = seeded.alerts.active()[0]
    page = open_page("alerts", alert=str(alert.id))
    page.assert_calm()
    assert f"Alert {alert.id}: eviction-storm" in page.text
    assert "2 of 2 engines, 60 s of data, no reset" in page.text
    states = page.tables[0]
    assert list(states["from"]) == ["○ inactive", "▲ pending"]
    assert list(states["to"]) == ["▲ pending", "■ firing"]
    assert list(states["value"]) == ["0.3", "0.62"]
    assert states["lasted"][0] == "30 s"
    assert len(page.at.get("vega_lite_chart")) == 1


def test_history_lists_every_alert(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    history = open_page("alerts").at.dataframe[-1].value
    assert list(history["rule"]) == ["eviction-storm"]
    assert list(history["state"]) == ["■ firing"]


def test_unknown_alert_is_a_notice(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    for wrong in ("999", "x'; drop"):
        page = open_page("alerts", alert=wrong)
        page.assert_calm()
        assert f"There is no alert `{wrong}`" in page.at.warning[0].value


def test_empty_store(store: Store, use: Use, open_page: Open) -> None:
    use(store)
    page = open_page("alerts")
    page.assert_calm()
    assert "No alert is firing or pending" in page.text
    assert "No alert was ever raised" in page.text
