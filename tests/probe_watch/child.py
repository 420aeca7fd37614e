"""Processes that tests start and kill: `child.py ROLE DATA_DIR [ARGUMENT]`. Reports a line at a time on stdout."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from probe.store import Sample, Store

NOW = 1_800_000_000.0


def scrape(target: str, at: float, series: int = 50) -> list[Sample]:
    return [Sample(target, "kv_blocks", {"state": str(i)}, at, float(i)) for i in range(series)]


def replay_and_die(data_dir: Path, _argument: str) -> None:
    store = Store.open(data_dir)
    replay = store.replays.create("oom", "drill-1", {})
    store.replays.append(replay.id, "inject", "sent")
    os._exit(9)


def write_much(data_dir: Path, name: str) -> None:
    with Store.open(data_dir) as store:
        store.targets.upsert(name, url="http://x", kind="external")
        for i in range(30):
            store.samples.write(scrape(name, NOW + i))
            store.events.add(name, "note", str(i))


def write_for_ever(data_dir: Path, _argument: str) -> None:
    store = Store.open(data_dir)
    store.targets.upsert("e", url="http://x", kind="external")
    replay = store.replays.create("oom", "drill", {})
    i = 0
    while True:
        store.samples.write(scrape("e", NOW + i))
        store.flush()
        store.replays.append(replay.id, "inject", str(i))
        print(i, flush=True)
        i += 1


def monitor(data_dir: Path, ttl_s: str) -> None:
    """Watch until stdin ends; says "leader" when it leads."""
    from probe.monitor import Monitor  # other roles start faster without

    with Store.open(data_dir) as store:
        watch = Monitor(store, lease_ttl_s=float(ttl_s), tick_s=0.1)
        watch.start()
        while not watch.status().leader:
            time.sleep(0.02)
        print("leader", flush=True)
        sys.stdin.read()
        watch.stop()


ROLES = {f.__name__: f for f in (replay_and_die, write_much, write_for_ever, monitor)}

if __name__ == "__main__":
    ROLES[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
