"""A recommendation in the form it is applied in: launch command, Helm values, docker-compose, Kubernetes, JSON, text.

Lists of arguments are complete, as none of these tools merges them: what the command has, with the changes made. Where
no command is given they hold what is known of the flags in force.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from runbooks.changes import FlagChange, Recommendation
from runbooks.command_edit import CommandError, command_of, edited, joined, lines_of, split_command
from runbooks.engine_names import SGLANG, TENSORRT_LLM
from runbooks.facts import TargetFacts
from runbooks.launch_line import read_flags

__all__ = ["FORMS", "CommandError", "render"]

API_OPTIONS = "--extra_llm_api_options"
_PARTIAL = "only the flags known to be in force are listed: give your launch command to get all of them"
_WHOLE = "the whole list: it replaces the one there is"


def render(recommendation: Recommendation, facts: TargetFacts, form: str = "text", command: str | None = None) -> str:
    """The recommendation as text, "launch", "helm", "compose", "kubernetes" or "json".

    command: the launch command in use, to which the changes are made. Raises `CommandError` for a command that cannot
    be read, and `ValueError` for a form that is not known.
    """
    if form not in FORMS:
        raise ValueError(f"there is no form {form!r}; there are: {', '.join(FORMS)}")
    return FORMS[form](recommendation, facts, command).rstrip()


def _words(facts: TargetFacts, command: str | None) -> list[str]:
    if command is not None:
        return split_command(command)
    return command_of(facts.engine, facts.version, facts.flags)


def _commands(advice: Recommendation, facts: TargetFacts, command: str | None) -> tuple[list[str], list[str]]:
    """The words of the command before and after."""
    before = _words(facts, command)
    return before, edited(before, advice.flag_values(), facts.engine, facts.version)


def _launch(advice: Recommendation, facts: TargetFacts, command: str | None) -> str:
    """A unified diff of the launch command, one flag a line; the YAML of the API options where the engine has them."""
    before, after = _commands(advice, facts, command)
    parts = []
    if before != after:
        diff = difflib.unified_diff(
            lines_of(before), lines_of(after), "launch command", "launch command, changed", lineterm="", n=1000
        )
        parts.append("\n".join(diff))
    if options := _api_options(advice):
        parts.append(f"# in the file given to {API_OPTIONS}\n{options}".rstrip())
    return "\n".join(parts) if parts else _nothing(advice)


def _nothing(advice: Recommendation) -> str:
    return f"# no flag changes: {advice.summary}"


def _arguments(words: list[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Environment in front of a command, the program's own words, and its arguments."""
    line = read_flags(words, lambda _: None)
    rest = [word for word in words if "=" not in word or word.partition("=")[0] not in line.env]
    own = 0
    while own < len(rest) and not rest[own].startswith("--"):
        own += 1
    return dict(line.env), rest[:own], rest[own:]


def _head(advice: Recommendation, command: str | None) -> str:
    """Comments above a YAML document: what it is for, what left the list, what else is to be done."""
    lines = [advice.summary, _WHOLE if command is not None else _PARTIAL]
    lines += [f"taken out: {change.flag} ({change.from_})" for change in advice.changes if change.to is None]
    lines += [f"{change.flag} {change.to}: {change.why}" for change in advice.changes if change.to is not None]
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def _yaml(data: Any) -> str:
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=False, width=10_000)


def _helm(advice: Recommendation, facts: TargetFacts, command: str | None) -> str:
    """Values for a chart: vLLM's production stack, or a plain `extraArgs` list."""
    _, after = _commands(advice, facts, command)
    env, _, arguments = _arguments(after)
    if facts.engine == TENSORRT_LLM:
        options = yaml.safe_load(_api_options(advice) or "{}")
        return _head(advice, command) + _yaml({"extraLlmApiOptions": options, "extraArgs": arguments})
    if facts.engine == "vllm":
        # The stack's own keys (maxModelLen, gpuMemoryUtilization, ...) come before extraArgs; the last one counts.
        model: dict[str, Any] = {"name": "MODEL", "vllmConfig": {"extraArgs": arguments}}
        if env:
            model["env"] = [{"name": name, "value": value} for name, value in env.items()]
        return _head(advice, command) + _yaml({"servingEngineSpec": {"modelSpec": [model]}})
    values: dict[str, Any] = {"extraArgs": arguments}
    if env:
        values["env"] = [{"name": name, "value": value} for name, value in env.items()]
    return _head(advice, command) + _yaml(values)


