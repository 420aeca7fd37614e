"""`kvoncall flags`: which flags an engine has in a version, and what changed between two versions."""

from __future__ import annotations

import argparse
from typing import Any

from probe.commands.output import UsageError, print_json, report

_USAGE = "`kvoncall flags ENGINE VERSION` or `kvoncall flags diff OLDER NEWER`"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("words", nargs="+", metavar="ENGINE VERSION | diff OLDER NEWER")
    parser.add_argument("--engine", help="engine of `diff`, vllm if not given")
    parser.add_argument("--kv", action="store_true", help="only flags about the KV cache, its memory and its queue")
    parser.add_argument("--search", metavar="WORD", help="only flags with the word in their name or meaning")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Prints a table or the differences."""
    words = list(options.words)
    if words[0] == "diff":
        return _diff(options, words[1:])
    if options.engine is not None:
        raise UsageError(f"--engine belongs to `flags diff`; here the engine comes first: {_USAGE}")
    engine, _, version = words[0].partition("@")
    rest = ([version] if version else []) + words[1:]
    if len(rest) > 1:
        raise UsageError(f"too many words: {_USAGE}")
    return _table(options, engine, rest[0] if rest else None)


def _table(options: argparse.Namespace, engine: str, version: str | None) -> int:
    from probe.catalog.text import flag_table
    from runbooks.flags import all_flags

    at, note = _version(engine, version)
    flags = [facts for facts in all_flags(engine, at) if facts.kv or not options.kv]
    if options.search:
        word = options.search.lower()
        flags = [f for f in flags if word in f"{f.name} {f.meaning} {f.raising}".lower()]
    if options.json:
        found: dict[str, Any] = {"engine": engine, "version": at, "note": note, "flags": [f.to_dict() for f in flags]}
        print_json(found)
    else:
        _say(note)
        print(flag_table(flags))
        report(f"{engine} {at}: {len(flags)} flags")
    return 0


def _diff(options: argparse.Namespace, words: list[str]) -> int:
    from probe.catalog.diff import diff
    from probe.catalog.text import changes

    if len(words) != 2:
        raise UsageError("`kvoncall flags diff` takes two versions: flags diff OLDER NEWER")
    engine = options.engine or "vllm"
    (older, first), (newer, second) = (_version(engine, word) for word in words)
    found = diff(engine, older, newer, kv=options.kv)
    if options.search:
        word = options.search.lower()
        found = [change for change in found if word in f"{change.name} {change.note}".lower()]
    if options.json:
        notes = [note for note in (first, second) if note]
        print_json({"engine": engine, "older": older, "newer": newer, "notes": notes,
                    "changes": [change.to_dict() for change in found]})  # fmt: skip
    else:
        _say(first)
        _say(second)
        print(f"{engine} {older} -> {newer}")
        print(changes(found))
    return 0


def _version(engine: str, version: str | None) -> tuple[str, str | None]:
    """The version read that stands for this one, and the sentence that says so."""
    from runbooks.catalog_data import engines
    from runbooks.flags import nearest_version

    try:
        return nearest_version(engine, version)
    except LookupError as error:
        raise UsageError(f"{error}; there are {', '.join(engines())}") from error


def _say(note: str | None) -> None:
    if note:
        report(f"note: {note}")
