"""A real `streamlit run app` process on a free port and a real Chromium."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

import app.runtime as runtime_module

APP = Path(runtime_module.__file__).parent
START_S = 180.0
ARGS = [
    "--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
]  # fmt: skip


@dataclass
class AppProcess:
    """`streamlit run app` over one data folder."""

    data: Path
    environ: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    url: str = ""

    def start(self) -> None:
        """Starts it and waits until /healthz answers with the embedded engine running (or switched off)."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env = {**os.environ, "PYTHONPATH": str(APP.parent), "KVONCALL_DATA": str(self.data), **self.environ}
        command = [sys.executable, "-m", "streamlit", "run", str(APP), "--server.port", str(port)]
        with (self.data / "app.log").open("ab") as log:
            # Another folder as working directory: the settings beside the app have to hold anywhere.
            self.process = subprocess.Popen(command, cwd=self.data, env=env, stdout=log, stderr=log)
        self.url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        while self.engine_state() not in {"running", "disabled"}:
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.5)

    def engine_state(self) -> Any:
        try:
            return httpx.get(f"{self.url}/healthz", timeout=5, trust_env=False).json().get("engine")
        except (httpx.HTTPError, ValueError):
            return None

    def log(self) -> str:
        return (self.data / "app.log").read_text(errors="replace")

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends the process and waits until it is gone."""
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait(timeout=120)


@pytest.fixture
def start_app(tmp_path: Path) -> Iterator[Callable[..., AppProcess]]:
    """Starts apps (all over the same data folder unless told otherwise); ends those that still run."""
    started: list[AppProcess] = []

    def start(data: Path = tmp_path, **environ: str) -> AppProcess:
        one = AppProcess(data, environ)
        started.append(one)
        one.start()
        return one

    yield start
    for one in started:
        if one.process is not None and one.process.poll() is None:
            one.end()


@pytest.fixture
def chromium() -> Iterator[Browser]:
    """Debian's Chromium. Without one the browser tests are skipped, except in CI, where that is a failure.

    Open for one test only: Playwright keeps an event loop running in this thread, in which no other test could
    use asyncio.run.
    """
    path = shutil.which("chromium")
    if path is None and os.environ.get("CI") == "true":
        pytest.fail("no chromium on the PATH; apt-get install chromium")
    if path is None:
        pytest.skip("no chromium on the PATH; apt-get install chromium")
    expect.set_options(timeout=120_000)  # of a busy machine: every wait ends as soon as it is fulfilled
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture
def new_page(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a browser page; what it asks of other hosts and its script errors are kept on the page."""
    contexts = []

    def open_(width: int = 1280, height: int = 900) -> Page:
        context = chromium.new_context(viewport={"width": width, "height": height})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)
        return page

    yield open_
    for context in contexts:
        context.close()
