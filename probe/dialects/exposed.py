"""Every metric an engine exposes, by version: also those that no canonical metric reads.

Data in exposed/ENGINE.json: for each name the forms it had (`versions` "first..last", both read; type, labels),
in ascending order. Where a gap between two read versions hides the change, the first version read counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from probe.dialects.versions import span

HIDDEN = "hidden"  # deprecated: only shown on demand


@dataclass(frozen=True)
class ExposedMetric:
    """One form of a metric. `gate` is what has to be set to see it, `hidden` that a flag for old names has to be."""

    name: str  # a counter with its _total, a histogram without _bucket
    type: str  # gauge, counter, histogram, summary or unknown
    labels: tuple[str, ...]
    since: str
    until: str
    gate: str | None = None
    hidden: bool = False
    deprecated: bool = False
    open_labels: bool = False  # labels not listed as well: one for each field of a configuration
    only: str | None = None  # "V0": only the older of two engine generations
    values: tuple[str, ...] = ()  # of the last label, where the label is what is measured


@dataclass(frozen=True, eq=False)
class Exposed:
    """All forms of all metrics. `always` are those of the process that serves the page, by name and type."""

    engine: str
    versions: tuple[str, ...]  # ascending; empty: only this package's version
    always: Mapping[str, str]
    forms: Mapping[str, tuple[ExposedMetric, ...]]

    @cache  # noqa: B019 - there is one for an engine, for good
    def at(self, version: str) -> dict[str, ExposedMetric]:
        """Metrics of one of `versions` by name, gated and hidden ones included; not to be changed."""
        if not self.versions:
            return {name: forms[-1] for name, forms in self.forms.items()}
        place = {known: index for index, known in enumerate(self.versions)}
        here = place[version]
        return {
            name: form
            for name, forms in self.forms.items()
            for form in forms
            if place[form.since] <= here <= place[form.until]
        }


@cache
def load_exposed(engine: str) -> Exposed:
    """The facts of exposed/ENGINE.json."""
    data = json.loads(files(__package__).joinpath(f"exposed/{engine}.json").read_text(encoding="utf-8"))
    versions = tuple(data["versions"])
    forms = {name: tuple(_form(name, spec, versions) for spec in specs) for name, specs in data["metrics"].items()}
    return Exposed(data["engine"], versions, data["always"], forms)


def _form(name: str, spec: dict[str, Any], versions: tuple[str, ...]) -> ExposedMetric:
    since = until = ""
    if versions:
        first, last = span(spec["versions"], versions)
        since, until = versions[first], versions[last]
    gate = spec.get("gate")
    return ExposedMetric(
        name,
        spec["type"],
        tuple(spec["labels"]),
        since,
        until,
        gate=None if gate == HIDDEN else gate,
        hidden=gate == HIDDEN,
        deprecated=spec.get("deprecated", False),
        open_labels=spec.get("open_labels", False),
        only=spec.get("only"),
        values=tuple(spec.get("values", ())),
    )
