"""The monitor tells receivers by itself: an alert fires and is sent, resolves and is sent once more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from probe.alerts.rules import DEFAULT_RULES
from probe.monitor import Monitor
from probe.store import Store

from .conftest import Hook

RULE = next(rule for rule in DEFAULT_RULES if rule.id == "kv-saturated")


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for: {what}"
        time.sleep(0.05)


def test_a_breach_is_told_once_and_its_end_once(store: Store, hook: Hook) -> None:
    usage = {"value": 1.0}

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            lines = [
                f'vllm:kv_cache_usage_perc{{engine="0"}} {usage["value"]}',
                'vllm:num_requests_waiting{engine="0"} 3',
            ]
            body = "".join(f"{line}\n" for line in lines).encode()
            self.send_response(200 if self.path == "/metrics" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    store.receivers.save({"name": "hook", "kind": "webhook", "url": hook.url})
    store.receivers.set_options(group_wait_s=0, group_interval_s=0)
    url = f"http://127.0.0.1:{server.server_port}"
    store.targets.upsert("t", url=url, kind="external", scrape_interval_s=0.2, time_scale=0.01)
    monitor = Monitor(store, rules=[RULE], tick_s=0.05, lease_ttl_s=30.0)
    monitor.start()
    try:
        wait_until(lambda: hook.posts, "the firing")
        usage["value"] = 0.1
        wait_until(lambda: len(hook.posts) > 1, "the resolution")
    finally:
        monitor.stop()
        server.shutdown()
        server.server_close()
    assert hook.messages == [("firing", [("firing", "kv-saturated")]), ("resolved", [("resolved", "kv-saturated")])]
    assert [(n.transition, n.state) for n in reversed(store.notifications.list())] == [
        ("firing", "sent"),
        ("resolved", "sent"),
    ]
