"""`kvoncall` command lines a page gives: the real parser takes them, and the ids in them exist. Nothing is run."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection, Iterator

from engine.config import ConfigError, EngineConfig
from probe.alerts.rules import DEFAULT_RULES
from probe.cli import COMMANDS, parser
from probe.commands.bench import KERNEL_BENCHES
from probe.commands.output import UsageError
from probe.replay.scenario import ReplayError, get_scenario
from probe.runbook_lint.document import Document
from probe.runbook_lint.finding import LintFinding
from runbooks.flags import known_versions

_LEFT_OPEN = {"…", "..."}


def check_commands(page: Document, pages: Collection[str]) -> Iterator[LintFinding]:
    """Findings of the command lines in any language's page."""
    for block in page.blocks:
        for span in block.spans:
            if span.text.startswith("kvoncall "):
                why = why_refused(span.text, pages)
                if why:
                    yield LintFinding(page.file, span.line, "command", f"`{span.text}`: {why}", "what `--help` shows")


def commands_in(page: Document) -> set[str]:
    """Every command line of a page."""
    return {span.text for block in page.blocks for span in block.spans if span.text.startswith("kvoncall ")}


def why_refused(text: str, pages: Collection[str]) -> str:
    """Why the command line would be refused, "" when it would not. Arguments that are left out are allowed."""
    try:
        words = [word for word in shlex.split(text)[1:] if word not in _LEFT_OPEN]
    except ValueError as error:
        return str(error)
    name, rest = words[0], words[1:]
    if name == "serve":
        return _serve(rest)
    if name not in COMMANDS:
        return f"there is no command {name!r}; there are: serve, {', '.join(COMMANDS)}"
    if name == "bench" and rest and rest[0] in KERNEL_BENCHES:
        return ""  # has a parser of its own, in a room that needs torch
    try:
        made = parser(name)
        flags = [word.partition("=")[0] for word in rest if word.startswith("--") and " " not in word]
        unknown = [flag for flag in flags if not _takes(made, flag)]
        if unknown:
            return f"{name} has no {unknown[0]}"
        options = made.parse_args(rest)
    except UsageError as error:
        return "" if "arguments are required" in str(error) else str(error)
    except ModuleNotFoundError as error:
        return f"the command is announced and not there: {error}"
    return _why_unknown(name, options, pages)


def _serve(words: list[str]) -> str:
    try:
        EngineConfig.from_args(words)
    except ConfigError as error:
        return str(error)
    except SystemExit:
        return "serve does not take that"
    return ""


def _takes(made: argparse.ArgumentParser, flag: str) -> bool:
    """Whether the parser, or one of its subcommands, has the flag."""
    for action in made._actions:
        if flag in action.option_strings:
            return True
        if isinstance(action, argparse._SubParsersAction) and any(_takes(one, flag) for one in action.choices.values()):
            return True
    return False


def _why_unknown(name: str, options: argparse.Namespace, pages: Collection[str]) -> str:
    """Why an id in a parsed command line names nothing."""
    if name == "replay" and options.id:
        try:
            get_scenario(options.id, getattr(options, "variant", None))
        except ReplayError as error:
            return str(error)
    if name == "runbooks" and options.action in ("show", "advise"):
        unknown = [one for one in options.names if one not in pages and one != "ID"]
        return f"there is no runbook {unknown[0]!r}" if unknown else ""
    if name == "backtest" and options.rule not in (None, "RULE", *(rule.id for rule in DEFAULT_RULES)):
        return f"there is no rule {options.rule!r}"
    return _why_no_catalog(options) if name == "flags" else ""


def _why_no_catalog(options: argparse.Namespace) -> str:
    """Why `kvoncall flags` would answer nothing: an engine or version that was not read."""
    words = list(options.words)
    if words[0] in ("ENGINE", "WHEEL"):
        return ""
    engine, versions = (options.engine or "vllm", words[1:]) if words[0] == "diff" else (words[0], words[1:])
    engine, _, version = engine.partition("@")
    known = known_versions(engine)
    if not known:
        return f"there is no flag catalog of {engine!r}"
    unread = [one for one in (*versions, *filter(None, [version])) if one not in (*known, "VERSION", "OLDER", "NEWER")]
    return f"{engine} {unread[0]} was not read; the newest is {known[-1]}" if unread else ""
