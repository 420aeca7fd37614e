"""What the front matter of a runbook page must be, key by key.

`problems` says everything that is wrong, one sentence each that names the key and what to write. Only what the page
itself can tell is checked here; whether flags, metrics and rules exist is `kvoncall runbooks lint`'s matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from runbooks.version_range import parse_range

ENGINES = ("kvoncall", "vllm", "sglang", "tensorrt-llm", "tgi", "triton")
SEVERITIES = ("info", "warning", "critical")
RESULTS = ("pass", "fail", "not drilled")
NEVER = "never"  # of a name that no release had

REQUIRED = (
    "title", "alert", "severity", "engines", "tested", "drill", "owner", "look_alikes", "inhibited_by", "flags",
)  # fmt: skip
OPTIONAL = ("incidents", "gone")
TRANSLATION_KEYS = ("title", "translated_from")
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
_INCIDENT = re.compile(r"[A-Z]\d{2}")
_VERSION = re.compile(r"\d+(\.\d+)*(\.post\d+|rc\d+)?")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Problem:
    """One defect of the front matter: where, and a sentence without the file's name."""

    key: str
    message: str


def problems(runbook_id: str, meta: Any, pages: Collection[str] | None = None) -> list[Problem]:
    """All that is wrong with a page's front matter; `pages`: the ids that links may name (None: any)."""
    if not isinstance(meta, Mapping):
        return [Problem("", "front matter is not a mapping: write `key: value` lines between the --- lines")]
    found = [Problem(key, f"front matter lacks {key}: {_WRITE[key]}") for key in REQUIRED if key not in meta]
    for key, value in meta.items():
        if key not in (*REQUIRED, *OPTIONAL):
            found.append(Problem(str(key), f"unknown key {key!r}: write one of {', '.join((*REQUIRED, *OPTIONAL))}"))
        elif not _CHECKS[key](value):
            found.append(Problem(key, f"{key} is {value!r}: {_WRITE[key]}"))
    if found:
        return found
    return [*_of_id(runbook_id, meta), *_of_links(runbook_id, meta, pages), *_of_flags(meta), *_of_drill(meta)]


def translation_problems(meta: Any) -> list[Problem]:
    """All that is wrong with a translation's front matter."""
    if not isinstance(meta, Mapping):
        return [Problem("", "front matter is not a mapping: write title and translated_from between the --- lines")]
    found = [Problem(key, f"front matter lacks {key}: {_WRITE[key]}") for key in TRANSLATION_KEYS if key not in meta]
    for key, value in meta.items():
        if key not in TRANSLATION_KEYS:
            found.append(Problem(str(key), f"unknown key {key!r}: a translation has title and translated_from only"))
        elif not _CHECKS[key](value):
            found.append(Problem(key, f"{key} is {value!r}: {_WRITE[key]}"))
    return found


def _of_id(runbook_id: str, meta: Mapping[str, Any]) -> list[Problem]:
    if meta["alert"] in (None, runbook_id):
        return []
    what = f"alert is {meta['alert']!r}: file name and alert id must agree, write {runbook_id} or null"
    return [Problem("alert", what)]


def _of_links(runbook_id: str, meta: Mapping[str, Any], pages: Collection[str] | None) -> list[Problem]:
    if pages is None:
        return []
    return [
        Problem(key, f"{key} names {other!r}, which is no other page: write the id of one, or leave it out")
        for key in ("look_alikes", "inhibited_by")
        for other in meta[key]
        if other not in pages or other == runbook_id
    ]


def _of_flags(meta: Mapping[str, Any]) -> list[Problem]:
    found = []
    for flag, entry in meta["flags"].items():
        strange = [engine for engine in entry["engines"] if engine not in meta["engines"]]
        found += [f"{flag} is of {one}, of which engines says no range: add one, or leave it out" for one in strange]
        spans = [(key, engine) for key in ("since", "until") for engine in entry.get(key, {})]
        found += [
            f"{flag} has {key} of {engine}: add {engine} to its engines"
            for key, engine in spans
            if engine not in entry["engines"]
        ]
    return [Problem("flags", message) for message in found]


