"""Engines that a Prometheus server scrapes already, attached as targets that are read from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from probe.collect.access import AccessError, access_from
from probe.collect.discovery import Candidate, Discovery, discover
from probe.collect.prometheus import PrometheusError, PrometheusServer
from probe.store import Store, Target
from probe.targets import TargetError

SCRAPE_INTERVAL_S = 15.0  # asking more often than Prometheus scrapes brings nothing


def look_around(url: str, options: dict[str, Any] | None = None) -> Discovery:
    """What a Prometheus server scrapes of the engines known here; raises `TargetError`.

    `options` say how the server is reached (`probe.collect.access`).
    """
    try:
        server = PrometheusServer(url, access_from(options or {}, url))
        try:
            return discover(server)
        finally:
            server.close()
    except (AccessError, PrometheusError) as error:
        raise TargetError(f"cannot ask Prometheus at {url}: {error}") from None


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
