"""Processes that tests start and kill: `child.py ROLE DATA_DIR [ARGUMENT]`. Reports a line at a time on stdout."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from probe.monitor import Monitor
from probe.store import Store


def monitor(data_dir: Path, ttl_s: str) -> None:
    """Watch until stdin ends; says "leader" when it leads."""
    with Store.open(data_dir) as store:
        watch = Monitor(store, lease_ttl_s=float(ttl_s), tick_s=0.1)
        watch.start()
        while not watch.status().leader:
            time.sleep(0.02)
        print("leader", flush=True)
        sys.stdin.read()
        watch.stop()


ROLES = {"monitor": monitor}

if __name__ == "__main__":
    ROLES[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
