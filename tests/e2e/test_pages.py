"""Every page in a real browser: nothing broken, nothing from outside, usable on a phone, alive after a kill."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from probe.store import Store

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

PAGES = {
    "": "Overview", "targets": "Targets", "engine": "Engine", "incidents": "Incidents", "isolation": "Isolation",
    "quality": "Quality", "alerts": "Alerts", "backtest": "Backtest", "capacity": "Capacity",
    "runbooks": "Runbooks",
}  # fmt: skip
NewPage = Callable[..., Page]
StartApp = Callable[..., Any]


def assert_calm(page: Page) -> None:
    """No traceback and no error box."""
    expect(page.get_by_test_id("stException")).to_have_count(0)
    expect(page.get_by_test_id("stAlertContentError")).to_have_count(0)


def test_every_page_opens_and_asks_nobody_else(start_app: StartApp, new_page: NewPage) -> None:
    app = start_app(KVONCALL_LOAD_RPS="1")
    page = new_page()
    elsewhere: list[str] = []
    failures: list[str] = []
    local = (app.url, app.url.replace("http", "ws"), "data:", "blob:")
    page.on("request", lambda r: elsewhere.append(r.url) if not r.url.startswith(local) else None)
    page.on("websocket", lambda w: elsewhere.append(w.url) if not w.url.startswith(local) else None)
    page.on("pageerror", lambda error: failures.append(str(error)))
    for path, title in PAGES.items():
        page.goto(f"{app.url}/{path}")
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
        assert_calm(page)
    page.goto(f"{app.url}/runbooks?runbook=oom")
    expect(page.get_by_role("heading", name="Diagnosis")).to_be_visible()
    assert_calm(page)
    page.goto(app.url)
    expect(page.get_by_text(re.compile(r"data of .* UTC"))).to_be_visible()
    expect(page.get_by_test_id("stMetric")).to_have_count(8)
    page.goto(f"{app.url}/engine")
    expect(page.get_by_alt_text(re.compile("KV blocks: "))).to_be_visible()
    assert_calm(page)
    assert elsewhere == []
    assert failures == []
    app.end()
    assert "Traceback" not in app.log()
    with Store.open(app.data) as store:
        assert store.events.recent(limit=1)[0].message == "stopped on purpose: the app was stopped"


def test_phone_width_needs_no_sideways_scrolling(start_app: StartApp, new_page: NewPage) -> None:
    app = start_app(KVONCALL_NO_ENGINE="1")
    page = new_page(width=390, height=844)
    for path in [*PAGES, "runbooks?runbook=eviction-storm"]:
        page.goto(f"{app.url}/{path}")
        expect(page.get_by_role("heading", level=1).first).to_be_visible()
        assert_calm(page)
        too_wide = page.get_by_test_id("stMain").evaluate("e => e.scrollWidth - e.clientWidth")
        assert too_wide <= 0, path


def test_engine_killed_is_seen_and_started_again(start_app: StartApp, new_page: NewPage) -> None:
    app = start_app(KVONCALL_LOAD_RPS="0")
    page = new_page()
    page.goto(f"{app.url}/engine")
    pid = re.search(r"pid (\d+)", page.get_by_text(re.compile(r"pid \d+")).first.inner_text())
    assert pid is not None
    os.kill(int(pid[1]), signal.SIGKILL)
    expect(page.get_by_text("✖ crashed")).to_be_visible()
    expect(page.get_by_text("Last exit: killed")).to_be_visible()
    assert_calm(page)
    page.goto(app.url)
    expect(page.get_by_text("■ firing: oom").first).to_be_visible()
    page.goto(f"{app.url}/engine")
    page.get_by_role("button", name="Start", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Reason").fill("killed for a test")
    dialog.get_by_role("button", name="Start", exact=True).click()
    expect(page.get_by_text("● running")).to_be_visible()
    assert_calm(page)
