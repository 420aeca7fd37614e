"""Exposition text as metric families: the official parsers, and a memory that spares them what they have seen.

A scrape mostly repeats the series of the one before. `ExpositionReader` remembers the text of each series (name and
labels) that an official parser accepted and reads only the value of it again; any new text or changed metadata sends
the whole answer through the official parser. On a vLLM answer of 60 kB that is 1 ms instead of 26. Readers share what
they learn of pages that differ in values only, as replicas of one model expose them.

Of a series that appears twice the first value counts. Timestamps in the text are not used (samples carry the time of
the scrape), but a sample older than 5 minutes by its own is left out, as Prometheus would show nothing for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families
from prometheus_client.samples import Sample as ExposedSample

MAX_SERIES = 50_000
MAX_LABEL_CHARS = 2_000
LOOKBACK_S = 300.0
OPENMETRICS = "application/openmetrics-text"

_BARE_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


class ScrapeError(Exception):
    """A scrape gave nothing to store; the message is one sentence for the user."""


@dataclass(frozen=True)
class _Series:
    """What the text of a series means: a sample of a family, by its index."""

    family: int
    sample: ExposedSample


@dataclass(frozen=True)
class _Shape:
    """What a page's text means but for the values. `families` are without samples."""

    comments: list[str]
    families: list[Metric]
    known: dict[str, _Series]


_NO_SHAPE = _Shape([], [], {})
_MAX_SHAPES, _MAX_SHARED = 64, 5_000  # pages, series of a page
_shapes: dict[tuple[str, ...], _Shape] = {}  # by all comments and series of a page


@dataclass
class Exposition:
    """Families with the samples that count; the others by how many they are."""

    families: list[Metric]
    duplicates: int = 0
    outdated: int = 0

    @property
    def num_samples(self) -> int:
        """Samples in all families."""
        return sum(len(family.samples) for family in self.families)


@dataclass
class ExpositionReader:
    """Reads the expositions of one target. Not for two threads at once."""

    _shape: _Shape = _NO_SHAPE

    def read(self, body: bytes, content_type: str, url: str, now: float) -> Exposition:
        """The exposition in `body`; raises `ScrapeError` if it is malformed, cut short, empty or too large."""
        text = _decoded(body, url)
        openmetrics = content_type.partition(";")[0].strip().lower() == OPENMETRICS
        comments, rows = _split(text)
        if len(rows) > MAX_SERIES:
            raise ScrapeError(f"{url} exposes {len(rows):,} series, more than {MAX_SERIES:,}: it was not read.")
        found = self._repeated(rows) if comments == self._shape.comments else None
        if found is None and (shape := _shapes.get(_page_key(comments, rows))) is not None:
            self._shape = shape
            found = self._repeated(rows)
        if found is None or (openmetrics and not text.endswith("# EOF\n")):
            found = self._learn(text, comments, rows, url, openmetrics, now)
        if rows and not openmetrics and not text.endswith("\n"):
            raise _malformed(url, "the last line has no end: the answer was cut short")
        if not found.families:
            raise ScrapeError(f"{url} answered without a single metric.")
        return found

    def _repeated(self, rows: list[str]) -> Exposition | None:
        """The exposition if every row is a known series with a value and nothing else."""
        samples: dict[int, list[ExposedSample]] = {}
        seen: set[str] = set()
        duplicates = 0
        for row in rows:
            head, _, text = row.rpartition(" ")
            series = self._shape.known.get(head)
            if series is None or "_" in text:
                return None
            try:
                value = float(text)
            except ValueError:
                return None
            if head in seen:
                duplicates += 1
                continue
            seen.add(head)
            known = series.sample
            samples.setdefault(series.family, []).append(ExposedSample(known.name, known.labels, value))
        return Exposition([_family(self._shape.families[i], found) for i, found in samples.items()], duplicates)

    def _learn(
        self, text: str, comments: list[str], rows: list[str], url: str, openmetrics: bool, now: float
    ) -> Exposition:
        families = parse(text, url, openmetrics=openmetrics)
        exposed = [(i, sample) for i, family in enumerate(families) for sample in family.samples]
        if len(exposed) != len(rows):
            raise _malformed(url, f"{len(rows)} lines hold {len(exposed)} samples")
        known: dict[str, _Series] = {}
        kept: dict[int, list[ExposedSample]] = {}
        seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
        result = Exposition([])
        for row, (index, sample) in zip(rows, exposed, strict=True):
            _check_labels(sample, url)
            identity = (sample.name, frozenset(sample.labels.items()))
            first = identity not in seen
            head = row.rpartition(" ")[0]
            alone = sample.timestamp is None and sample.exemplar is None
            if first and alone and (head[-1:] == "}" or _BARE_NAME.fullmatch(head)):
                known[head] = _Series(index, sample)
            if not first:
                result.duplicates += 1
                continue
            seen.add(identity)
            if sample.timestamp is not None and now - float(sample.timestamp) > LOOKBACK_S:
                result.outdated += 1
                continue
            kept.setdefault(index, []).append(ExposedSample(sample.name, sample.labels, sample.value))
        self._shape = _Shape(comments, [_family(family, []) for family in families], known)
        if len(rows) <= _MAX_SHARED:
            if len(_shapes) >= _MAX_SHAPES:
                _shapes.clear()
            _shapes[_page_key(comments, rows)] = self._shape
        result.families = [_family(families[i], found) for i, found in kept.items()]
        return result


def parse(text: str, url: str, *, openmetrics: bool = False) -> list[Metric]:
    """Exposition text as metric families, by the official parser; `ScrapeError` if any line is malformed."""
    try:
        families: Callable[[str], Iterable[Metric]] = openmetrics_families if openmetrics else text_families
        return list(families(text))
    except Exception as error:  # the parsers raise ValueError, KeyError, IndexError on various malformed lines
        raise _malformed(url, reason(error)) from None


def _page_key(comments: list[str], rows: list[str]) -> tuple[str, ...]:
    return (*comments, *(row.rpartition(" ")[0] for row in rows))


def _split(text: str) -> tuple[list[str], list[str]]:
    """Lines that begin with #, and lines with a sample."""
    comments: list[str] = []
    rows: list[str] = []
    for line in text.split("\n"):
        start = line[:1]
        if start.isspace():
            start = line.lstrip()[:1]
        if start:
            (comments if start == "#" else rows).append(line)
    return comments, rows


def reason(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _malformed(url: str, why: str) -> ScrapeError:
    return ScrapeError(f"{url} is not in the Prometheus text format ({why}).")


def _decoded(body: bytes, url: str) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        raise ScrapeError(f"{url} is not text.") from None


def _family(family: Metric, samples: list[ExposedSample]) -> Metric:
    copy = Metric(family.name, family.documentation, family.type, family.unit)
    copy.samples = samples
    return copy


def _check_labels(sample: ExposedSample, url: str) -> None:
    for name, value in sample.labels.items():
        if len(value) > MAX_LABEL_CHARS or len(name) > MAX_LABEL_CHARS:
            shown = f"{sample.name}{{{name[:60]}}}"
            raise ScrapeError(f"{url}: the label of {shown} has {max(len(name), len(value)):,} characters.")
