"""Resident memory of the whole app with its idle engine, counted over the process tree (Linux)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from probe.bench import Report

SETTLE_S = 20.0


def bench_memory(*, report: Report) -> dict[str, Any]:
    """Starts `streamlit run app` without background load and sums PSS over the processes, in MiB."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "streamlit",
            "run",
            "app",
            "--server.port",
            str(port),
            "--server.headless=true",
        ]
        environment = os.environ | {"KVONCALL_DATA": folder, "KVONCALL_LOAD_RPS": "0"}
        report("starting the app with its engine, idle")
        with (Path(folder) / "app.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            _wait_until_healthy(port, process)
            time.sleep(SETTLE_S)
            sizes = {pid: _pss_mib(pid) for pid in _tree(process.pid)}
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)
    if len(sizes) < 2:
        raise RuntimeError("the engine process was not running; its memory would be missing from the figure")
    return {"processes": len(sizes), "app_and_engine_mib": round(sum(sizes.values()))}


def _wait_until_healthy(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the app ended with code {process.returncode} before it was ready")
        try:
            health = httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=2)
            if health.status_code == 200 and health.json().get("engine") == "running":
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise RuntimeError("the app was not ready within 120 s")


def _tree(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():  # a child belongs to the thread that started it
        children += (task / "children").read_text().split() if task.name != str(pid) else []
    for child in children:
        found += _tree(int(child))
    return found


def _pss_mib(pid: int) -> float:
    """Proportional set size: private pages plus this process's share of shared ones."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no Pss in /proc/{pid}/smaps_rollup")
