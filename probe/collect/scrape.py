"""One scrape of one target: HTTP with limits, exposition text, canonical samples.

All samples of a scrape carry the time at which it started. What no rule could use is left out and said in `refused`:
infinite values and negative counters; NaN and `*_created` series are dropped without a word.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field

import httpx
from prometheus_client import Metric

from probe.collect.canonical import canonical_samples, missing
from probe.collect.exposition import ExpositionReader, reason
from probe.collect.exposition import ScrapeError as ScrapeError
from probe.dialects import Dialect, load_dialect
from probe.store import Sample, Target

MAX_BYTES = 8 * 1024 * 1024  # vLLM with one engine answers about 60 kB
MAX_WIRE_BYTES = MAX_BYTES
# Text first: every engine speaks it, and its parser takes what engines really send.
ACCEPT = (
    "text/plain;version=0.0.4;q=1,application/openmetrics-text;version=1.0.0;q=0.8,"
    "application/openmetrics-text;version=0.0.1;q=0.7,*/*;q=0.1"
)
_CHUNK = 64 * 1024


@dataclass(frozen=True)
class Scrape:
    """What one successful scrape read.

    `info` holds the labels of the dialect's configuration metric. `missing`: required canonical metrics that the
    target does not expose. `refused`: why samples were left out -> how many. `exposed`: samples in the answer.
    """

    samples: list[Sample]
    info: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    refused: Mapping[str, int] = field(default_factory=dict)
    exposed: int = 0


@dataclass(frozen=True)
class Answer:
    """A body and what the server calls it."""

    body: bytes
    content_type: str = ""


def dialect_of(target: Target) -> Dialect:
    """The dialect of a target's engine in the version it told; raises `DialectError`."""
    version = target.facts.get("version")
    return load_dialect(target.engine, version if isinstance(version, str) else None)


def metrics_url(url: str) -> str:
    """A target's base URL with `/metrics`, unless it already names a path of that kind."""
    url = url.rstrip("/")
    return url if url.endswith("/metrics") else f"{url}/metrics"


async def get(
    client: httpx.AsyncClient,
    url: str,
    *,
    timeout_s: float,
    max_bytes: int = MAX_BYTES,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """What `url` answers, read in full within `timeout_s` seconds and `max_bytes` bytes; else `ScrapeError`."""
    sent = {"Accept": ACCEPT, "Accept-Encoding": "gzip", **(headers or {})}
    try:
        async with asyncio.timeout(timeout_s), client.stream("GET", url, headers=sent) as response:
            if response.status_code != 200:
                raise ScrapeError(f"{url} answered HTTP {response.status_code} instead of metrics.")
            body = bytearray()
            async for chunk in _unpacked(response, url):
                body += chunk
                if len(body) > max_bytes:
                    raise ScrapeError(f"{url} sent more than {max_bytes:,} bytes: it was not read.")
            return Answer(bytes(body), response.headers.get("Content-Type", ""))
    except (TimeoutError, httpx.TimeoutException):
        raise ScrapeError(f"{url} did not answer in full within {timeout_s:g} s.") from None
    except httpx.ConnectError as error:
        raise ScrapeError(f"{url} cannot be reached ({reason(error)}).") from None
    except zlib.error as error:
        raise ScrapeError(f"{url} sent damaged gzip data ({reason(error)}).") from None
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        raise ScrapeError(f"{url} could not be read ({reason(error)}).") from None


async def fetch(
    client: httpx.AsyncClient,
    url: str,
    *,
    timeout_s: float,
    max_bytes: int = MAX_BYTES,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """The body of `get`."""
    return (await get(client, url, timeout_s=timeout_s, max_bytes=max_bytes, headers=headers)).body


async def _unpacked(response: httpx.Response, url: str) -> AsyncIterator[bytes]:
    """The body in pieces of at most 64 KiB after decompression, so that a bomb cannot grow before it is measured."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise ScrapeError(f"{url} answered in the encoding {encoding!r}, which was not asked for.")
    received = 0
    gzip = zlib.decompressobj(31) if encoding.endswith("gzip") else None
    async for raw in response.aiter_raw():
        received += len(raw)
        if received > MAX_WIRE_BYTES:
            raise ScrapeError(f"{url} sent more than {MAX_WIRE_BYTES:,} bytes over the network: it was not read.")
        if gzip is None:
            yield raw
            continue
        data = raw
        while data:
            if gzip.eof:  # another member follows
                gzip = zlib.decompressobj(31)
            yield gzip.decompress(data, _CHUNK)
            data = gzip.unconsumed_tail or gzip.unused_data
    if gzip is not None and not gzip.eof:
        raise ScrapeError(f"{url} sent gzip data that was cut short.")


def read_scrape(
    families: Iterable[Metric], dialect: Dialect, target: str, ts: float, refused: Mapping[str, int] | None = None
) -> Scrape:
    """Families of one moment in canonical names; `refused` is what was left out before, why -> how many."""
    families = list(families)
    samples, info = canonical_samples(families, dialect, target, ts)
    kept, why = _vetted(samples, dialect)
    exposed = sum(len(family.samples) for family in families)
    return Scrape(kept, info, missing(dialect, kept), {**(refused or {}), **why}, exposed)


def _vetted(samples: list[Sample], dialect: Dialect) -> tuple[list[Sample], dict[str, int]]:
    kept: list[Sample] = []
    refused: dict[str, int] = {}
    for sample in samples:
        if math.isinf(sample.value):
            why = f"{sample.metric} is infinite"
        elif sample.value < 0 and sample.metric in dialect.counters:
            why = f"the counter {sample.metric} is negative"
        else:
            kept.append(sample)
            continue
        refused[why] = refused.get(why, 0) + 1
    return kept, refused


async def scrape(
    client: httpx.AsyncClient,
    url: str,
    dialect: Dialect,
    target: str,
    *,
    ts: float,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    reader: ExpositionReader | None = None,
) -> Scrape:
    """Read a target once; raises `ScrapeError`. `reader` remembers the target's series between scrapes."""
    where = metrics_url(url)
    answer = await get(client, where, timeout_s=timeout_s, headers=headers)
    reader = reader or ExpositionReader()
    if len(answer.body) > 20 * _CHUNK:  # seconds of parsing: other targets go on meanwhile
        found = await asyncio.to_thread(reader.read, answer.body, answer.content_type, where, ts)
    else:
        found = reader.read(answer.body, answer.content_type, where, ts)
    odd = {"series appear twice": found.duplicates, "timestamps are older than 5 minutes": found.outdated}
    return read_scrape(found.families, dialect, target, ts, {why: count for why, count in odd.items() if count})
