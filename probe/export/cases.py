"""What a target looks like when a rule should fire and when it should stay quiet: a value a scrape, in canonical names.

One pair a rule. The quiet case is the near miss: the old counter that stands still, the full cache without a queue,
the budget that burns just below the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from probe.alerts.expr import leaves, look_back_s
from probe.alerts.rule import Rule, ValueSignal
from probe.export.naming import RULE_BREACH, UP, Names
from probe.export.stand_in import FIRST_EVENT, PROCESS_START, needed, sign_of

Traces = dict[tuple[str, str], list[float]]
"""(canonical series, which one) -> its value at each scrape. Which one: the engine, GPU or rule; "" where it is one."""

LEAST_SCRAPES, SCRAPES_PER_WINDOW = 10, 60
_GIB = 2.0**30


@dataclass(frozen=True)
class Scene:
    """The time a case takes for a (fitted) rule: `scrapes` values, `interval_s` apart; at `turn` something begins."""

    rule: Rule
    names: Names
    scrapes: int
    interval_s: float
    turn: int

    def flat(self, value: float) -> list[float]:
        """The same value all the time."""
        return [value] * self.scrapes

    def ramp(self, step: float, start: float = 0.0) -> list[float]:
        """A counter that grows by `step` a scrape."""
        return [start + step * i for i in range(self.scrapes)]

    def until_turn(self, step: float) -> list[float]:
        """A counter that grows until the turn and stands still from there."""
        return [step * min(i, self.turn) for i in range(self.scrapes)]

    def from_turn(self, before: float, after: float) -> list[float]:
        """One value before the turn, another from there on."""
        return [before if i < self.turn else after for i in range(self.scrapes)]


Make = Callable[[Scene], Traces]


def scene(rule: Rule, names: Names, scrape_interval_s: float) -> Scene:
    """Long enough for the rule's windows and hold time; a baseline of a day is seen in steps of a window."""
    parts = rule.signal.parts if isinstance(rule.signal, ValueSignal) else ()
    reach_s = max([rule.window_s, *(look_back_s(leaf) for part in parts for leaf in leaves(part))])
    has_baseline = reach_s > 10 * rule.window_s
    interval_s = rule.window_s if has_baseline else max(scrape_interval_s, rule.window_s / SCRAPES_PER_WINDOW)
    before = math.ceil(reach_s / interval_s) if has_baseline else LEAST_SCRAPES
    after = math.ceil((rule.window_s + rule.hold_s) / interval_s) + 4
    return Scene(rule, names, before + after, interval_s, before)


def _preempting(scene: Scene, preempted: list[float], finished: list[float]) -> Traces:
    return {
        ("preemptions_total", "0"): preempted,
        ("requests_finished_total", "0"): finished,
        ("requests_running", "0"): scene.flat(4),
    }


def _held(scene: Scene, tokens: list[float]) -> Traces:
    return {
        ("generation_tokens_total", "0"): tokens,
        ("prompt_tokens_total", "0"): scene.flat(9_000),
        ("requests_running", "0"): scene.flat(2),
        ("requests_waiting", "0"): scene.flat(0),
    }


def _waiting(scene: Scene, admitted: list[float]) -> Traces:
    return {
        ("requests_waiting", "0"): scene.flat(3),
        ("ttft_seconds_count", "0"): admitted,
        ("generation_tokens_total", "0"): scene.ramp(20),
        ("kv_usage_ratio", "0"): scene.flat(0.4),
    }


def _full(scene: Scene, waiting: float) -> Traces:
    return {
        ("kv_usage_ratio", "0"): scene.flat(0.97),
        ("requests_waiting", "0"): scene.flat(waiting),
        ("kv_usage_ratio", "1"): scene.flat(0.2),
        ("requests_waiting", "1"): scene.flat(0),
    }


def _slow(scene: Scene, metric: str, share: float) -> Traces:
    return {
        (f"{metric}_count", "0"): scene.ramp(20),
        (f"{metric}_bucket", "0"): scene.ramp(20 * (1 - share)),
    }


def _hitting(scene: Scene, hits: list[float]) -> Traces:
    return {("prompt_tokens_total", "0"): scene.ramp(30_000), ("prefix_hits_total", "0"): hits}


