"""What is exposed: every engine's metrics in the version that is checked against, and what a live server shows.

A name belongs to an engine by its prefix; one that belongs to none is not ours to judge. `resolve` says what a name
means in the version at hand. Versions order as the dialect's data lists them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from probe.check.replacements import OTHER_EXPORTERS, REPLACED

ENGINES = ("vllm", "sglang", "tensorrt-llm", "tgi", "triton")
_PREFIXES = {
    "vllm:": "vllm", "vllm_": "vllm", "sglang:": "sglang", "sglang_": "sglang", "trtllm_": "tensorrt-llm",
    "trtllm:": "tensorrt-llm", "tgi_": "tgi", "tgi:": "tgi", "nv_trt_llm_": "triton", "nv_llm_": "triton",
    "kvoncall:": "kvoncall",
}  # fmt: skip
_SEPARATOR = {"kvoncall": ":", "vllm": ":", "sglang": ":", "tensorrt-llm": "_", "tgi": "_", "triton": "_"}
_BOTH_SEPARATORS = {"sglang"}  # releases differ
_NEIGHBOURS = ("inference_pool_", "inference_model_", "inference_objective_", "inference_extension_")
_HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")
HIDDEN = "hidden"


@dataclass(frozen=True)
class Era:
    """One form of a metric, in `first`..`last` (indices of the engine's versions)."""

    first: int
    last: int
    type: str
    labels: frozenset[str]
    open_labels: bool = False
    gate: str = ""


@dataclass(frozen=True)
class Engine:
    """An engine's metrics by base name, and the version that is checked against."""

    name: str
    versions: tuple[str, ...]
    at: int
    metrics: Mapping[str, tuple[Era, ...]]
    canonical: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # exposed -> (canonical, unit)
    hidden_flag: str = "a flag for hidden metrics"
    common_labels: frozenset[str] = frozenset()  # that any metric may carry, by the server's flags

    @property
    def version(self) -> str:
        return self.versions[self.at]

    def era(self, base: str, at: int | None = None) -> Era | None:
        at = self.at if at is None else at
        return next((era for era in self.metrics.get(base, ()) if era.first <= at <= era.last), None)

    def successor(self, base: str) -> str:
        """The name that the same canonical metric has in this version, "" if none."""
        meant = self.canonical.get(base)
        if meant is None:
            return ""
        for other, (canonical, _) in self.canonical.items():
            era = self.era(other) if canonical == meant[0] and other != base else None
            if era is not None and era.gate != HIDDEN:
                return other
        return ""


@dataclass(frozen=True)
class Resolution:
    """What a name means; `era` is the last one where the metric is gone.

    `status`: live, gated, hidden, gone, future, unknown, missing-total, bare-histogram, not-shown (by the live
    server), prefix (of no engine, though near to one's), stranger (the same, near to nothing), neighbour or foreign.
    """

    name: str
    status: str
    engine: Engine | None = None
    base: str = ""
    part: str = ""
    era: Era | None = None
    instead: str = ""

    @property
    def type(self) -> str:
        """gauge, counter, or histogram (then `part` says which); "" if unknown."""
        return self.era.type if self.era else ""

    @property
    def grows(self) -> bool:
        """Whether it is a total since the start of the process."""
        return self.type == "counter" or (self.type == "histogram" and bool(self.part))

    @property
    def labels(self) -> frozenset[str] | None:
        """The labels of its series, None where they are not known."""
        if self.era is None or self.era.open_labels:
            return None
        return self.era.labels | {"le"} if self.part == "_bucket" else self.era.labels

    @property
    def canonical(self) -> str:
        return self.engine.canonical.get(self.base, ("", ""))[0] if self.engine else ""

    @property
    def unit(self) -> str:
        """ratio, seconds, milliseconds or ""."""
        known = self.engine.canonical.get(self.base, ("", ""))[1] if self.engine else ""
        return known or _unit_of_name(self.base)


def _unit_of_name(base: str) -> str:
    if re.search(r"(usage_perc|token_usage|hit_rate|acceptance_rate|kv_cache_utilization|[:_]utilization)$", base):
        return "ratio"
    if re.search(r"milliseconds$|_ms$", base):
        return "milliseconds"
    return "seconds" if re.search(r"_seconds(_total)?$", base) else ""


@dataclass(frozen=True)
class Page:
    """What a live server shows: `labels` by name of series (or of a family without series), `bounds` of buckets."""

    labels: Mapping[str, frozenset[str]]
    bounds: Mapping[str, frozenset[float]] = field(default_factory=dict)

    def shows(self, resolution: Resolution) -> bool:
        """Whether it shows the family, if not one of its series."""
        return not self.labels.keys().isdisjoint({resolution.base, _swapped(resolution.base)})


class Vocabulary:
    """All engines, and the live server if there is one."""

    def __init__(
        self, engines: Mapping[str, Engine], page: Page | None = None, chosen: frozenset[str] = frozenset()
    ) -> None:
        self.engines = dict(engines)
        self.page = page
        self.chosen = chosen  # engines the user named: their metrics without a prefix are theirs too
        self._resolved: dict[str, Resolution] = {}

    def resolve(self, name: str) -> Resolution:
        """What `name` means; status "foreign" when no engine claims it."""
        if name not in self._resolved:
            self._resolved[name] = self._resolve(name)
        return self._resolved[name]

    def _resolve(self, name: str) -> Resolution:
        engine = self._engine_of(name)
        if engine is None:
            return _of_neighbour(name)
        native = _native(name, engine.name)
        found = _in_engine(native, engine)
        if engine.name == "kvoncall" and found.status == "unknown":
            found = _of_another_time(_in_engine(native, self.engines["vllm"]), found)
        shown = self._on_the_page(name, native, found, engine) if self.page is not None else None
        if shown is not None:
            return shown
        if native != name and engine.name not in _BOTH_SEPARATORS:
            return _other_separator(name, found, engine)
        if found.status == "unknown" and (name in OTHER_EXPORTERS or name.count(":") > 1):
            return Resolution(name, "foreign")
        return found if native == name else _respell(found, name)

    def _on_the_page(self, name: str, native: str, found: Resolution, engine: Engine) -> Resolution | None:
        """What the live server alone decides."""
        assert self.page is not None
        if name in self.page.labels:
            return Resolution(name, "live", engine, found.base, found.part, found.era)
        if engine.name not in self.chosen:
            return None
        other = _swapped(name)
        if other in self.page.labels:
            return Resolution(name, "prefix", engine, found.base, found.part, found.era, instead=other)
        spelt_right = native == name or engine.name in _BOTH_SEPARATORS
        if found.status == "live" and spelt_right and not self.page.shows(found):
            return replace(found, name=name, status="not-shown")
        return None

    def _engine_of(self, name: str) -> Engine | None:
        for prefix, owner in _PREFIXES.items():
            if name.startswith(prefix):
                return self._owner(owner)
        for engine_ in self.engines.values():
            if (engine_.name in self.chosen or name.startswith("nv_")) and _split(name, engine_)[0] in engine_.metrics:
                return engine_
        return None

    def _owner(self, engine: str) -> Engine | None:
        """The embedded engine, where that is asked for, exposes vLLM's names too."""
        if engine == "vllm" and "kvoncall" in self.chosen:
            engine = "kvoncall"
        return self.engines.get(engine)

    @property
    def met(self) -> dict[str, str]:
        """The engines whose metrics were asked about or that the user named, and their versions."""
        seen = {resolved.engine.name for resolved in self._resolved.values() if resolved.engine is not None}
        return {name: engine.version for name, engine in self.engines.items() if name in seen | self.chosen}

    def engine_of_pattern(self, pattern: str) -> Engine | None:
        """The engine whose prefix a regular expression of names begins with."""
        return next((self._owner(owner) for prefix, owner in _PREFIXES.items() if pattern.startswith(prefix)), None)

    def matches_live(self, pattern: str, engine: Engine) -> bool:
        """Whether a pattern matches a name exposed in this version; one that is no Python pattern is taken to."""
        try:
            compiled = re.compile(pattern)
        except re.error:
            return True
        names = set(self.page.labels) if self.page is not None else set()
        for base in engine.metrics:
            era = engine.era(base)
            if era is not None and era.gate != HIDDEN:
                names |= {base + part for part in _HISTOGRAM_PARTS} if era.type == "histogram" else {base}
        if engine.name in _BOTH_SEPARATORS:
            names |= {name.replace(":", "_", 1) for name in names}
        return any(compiled.fullmatch(name) for name in names)

    def labels_of(self, resolution: Resolution) -> frozenset[str] | None:
        """The labels of a metric's series: the live server's where it shows the metric."""
        shown = self.page.labels.get(resolution.name) if self.page is not None else None
        return shown or resolution.labels

    def domain_labels(self, engine: Engine) -> frozenset[str]:
        """Every label any metric of the engine has in any version."""
        return frozenset(label for eras in engine.metrics.values() for era in eras for label in era.labels) | {"le"}


def _of_another_time(in_vllm: Resolution, unknown: Resolution) -> Resolution:
    """A name the embedded engine lacks: what vLLM says of it where it is old, hidden or misspelt there."""
    return unknown if in_vllm.status in ("live", "gated", "unknown") else in_vllm


def _of_neighbour(name: str) -> Resolution:
    """A metric of the Gateway API inference extension, judged by its form alone; any other is foreign."""
    if not name.startswith(_NEIGHBOURS):
        return Resolution(name, "foreign")
    part = next((part for part in _HISTOGRAM_PARTS if name.endswith(part)), "")
    kind = "histogram" if part else "counter" if name.endswith("_total") else "gauge"
    era = Era(0, 0, kind, frozenset(), open_labels=True)
    return Resolution(name, "neighbour", None, name.removesuffix(part), part, era)


def _native(name: str, engine: str) -> str:
    """A name with the engine's own separator after the prefix."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "nv_")
    if prefix.startswith("nv_"):
        return name
    return prefix[:-1] + _SEPARATOR[engine] + name[len(prefix) :]


def _swapped(name: str) -> str:
    """The name with the other separator after its prefix."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return prefix[:-1] + {":": "_", "_": ":"}[prefix[-1]] + name[len(prefix) :] if prefix else name


def _in_engine(name: str, engine: Engine) -> Resolution:
    base, part = _split(name, engine)
    era = engine.era(base)
    if era is not None:
        if part == "_total_missing":
            return Resolution(name, "missing-total", engine, base, "", era, instead=base)
        if era.type == "histogram" and not part:
            return Resolution(name, "bare-histogram", engine, base, "", era)
        status = {"": "live", HIDDEN: "hidden"}.get(era.gate, "gated")
        instead = _successor(base, engine) if status == "hidden" else ""
        return Resolution(name, status, engine, base, part, era, instead=instead and instead + part)
    if base in engine.metrics:
        status = "gone" if all(era.last < engine.at for era in engine.metrics[base]) else "future"
        part = "" if part == "_total_missing" else part
        instead = _successor(base, engine)
        return Resolution(name, status, engine, base, part, _any_era(engine, base), instead=instead and instead + part)
    instead = _in_this_version(REPLACED[name].name, engine) if name in REPLACED else _nearest(name, engine)
    return Resolution(name, "unknown", engine, "", "", None, instead=instead)


def _split(name: str, engine: Engine) -> tuple[str, str]:
    """(base name, part) of an exposed name: the base is what the engine's data lists."""
    if name in engine.metrics:
        return name, ""
    for part in _HISTOGRAM_PARTS:
        base = name.removesuffix(part)
        eras = engine.metrics.get(base, ()) if base != name else ()
        if any(era.type in ("histogram", "summary") for era in eras):
            return base, part
    base = name.removesuffix("_created")
    if base != name and (base in engine.metrics or f"{base}_total" in engine.metrics):
        return (base if base in engine.metrics else f"{base}_total"), "_created"
    if f"{name}_total" in engine.metrics:
        return f"{name}_total", "_total_missing"
    return name, ""


def _successor(base: str, engine: Engine) -> str:
    return _in_this_version(REPLACED[base].name, engine) if base in REPLACED else engine.successor(base)


def _in_this_version(name: str, engine: Engine) -> str:
    """The name if the version has it, else what it is called there."""
    era = engine.era(name)
    return name if era is not None and era.gate != HIDDEN else engine.successor(name)


def _other_separator(name: str, found: Resolution, engine: Engine) -> Resolution:
    if found.status == "unknown" and not found.instead and found.name not in REPLACED:
        return Resolution(name, "stranger", engine)
    instead = found.instead
    if found.status in ("live", "gated", "hidden", "bare-histogram"):
        instead = found.instead or found.name
    return Resolution(name, "prefix", engine, found.base, found.part, found.era, instead=instead)


def _respell(found: Resolution, name: str) -> Resolution:
    instead = found.instead.replace("sglang:", "sglang_")
    return Resolution(name, found.status, found.engine, found.base, found.part, found.era, instead)


def _any_era(engine: Engine, base: str) -> Era | None:
    eras = engine.metrics.get(base, ())
    return eras[-1] if eras else None


def _nearest(name: str, engine: Engine) -> str:
    """The live name most like `name`, "" if none is near."""
    base, part = name, ""
    for suffix in _HISTOGRAM_PARTS:
        if name.endswith(suffix):
            base, part = name.removesuffix(suffix), suffix
    live = [other for other in engine.metrics if engine.era(other) is not None]
    near = get_close_matches(base, live, n=1, cutoff=0.84)
    if not near:
        return ""
    era = engine.era(near[0])
    histogram = era is not None and era.type == "histogram"
    return near[0] + part if histogram or not part else near[0]
