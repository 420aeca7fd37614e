"""The main job in a browser: run the incident, follow the alert to its runbook, apply the change, see it verified.

And the app killed in the middle: the journal shows how far it came, and the next replay works.
"""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

NewPage = Callable[..., Page]
StartApp = Callable[..., Any]
REPLAY_MS = 240_000  # of a busy machine; about half a minute on an idle one


def run_oom(page: Page, url: str) -> None:
    page.goto(f"{url}/incidents")
    page.locator(".st-key-run-oom button").click()
    expect(page.get_by_text("Replay ", exact=False).first).to_be_visible()


def test_oom_is_run_alerted_remedied_and_verified(start_app: StartApp, new_page: NewPage) -> None:
    app = start_app()
    page = new_page()
    run_oom(page, app.url)
    expect(page.get_by_text("waiting for your change").first).to_be_visible(timeout=REPLAY_MS)
    page.get_by_role("link", name="Alert ").first.click()
    expect(page.get_by_role("heading", name="Alerts", exact=True)).to_be_visible()
    expect(page.get_by_text("■ firing").first).to_be_visible()
    page.get_by_role("link", name="Open runbook oom").first.click()
    expect(page.get_by_role("heading", name="Diagnosis")).to_be_visible()
    page.get_by_role("button", name="Apply change").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Reason").fill("the drill died of memory")
    dialog.get_by_role("button", name="Apply", exact=True).click()
    expect(page.get_by_text("✔ verified").first).to_be_visible(timeout=REPLAY_MS)
    row = page.get_by_role("row").filter(has_text="requests failed")
    expect(row.get_by_role("cell").last).to_have_text("0")
    expect(page.get_by_test_id("stException")).to_have_count(0)
    expect(page.get_by_test_id("stAlertContentError")).to_have_count(0)


def test_app_killed_in_a_replay_keeps_the_journal(start_app: StartApp, new_page: NewPage, tmp_path: Path) -> None:
    first = start_app(KVONCALL_NO_ENGINE="1")
    page = new_page()
    run_oom(page, first.url)
    expect(page.get_by_text("drill engine runs and is scraped").first).to_be_visible(timeout=REPLAY_MS)
    first.end(signal.SIGKILL)
    second = start_app(KVONCALL_NO_ENGINE="1")
    page.goto(f"{second.url}/incidents")
    page.get_by_role("link", name="Open last run").first.click()
    expect(page.get_by_text("This replay was interrupted at step")).to_be_visible()
    expect(page.get_by_text("drill engine runs and is scraped").first).to_be_visible()
    run_oom(page, second.url)
    expect(page.get_by_text("starting a drill engine").first).to_be_visible(timeout=REPLAY_MS)
    expect(page.get_by_text("This replay was interrupted at step")).to_have_count(0)
    with closing(sqlite3.connect(tmp_path / "kvoncall.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
