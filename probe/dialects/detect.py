"""Which engine answers, told by the names on its page.

A page holds no engine's version: `Detection.versions` are those whose list of metrics holds every name seen, and
whoever can asks the server itself (`Dialect.version_at`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import Metric

from probe.dialects.load import ENGINES, load_dialect
from probe.dialects.model import Dialect


@dataclass(frozen=True)
class Detection:
    """The engine of a page. `spelling` is the prefix in use, `evidence` one sentence for the user."""

    engine: str
    version: str | None
    spelling: str
    evidence: str
    versions: tuple[str, ...] = ()  # read versions that have every name seen, ascending


def detect(families: Mapping[str, Metric]) -> Detection | None:
    """The engine that exposes these metric families; None where no dialect knows them.

    The embedded engine exposes vLLM's names beside its own, and Triton's page may hold those of a vLLM inside it:
    `ENGINES` is the order of precedence.
    """
    names = exposed_families(families)
    for engine in ENGINES:
        dialect = load_dialect(engine)
        for prefix in dialect.prefixes:
            own = sorted(name for name in families if name.startswith(prefix) and not name.endswith("_created"))
            if own:
                return _detection(dialect, prefix, own, names)
        if dialect.marks and names.issuperset(dialect.marks):
            return _detection(dialect, "", sorted(dialect.marks), names)
    return None


def exposed_families(families: Mapping[str, Metric]) -> frozenset[str]:
    """Names as a dialect lists them; a counter with and without `_total`, because the parser hides which it had."""
    counters = {f"{family.name}_total" for family in families.values() if family.type == "counter"}
    names = {family.name for family in families.values()}
    return frozenset(name for name in names | counters if not name.endswith("_created"))


def _detection(dialect: Dialect, prefix: str, own: list[str], names: frozenset[str]) -> Detection:
    spelling = prefix if prefix in dialect.prefixes else dialect.prefixes[0]
    known = load_dialect(dialect.engine, None, spelling)
    seen = {name for name in names if name in known.exposed.forms}
    versions = tuple(v for v in known.known_versions if seen <= known.exposed_at(v).keys())
    evidence = f"{len(own)} metrics such as {own[0]} are {dialect.engine}'s"
    if versions and versions != known.known_versions:
        spread = versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
        evidence += f"; of the versions read, {spread} have all of them"
    elif seen and known.known_versions and not versions:
        evidence += "; no version read has all of them"
    return Detection(dialect.engine, None, spelling, f"{evidence}.", versions)
