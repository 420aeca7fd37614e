"""Canonical series as selectors of one engine's version: the names, matchers and units that PromQL needs.

A target is one (job, instance), as everywhere. What a version does not expose raises `NotExposedError` with the
reason: whoever exports leaves that rule or panel out and says why.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from probe.alerts.expr import Match
from probe.alerts.fit import exposed_label, split_histogram
from probe.dialects import Dialect, ExposedMetric, Source, canonical_names
from probe.dialects.model import base_name

TARGET_LABELS = ("job", "instance")
# Written by Prometheus itself, or by kvoncall's own /metrics.
UP, RULE_BREACH = "up", "kvoncall_rule_breach"
# The job of targets where none is named: the engine's name, but kvoncall is what answers for kvoncall itself.
OWN_JOB, EMBEDDED_JOB = "kvoncall", "kvoncall-engine"


class ExportError(ValueError):
    """What was asked for cannot be exported; the message is one sentence for the user."""


class NotExposedError(Exception):
    """An engine's version has no such metric; the message is the reason, without a full stop."""


@dataclass(frozen=True)
class Selected:
    """A canonical series as exposed: its value is the selector's times `factor`, over that of `over`.

    `ranks`: labels of processes that report the same requests; of series that differ in nothing else one counts.
    `ignoring`: labels that tell the two apart. `only_with`: only where this selector, of equal `only_with_on` labels,
    has a series too.
    """

    selector: str
    factor: float = 1.0
    over: str | None = None
    ranks: tuple[str, ...] = ()
    ignoring: tuple[str, ...] = ()
    only_with: str | None = None
    only_with_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class Names:
    """The names of a dialect's version. `jobs`: Prometheus jobs of its targets, () for any (but see `select`).

    `matchers` go into every selector of the engine. What had to be known to read the result collects in `notes`.
    """

    dialect: Dialect
    version: str | None = None
    jobs: tuple[str, ...] = ()
    matchers: tuple[str, ...] = ()
    by_model: bool = False
    notes: dict[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.by_model and self.dialect.model_label is None:
            raise ExportError(f"The metrics of {self.dialect.engine} carry no model label: leave --by model out.")

    @property
    def own_jobs(self) -> tuple[str, ...]:
        """The jobs of the targets; the engine's name where none was given."""
        engine = self.dialect.engine
        return self.jobs or (EMBEDDED_JOB if engine == OWN_JOB else engine,)

    def labels(self, by: Iterable[str]) -> tuple[str, ...]:
        """Exposed labels to aggregate by: the target's, the model's where asked for, and those of `by`."""
        model = (self.dialect.model_label or "",) if self.by_model else ()
        found = (*TARGET_LABELS, *model, *(label for name in by if (label := self.exposed_label(name))))
        return tuple(dict.fromkeys(found))

    def select(self, canonical: str, match: Match = ()) -> Selected:
        """The selector of a canonical series (a histogram's with its suffix)."""
        if canonical == UP:
            return Selected(_selector(UP, [job_matcher(self.own_jobs), *self.matchers, *_matchers(match)]))
        if canonical == RULE_BREACH:
            return Selected(_selector(RULE_BREACH, _matchers(match)))
        source, suffix = self.source(canonical)
        factor = 1.0 if suffix in ("_bucket", "_count") else source.factor
        carried = self._labels_of(source.name)
        ranks = tuple(label for label in self.dialect.ranks if label in carried)
        found = Selected(self._exposed(source, suffix, match), factor, ranks=ranks)
        if source.over is not None:
            over = self._exposed(source.over, "", ())
            ignoring = tuple(sorted({*source.match, *source.over.match}))
            found = dataclasses.replace(found, over=over, ignoring=ignoring)
        only, model = self.dialect.only_models_of, self.dialect.model_label
        if only and model in self._labels_of(source.name) and not self._of_one_family(source.name, only):
            marker = _selector(only, self._common())
            found = dataclasses.replace(found, only_with=marker, only_with_on=(*TARGET_LABELS, model or ""))
        return found

    def exposed_name(self, canonical: str) -> str:
        """The name of a canonical metric in this version, for people."""
        return self.source(canonical)[0].name

    def exposed_label(self, canonical: str) -> str | None:
        """The exposed name of a canonical label; None for one that the engine does not have."""
        return exposed_label(self.dialect, canonical)

    def has(self, canonical: str) -> bool:
        """Whether the version exposes a canonical series."""
        try:
            self.select(canonical)
        except NotExposedError:
            return False
        return True

    def source(self, canonical: str) -> tuple[Source, str]:
        """Where a canonical series is read, and its suffix if it is a histogram's."""
        base, suffix = split_histogram(canonical)
        source = _source_at(self.dialect, base, self.version)
        if source is None:
            raise NotExposedError(self._why_missing(base))
        if source.factor_info is not None:
            raise NotExposedError(f"{source.name} counts in units of {source.factor_info}, which PromQL cannot convert")
        if source.gate:
            self.notes[f"{source.name} (gate)"] = f"{source.name} is there only with {source.gate}"
        if source.note:
            self.notes[source.name] = f"{source.name}: {source.note}"
        return source, suffix

    def _why_missing(self, canonical: str) -> str:
        known = canonical_names().get(canonical)
        if known is not None and known.measured_by != "engine":
            return f"{self.dialect.engine} does not expose {canonical}: kvoncall reads it from the {known.measured_by}"
        where = f"{self.dialect.engine} {self.dialect.nearest(self.version)[0]}".strip()
        why = self.dialect.absent.get(canonical)
        return f"{where} does not expose {canonical}" + (f" ({why})" if why else "")

    def _exposed(self, source: Source, suffix: str, match: Match) -> str:
        own = [f'{label}="{value}"' for label, value in sorted(source.match.items())]
        own += [f'{label}=""' for label in self.dialect.totals]
        asked = [(self.exposed_label(label) or label, value) for label, value in match]
        bound = source.factor if suffix == "_bucket" else 1.0
        return _selector(source.name + suffix, [*self._common(), *own, *_matchers(asked, bound)])

    def _of_one_family(self, name: str, other: str) -> bool:
        return any(name.startswith(prefix) and other.startswith(prefix) for prefix in self.dialect.prefixes)

    def _common(self) -> list[str]:
        return [*([job_matcher(self.jobs)] if self.jobs else []), *self.matchers]

    def _labels_of(self, name: str) -> tuple[str, ...]:
        form = _exposed_at(self.dialect, self.version).get(base_name(self.dialect, name))
        return form.labels if form is not None else ()


@cache
def _source_at(dialect: Dialect, canonical: str, version: str | None) -> Source | None:
    return dialect.source_at(canonical, version)


@cache
def _exposed_at(dialect: Dialect, version: str | None) -> Mapping[str, ExposedMetric]:
    return dialect.exposed_at(version)


def job_matcher(jobs: tuple[str, ...]) -> str:
    """The matcher of one job or several."""
    if len(jobs) == 1:
        return f"job={quoted(jobs[0])}"
    return f"job=~{quoted('|'.join(map(re.escape, jobs)))}"


def quoted(text: str) -> str:
    """A PromQL string."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _selector(name: str, matchers: list[str]) -> str:
    return f"{name}{{{','.join(matchers)}}}" if matchers else name


def _matchers(match: Iterable[tuple[str, str]], factor: float = 1.0) -> list[str]:
    found = []
    for label, value in match:
        found.append(le_matcher(float(value) / factor) if label == "le" else f"{label}={quoted(value)}")
    return found


def le_matcher(bound: float) -> str:
    """The bucket of a bound in any exporter's spelling: 1 is "1" to some and "1.0" to others, 2.5 is "2.5" to all."""
    bound = float(f"{bound:.12g}")
    whole = [str(int(bound))] if bound == int(bound) else []
    spelled = list(dict.fromkeys([*whole, f"{bound:g}", repr(bound)]))
    if len(spelled) == 1:
        return f'le="{spelled[0]}"'
    return f"le=~{quoted('|'.join(map(re.escape, spelled)))}"
