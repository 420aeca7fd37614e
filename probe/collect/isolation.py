"""What is known of an isolation breach of a target: the counter of its engine, and the newest rounds of the probe."""

from __future__ import annotations

import math
import time
from typing import Any

from probe.alerts.arithmetic import growth
from probe.alerts.evaluate import breaches
from probe.alerts.isolation import newest
from probe.alerts.rule import BreachSignal
from probe.alerts.rules import PREFIX_ISOLATION_BREACH
from probe.alerts.window import Window
from probe.store import Store
from runbooks.isolation_facts import kind_of

_REQUESTS, _ASKED, _LOST = "requests_finished_total", "prefix_queries_total", "prefix_hits_lost_total"


def observed_isolation(store: Store, target: str, since: float, until: float | None = None) -> dict[str, Any] | None:
    """The facts of `runbooks.isolation_facts.IsolationFacts` from samples between two times; None: no breach seen.

    Rounds of the probe count as far back as for the alert.
    """
    rule = PREFIX_ISOLATION_BREACH
    signal = rule.signal
    assert isinstance(signal, BreachSignal)
    until = time.time() if until is None else until
    store.samples.flush()
    scraped = ("up", signal.counter, _REQUESTS, _ASKED, _LOST)
    window = Window(dict.fromkeys((*scraped, *rule.round_metrics), math.inf))
    for metrics, start in ((scraped, since), (rule.round_metrics, until - rule.rounds_s)):
        window.add(s for s in store.samples.recent(target, metrics, start) if s.ts <= until)
    counted = breaches(window, signal, since, until)
    leaking = [reading for reading in newest(window, signal, until - rule.rounds_s) if reading.leaks]
    hits = round(sum(counted.values()))
    if not hits and not leaking:
        return None

    def rise(metric: str) -> float:
        return sum(found.value for s in window.series(metric) if (found := growth(s, since, until)))

    asked = rise(_ASKED)
    # What the engine counted is of its requests; without a counter the probe's own questions are all that is known.
    return {
        "kind": kind_of(counted, [reading.check for reading in leaking]),
        "breaches": hits or sum(reading.leaks for reading in leaking),
        "requests": round(rise(_REQUESTS)) if hits else sum(reading.probes for reading in leaking),
        "lost_hit_rate": rise(_LOST) / asked if asked and window.series(_LOST) else None,
    }
