"""The vocabulary made from the dialects' data, for the versions asked for, and from a live server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import Metric

from probe.check.vocabulary import ENGINES, HIDDEN, Engine, Era, Page, Vocabulary
from probe.dialects import Dialect, ExposedMetric, load_dialect


def vocabulary(asked: Mapping[str, str | None] | None = None, page: Page | None = None) -> tuple[Vocabulary, list[str]]:
    """Every engine, in the version `asked` for or else the newest known, and sentences about versions not read."""
    asked = dict(asked or {})
    engines, notes = {}, []
    for name in dict.fromkeys((*asked, *ENGINES)):
        engine, note = load_engine(name, asked.get(name))
        engines[name] = engine
        notes += [note] if note else []
    return Vocabulary(engines, page, frozenset(asked)), notes


def load_engine(name: str, version: str | None) -> tuple[Engine, str | None]:
    """One engine's metrics at a version, and a sentence where that version was not read itself."""
    dialect = load_dialect(name)
    versions = dialect.known_versions or ("of this package",)
    at, note = (_newest(dialect, versions), None) if version is None else dialect.nearest(version)
    at = at if at in versions else versions[-1]
    metrics = {metric: tuple(_era(form, versions) for form in forms) for metric, forms in dialect.exposed.forms.items()}
    hidden_flag = dialect.hidden_flag(at) or "a flag for hidden metrics"
    common = {*dialect.ranks, *dialect.totals, dialect.model_label or "", dialect.engine_label or ""}
    if name in ("vllm", "kvoncall"):  # whose listing says of each metric and version whether it has them
        common = set()
    engine = Engine(name, versions, versions.index(at), metrics, _canonical(dialect), hidden_flag, frozenset(common))
    return engine, note


def _newest(dialect: Dialect, versions: tuple[str, ...]) -> str:
    """The newest version that tells how full its KV cache is, if any does: Triton's present main branch does not."""
    telling = [version for version in versions if dialect.source_at("kv_usage_ratio", version) is not None]
    return (telling or versions)[-1]


def _era(form: ExposedMetric, versions: tuple[str, ...]) -> Era:
    first = versions.index(form.since) if form.since else 0
    last = versions.index(form.until) if form.until else len(versions) - 1
    gate = HIDDEN if form.hidden else form.gate or ""
    return Era(first, last, form.type, frozenset(form.labels), form.open_labels, gate)


def _canonical(dialect: Dialect) -> dict[str, tuple[str, str]]:
    """Exposed name -> canonical name and its unit, where the exposed value has that unit too."""
    found: dict[str, tuple[str, str]] = {}
    for metric in dialect.metrics:
        for source in metric.sources:
            same_unit = source.factor == 1 and source.over is None
            found.setdefault(source.name, (metric.name, metric.unit if same_unit else ""))
    return found


def page_of(families: Iterable[Metric]) -> Page:
    """What a server shows, from its families."""
    labels: dict[str, frozenset[str]] = {}
    bounds: dict[str, frozenset[float]] = {}
    for family in families:
        for sample in family.samples:
            labels[sample.name] = labels.get(sample.name, frozenset()) | frozenset(sample.labels)
            if sample.name.endswith("_bucket") and "le" in sample.labels:
                bounds[sample.name] = bounds.get(sample.name, frozenset()) | {float(sample.labels["le"])}
        if not family.samples:
            labels.setdefault(family.name + ("_total" if family.type == "counter" else ""), frozenset())
    return Page(labels, bounds)
