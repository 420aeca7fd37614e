"""The vocabulary at versions, and the findings of rules and panels given as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from probe.check.check import check_queries
from probe.check.documents import read_text
from probe.check.engines import vocabulary
from probe.check.finding import Finding
from probe.check.query import find_queries
from probe.check.subject import Settings

RUNBOOK = {"runbook_url": "https://runbooks.example/x"}
Find = Callable[..., list[Finding]]


@pytest.fixture(scope="session")
def known() -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def at(dialect: str) -> Any:
        if dialect not in made:
            engine, _, version = dialect.partition("@")
            made[dialect] = vocabulary({engine: version or None})[0]
        return made[dialect]

    return at


@pytest.fixture(scope="session")
def find(known: Callable[[str], Any]) -> Find:
    """Findings of documents in one file."""

    def of(text: str, name: str = "rules.yaml", dialect: str = "vllm@0.33.0", scrape_s: float = 15.0) -> list[Finding]:
        return check_queries(find_queries(read_text(text, name), name), known(dialect), Settings(scrape_s))

    return of


@pytest.fixture(scope="session")
def rule(find: Find) -> Find:
    """Findings of one alert, complete but for what `fields` change."""

    def of(expr: str, dialect: str = "vllm@0.33.0", scrape_s: float = 15.0, **fields: Any) -> list[Finding]:
        one = {"alert": "One", "expr": expr, "for": "5m", "annotations": RUNBOOK, **fields}
        text = yaml.safe_dump({"groups": [{"name": "g", "rules": [one]}]})
        return find(text, dialect=dialect, scrape_s=scrape_s)

    return of


@pytest.fixture(scope="session")
def panel(find: Find) -> Find:
    """Findings of one panel of a dashboard."""

    def of(expr: str, dialect: str = "vllm@0.33.0", unit: str = "", variables: Any = ()) -> list[Finding]:
        one = {"title": "One", "targets": [{"expr": expr}], "fieldConfig": {"defaults": {"unit": unit}}}
        dashboard = {"title": "Board", "panels": [one], "templating": {"list": list(variables)}}
        return find(json.dumps(dashboard), "board.json", dialect=dialect)

    return of


@pytest.fixture(scope="session")
def data() -> Path:
    return Path(__file__).with_name("data")
