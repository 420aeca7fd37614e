"""Prometheus' own answers: its rule engine run over a trace, with stale markers where a scrape missed a series.

`promtool test rules` evaluates rules on series given sample by sample. It is asked every minute for everything that
was recorded and for all alerts, is told to expect nothing, and so prints what it has.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.probe_oracle.traces import Key, Labels, Trace

Answers = list[dict[str, dict[Labels, float]]]
"""By minute: series by name, value by labels."""

_FAILED = re.compile(r'^    expr: ".*", time: (\S+),\s+exp: ?(?:nil|\[\])?\s+got: ?(.*)$', re.MULTILINE)
_SERIES = re.compile(r"\{([^}]*)\} (\S+?)(?:, |$)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PART = re.compile(r"(\d+)(ms|d|h|m|s)")
_SECONDS = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


@dataclass(frozen=True)
class Alerting:
    """An alert for Prometheus to evaluate."""

    name: str
    expr: str
    hold_s: float
    keep_firing_s: float


def ask(
    trace: Trace,
    recorded: Mapping[str, str],
    alerts: Sequence[Alerting],
    folder: Path,
    expose: Callable[[Key], str | None] | None = None,
) -> Answers:
    """What Prometheus says of every recorded expression and every alert, minute by minute.

    `expose` spells a series, or leaves it out; canonical by default.
    """
    rules: list[dict[str, object]] = [{"record": name, "expr": expr} for name, expr in recorded.items()]
    for alert in alerts:
        times = {"for": f"{alert.hold_s:g}s", "keep_firing_for": f"{alert.keep_firing_s:g}s"}
        rules.append({"alert": alert.name, "expr": alert.expr, **times})
    wanted = "|".join(["ALERTS", *recorded])
    asked = [{"expr": f'{{__name__=~"{wanted}"}}', "eval_time": f"{minute}m"} for minute in range(trace.minutes + 1)]
    series = [{"series": name, "values": values} for name, values in _input_series(trace, expose or spelled).items()]
    test = {"interval": "1s", "input_series": series, "promql_expr_test": asked}
    _write(folder / "rules.yml", {"groups": [{"name": "all", "rules": rules}]})
    _write(folder / "test.yml", {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [test]})
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    said = done.stdout + done.stderr
    assert "FAILED" in said, said[:2000]
    return _parsed(said, trace.minutes)


def spelled(key: Key) -> str:
    """A series as PromQL writes it."""
    return key[0] + "{" + ",".join(f"{name}={json.dumps(value)}" for name, value in key[1]) + "}"


def _input_series(trace: Trace, expose: Callable[[Key], str | None]) -> dict[str, str]:
    """Each series as promtool reads it: a value a second, `_` for none, `stale` where a scrape did not bring it."""
    points: dict[Key, list[tuple[int, str]]] = {}
    current: set[Key] = set()
    for scrape in trace.scrapes:
        for key, value in scrape.values.items():
            points.setdefault(key, []).append((scrape.at, repr(value)))
        if scrape.up is None:
            continue
        for key in current - scrape.values.keys():
            points[key].append((scrape.at, "stale"))
        current = set(scrape.values)
        points.setdefault(("up", ()), []).append((scrape.at, str(int(scrape.up))))
    return {name: _spaced(found) for key, found in points.items() if (name := expose(key)) is not None}


def _spaced(points: list[tuple[int, str]]) -> str:
    words, at = [], 0
    for when, value in points:
        if when > at:
            words.append(f"_x{when - at}")
        words.append(value)
        at = when + 1
    return " ".join(words)


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML


def _parsed(said: str, minutes: int) -> Answers:
    answers: Answers = [{} for _ in range(minutes + 1)]
    for time, got in _FAILED.findall(said):
        at = sum(int(count) * _SECONDS[unit] for count, unit in _PART.findall(time))
        for text, value in _SERIES.findall(got):
            labels = dict(_LABEL.findall(text))
            name = labels.pop("__name__")
            answers[round(at / 60)].setdefault(name, {})[tuple(sorted(labels.items()))] = _number(value)
    return answers


def _number(text: str) -> float:
    return math.inf if text == "+Inf" else float(text)
