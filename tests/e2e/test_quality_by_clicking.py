"""Quality in a browser, on the live engine: measure formats, see turns and the front, apply one, watch the canary."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeout

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

NewPage = Callable[..., Page]
StartApp = Callable[..., Any]
TRIES = 5
MEASURED_MS = 300_000  # of a busy machine: three engines start and are asked one after another
FLAGS = "--model testbed-outliers --kv-cache-dtype int4_symmetric"


def assert_calm(page: Page) -> None:
    """No traceback and no error box."""
    expect(page.get_by_test_id("stException")).to_have_count(0)
    expect(page.get_by_test_id("stAlertContentError")).to_have_count(0)


def choose(page: Page, label: str, name: str) -> None:
    """Picks an option of a select box; the list closes when the page is drawn again just then."""
    for _ in range(TRIES):
        page.get_by_role("combobox", name=re.compile(label)).click()
        option = page.get_by_role("option", name=name, exact=True)
        try:
            option.click(timeout=5_000)
        except PlaywrightTimeout:
            page.keyboard.press("Escape")
        else:
            return
    raise AssertionError(f"{name} could not be chosen as {label}")


def measure(page: Page) -> None:
    """Measures full precision, plain INT4 and KIVI with two conversations each."""
    page.get_by_role("button", name="Measure formats").click()
    dialog = page.get_by_role("dialog")
    for name in ("fp8_e4m3", "int8_per_token_head", "int8k_int4v", "int4_per_token_head"):
        dialog.get_by_role("button", name=re.compile(rf"^(Remove )?{name}\b")).or_(
            dialog.locator("[data-baseweb=tag]", has_text=re.compile(rf"^{name}$")).get_by_role("presentation")
        ).first.click()
    dialog.get_by_label("Conversations").fill("2")
    dialog.get_by_label("Conversations").press("Tab")
    dialog.get_by_role("button", name="Measure", exact=True).click()


def test_formats_are_measured_compared_and_applied_then_watched(start_app: StartApp, new_page: NewPage) -> None:
    app = start_app(KVONCALL_ENGINE_FLAGS=FLAGS, KVONCALL_LOAD_RPS="0")
    page = new_page()
    page.goto(f"{app.url}/quality")
    expect(page.get_by_text("No cache format was measured here yet")).to_be_visible()
    measure(page)
    expect(page.get_by_text(re.compile(r"of 3 formats measured"))).to_be_visible()
    expect(page.get_by_role("cell", name="int4_kivi", exact=True).first).to_be_visible(timeout=MEASURED_MS)
    expect(page.get_by_text("of 3 formats measured")).to_have_count(0, timeout=MEASURED_MS)
    expect(page.get_by_text("This model was altered on purpose")).to_be_visible()
    by_turn = re.compile(r"^Accuracy by turn.*auto \(baseline\).*at turn 20")
    # While the page is drawn again, a chart can stand beside the one it replaces.
    expect(page.get_by_label(by_turn).first).to_be_visible()
    front = re.compile(r"^Bytes per token against accuracy.*on the front: .*int4_kivi")
    expect(page.get_by_label(front).first).to_be_visible()
    worse = page.get_by_role("row").filter(has_text="int4_symmetric").filter(has_text="✖ worse")
    expect(worse.first).to_be_visible()
    choose(page, "Candidate", "int4_kivi")
    page.get_by_role("button", name="Apply change").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Reason").fill("answers got worse")
    dialog.get_by_role("button", name="Apply", exact=True).click()
    expect(page.get_by_text("The embedded engine runs this format.")).to_be_visible()
    start_and_stop_the_canary(page)
    assert_calm(page)


def start_and_stop_the_canary(page: Page) -> None:
    """Its first round is its own baseline."""
    page.get_by_role("button", name="Start canary").click()
    page.get_by_role("dialog").get_by_role("button", name="Start", exact=True).click()
    expect(page.get_by_role("cell", name="itself: the baseline")).to_be_visible(timeout=MEASURED_MS)
    page.get_by_role("button", name="Stop canary").click()
    expect(page.get_by_role("button", name="Start canary")).to_be_visible()
