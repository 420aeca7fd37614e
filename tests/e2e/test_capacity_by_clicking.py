"""Capacity and Runbooks in a browser: a preset gets a verdict, a slider changes it, a broken config is one sentence,
two plans stand side by side; a firing alert's runbook shows values computed for its target, and keeps a note."""

from __future__ import annotations

import http.server
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from probe.store import Store

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

NewPage = Callable[..., Page]
StartApp = Callable[..., Any]


@pytest.fixture
def server() -> Iterator[str]:
    """An exposition of vLLM 0.32.0 that preempts without end; yields its address."""
    started = time.monotonic()
    info = 'block_size="16",num_gpu_blocks="1000",gpu_memory_utilization="0.8",cache_dtype="auto"'

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            passed = time.monotonic() - started
            labels = '{engine="0",model_name="m"}'
            text = "".join(
                f"# TYPE {name} {kind}\n{name}{'_total' if kind == 'counter' else ''}{labels} {value}\n"
                for name, kind, value in (
                    ("vllm:num_requests_running", "gauge", 8),
                    ("vllm:num_requests_waiting", "gauge", 0),
                    ("vllm:kv_cache_usage_perc", "gauge", 0.97),
                    ("vllm:num_preemptions", "counter", 5 * passed),
                    ("vllm:request_success", "counter", 20 * passed),
                )
            )
            body = (
                f'{text}# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{engine="0",{info}}} 1\n'.encode()
            )
            self.send_response(200 if self.path == "/metrics" else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()
    thread.join()


def test_capacity_and_the_runbook_of_a_firing_alert(
    start_app: StartApp, new_page: NewPage, tmp_path: Path, server: str
) -> None:
    with Store.open(tmp_path) as store:
        store.targets.upsert(
            "gpu-7", url=server, kind="external", engine="vllm", scrape_interval_s=0.5, time_scale=0.05
        )  # fmt: skip
        store.targets.set_facts("gpu-7", {
            "version": "0.32.0", "model": "Llama-3.1-8B", "gpu": "L4-24GB", "max_model_len": 4096,
            "cache_config_info": {
                "block_size": "16", "num_gpu_blocks": "1000", "gpu_memory_utilization": "0.8", "cache_dtype": "auto",
            },
        })  # fmt: skip
    app = start_app(KVONCALL_NO_ENGINE="1")
    page = new_page()
    plan_by_clicking(page, app.url)
    runbook_by_clicking(page, app.url)
    assert "Traceback" not in app.log()
    with Store.open(tmp_path) as store:
        alert = store.alerts.history(limit=1)[0]
        assert [note.current.text for note in store.notes.list("alert", str(alert.id))] == ["two replicas drained"]
        assert store.notes.checklist("alert", str(alert.id))["diagnosis-1"].author == "kim"


def chart(page: Page, text: str) -> Locator:
    """A chart by a part of its alternative text."""
    return page.locator(f'[data-testid="stVegaLiteChart"][aria-label*="{text}"]')


def plan_by_clicking(page: Page, url: str) -> None:
    """Preset, slider, comparison, a broken config."""
    page.goto(f"{url}/capacity?model=llama-3.1-8b")
    expect(page.get_by_text("✔ Fits")).to_be_visible()
    expect(chart(page, "Memory of one GPU: stacked bar; weights 15.0 GiB")).to_be_visible()
    page.get_by_role("button", name="Keep as plan A").click()
    expect(page.get_by_role("button", name="Forget plan A")).to_be_visible()
    page.get_by_role("slider", name=re.compile("Longest request")).press("End")
    expect(page.get_by_text("✖ Does not fit")).to_be_visible()
    expect(page.get_by_text(re.compile("first lever"))).to_be_visible()
    expect(chart(page, "plan A and plan B: stacked bar; A: weights")).to_be_visible()
    assert "max_model_len=1048576" in page.url

    page.get_by_role("radio", name="config.json").click()
    field = page.get_by_label("or its text")
    field.fill('{"num_hidden_layers": ')
    field.press("Control+Enter")
    expect(page.get_by_test_id("stAlertContentError")).to_have_text(re.compile("the pasted config is not JSON"))
    expect(page.get_by_test_id("stException")).to_have_count(0)
    page.get_by_role("radio", name="preset").click()
    expect(page.get_by_text("✖ Does not fit")).to_be_visible()
    page.get_by_role("tab", name="Templates").click()
    expect(page.get_by_role("button", name="Take it into the plan")).to_be_visible()


def runbook_by_clicking(page: Page, url: str) -> None:
    """From the firing alert to its runbook: computed values, the checklist, a note."""
    page.goto(f"{url}/alerts")
    expect(page.get_by_text("■ firing").first).to_be_visible()
    page.get_by_role("link", name="Open runbook eviction-storm").first.click()
    expect(page.get_by_role("heading", name="For gpu-7")).to_be_visible()
    expect(page.get_by_text(re.compile("18048 tokens at 131072 bytes each"))).to_be_visible()
    page.get_by_text("Checklist and team notes").click()
    name = page.get_by_label("Your name")
    name.fill("kim")
    name.press("Tab")
    page.get_by_role("checkbox").first.press("Space")
    expect(page.get_by_text("done by kim")).to_be_visible()
    note = page.get_by_label("New note")
    note.fill("two replicas drained")
    note.press("Control+Enter")
    page.get_by_role("button", name="Add note").click()
    expect(page.get_by_text("Notes about alert 1: 1")).to_be_visible()
    expect(page.get_by_test_id("stException")).to_have_count(0)
    expect(page.get_by_test_id("stAlertContentError")).to_have_count(0)
