"""Processes that tests start and kill: `store_child.py ROLE LOCATION [ARGUMENT]`; they report on stdout, by lines."""

from __future__ import annotations

import os
import sys

from probe.store import Sample, Store

NOW = 1_800_000_000.0


def scrape(target: str, at: float, series: int = 50) -> list[Sample]:
    return [Sample(target, "kv_blocks", {"state": str(i)}, at, float(i)) for i in range(series)]


def replay_and_die(location: str, _argument: str) -> None:
    store = Store.open(location)
    replay = store.replays.create("oom", "drill-1", {})
    store.replays.append(replay.id, "inject", "sent")
    os._exit(9)


def write_much(location: str, name: str) -> None:
    with Store.open(location) as store:
        store.targets.upsert(name, url="http://x", kind="external")
        for i in range(30):
            store.samples.write(scrape(name, NOW + i))
            store.events.add(name, "note", str(i))


def write_for_ever(location: str, _argument: str) -> None:
    store = Store.open(location)
    store.targets.upsert("e", url="http://x", kind="external")
    replay = store.replays.create("oom", "drill", {})
    i = 0
    while True:
        store.samples.write(scrape("e", NOW + i))
        store.flush()
        store.replays.append(replay.id, "inject", str(i))
        print(i, flush=True)
        i += 1


ROLES = {f.__name__: f for f in (replay_and_die, write_much, write_for_ever)}

if __name__ == "__main__":
    ROLES[sys.argv[1]](sys.argv[2], sys.argv[3])
