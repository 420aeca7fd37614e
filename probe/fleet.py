"""Engines that a Prometheus server scrapes already: attached as targets read from it, or only looked back at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from probe.alerts.backtest import BacktestError, History, needed_metrics
from probe.alerts.rule import Rule, ValueSignal
from probe.collect.access import AccessError, access_from
from probe.collect.discovery import Candidate, Discovery, discover
from probe.collect.prometheus import PrometheusError, PrometheusServer
from probe.collect.prometheus_target import series
from probe.store import Sample, Store, Target
from probe.targets import TargetError

MAX_POINTS = 11_000  # of one series: as many as one query answers
SCRAPE_INTERVAL_S = 15.0  # asking more often than Prometheus scrapes brings nothing


def access_options(variable: str | None) -> dict[str, Any]:
    """How a server is reached, as it is kept: the variable that holds the Authorization header, never the header."""
    return {"headers_env": {"Authorization": variable.strip()}} if variable and variable.strip() else {}


def look_around(url: str, options: dict[str, Any] | None = None) -> Discovery:
    """What a Prometheus server scrapes of the engines known here; raises `TargetError`.

    `options` say how the server is reached (`probe.collect.access`).
    """
    with _asking(url, options or {}) as server:
        return discover(server)


def attach_found(
    store: Store, url: str, found: Iterable[Candidate], options: dict[str, Any] | None = None
) -> list[Target]:
    """Registers engines as targets that are read from the Prometheus server at `url`."""
    return [
        store.targets.upsert(
            one.name,
            url=url.rstrip("/"),
            kind="external",
            engine=one.engine,
            source="prometheus",
            options={**(options or {}), "matchers": one.matchers},
            scrape_interval_s=one.scrape_interval_s or SCRAPE_INTERVAL_S,
        )
        for one in found
    ]


def histories(
    url: str,
    rule: Rule,
    since: float,
    until: float,
    *,
    name: str | None = None,
    options: dict[str, Any] | None = None,
    step_s: float | None = None,
    report: Callable[[str], None],
) -> list[History]:
    """A rule's history on every engine that Prometheus scrapes now (or on the one of that name).

    Raises `TargetError` and `BacktestError`; what Prometheus lacks or warns of is reported.
    """
    if not isinstance(rule.signal, ValueSignal):
        raise BacktestError(f"{rule.id} reads what only this store knows: leave --prometheus out")
    found = look_around(url, options)
    chosen = [one for one in found.candidates if name in (None, one.name)]
    if not chosen:
        known = ", ".join(one.name for one in found.candidates) or "none"
        raise BacktestError(f"Prometheus scrapes no engine {name or 'known here'} now; it scrapes: {known}")
    with _asking(url, options or {}) as server:
        return [_history(server, one, rule, since, until, step_s, report) for one in chosen]


def _history(
    server: PrometheusServer,
    one: Candidate,
    rule: Rule,
    since: float,
    until: float,
    step_s: float | None,
    report: Callable[[str], None],
) -> History:
    step = max(step_s or 0.0, one.scrape_interval_s or SCRAPE_INTERVAL_S, (until - since) / MAX_POINTS)
    target = Target(
        0, one.name, server.url, "external", one.engine, [], {"version": one.versions[-1]} if one.versions else {},
        step, 1.0, True, since, "prometheus", {"matchers": one.matchers},
    )  # fmt: skip
    samples: list[Sample] = []
    for metric, reach in needed_metrics(rule).items():
        try:
            frame, problems = series(server, target, metric, since - max(reach, step), until, step)
        except PrometheusError as error:
            report(f"{one.name}: {error}")
            continue
        for problem in problems:
            report(f"{one.name}: {metric}: {problem}")
        labels = [column for column in frame.columns if column not in ("ts", "value")]
        samples += [
            Sample(one.name, metric, {k: str(row[k]) for k in labels if row[k]}, float(row["ts"]), float(row["value"]))
            for row in frame.to_dict("records")
        ]
    if not samples:
        raise BacktestError(f"Prometheus has nothing of {one.name} since then: choose another --since")
    samples.sort(key=lambda sample: sample.ts)
    return History(rule, target, samples, [], max(since, samples[0].ts), until, step)


@contextmanager
def _asking(url: str, options: dict[str, Any]) -> Iterator[PrometheusServer]:
    try:
        server = PrometheusServer(url, access_from(options, url))
        try:
            yield server
        finally:
            server.close()
    except (AccessError, PrometheusError) as error:
        raise TargetError(f"cannot ask Prometheus at {url}: {error}") from None
