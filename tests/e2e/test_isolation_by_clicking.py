"""Isolation in a browser, from a store that already holds a replay and a round of the probe: no engine runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from probe.store import Store

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

NewPage = Callable[..., Page]
StartApp = Callable[..., Any]
TOLD: dict[str, Any] = json.loads((Path(__file__).parents[1] / "app" / "isolation.json").read_text())


def test_leak_is_seen_in_the_replay_and_in_a_round_of_the_probe(
    start_app: StartApp, new_page: NewPage, tmp_path: Path
) -> None:
    with Store.open(tmp_path) as store:
        replay = store.replays.create("prefix-collision", "drill-1")
        store.replays.finish(replay.id, "done", TOLD["replay"])
        store.targets.upsert("gateway", url="http://127.0.0.1:1", kind="external", engine="vllm")
        store.events.add("gateway", "isolation_round", "leak shown", data=TOLD["round"])
    app = start_app(KVONCALL_NO_ENGINE="1")
    page = new_page()
    page.goto(f"{app.url}/incidents?replay={replay.id}")
    see_both_conversations(page)
    see_both_trees(page)
    page.get_by_role("link", name=re.compile(r"\bIsolation$")).click()
    see_the_round(page)
    for role in ("stException", "stAlertContentError"):
        expect(page.get_by_test_id(role)).to_have_count(0)


def see_both_conversations(page: Page) -> None:
    """Beside each other, with the leaked text marked in both."""
    victim, attacker = page.get_by_role("region", name="Session A"), page.get_by_role("region", name="Session B")
    expect(victim.locator("mark")).to_have_text(["4711", "4711"])
    expect(attacker.locator("mark")).to_have_text(["4711"])
    left, right = victim.bounding_box(), attacker.bounding_box()
    assert left is not None
    assert right is not None
    assert left["x"] + left["width"] <= right["x"]
    assert left["y"] == right["y"]


def see_both_trees(page: Page) -> None:
    """Before: a node that two owners were served from. After: only a public one."""
    shared = page.get_by_role("row").filter(has_text="1f0c9a7b")
    expect(shared).to_contain_text("◆ 2 owners")
    expect(page.get_by_role("row").filter(has_text="7a44ee55")).to_contain_text("◇ public")
    expect(page.get_by_text("Prefix tree before the change")).to_be_visible()
    expect(page.get_by_text("Prefix tree after the change")).to_be_visible()


def see_the_round(page: Page) -> None:
    """Its verdicts, and what another one would send before it is sent."""
    expect(page.get_by_role("row").filter(has_text="side-channel-tokens")).to_contain_text("■ leak shown")
    expect(page.get_by_role("row").filter(has_text="leak-canary").first).to_contain_text("◇ no leak found")
    page.get_by_role("button", name="Probe isolation").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_text(re.compile(r"Budget: at most [\d,]+ requests"))).to_be_visible()
    expect(dialog.get_by_role("button", name="Probe", exact=True)).to_be_enabled()
