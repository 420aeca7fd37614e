"""An alert's whole life in a browser: a server preempts, the alert fires and is sent, an operator acknowledges and
silences it, the server recovers, it resolves and that is sent too. One message each."""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from probe.store import Store

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

NewPage = Callable[..., Page]
StartApp = Callable[..., Any]
TRIES = 5


class FakeServer:
    """An exposition of vLLM's names whose preemptions grow while `storm` is set, and a webhook that keeps messages."""

    def __init__(self) -> None:
        self.storm = True
        self.messages: list[dict[str, Any]] = []
        self._started = time.monotonic()
        self._preempted, self._since = 0.0, time.monotonic()

    def exposition(self) -> str:
        now = time.monotonic()
        self._preempted += 5 * (now - self._since) if self.storm else 0
        self._since = now
        finished = 20 * (now - self._started)
        labels = '{engine="0",model_name="m"}'
        return (
            f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{labels} 8\n"
            f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{labels} 0\n"
            f"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{labels} 0.5\n"
            f"# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total{labels} {self._preempted}\n"
            f"# TYPE vllm:request_success counter\nvllm:request_success_total{labels} {finished}\n"
            f"# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total{labels} {100 * finished}\n"
            f"# TYPE vllm:prompt_tokens counter\nvllm:prompt_tokens_total{labels} {100 * finished}\n"
        )


@pytest.fixture
def server() -> Iterator[tuple[str, FakeServer]]:
    """The fake server on loopback."""
    fake = FakeServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = fake.exposition().encode() if self.path == "/metrics" else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            fake.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}", fake
    made.shutdown()
    made.server_close()
    thread.join()


def press(page: Page, name: str) -> None:
    """Opens a dialog; a click that comes while the page is drawn again is lost."""
    for _ in range(TRIES):
        page.get_by_role("button", name=name, exact=True).click()
        try:
            page.get_by_role("dialog").wait_for(timeout=10_000)
        except PlaywrightTimeout:
            continue
        return
    raise AssertionError(f"{name} opens no dialog")


def confirm(page: Page, **fields: str) -> None:
    """Fills in a dialog and presses its primary button."""
    dialog = page.get_by_role("dialog")
    for label, value in fields.items():
        field = dialog.get_by_label(label.replace("_", " "), exact=True)
        field.fill(value)
        field.press("Tab")
    dialog.get_by_test_id("stBaseButton-primary").click()
    expect(dialog).to_have_count(0)


def wait_for_messages(fake: FakeServer, count: int) -> None:
    deadline = time.monotonic() + 120
    while len(fake.messages) < count and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(fake.messages) == count


def test_fire_acknowledge_silence_resolve(
    start_app: StartApp, new_page: NewPage, tmp_path: Path, server: tuple[str, FakeServer]
) -> None:
    url, fake = server
    with Store.open(tmp_path) as store:
        # Windows of 15 s and hold times of 3 s instead of 5 min and 1 min.
        store.targets.upsert("gpu-7", url=url, kind="external", engine="vllm", scrape_interval_s=0.5, time_scale=0.05)
        store.receivers.save({"name": "on call", "kind": "webhook", "url": f"{url}/hook"})
        store.receivers.set_options(group_wait_s=0, group_interval_s=1)
    app = start_app(KVONCALL_NO_ENGINE="1")
    with Store.open(tmp_path) as store:
        store.receivers.set_options(base_url=app.url)
    page = new_page()
    page.goto(f"{app.url}/alerts")
    expect(page.get_by_text("■ firing").first).to_be_visible()
    wait_for_messages(fake, 1)
    (told,) = fake.messages[0]["alerts"]
    assert (told["status"], told["labels"]["alertname"]) == ("firing", "eviction-storm")

    # The link in the message opens this alert; there it is taken on and silenced.
    page.goto(told["generatorURL"])
    expect(page.get_by_role("heading", name=re.compile(r"^Alert \d+: eviction-storm"))).to_be_visible()
    press(page, "Acknowledge")
    confirm(page, Your_name="kim", Reason="pool is being resized")
    expect(page.get_by_text("acknowledged by kim: pool is being resized").first).to_be_visible()
    press(page, "Silence")
    confirm(page, Reason="planned test")
    expect(page.get_by_text("silenced by kim: planned test").first).to_be_visible()

    # What is wrong ends; so does the silence, and the recovery is told.
    fake.storm = False
    expect(page.get_by_text("✔ resolved").first).to_be_visible()
    page.get_by_role("tab", name="Silences").click()
    press(page, "End it")
    confirm(page)
    expect(page.get_by_text("Nothing is silenced.")).to_be_visible()
    wait_for_messages(fake, 2)
    assert fake.messages[1]["alerts"][0]["status"] == "resolved"
    expect(page.get_by_test_id("stException")).to_have_count(0)
    expect(page.get_by_test_id("stAlertContentError")).to_have_count(0)

    # The runbook's link leads to the page of this alert.
    page.goto(told["annotations"]["runbook_url"])
    expect(page.get_by_role("heading", name="Diagnosis")).to_be_visible()
    assert len(fake.messages) == 2, "one message a transition"
