"""Attaching a server by its address, and what is known of it when a runbook asks.

Attaching looks before it registers: the address must answer with metrics of an engine that a dialect knows. What
the engine, its version and its page tell is kept in the target's facts: "version", "spelling" where the names have
several, and "coverage", the report of `probe.collect.coverage`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from probe.collect.access import AccessError, access_from
from probe.collect.canonical import canonical_samples
from probe.collect.coverage import CoverageReport, coverage
from probe.collect.exposition import ExpositionReader
from probe.collect.isolation import observed_isolation
from probe.collect.scrape import ScrapeError, get, metrics_url
from probe.dialects import ENGINES, load_dialect
from probe.dialects.detect import Detection, detect
from probe.replay.evidence import observed_traffic
from probe.store import Alert, Store, Target

ATTACH_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 1024 * 1024
LOOK_BACK_S = 900.0


class TargetError(Exception):
    """A server cannot be attached; the message is one sentence."""


@dataclass(frozen=True)
class Look:
    """What one look at an address told: the engine, its version where it says one, and what its page carries."""

    url: str  # with the path of the metrics where it is not /metrics
    detection: Detection
    version: str | None
    info: dict[str, str]
    report: CoverageReport

    @property
    def facts(self) -> dict[str, Any]:
        """What to keep of it in a target's facts."""
        found: dict[str, Any] = {"engine": self.detection.engine, "coverage": self.report.to_dict()}
        if self.version:
            found["version"] = self.version
        if self.info:
            found["cache_config_info"] = self.info
        if len(load_dialect(self.detection.engine).prefixes) > 1:
            found["spelling"] = self.detection.spelling
        return found


def attach_target(store: Store, spec: str, options: dict[str, Any] | None = None) -> Target:
    """Registers the server of `[NAME=]URL` as an external target and returns it.

    Without a name the host and port are the name. `options` say how it is reached (`probe.collect.access`); None
    keeps those of a target attached before. Raises `TargetError` when the address makes no sense, does not answer
    with metrics, or serves an engine that no dialect describes.
    """
    name, url = _split(spec)
    known = store.targets.get(name)
    if options is None and known is not None and known.source == "metrics":
        options = known.options
    look = look_at(url, options)
    store.targets.upsert(name, url=look.url, kind="external", engine=look.detection.engine, options=options)
    store.targets.set_facts(name, look.facts)
    target = store.targets.get(name)
    assert target is not None
    return target


def look_at(url: str, options: dict[str, Any] | None = None) -> Look:
    """What the address of an engine tells of itself, without registering it; raises `TargetError`."""
    try:
        return asyncio.run(_look(url, options or {}))
    except (ScrapeError, AccessError) as error:
        raise TargetError(f"cannot attach {url}: {error}") from None


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
            return target.name, target.url.removesuffix("/metrics").removesuffix("/prometheus")
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


async def _look(url: str, options: dict[str, Any]) -> Look:
    access = access_from(options, url)
    paths = {load_dialect(engine).metrics_path: None for engine in ENGINES}
    pages = [url] if url.endswith("/metrics") else [url + path for path in paths]
    failed: ScrapeError | None = None
    other = False
    async with httpx.AsyncClient(trust_env=False, verify=access.ssl_context(), headers=access.headers) as client:
        for page in pages:
            try:
                answer = await get(client, page, timeout_s=ATTACH_TIMEOUT_S)
                read = ExpositionReader().read(answer.body, answer.content_type, page, time.time())
            except ScrapeError as error:
                failed = failed or error
                continue
            families = {family.name: family for family in read.families}
            detection = detect(families)
            if detection is not None:
                where = url if page == metrics_url(url) else page
                version = await _version(client, page, detection.engine)
                dialect = load_dialect(detection.engine, version)
                samples, info = canonical_samples(families.values(), dialect, "", 0.0)
                exposed = {sample.name for family in families.values() for sample in family.samples} | families.keys()
                carried = {sample.metric for sample in samples}
                report = coverage(dialect, exposed, version, carried=carried, likely=detection.versions)
                return Look(where, detection, version, info, report)
            other = True
    if failed is not None and not other:
        raise failed
    raise ScrapeError(
        f"it serves metrics, but none of an engine known here ({', '.join(ENGINES)}); "
        "give the address of the engine itself"
    )


async def _version(client: httpx.AsyncClient, page: str, engine: str) -> str | None:
    """The version a server tells of itself; None where it does not."""
    dialect = load_dialect(engine)
    base = page.removesuffix(dialect.metrics_path).rstrip("/")
    for path, key in dialect.version_at:
        try:
            answer = await get(client, base + path, timeout_s=ATTACH_TIMEOUT_S, max_bytes=MAX_ANSWER_BYTES)
            version = json.loads(answer.body)[key]
        except (ScrapeError, ValueError, KeyError, TypeError):
            continue
        if isinstance(version, str):
            return version
    return None