def _evicting(scene: Scene, missed_soon: float) -> Traces:
    return {
        ("kv_block_evictions_total", "0"): scene.ramp(10),
        ("kv_evicted_before_reuse_total", "0"): scene.ramp(missed_soon),
    }


def _drained(scene: Scene, used: float) -> Traces:
    idle = {("requests_running", "0"): scene.flat(0), ("requests_waiting", "0"): scene.flat(0)}
    return {("kv_usage_ratio", "0"): scene.flat(used), **idle}


def _memory(scene: Scene, grown_gib: float) -> Traces:
    return {
        ("device_memory_used_bytes", "0"): scene.ramp(grown_gib * _GIB, 40 * _GIB),
        ("device_memory_total_bytes", "0"): scene.flat(80 * _GIB),
    }


def _required(scene: Scene) -> list[str]:
    finished = [FIRST_EVENT] if scene.names.dialect.lazy else []
    return list(dict.fromkeys((*needed(scene.names), *finished)))


def _exposing(scene: Scene, *, all_of_them: bool) -> Traces:
    shown = _required(scene)
    gone = None if all_of_them else shown[0]
    return {(name, "0"): scene.flat(1) for name in shown if name != gone}


def _process(scene: Scene, *, restarts: bool) -> Traces:
    if scene.names.has(PROCESS_START):
        started = scene.from_turn(1_700_000_000, 1_700_000_500) if restarts else scene.flat(1_700_000_000)
        return {(PROCESS_START, ""): started, (sign_of(scene.names), "0"): scene.flat(1)}
    grown = [float(i) if i < scene.turn or not restarts else float(i - scene.turn) for i in range(scene.scrapes)]
    return {("requests_finished_total", "0"): grown}


def _flag(scene: Scene, value: float) -> Traces:
    return {(RULE_BREACH, scene.rule.id): scene.flat(value)}


# Rule -> (fires, stays quiet).
CASES: Mapping[str, tuple[Make, Make]] = {
    "oom": (lambda s: _process(s, restarts=True), lambda s: _process(s, restarts=False)),
    "target-missing": (lambda s: {(UP, ""): s.flat(0)}, lambda s: {(UP, ""): s.flat(1)}),
    "engine-stall": (lambda s: _held(s, s.flat(500)), lambda s: _held(s, s.ramp(5))),
    "preemption-livelock": (
        lambda s: _preempting(s, s.ramp(2), s.flat(100)),
        lambda s: _preempting(s, s.ramp(2), s.ramp(1)),
    ),
    "eviction-storm": (
        lambda s: _preempting(s, s.ramp(1), s.ramp(5)),
        lambda s: _preempting(s, s.flat(1_000), s.ramp(5)),
    ),
    "kv-saturated": (lambda s: _full(s, 3), lambda s: _full(s, 0)),
    "head-of-line-block": (lambda s: _waiting(s, s.flat(50)), lambda s: _waiting(s, s.ramp(1))),
    "ttft-slo-burn": (lambda s: _slow(s, "ttft_seconds", 0.5), lambda s: _slow(s, "ttft_seconds", 0.05)),
    "itl-slo-burn": (lambda s: _slow(s, "itl_seconds", 0.5), lambda s: _slow(s, "itl_seconds", 0.05)),
    "prefix-hit-collapse": (lambda s: _hitting(s, s.until_turn(15_000)), lambda s: _hitting(s, s.ramp(15_000))),
    "cache-thrash": (lambda s: _evicting(s, 4), lambda s: _evicting(s, 1)),
    "kv-block-leak": (lambda s: _drained(s, 0.3), lambda s: _drained(s, 0)),
    "gpu-memory-creep": (lambda s: _memory(s, 0.125), lambda s: _memory(s, 0)),
    "metrics-unknown": (lambda s: _exposing(s, all_of_them=False), lambda s: _exposing(s, all_of_them=True)),
    "kv-quality-drop": (lambda s: _flag(s, 1), lambda s: _flag(s, 0)),
    "prefix-isolation-breach": (lambda s: _flag(s, 1), lambda s: _flag(s, 0)),
}
