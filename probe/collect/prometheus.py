"""A Prometheus server as a source: queries with limits, and one target's own samples out of it.

A target is read by an instant query of a range (`{...}[90s]`): it gives every stored sample with the time at which
Prometheus scraped it, so that nothing between two reads is lost and nothing gets a time that is not its own.
`PrometheusConnect` blocks: each server has threads of its own, so that one that hangs delays no other.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from prometheus_api_client import PrometheusConnect
from urllib3.util.retry import Retry

from probe.collect.access import Access
from probe.collect.exposition import ScrapeError, reason

MAX_POINTS = 11_000  # Prometheus' own limit for each series of a range query
MAX_ANSWER_BYTES = 64 * 1024 * 1024
THREADS = 4
T = TypeVar("T")

Labels = dict[str, str]
Series = tuple[Labels, list[tuple[float, float]]]  # labels (with __name__), (Unix seconds, value) in time order


class PrometheusError(ScrapeError):
    """A Prometheus server did not answer a query; the message is one sentence for the user."""


@dataclass(frozen=True)
class RangeAnswer:
    """Series over time, what the server warned of, and where the answer has a hole because a part was refused."""

    series: list[Series]
    warnings: tuple[str, ...] = ()
    problem: str | None = None


class PrometheusServer:
    """Asks one server. Blocking calls, safe from several threads; `run` calls them from asyncio."""

    def __init__(self, url: str, access: Access | None = None, *, timeout_s: float = 10.0) -> None:
        access = access or Access()
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._said = threading.local()
        self._connect = PrometheusConnect(
            self.url,
            headers={"Accept-Encoding": "gzip", **access.headers},
            retry=Retry(total=0),  # whoever asks comes back
            timeout=timeout_s,
            method="POST",  # selectors of all names an engine may have are long
        )
        session = self._connect._session
        session.verify = access.verify
        session.trust_env = False  # neither proxies nor .netrc: what is asked is what was named
        session.hooks["response"].append(self._receive)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvoncall-prometheus")

    async def run(self, call: Callable[[], T]) -> T:
        """`call` in one of this server's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        """Let go of connections and threads; calls under way end by their timeouts."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._connect.close()

    def query(self, promql: str, at: float | None = None) -> RangeAnswer:
        """An instant query at the server's now (or `at`): an instant vector has one point a series."""
        params: dict[str, Any] = {"timeout": f"{math.ceil(self._timeout_s)}s"}
        if at is not None:
            params["time"] = f"{at:.3f}"
        result = self._ask(lambda: self._connect.custom_query(promql, params=params))
        return RangeAnswer(_series(result, self.url), tuple(self._said.warnings))

    def query_range(self, promql: str, start: float, end: float, step: float) -> RangeAnswer:
        """The values at start, start + step, … up to end, asked for in parts of at most 11,000 points.

        Raises `PrometheusError` if the first part is refused; a later one leaves a hole, told in `problem`.
        """
        if step <= 0 or end < start:
            raise PrometheusError("A range query needs a step above 0 and an end after its start.")
        found: dict[frozenset[tuple[str, str]], Series] = {}
        warnings: dict[str, None] = {}
        problem = None
        total = int((end - start) / step + 1e-9) + 1
        for first in range(0, total, MAX_POINTS):
            begin, stop = start + first * step, start + (min(first + MAX_POINTS, total) - 1) * step
            try:
                part = self._range_part(promql, begin, stop, step)
            except PrometheusError as error:
                if first == 0:
                    raise
                problem = f"The values after {_iso(begin)} are missing: {error}"
                break
            for labels, points in part:
                found.setdefault(frozenset(labels.items()), (labels, []))[1].extend(points)
            warnings.update(dict.fromkeys(self._said.warnings))
        return RangeAnswer(list(found.values()), tuple(warnings), problem)

    def _range_part(self, promql: str, start: float, end: float, step: float) -> list[Series]:
        exact = {"start": f"{start:.3f}", "end": f"{end:.3f}"}  # the client rounds its times to seconds
        begin, stop = datetime.fromtimestamp(start, UTC), datetime.fromtimestamp(end, UTC)
        result = self._ask(lambda: self._connect.custom_query_range(promql, begin, stop, f"{step:.3f}", params=exact))
        return _series(result, self.url)

    def _ask(self, call: Callable[[], Any]) -> Any:
        self._said.warnings, self._said.deadline = [], time.monotonic() + self._timeout_s
        try:
            return call()
        except PrometheusError:
            raise
        except (ValueError, KeyError, TypeError):
            raise PrometheusError(f"{self.url} does not answer as Prometheus does: is it a Prometheus?") from None
        except OSError as error:  # requests' exceptions are OSErrors
            raise PrometheusError(self._sentence(error)) from None

    def _sentence(self, error: OSError) -> str:
        kind = type(error).__name__
        if "Timeout" in kind:
            return f"{self.url} did not answer within {self._timeout_s:g} s."
        if kind == "SSLError":
            return f"{self.url} shows a certificate that is not trusted: name its CA file."
        if kind.startswith(("Connection", "Chunked", "Protocol")):
            return f"{self.url} cannot be reached ({_innermost(error)})."
        return f"{self.url} could not be asked ({_innermost(error)})."

    def _receive(self, response: Any, *_: object, **__: object) -> Any:
        """Read the body within its limits, keep warnings, and turn refusals into one sentence."""
        body = bytearray()
        for chunk in response.iter_content(64 * 1024):
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                raise PrometheusError(f"{self.url} sent more than {MAX_ANSWER_BYTES:,} bytes: ask for less.")
            if time.monotonic() > self._said.deadline:
                raise PrometheusError(f"{self.url} did not answer in full within {self._timeout_s:g} s.")
        response._content = bytes(body)
        if response.status_code != 200:
            raise PrometheusError(_refusal(self.url, response.status_code, bytes(body)))
        if b'"warnings"' in body:
            self._said.warnings = [str(w) for w in json.loads(body).get("warnings") or ()]
        return response


def _refusal(url: str, status: int, body: bytes) -> str:
    if status in (401, 403):
        return f"{url} refuses the credentials (HTTP {status})."
    try:
        why = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"{url} answered HTTP {status}."
    return f"{url} answered HTTP {status}: {' '.join(str(why).split())[:300]}."


def _innermost(error: BaseException) -> str:
    """The cause in a few words: requests and urllib3 wrap it in their own, with object addresses."""
    seen: BaseException = error
    while True:
        inner = getattr(seen, "reason", None) or next((a for a in seen.args if isinstance(a, BaseException)), None)
        if not isinstance(inner, BaseException) or inner is seen:
            break
        seen = inner
    return reason(seen).rpartition(">: ")[2] or type(seen).__name__


def _series(result: Any, url: str) -> list[Series]:
    try:
        return [
            (dict(item["metric"]), [(float(t), float(v)) for t, v in item.get("values") or [item["value"]]])
            for item in result
        ]
    except (KeyError, TypeError, ValueError):
        raise PrometheusError(f"{url} answered with something that is no vector.") from None


def _iso(ts: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(ts))


def selector(matchers: Mapping[str, str], names: Iterable[str] = ()) -> str:
    """A PromQL selector of series with these labels and one of these names."""
    parts = [f"{label}={quoted(value)}" for label, value in sorted(matchers.items())]
    among = sorted(set(names))
    if among:
        parts.insert(0, f"__name__=~{quoted('|'.join(among))}")
    return "{" + ",".join(parts) + "}"


def quoted(value: str) -> str:
    """A PromQL string."""
    return json.dumps(value, ensure_ascii=False)
