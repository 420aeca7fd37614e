"""One scrape of one target: HTTP with limits, the official Prometheus parser, canonical samples.

All samples of a scrape carry the time at which it started. `*_created` series are dropped, NaN too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from probe.dialects import CanonicalMetric, Dialect
from probe.store import Sample

MAX_BYTES = 8 * 1024 * 1024  # vLLM with one engine answers about 60 kB


class ScrapeError(Exception):
    """A scrape gave nothing to store; the message is one sentence for the user."""


@dataclass(frozen=True)
class Scrape:
    """What one successful scrape read. `info` holds the labels of the dialect's configuration metric."""

    samples: list[Sample]
    info: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()  # required canonical metrics that the target does not expose


def metrics_url(url: str) -> str:
    """A target's base URL with `/metrics`, unless it already names a path of that kind."""
    url = url.rstrip("/")
    return url if url.endswith("/metrics") else f"{url}/metrics"


async def fetch(client: httpx.AsyncClient, url: str, *, timeout_s: float, max_bytes: int = MAX_BYTES) -> bytes:
    """The body at `url`, read in full within `timeout_s` seconds and `max_bytes` bytes; else `ScrapeError`."""
    try:
        async with asyncio.timeout(timeout_s), client.stream("GET", url) as response:
            if response.status_code != 200:
                raise ScrapeError(f"{url} answered HTTP {response.status_code} instead of metrics.")
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > max_bytes:
                    raise ScrapeError(f"{url} sent more than {max_bytes:,} bytes: it was not read.")
            return bytes(body)
    except (TimeoutError, httpx.TimeoutException):
        raise ScrapeError(f"{url} did not answer in full within {timeout_s:g} s.") from None
    except httpx.ConnectError as error:
        raise ScrapeError(f"{url} cannot be reached ({_reason(error)}).") from None
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        raise ScrapeError(f"{url} could not be read ({_reason(error)}).") from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def parse_families(text: str, url: str) -> list[Metric]:
    """Prometheus text as metric families; `ScrapeError` if any line is malformed or nothing is there."""
    try:
        families = list(text_string_to_metric_families(text))
    except Exception as error:  # the parser raises ValueError, KeyError, IndexError on various malformed lines
        raise ScrapeError(f"{url} is not in the Prometheus text format ({_reason(error)}).") from None
    if not any(family.samples for family in families):
        raise ScrapeError(f"{url} answered without a single metric.")
    return families


def canonical_samples(
    families: Iterable[Metric], dialect: Dialect, target: str, ts: float
) -> tuple[list[Sample], dict[str, str]]:
    """Families as samples in canonical names, and the labels of the dialect's configuration metric.

    Where several engines answer, the configuration is the first one's.
    """
    exposed: dict[str, list[tuple[str, Mapping[str, str], float]]] = {}
    for family in families:
        for sample in family.samples:
            if not sample.name.endswith("_created") and not math.isnan(sample.value):
                exposed.setdefault(sample.name, []).append((sample.name, sample.labels, sample.value))
    found: list[Sample] = []
    for metric in dialect.metrics:
        for suffix, source in _sources(metric, exposed):
            found += [
                Sample(target, metric.name + suffix, dict(labels), ts, float(value))
                for _, labels, value in exposed.get(source + suffix, ())
            ]
    info = exposed.get(dialect.info or "", ())
    return found, dict(info[0][1]) if info else {}


def _sources(metric: CanonicalMetric, exposed: Mapping[str, object]) -> list[tuple[str, str]]:
    """(suffix, exposed base name) to read for a metric: from the first of its sources that is there."""
    suffixes = [""]
    if metric.type == "histogram":
        suffixes = ["_sum", "_count", "_bucket"] if metric.buckets else ["_sum", "_count"]
    for source in metric.sources:
        if source + suffixes[0] in exposed:
            return [(suffix, source) for suffix in suffixes]
    return []


async def scrape(
    client: httpx.AsyncClient, url: str, dialect: Dialect, target: str, *, ts: float, timeout_s: float
) -> Scrape:
    """Read a target once; raises `ScrapeError`."""
    where = metrics_url(url)
    body = await fetch(client, where, timeout_s=timeout_s)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise ScrapeError(f"{where} is not text.") from None
    families = parse_families(text, where)
    samples, info = canonical_samples(families, dialect, target, ts)
    names = {sample.metric for sample in samples}
    return Scrape(samples, info, tuple(name for name in dialect.required if name not in names))
