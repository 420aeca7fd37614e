"""What a dialect says: which exposed metric is which canonical one, in which version, in which unit.

A `Source` is one exposed name in one meaning. `Dialect.source_at` answers with exactly one for a version (exports
and `check` need that); a scrape reads the first source of a metric that is there (`probe.collect.canonical`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from probe.dialects.exposed import Exposed, ExposedMetric
from probe.dialects.versions import nearest, version_key

HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")


class DialectError(ValueError):
    """There is no dialect for an engine; the message is one sentence for the user."""


@dataclass(frozen=True)
class Source:
    """An exposed metric that carries a canonical one.

    `since` and `until` (inclusive, None: open) bound the versions read that have it in this meaning. The canonical
    value is the exposed one times `factor`, times the label `factor_info` of the configuration metric, over the
    sum of `over` with the same labels. Only series with the labels of `match` are read. `labels` maps exposed
    labels to canonical ones.
    """

    name: str
    since: str | None = None
    until: str | None = None
    factor: float = 1.0
    factor_info: str | None = None
    match: Mapping[str, str] = field(default_factory=dict)
    over: Source | None = None
    gate: str | None = None  # what has to be set to see it, in the version that was asked for
    labels: Mapping[str, str] = field(default_factory=dict)
    at_finish: bool = False  # a counter that moves when a request ends, not while it runs
    note: str | None = None  # where its meaning differs

    def covers(self, version: str) -> bool:
        """Whether `version` is between `since` and `until`."""
        key = version_key(version)
        since = version_key(self.since) if self.since else None
        until = version_key(self.until) if self.until else None
        return key is None or ((since is None or since <= key) and (until is None or key <= until))


@dataclass(frozen=True)
class CanonicalMetric:
    """One metric we keep; `sources` in the order of preference. `note`: what to know where it is not there."""

    name: str
    type: str  # gauge, counter or histogram
    unit: str
    sources: tuple[Source, ...]
    buckets: bool = False  # of a histogram: whether its buckets are kept
    note: str | None = None
    meaning: str = ""


@dataclass(frozen=True)
class Config:
    """A gauge that is configuration: its value becomes a fact under `key`."""

    key: str
    name: str
    match: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Dialect:
    """What an engine exposes, in canonical names; `version` is the one it was loaded for, None where unknown.

    `info` is the metric whose labels are the configuration. `ranks` are labels of processes that report the same
    requests: of series that differ in nothing else the lowest is read, in PromQL `max without (ranks)`. A matcher for
    rank 0 would lose replicas: with data-parallel attention ranks count on from one replica to the next. `totals` are
    labels, only there if a flag is set, whose empty value marks the sum over the others (`label=""` fits series
    without the label as well). `only_models_of` names the metric that tells which models are language models.
    """

    engine: str
    version: str | None
    metrics: tuple[CanonicalMetric, ...]
    required: tuple[str, ...]
    info: str | None
    exposed: Exposed
    prefixes: tuple[str, ...]  # spellings of the names' beginning, the usual one first
    marks: tuple[str, ...] = ()  # names that tell the engine where there is no prefix
    config: tuple[Config, ...] = ()
    model_label: str | None = None
    engine_label: str | None = None
    ranks: tuple[str, ...] = ()
    totals: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    only_models_of: str | None = None
    lazy: bool = False  # a metric shows up at its first event
    hidden_by: str | None = None
    metrics_path: str = "/metrics"
    version_at: tuple[tuple[str, str], ...] = ()  # (path, key of the JSON answer)
    slo: Mapping[str, float] = field(default_factory=dict)  # default bounds, each a bucket bound of the histogram
    slo_source: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def counters(self) -> frozenset[str]:
        """Canonical series names that only grow within one process."""
        names: set[str] = set()
        for metric in self.metrics:
            if metric.type == "counter":
                names.add(metric.name)
            if metric.type == "histogram":
                names |= {f"{metric.name}{suffix}" for suffix in HISTOGRAM_SUFFIXES}
        return frozenset(names)

    @cached_property
    def _by_name(self) -> dict[str, CanonicalMetric]:
        return {metric.name: metric for metric in self.metrics}

    def find(self, canonical: str) -> CanonicalMetric | None:
        """The metric, or None where no version of this engine exposes it."""
        return self._by_name.get(canonical)

    @property
    def known_versions(self) -> tuple[str, ...]:
        """Versions that were read, ascending; empty for the embedded engine, which goes with this package."""
        return self.exposed.versions

    def nearest(self, version: str | None = None) -> tuple[str, str | None]:
        """The version read whose facts hold for `version` (None: the newest), and a sentence where that is a guess."""
        version = version or self.version
        if not self.known_versions:
            return version or "", None
        if version is None:
            newest = self.known_versions[-1]
            return newest, f"The version of {self.engine} is not known: {newest} is assumed."
        return nearest(self.engine, version, self.known_versions)

    def source_at(self, canonical: str, version: str | None = None) -> Source | None:
        """The one source of a metric in a version; None where that version has none.

        One that shows up without setting anything goes before a gated one, whose `gate` says what to set.
        """
        metric = self.find(canonical)
        return None if metric is None else _source_at(self, metric, self.nearest(version)[0])

    def exposed_at(self, version: str | None = None) -> dict[str, ExposedMetric]:
        """All metrics of a version by exposed name, gated and hidden ones included, without those of the process."""
        return self.exposed.at(self.nearest(version)[0])

    def exposed_names(self, version: str | None = None) -> dict[str, str]:
        """All metrics a version exposes, name to type; those hidden for their age are left out (`hidden_names`)."""
        found = {name: form.type for name, form in self.exposed_at(version).items() if not form.hidden}
        return {**found, **self.exposed.always}

    def hidden_names(self, version: str | None = None) -> dict[str, str]:
        """Metrics a version still has but does not show, name to the flag that shows them."""
        flag = self.hidden_flag(version)
        return {name: flag for name, form in self.exposed_at(version).items() if form.hidden and flag}

    def hidden_flag(self, version: str | None = None) -> str | None:
        """The flag with the value that shows what a version hides: the minor version before it."""
        at = self.nearest(version)[0]
        older = [minor for known in self.known_versions if (minor := _minor(known)) < _minor(at)]
        if self.hidden_by is None or not older:
            return None
        return f"{self.hidden_by}={'.'.join(map(str, max(older)))}"

    def gate_of(self, form: ExposedMetric, version: str | None = None) -> str | None:
        """What has to be set to see a form of a metric in a version."""
        return self.hidden_flag(version) or "a flag for hidden metrics" if form.hidden else form.gate

    def canonical_of(self, exposed_name: str) -> CanonicalMetric | None:
        """The canonical metric that has an exposed name (also of another version) among its sources."""
        return next((m for m in self.metrics if any(s.name == exposed_name for s in m.sources)), None)


def base_name(dialect: Dialect, name: str) -> str:
    """A histogram's name for the name of one of its series, else the name itself."""
    for suffix in HISTOGRAM_SUFFIXES:
        base = name.removesuffix(suffix)
        if base != name and base in dialect.exposed.forms:
            return base
    return name


def _minor(version: str) -> tuple[int, ...]:
    key = version_key(version)
    return (*key, 0)[:2] if key else ()


def _source_at(dialect: Dialect, metric: CanonicalMetric, version: str) -> Source | None:
    forms, gated = dialect.exposed.at(version), None
    for source in metric.sources:
        if not source.covers(version):
            continue
        form = forms.get(base_name(dialect, source.name))
        if form is None and source.name not in dialect.exposed.always:
            continue
        gate = dialect.gate_of(form, version) if form is not None else None
        if gate is None:
            return source
        gated = gated or dataclasses.replace(source, gate=gate)
    return gated
