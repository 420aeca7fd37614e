"""Workload templates: for each a server's flags, computed for its model, GPUs, engine and version.

`advise` plans the deployment as it is, then changes what the workload asks for, planning anew after each change; a
flag is named only where it exists in that version, takes the value, and is not the default anyway.
"""

from __future__ import annotations

import functools
from typing import Any

from engine.memory.deployment import Deployment
from runbooks.knowledge.template_parts import FlagChoice, LeftOut, Template, TemplateAdvice
from runbooks.knowledge.template_values import Draft
from runbooks.knowledge.text import data, text_of

__all__ = [
    "FlagChoice",
    "LeftOut",
    "Template",
    "TemplateAdvice",
    "advise",
    "flags_for",
    "launch_command",
    "template",
    "templates",
]


@functools.cache
def templates() -> list[Template]:
    """All templates, the articles' three first."""
    return [_template(entry) for entry in data("templates")]


def template(template_id: str) -> Template:
    """One template; `KeyError` with the known ids."""
    found = next((one for one in templates() if one.id == template_id), None)
    if found is None:
        raise KeyError(f"there is no template {template_id!r}; there are {', '.join(one.id for one in templates())}")
    return found


def _template(entry: dict[str, Any]) -> Template:
    texts = {name: text_of(entry[name]) for name in ("title", "summary")}
    return Template(**{**entry, **texts, "features": tuple(entry.get("features", ()))})


def advise(template: Template, deployment: Deployment) -> TemplateAdvice:
    """The template for a server. Raises `engine.errors.ConfigError` where the deployment itself cannot be planned."""
    return Draft(template, deployment).advice()


def flags_for(template: Template, deployment: Deployment) -> list[FlagChoice]:
    """The flags of a template for a server, with the reason of every value."""
    return list(advise(template, deployment).flags)


def launch_command(template: Template, deployment: Deployment, model: str | None = None) -> str:
    """The command that starts such a server."""
    return advise(template, deployment).command(model)
