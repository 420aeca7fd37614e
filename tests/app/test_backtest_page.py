"""The backtest page: the history is read once, and the threshold moved says at once what the rule would have done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app.runtime import Runtime
from probe.store import Store

Open = Callable[..., Any]
Use = Callable[..., Runtime]


def figures(page: Any) -> dict[str, str]:
    return {metric.label: metric.value for metric in page.at.metric}


def test_threshold_and_hold_time_are_tried_on_stored_samples(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    page = open_page("backtest")
    page.assert_calm()
    assert "Press Test to read the history" in page.text
    page.button("Test").click().run()
    page.assert_calm()
    # The storm of the last minute is shorter than the hold time of a minute, or just as long.
    page.at.slider(key="hold-eviction-storm").set_value(10).run()
    page.assert_calm()
    assert figures(page)["Fired"] == "1 time"
    assert "still firing" in page.text
    assert len(page.at.get("vega_lite_chart")) == 1
    threshold = page.at.slider(key="threshold-eviction-storm")
    threshold.set_value(threshold.max).run()
    assert figures(page)["Fired"] == "0 times"
    assert "the alert would not have fired" in page.text


def test_a_rule_without_one_threshold_keeps_its_hold_time(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    page = open_page("backtest")
    page.at.selectbox(key="rule").set_value("ttft-slo-burn").run()
    page.button("Test").click().run()
    page.assert_calm()
    assert "compares no single number" in page.text
    assert len(page.at.slider) == 1


def test_nothing_stored_is_said(seeded: Store, use: Use, open_page: Open) -> None:
    seeded.targets.deactivate("embedded")
    seeded.targets.upsert("new", url="http://127.0.0.1:1", kind="external")
    use(seeded)
    page = open_page("backtest")
    page.button("Test").click().run()
    assert any("nothing is stored of new" in error for error in page.errors)
    seeded.targets.deactivate("new")
    assert "No target is watched yet" in open_page("backtest").text
