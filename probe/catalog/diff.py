"""What differs between two versions of an engine: flags and metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from probe.catalog.metrics import metrics_at
from probe.dialects.exposed import ExposedMetric
from runbooks.flags import FlagFacts, all_flags

_KV_METRIC = re.compile(
    "kv|cache|prefix|preempt|evict|offload|swap|retract|token_usage|used_tokens|num_requests|waiting|queue"
)
ORDER = ("renamed", "removed", "default", "choices", "kind", "deprecated", "labels", "type", "hidden", "added")


@dataclass(frozen=True)
class Change:
    """One difference. `what` is one of `ORDER`; `before` and `after` are values, or the name for a renamed one."""

    what: str
    subject: str  # "flag" or "metric"
    name: str
    before: Any = None
    after: Any = None
    note: str = ""
    kv: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def diff(engine: str, older: str, newer: str, *, kv: bool = False) -> list[Change]:
    """Changes of flags, then of metrics, from one version read to another; `kv`: only those about the KV cache."""
    flags = flag_changes(all_flags(engine, older), all_flags(engine, newer))
    metrics = metric_changes(metrics_at(engine, older), metrics_at(engine, newer))
    return [change for change in flags + metrics if change.kv or not kv]


def flag_changes(before: Iterable[FlagFacts], after: Iterable[FlagFacts]) -> list[Change]:
    """What differs between two sets of flags, in `ORDER`."""
    return _sorted(_flags({facts.name: facts for facts in before}, {facts.name: facts for facts in after}))


def metric_changes(before: Mapping[str, ExposedMetric], after: Mapping[str, ExposedMetric]) -> list[Change]:
    """What differs between two sets of metrics, in `ORDER`."""
    return _sorted(_metrics(before, after))


def _sorted(found: Iterable[Change]) -> list[Change]:
    rank = {what: place for place, what in enumerate(ORDER)}
    return sorted(found, key=lambda change: (rank[change.what], change.name))


def _flags(before: dict[str, FlagFacts], after: dict[str, FlagFacts]) -> Iterator[Change]:
    taken_over = {alias: facts.name for facts in after.values() for alias in facts.aliases}
    renamed = set()
    for name in sorted(before.keys() - after.keys()):
        facts = before[name]
        target = (facts.replaced_by or "").split(" ")[0] or taken_over.get(name, "")
        if target in after:
            new = target not in before
            renamed |= {target} if new and facts.replaced_by == target else set()
            note = "the old name still works" if taken_over.get(name) == target else ""
            yield Change("renamed", "flag", name, name, facts.replaced_by or target, note, facts.kv or after[target].kv)
        else:
            yield Change("removed", "flag", name, note=facts.replaced_by or "", kv=facts.kv)
    for name in sorted(after.keys() - before.keys() - renamed):
        facts = after[name]
        yield Change("added", "flag", name, after=facts.default, note=facts.meaning, kv=facts.kv)
    for name in sorted(before.keys() & after.keys()):
        yield from _changed(before[name], after[name])


def _changed(old: FlagFacts, new: FlagFacts) -> Iterator[Change]:
    name, kv = new.name, new.kv
    if repr(old.default) != repr(new.default) or old.default_note != new.default_note:
        was = old.default if old.default is not None else old.default_note
        now = new.default if new.default is not None else new.default_note
        yield Change("default", "flag", name, was, now, kv=kv)
    if set(old.choices or ()) != set(new.choices or ()):
        was, now = (None if c is None else list(c) for c in (old.choices, new.choices))
        yield Change("choices", "flag", name, was, now, _choices_note(old.choices, new.choices), kv)
    if old.kind != new.kind:
        yield Change("kind", "flag", name, old.kind, new.kind, kv=kv)
    if old.deprecated != new.deprecated:
        yield Change("deprecated", "flag", name, old.deprecated, new.deprecated, new.replaced_by or "", kv)


def _choices_note(old: tuple[Any, ...] | None, new: tuple[Any, ...] | None) -> str:
    if old is None or new is None:
        return "any value now" if new is None else "restricted now"
    more = [f"+{choice}" for choice in new if choice not in old]
    return " ".join(more + [f"-{choice}" for choice in old if choice not in new])


def _metrics(before: Mapping[str, ExposedMetric], after: Mapping[str, ExposedMetric]) -> Iterator[Change]:
    for name in before.keys() - after.keys():
        yield Change("removed", "metric", name, before[name].type, kv=_about_kv(name))
    for name in after.keys() - before.keys():
        gate = after[name].gate
        yield Change(
            "added",
            "metric",
            name,
            after=after[name].type,
            note=f"only with {gate}" if gate else "",
            kv=_about_kv(name),
        )
    for name in before.keys() & after.keys():
        old, new, kv = before[name], after[name], _about_kv(name)
        if old.type != new.type:
            yield Change("type", "metric", name, old.type, new.type, kv=kv)
        if set(old.labels) != set(new.labels) and not (old.open_labels or new.open_labels):
            yield Change("labels", "metric", name, list(old.labels), list(new.labels), kv=kv)
        if old.hidden != new.hidden:
            yield Change("hidden", "metric", name, old.hidden, new.hidden, kv=kv)


def _about_kv(metric: str) -> bool:
    return _KV_METRIC.search(metric) is not None