def _of_drill(meta: Mapping[str, Any]) -> list[Problem]:
    drill, tested = meta["drill"], meta["tested"]
    found = []
    if drill["replay"] is not None and "command" in drill:
        found.append(Problem("drill", "drill has a replay and a command: write one of them"))
    if drill["replay"] is None and "command" not in drill and tested["result"] != "not drilled":
        found.append(Problem("tested", "tested without a drill: write {result: not drilled}, or name the drill"))
    if tested["result"] != "not drilled" and ("date" not in tested or not set(tested) & set(ENGINES)):
        found.append(Problem("tested", "tested names no version or no date: write {ENGINE: VERSION, date:, result:}"))
    return found


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value)) and len(set(value)) == len(value)


def _engines(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(engine in ENGINES and parse_range(text) is not None for engine, text in value.items())
    )


def _version(value: Any) -> bool:
    return isinstance(value, str) and bool(_VERSION.fullmatch(value))


def _tested(value: Any) -> bool:
    if not isinstance(value, Mapping) or value.get("result") not in RESULTS:
        return False
    return all(
        key == "result" or (key == "date" and _date(one)) or (key in ENGINES and _version(one))
        for key, one in value.items()
    )


def _date(value: Any) -> bool:
    if isinstance(value, date):
        return True
    try:
        return isinstance(value, str) and bool(date.fromisoformat(value))
    except ValueError:
        return False


def _drill(value: Any) -> bool:
    if not isinstance(value, Mapping) or "replay" not in value:
        return False
    known = {"replay", "command", "detects_in", "mitigates_in"}
    texts = all(_text(one) for key, one in value.items() if key != "replay")
    return set(value) <= known and texts and (value["replay"] is None or _text(value["replay"]))


def _flags(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(flag, str) and _FLAG.fullmatch(flag) and _flag_entry(entry) for flag, entry in value.items()
    )


def _flag_entry(entry: Any) -> bool:
    if not isinstance(entry, Mapping) or not set(entry) <= {"engines", "since", "until"}:
        return False
    engines = entry.get("engines")
    if not isinstance(engines, list) or not engines or not all(engine in ENGINES for engine in engines):
        return False
    spans = [entry[key] for key in ("since", "until") if key in entry]
    return all(isinstance(span, Mapping) and all(map(_version, span.values())) for span in spans)


def _gone(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _text(name)
        and isinstance(spans, Mapping)
        and bool(spans)
        and all(engine in ENGINES and (last == NEVER or _version(last)) for engine, last in spans.items())
        for name, spans in value.items()
    )


def _incidents(value: Any) -> bool:
    return _texts(value) and all(_INCIDENT.fullmatch(one) for one in value)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "title": _text,
    "alert": lambda value: value is None or _text(value),
    "severity": lambda value: value in SEVERITIES,
    "engines": _engines,
    "tested": _tested,
    "drill": _drill,
    "owner": _text,
    "look_alikes": _texts,
    "inhibited_by": _texts,
    "flags": _flags,
    "incidents": _incidents,
    "gone": _gone,
    "translated_from": lambda value: isinstance(value, str) and bool(_SHA256.fullmatch(value)),
}
_WRITE = {
    "title": "write a title in quotes",
    "alert": "write the page's own id when an alert rule has it, else null",
    "severity": f"write one of {', '.join(SEVERITIES)}",
    "engines": f'write {{ENGINE: ">=A,<B"}} with engines out of {", ".join(ENGINES)}',
    "tested": 'write {kvoncall: "0.1.0", date: "2026-11-30", result: pass}, or {result: not drilled}',
    "drill": "write {replay: ID, detects_in: TEXT, mitigates_in: TEXT}, or {replay: null, command: COMMAND}",
    "owner": "write who owns the page",
    "look_alikes": "write a list of page ids, each once",
    "inhibited_by": "write a list of page ids, each once",
    "flags": 'write {--flag: {engines: [ENGINE], since: {ENGINE: "A"}, until: {ENGINE: "B"}}}, or {}',
    "incidents": "write a list of ids such as A06, each once",
    "gone": 'write {NAME: {ENGINE: "last version that had it"}}, or `never` for a name that no release had',
    "translated_from": "write the sha256 of the English page, 64 hexadecimal digits",
}
