"""The one place that knows engines' metric names: data files that map them to canonical names.

`canonical.json` lists the canonical metrics, ENGINE.json which exposed metric carries which of them, and
exposed/ENGINE.json every metric of every version read. A dialect is also the list of what is stored: what it does
not name is dropped, so that an engine's next release cannot flood the store. Canonical histograms become
`NAME_sum`, `NAME_count` and, where `buckets` is set, `NAME_bucket` with the label `le`.
"""

from __future__ import annotations

from probe.dialects.exposed import Exposed, ExposedMetric
from probe.dialects.load import ENGINES, CanonicalName, canonical_names, load_dialect
from probe.dialects.model import CanonicalMetric, Config, Dialect, DialectError, Source

__all__ = [
    "ENGINES",
    "CanonicalMetric",
    "CanonicalName",
    "Config",
    "Dialect",
    "DialectError",
    "Exposed",
    "ExposedMetric",
    "Source",
    "canonical_names",
    "load_dialect",
]
