"""What of the canonical metrics a target carries, and what to do about the rest: the report made when attaching.

It says only what was read of engines: for a version that was not, the nearest one is used and named.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from probe.collect.canonical import readable, usual_spelling
from probe.dialects import CanonicalMetric, Dialect, Source, canonical_names
from probe.dialects.model import HISTOGRAM_SUFFIXES

Status = Literal["present", "renamed", "hidden", "missing", "not exposed by this engine"]
STATUSES: tuple[Status, ...] = ("present", "renamed", "hidden", "missing", "not exposed by this engine")


@dataclass(frozen=True)
class CoverageRow:
    """One canonical metric. `exposed`: the name it is read from, or would be; `note`: how its meaning differs.

    renamed: read from a name that newer versions do not have. hidden: the version has it, a flag shows it.
    """

    canonical: str
    status: Status
    exposed: str | None = None
    todo: str | None = None
    note: str | None = None
    required: bool = False


@dataclass(frozen=True)
class CoverageReport:
    """All rows, and in `assumed` what had to be guessed about the version."""

    engine: str
    version: str | None
    assumed: str | None
    rows: tuple[CoverageRow, ...]
    notes: tuple[str, ...] = ()

    def having(self, status: Status) -> list[CoverageRow]:
        """Rows of one status."""
        return [row for row in self.rows if row.status == status]

    def row(self, canonical: str) -> CoverageRow | None:
        """The row of a canonical metric."""
        return next((row for row in self.rows if row.canonical == canonical), None)

    @property
    def missing_required(self) -> list[str]:
        """Required metrics that are not read."""
        return [row.canonical for row in self.rows if row.required and row.status not in ("present", "renamed")]

    def text(self) -> str:
        """The report for a terminal."""
        counts = ", ".join(f"{len(self.having(s))} {s}" for s in STATUSES if self.having(s))
        lines = [f"{self.engine} {self.version or '(version unknown)'}: {counts}"]
        lines += [self.assumed] if self.assumed else []
        for status in STATUSES:
            rows = self.having(status)
            lines += ["", status] if rows else []
            for row in rows:
                exposed = f"  {row.exposed}" if row.exposed else ""
                lines.append(f"  {row.canonical}{' (required)' if row.required else ''}{exposed}")
                lines += [f"      {text}" for text in (row.todo, row.note) if text]
        lines += ["", *self.notes] if self.notes else []
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON, as it is kept in a target's facts: of a row only what there is to say."""
        rows = [{key: value for key, value in asdict(row).items() if value} for row in self.rows]
        return {**asdict(self), "rows": rows, "notes": list(self.notes)}


def coverage(
    dialect: Dialect,
    exposed: Collection[str],
    version: str | None = None,
    *,
    carried: Collection[str] | None = None,
    likely: Sequence[str] = (),
) -> CoverageReport:
    """Compare the names on a page (samples or families) with what a dialect reads in a version.

    `carried` are the canonical series that were really read from the page, where that is known: a name may be there
    without the label that is asked for, or in a unit that cannot be told. Without a version the newest of `likely`
    is assumed (`Detection.versions`), else the newest that was read.
    """
    version = version or dialect.version
    names = {usual_spelling(dialect, name) for name in exposed}
    wanted = [n for n, known in canonical_names().items() if known.measured_by == "engine" or dialect.find(n)]
    at, assumed = dialect.nearest(version)
    if version is None and likely:
        at = likely[-1]
        assumed = f"The version of {dialect.engine} is not known: {at} is assumed, by the metrics it shows."
    page = _Page(dialect, names, carried, at, version is not None or not dialect.known_versions)
    return CoverageReport(dialect.engine, version, assumed, tuple(map(page.row, wanted)), dialect.notes)


@dataclass(frozen=True)
class _Page:
    """A page to compare with; `at` is the version read whose facts hold, `told` whether the server told a version."""

    dialect: Dialect
    names: Collection[str]
    carried: Collection[str] | None
    at: str
    told: bool

    def row(self, canonical: str) -> CoverageRow:
        metric, required = self.dialect.find(canonical), canonical in self.dialect.required
        if metric is None:
            return CoverageRow(canonical, "not exposed by this engine", todo=self.dialect.absent.get(canonical))
        on_page = [source for source in readable(self.dialect, metric) if _is_there(metric, source, self.names)]
        if on_page and (self.carried is None or any(n in self.carried for n in _series_names(metric))):
            source, newer = on_page[0], _newer_name(metric, on_page[0])
            status: Status = "renamed" if newer else "present"
            return CoverageRow(canonical, status, source.name, newer, source.note, required)
        unread = next((source for source in metric.sources if _is_there(metric, source, self.names)), None)
        if unread is not None and (reason := self._why_unread(metric, unread)):
            return CoverageRow(canonical, "missing", unread.name, reason, unread.note, required)
        return self._absent(metric, required)

    def _absent(self, metric: CanonicalMetric, required: bool) -> CoverageRow:
        """The row of a metric that this engine has, but this page does not."""
        source = self.dialect.source_at(metric.name, self.at)
        if source is None:
            return CoverageRow(metric.name, "missing", None, metric.note or _when(self.dialect, metric), None, required)
        if source.gate is not None:
            return CoverageRow(metric.name, "hidden", source.name, f"needs {source.gate}", source.note, required)
        form = self.dialect.exposed.at(self.at).get(source.name)
        if form is not None and form.only is not None:
            todo = f"only the {form.only} engine of {self.dialect.engine} has it in this version"
        elif not self.told and source.since not in (None, self.dialect.known_versions[0]):
            todo = f"{self.dialect.engine} has it from {source.since} on; the version of this server is not known"
        elif self.dialect.lazy:
            todo = f"{self.dialect.engine} shows a metric after its first event: look again under load"
        else:
            todo = "this version has it, the server does not show it: look at its flags for metrics"
        return CoverageRow(metric.name, "missing", source.name, todo, source.note, required)

    def _why_unread(self, metric: CanonicalMetric, source: Source) -> str | None:
        """Why a metric that is on the page was not read; None where nothing is known against it."""
        meanings = {s.factor_info for s in metric.sources if s.name == source.name}
        if len(meanings) > 1 and not self.told:
            return f"its unit changed between versions of {self.dialect.engine}: read once the version is known"
        current = self.dialect.source_at(metric.name, self.at)
        if current is not None and current.factor_info is not None:
            return f"its unit needs {current.factor_info} of {self.dialect.info}, which the server does not tell"
        if current is not None and (source.match or source.over is not None):
            return "the name is there, the series that carries it is not (yet)"
        return None


def _is_there(metric: CanonicalMetric, source: Source, names: Collection[str]) -> bool:
    suffixes = ("", *HISTOGRAM_SUFFIXES) if metric.type == "histogram" else ("",)
    return any(source.name + suffix in names for suffix in suffixes)


def _series_names(metric: CanonicalMetric) -> tuple[str, ...]:
    return tuple(metric.name + s for s in HISTOGRAM_SUFFIXES) if metric.type == "histogram" else (metric.name,)


def _newer_name(metric: CanonicalMetric, source: Source) -> str | None:
    newest = metric.sources[0]
    if source.until is None or newest.name == source.name:
        return None
    return f"newer versions call it {newest.name}" + (f" (since {newest.since})" if newest.since else "")


def _when(dialect: Dialect, metric: CanonicalMetric) -> str:
    first, last = metric.sources[-1].since, metric.sources[0].until
    if last is not None:
        return f"last read in {dialect.engine} {last}"
    return f"first read in {dialect.engine} {first}"
