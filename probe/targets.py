"""Attaching a server by its address, and what is known of it when a runbook asks.

Attaching looks before it registers: the address must answer with metrics of an engine that a dialect knows.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

from probe.collect.isolation import observed_isolation
from probe.collect.scrape import ScrapeError, fetch, metrics_url, parse_families
from probe.replay.evidence import observed_traffic
from probe.store import Alert, Store, Target

ATTACH_TIMEOUT_S = 5.0
LOOK_BACK_S = 900.0

# A family's prefix tells the engine; the embedded one exposes vLLM's names beside its own, so it comes first.
_PREFIXES = {"kvoncall": "kvoncall:", "vllm": "vllm:"}


class TargetError(Exception):
    """A server cannot be attached; the message is one sentence."""


def attach_target(store: Store, spec: str) -> Target:
    """Registers the server of `[NAME=]URL` as an external target and returns it.

    Without a name the host and port are the name. Raises `TargetError` when the address makes no sense, does not
    answer with metrics, or serves an engine that no dialect describes.
    """
    name, url = _split(spec)
    try:
        families = asyncio.run(_families(url))
    except ScrapeError as error:
        raise TargetError(f"cannot attach {url}: {error}") from None
    for engine, prefix in _PREFIXES.items():
        if any(family.startswith(prefix) for family in families):
            return store.targets.upsert(name, url=url, kind="external", engine=engine)
    raise TargetError(
        f"cannot attach {url}: it serves metrics, but none of an engine known here ({', '.join(_PREFIXES)}); "
        "give the address of the engine itself"
    )


def measured_facts(store: Store, target: Target, alert: Alert | None) -> dict[str, Any]:
    """`target.facts` with what the alert's time (or the last 15 minutes) shows: traffic, failed allocation, breach.

    What `runbooks.recommend.from_facts` reads. A figure that was not measured is left out; the runbook then says
    what is missing.
    """
    until = alert.resolved_at if alert is not None and alert.resolved_at else time.time()
    since = alert.pending_at - alert.window_s if alert is not None else until - LOOK_BACK_S
    facts = {
        **target.facts,
        "engine": target.engine,
        "traffic": observed_traffic(store, target.name, since, until),
        "isolation": observed_isolation(store, target.name, since, until),
    }
    exits = store.events.recent(limit=1, target=target.name, kinds=["engine_exit"], since=since)
    allocation = exits[0].data.get("allocation_bytes") if exits else None
    if allocation is not None:
        facts["oom_allocation_bytes"] = allocation
    return facts


def find_server(store: Store, where: str) -> tuple[str, str]:
    """(name, URL) of a stored target, watched or not, or of an address; raises `TargetError`."""
    targets = store.targets.list(active=None)
    for target in targets:
        if where in (target.name, target.url):
            return target.name, target.url.removesuffix("/metrics")
    if urlsplit(where).scheme not in ("http", "https"):
        known = ", ".join(target.name for target in targets) or "none is stored"
        raise TargetError(f"there is no target {where!r} ({known}); give http://host:port or a stored target's name")
    return where.rstrip("/"), where.rstrip("/")


def api_key_from(variable: str | None) -> str | None:
    """The key in an environment variable, `None` when no variable is named; raises `TargetError` when it is empty."""
    if not variable:
        return None
    key = os.environ.get(variable)
    if not key:
        raise TargetError(f"the environment variable {variable} is empty; put the API key there")
    return key


def _split(spec: str) -> tuple[str, str]:
    match = re.fullmatch(r"(?:([A-Za-z0-9._-]+)=)?(https?://.+)", spec.strip())
    if not match:
        raise TargetError(f"{spec!r} is not an address; write [NAME=]http://host:port")
    url = match[2].rstrip("/")
    try:
        parts = urlsplit(url)
        host = f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
    except ValueError:
        raise TargetError(f"{url!r} is not an address; write [NAME=]http://host:port") from None
    if not parts.hostname:
        raise TargetError(f"{url!r} names no host; write [NAME=]http://host:port")
    return match[1] or host, url


async def _families(url: str) -> set[str]:
    async with httpx.AsyncClient() as client:
        body = await fetch(client, metrics_url(url), timeout_s=ATTACH_TIMEOUT_S)
    return {family.name for family in parse_families(body.decode("utf-8", errors="replace"), url)}