def _service(facts: TargetFacts) -> str:
    return {"kvoncall": "engine", SGLANG: "sglang", TENSORRT_LLM: "trtllm"}.get(facts.engine, facts.engine)


def _compose(advice: Recommendation, facts: TargetFacts, command: str | None) -> str:
    """A docker-compose override: the command as a list, and the environment."""
    _, after = _commands(advice, facts, command)
    env, program, arguments = _arguments(after)
    # Compose reads $NAME; a dollar that is meant is doubled.
    service: dict[str, Any] = {"command": [word.replace("$", "$$") for word in [*program, *arguments]]}
    if env:
        service["environment"] = {name: value.replace("$", "$$") for name, value in env.items()}
    text = _head(advice, command) + _yaml({"services": {_service(facts): service}})
    return text + _options_as_comment(advice)


def _kubernetes(advice: Recommendation, facts: TargetFacts, command: str | None) -> str:
    """A strategic merge patch of a Deployment's container, for `kubectl patch deployment NAME --patch-file`."""
    _, after = _commands(advice, facts, command)
    env, program, arguments = _arguments(after)
    container: dict[str, Any] = {"name": _service(facts), "command": program, "args": arguments}
    if env:
        container["env"] = [{"name": name, "value": value} for name, value in env.items()]
    patch = {"spec": {"template": {"spec": {"containers": [container]}}}}
    return _head(advice, command) + _yaml(patch) + _options_as_comment(advice)


def _api_options(advice: Recommendation) -> str:
    """TensorRT-LLM's YAML: the fields that change; one that is taken out is null."""
    tree: dict[str, Any] = {}
    for change in advice.changes:
        if change.flag.startswith("--"):
            continue
        *path, leaf = change.flag.split(".")
        place = tree
        for name in path:
            place = place.setdefault(name, {})
        place[leaf] = change.to
    return _yaml(tree) if tree else ""


def _options_as_comment(advice: Recommendation) -> str:
    options = _api_options(advice)
    if not options:
        return ""
    return "".join(f"# {line}\n" for line in [f"in the file given to {API_OPTIONS}:", *options.splitlines()])


def _json(advice: Recommendation, facts: TargetFacts, command: str | None) -> str:
    """Everything, with the command before and after as a shell reads it."""
    before, after = _commands(advice, facts, command)
    found: dict[str, Any] = {"engine": facts.engine, "version": facts.version, **advice.to_dict()}
    found["command"] = {"before": joined(before), "after": joined(after), "complete": command is not None}
    if options := _api_options(advice):
        found["extra_llm_api_options"] = yaml.safe_load(options)
    return json.dumps(found, indent=2, ensure_ascii=False, default=str)


def _text(advice: Recommendation, _facts: TargetFacts, _command: str | None) -> str:
    """What a person reads: the changes with their reasons, then what else, what not, and what is missing."""
    lines = [advice.summary.rstrip(".") + "."]
    for number, change in enumerate(advice.changes, 1):
        lines += ["", f"{number}. {_change(change)}", *_details(change)]
    if advice.alternatives:
        lines += ["", "In their place, alone:"]
        for change in advice.alternatives:
            lines += [f"  - {_change(change)}", *(f"  {line}" for line in _details(change))]
    for title, entries in (
        ("Besides:", advice.steps),
        ("Not advised:", [_refused(r.flag, r.to, r.reason) for r in advice.refused]),
        ("Would help to say more:", advice.missing),
    ):
        if entries:
            lines += ["", title, *(f"  - {entry}" for entry in entries)]
    return "\n".join(lines)


def _change(change: FlagChange) -> str:
    return f"{change.flag}: {_value(change.from_)} -> {_value(change.to)}"


def _value(value: Any) -> str:
    if value is None:
        return "unset"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _refused(flag: str, to: Any, reason: str) -> str:
    return f"{flag}: {reason}" if to is None else f"{flag} {_value(to)}: {reason}"


def _details(change: FlagChange) -> list[str]:
    restart = "needs a restart" if change.restart else "no restart"
    parts: Mapping[str, str] = {
        "why": change.why,
        "expect": change.expected,
        "cost": f"{change.cost}; {restart}",
        "risk": change.risk,
        "verify": change.verify,
        "back": change.rollback,
    }
    return [f"   {name:7}{text}" for name, text in parts.items() if text]


FORMS: dict[str, Callable[[Recommendation, TargetFacts, str | None], str]] = {
    "text": _text,
    "launch": _launch,
    "helm": _helm,
    "compose": _compose,
    "kubernetes": _kubernetes,
    "json": _json,
}
