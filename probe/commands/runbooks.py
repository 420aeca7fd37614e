"""`kvoncall runbooks`: what to do about an alert or an incident; whether the pages say only what is so; the change
computed for a target.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probe.commands.output import UsageError, add_data_dir, open_store, print_json, report

if TYPE_CHECKING:
    from runbooks.load import Runbook

ACTIONS = ("list", "show", "lint", "advise")
FORMS = ("text", "launch", "helm", "compose", "kubernetes", "json")
_BELONGS = {
    "lang": ("list", "show"),
    "target": ("advise",),
    "facts": ("advise",),
    "form": ("advise",),
    "launch_command": ("advise",),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add = parser.add_argument
    add("action", choices=ACTIONS)
    add("names", nargs="*", metavar="ID|FILE", help="show, advise: the runbook; lint: files (default: all pages)")
    add("--lang", metavar="LANG", help="list, show: en or zh")
    add("--target", metavar="NAME|URL", help="advise: compute for this target")
    add("--facts", metavar="FILE", help="advise: compute from facts in a JSON file (- reads stdin)")
    add("--as", dest="form", choices=FORMS, help="advise: the form of the change (default: text)")
    add("--command", dest="launch_command", metavar="TEXT", help="advise: the launch command in use, to be changed")
    add("--json", action="store_true", help="print one JSON value")
    add_data_dir(parser)


def run(options: argparse.Namespace) -> int:
    """Runs one action; lint exits 1 when it finds anything."""
    for name, actions in _BELONGS.items():
        if getattr(options, name) is not None and options.action not in actions:
            flag = {"form": "--as", "launch_command": "--command"}.get(name, f"--{name}")
            raise UsageError(f"{flag} belongs to `runbooks {' and '.join(actions)}`, not to {options.action}")
    return {"list": _list, "show": _show, "lint": _lint, "advise": _advise}[options.action](options)


def _list(options: argparse.Namespace) -> int:
    from runbooks.load import list_runbooks, unreadable_pages

    if options.names:
        raise UsageError("`runbooks list` takes no id; `runbooks show ID` shows one")
    for problem in unreadable_pages():
        report(f"not listed: {problem}")
    runbooks = list_runbooks(options.lang or "en")
    if options.json:
        print_json([_summary(runbook) for runbook in runbooks])
        return 0
    width = max(len(runbook.id) for runbook in runbooks)
    for runbook in runbooks:
        print(f"{runbook.id:{width}} {runbook.severity:9} {runbook.title}")
    return 0


def _summary(runbook: Runbook) -> dict[str, Any]:
    return {
        "id": runbook.id,
        "title": runbook.title,
        "severity": runbook.severity,
        "alert": runbook.alert,
        "incidents": list(runbook.incidents),
        "engines": runbook.engines,
        "lang": runbook.lang,
        "own": runbook.own,
    }


def _one(options: argparse.Namespace) -> str:
    from runbooks.load import RunbookError

    if not options.names:
        raise RunbookError("which runbook? `kvoncall runbooks list` names them")
    if len(options.names) > 1:
        raise UsageError(f"`runbooks {options.action}` takes one id, not {len(options.names)}")
    return str(options.names[0])


def _show(options: argparse.Namespace) -> int:
    from runbooks.load import get_runbook

    runbook = get_runbook(_one(options), options.lang or "en")
    if options.json:
        print_json({**_summary(runbook), "note": runbook.note, "meta": runbook.meta, "sections": runbook.sections})
        return 0
    if runbook.note:
        report(runbook.note)
    if not runbook.tested:
        report("No drill of this page has passed yet.")
    print(runbook.markdown, end="")
    return 0


def _lint(options: argparse.Namespace) -> int:
    from probe.runbook_lint.lint import lint

    files = [Path(name) for name in options.names]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise UsageError(f"there is no file {missing[0]}; `runbooks lint` takes Markdown files, or none for all pages")
    result = lint(files)
    if options.json:
        print_json({"pages": result.pages, "findings": [finding.to_dict() for finding in result.findings]})
    else:
        for finding in result.findings:
            print(f"{finding.file}:{finding.line}: [{finding.code}] {finding.what}")
            print(f"    write: {finding.write}")
        found = f"{len(result.findings)} findings" if result.findings else "nothing wrong"
        print(f"{result.pages} pages: {found}.")
    return 1 if result.findings else 0


def _advise(options: argparse.Namespace) -> int:
    from runbooks.facts import from_facts
    from runbooks.load import get_runbook
    from runbooks.outputs import render
    from runbooks.recommend import recommend

    runbook = get_runbook(_one(options))
    if (options.target is None) == (options.facts is None):
        raise UsageError("say for whom: --target NAME|URL, or --facts FILE")
    facts = from_facts(_facts_in(options.facts) if options.facts else _facts_of(options))
    form = "json" if options.json else options.form or "text"
    print(render(recommend(runbook.id, facts), facts, form, options.launch_command))
    return 0


def _facts_in(name: str) -> dict[str, Any]:
    """The facts in a JSON file."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        facts = json.loads(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"--facts {name} cannot be read: {error}") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("engine"), str):
        raise UsageError(f'--facts {name} must be a JSON object with "engine", such as {{"engine": "vllm"}}')
    return facts


def _facts_of(options: argparse.Namespace) -> dict[str, Any]:
    """What is known of a stored target, or what a server at an address tells of itself now."""
    from probe.targets import find_server, measured_facts

    with open_store(options) as store:
        name, url = find_server(store, options.target)
        target = store.targets.get(name)
        if target is not None:
            return measured_facts(store, target, None)
    report(f"{url} is not watched: there is no traffic to compute with, only its configuration")
    return asyncio.run(_facts_at(url))


async def _facts_at(url: str) -> dict[str, Any]:
    import httpx

    from probe.collect.facts import read_facts
    from probe.store import Target
    from probe.targets import ATTACH_TIMEOUT_S, look_at

    look = await asyncio.to_thread(look_at, url)
    engine = look.detection.engine
    target = Target(0, url, look.url, "external", engine, [], look.facts, 0.0, 1.0, False, 0.0)
    async with httpx.AsyncClient(trust_env=False) as client:
        read = await read_facts(client, target, look.info, timeout_s=ATTACH_TIMEOUT_S)
    return {**look.facts, **read}
