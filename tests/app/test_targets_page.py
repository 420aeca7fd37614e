"""The targets page: what a target carries is said with what to do; a server is looked at before it is attached."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app.runtime import Runtime
from app.ui import targets_page
from probe.collect.discovery import Candidate, Discovery
from probe.store import Store

Open = Callable[..., Any]
Use = Callable[..., Runtime]
PAGE = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1
"""


@pytest.fixture
def server() -> Iterator[str]:
    """A server that shows two of vLLM's metrics and its version."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers = {"/metrics": PAGE, "/version": b'{"version": "0.33.0"}'}
            body = answers.get(self.path, b"")
            self.send_response(200 if self.path in answers else 404)
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


def open_dialog(call: str) -> AppTest:
    script = f"from app.runtime import get_runtime\nfrom app.ui import targets_page as view\nview.{call}"
    return AppTest.from_string(script, default_timeout=60).run()


def test_attached_with_its_coverage_and_stopped(seeded: Store, use: Use, open_page: Open, server: str) -> None:
    use(seeded)
    dialog = open_dialog("attach()")
    dialog.text_input(key="attach-url").input(server)
    dialog.text_input(key="attach-name").input("gpu-7")
    dialog.button(key="attach-confirm").click().run()
    assert not dialog.exception
    target = seeded.targets.get("gpu-7")
    assert target is not None
    assert (target.engine, target.facts["version"]) == ("vllm", "0.33.0")

    page = open_page("targets")
    page.at.selectbox(key="shown").set_value("gpu-7").run()
    page.assert_calm()
    assert "What gpu-7 carries" in page.text
    assert any("kv_usage_ratio" in error for error in page.errors)
    assert "vllm:num_requests_running" in page.text

    seeded.targets.set_facts("gpu-7", {"coverage": None, "version": "0.1.0"})
    page.at.run()
    assert "No report yet." in page.text
    page.button("Look at its metrics now").click().run()
    page.assert_calm()
    assert "vllm:num_requests_running" in page.text
    assert seeded.targets.get("gpu-7").facts["version"] == "0.33.0"  # type: ignore[union-attr]

    dialog = open_dialog("detach('gpu-7')")
    dialog.text_input(key="detach-reason").input("gone")
    dialog.button(key="detach-confirm").click().run()
    assert [t.name for t in seeded.targets.list()] == ["embedded"]


@pytest.mark.parametrize(
    ("address", "says"), [("127.0.0.1:9", "is not an address"), ("http://127.0.0.1:9", "cannot be reached")]
)
def test_an_address_that_does_not_answer_is_refused(seeded: Store, use: Use, address: str, says: str) -> None:
    use(seeded)
    dialog = open_dialog("attach()")
    dialog.text_input(key="attach-url").input(address)
    dialog.button(key="attach-confirm").click().run()
    assert says in dialog.error[0].value.replace("\\", "")
    assert [t.name for t in seeded.targets.list()] == ["embedded"]


def test_engines_that_prometheus_scrapes_are_chosen(seeded: Store, use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    use(seeded)
    found = [
        Candidate(f"gpu-{i}", "vllm", ("0.33.0",), ("m",), {"job": "vllm", "instance": f"gpu-{i}"}, "") for i in (1, 2)
    ]
    asked: list[Any] = []
    monkeypatch.setattr(targets_page, "look_around", lambda *args: (asked.append(args), Discovery(tuple(found)))[1])
    dialog = open_dialog("find_in_prometheus()")
    dialog.text_input(key="prometheus-url").input("http://prometheus:9090")
    dialog.text_input(key="prometheus-auth").input("PROM_AUTH")
    dialog.button(key="prometheus-look").click().run()
    assert asked == [("http://prometheus:9090", {"headers_env": {"Authorization": "PROM_AUTH"}})]
    dialog.multiselect(key="prometheus-chosen").set_value(["gpu-2"]).run()
    dialog.button(key="prometheus-confirm").click().run()
    assert not dialog.exception
    target = seeded.targets.get("gpu-2")
    assert target is not None
    assert (target.source, target.url) == ("prometheus", "http://prometheus:9090")
    assert target.options["matchers"] == {"job": "vllm", "instance": "gpu-2"}
    assert seeded.targets.get("gpu-1") is None


def test_no_target_yet(store: Store, use: Use, open_page: Open) -> None:
    use(store)
    page = open_page("targets")
    page.assert_calm()
    assert "No target is watched yet" in page.text
