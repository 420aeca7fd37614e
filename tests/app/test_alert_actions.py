"""Acknowledging, silencing and telling people, from the alerts page: what is done is kept with a name and a reason."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app.runtime import Runtime
from probe.store import ImportedAlert, Store

Open = Callable[..., Any]
Use = Callable[..., Runtime]


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A webhook that takes everything; its address and what it got."""
    got: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", got
    server.shutdown()
    server.server_close()
    thread.join()


def open_dialog(call: str, module: str = "alert_actions") -> AppTest:
    """A dialog alone: a script that opens it on every run (an `AppTest` click redraws the whole script)."""
    script = f"from app.runtime import get_runtime\nfrom app.ui import {module} as view\nview.{call}"
    return AppTest.from_string(script, default_timeout=60).run()


def press(dialog: AppTest, key: str, **fields: str) -> list[str]:
    """Fills in and presses; returns the errors shown."""
    for name, value in fields.items():
        dialog.text_input(key=name.replace("_", "-")).input(value)
    dialog.button(key=key).click().run()
    assert not dialog.exception
    return [error.value.replace("\\", "") for error in dialog.error]


def test_an_alert_is_acknowledged_with_a_reason_and_taken_back(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    alert = seeded.alerts.active()[0]
    dialog = open_dialog(f"acknowledge(get_runtime().store.alerts.get({alert.id}))")
    assert press(dialog, "ack-confirm", author="kim") == ["Give a reason: it is kept with the event."]
    press(dialog, "ack-confirm", author="kim", ack_reason="pool is being resized")
    kept = seeded.alerts.active()[0].acknowledgement
    assert kept is not None
    assert (kept.author, kept.kind, kept.reason) == ("kim", "investigating", "pool is being resized")

    page = open_page("alerts", alert=str(alert.id))
    page.assert_calm()
    assert "◌ nobody is told] acknowledged by kim: pool is being resized" in page.text
    assert page.button("Take back")
    assert page.button("Silence")
    press(open_dialog(f"take_back(get_runtime().store.alerts.get({alert.id}))"), "unack-confirm", author="lee")
    assert seeded.alerts.active()[0].acknowledgement is None
    assert open_page("alerts", alert=str(alert.id)).button("Acknowledge")


def test_a_silence_is_made_and_ended(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    alert = seeded.alerts.active()[0]
    dialog = open_dialog("silence(view.matchers_of(get_runtime().store.alerts.active()[0]))")
    assert dialog.text_input(key="silence-matchers").value == 'rule="eviction-storm", target="embedded"'
    press(dialog, "silence-confirm", author="kim", silence_reason="planned load test")
    (kept,) = seeded.silences.list()
    assert 3_500 < kept.ends_at - time.time() <= 3_600

    page = open_page("alerts", alert=str(alert.id))
    page.assert_calm()
    assert '◌ silenced] rule="eviction-storm", target="embedded" until' in page.text
    assert "◌ nobody is told] silenced by kim: planned load test" in page.text
    assert page.button("End it")
    press(open_dialog(f"end_silence({kept.id})"), "expire-confirm", author="kim")
    assert seeded.silences.list() == []
    assert "1 ended" in open_page("alerts").text


def test_a_silence_of_everything_is_refused_with_a_sentence(seeded: Store, use: Use) -> None:
    use(seeded)
    dialog = open_dialog("silence('')")
    errors = press(dialog, "silence-confirm", silence_matchers='rule!="x"', author="kim", silence_reason="quiet please")
    assert any("it would mute every alert" in error for error in errors)
    assert seeded.silences.list() == []


def test_a_receiver_is_added_tried_and_removed(
    seeded: Store, use: Use, open_page: Open, hook: tuple[str, list[dict[str, Any]]]
) -> None:
    use(seeded)
    url, got = hook
    dialog = open_dialog("add_receiver()", "receivers_view")
    press(dialog, "receiver-confirm", receiver_name="on call", receiver_url=url)
    assert [receiver.name for receiver in seeded.receivers.list()] == ["on call"]
    page = open_page("alerts")
    page.at.button(key="test-on call").click().run()
    page.assert_calm()
    assert page.errors == []
    assert len(got) == 1
    assert [s.value for s in page.at.success] == ["on call took the test message."]  # the mark is its icon
    press(open_dialog("remove_receiver('on call')", "receivers_view"), "receiver-remove")
    assert seeded.receivers.list() == []


def test_links_and_pacing_of_messages_are_set(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    dialog = open_dialog("change_options()", "receivers_view")
    assert press(dialog, "notify-confirm", notify_url="not an address") != []
    assert seeded.receivers.options().base_url == ""
    dialog.multiselect(key="notify-group").set_value(["rule", "target"])
    press(dialog, "notify-confirm", notify_url="https://kv.example.com/")
    options = seeded.receivers.options()
    assert (options.base_url, options.group_by) == ("https://kv.example.com", ("rule", "target"))
    assert options.repeat_interval_s == 14_400.0
    assert "Messages are grouped by rule, target" in open_page("alerts").text


def test_an_address_with_a_credential_is_refused(seeded: Store, use: Use) -> None:
    use(seeded)
    dialog = open_dialog("add_receiver()", "receivers_view")
    address = "https://hooks.slack.com/services/T0/B0/abcdef"
    errors = press(dialog, "receiver-confirm", receiver_name="slack", receiver_url=address)
    assert any("env:NAME or secret:NAME" in error for error in errors)
    assert seeded.receivers.list() == []


def test_alerts_of_another_alertmanager_stand_with_our_runbook(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    labels = {"alertname": "VLLMPreemptionsHigh", "job": "vllm"}
    seeded.imported.save(
        [
            ImportedAlert(
                "f1", "firing", labels, {"summary": "many *preemptions*"}, time.time() - 60, None, "", "", "kvoncall",
                time.time(), "eviction-storm",
            )
        ]
    )  # fmt: skip
    page = open_page("alerts")
    page.assert_calm()
    assert "VLLMPreemptionsHigh" in page.text
    assert "many *preemptions*" in page.text
    assert "Open runbook eviction-storm -> runbooks?runbook=eviction-storm" in page.text
