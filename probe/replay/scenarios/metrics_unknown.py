"""Metrics unknown: an engine started with --disable-log-stats serves well and exposes none of its own series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from probe.load.endpoint import Endpoint
from probe.load.generator import LoadOptions
from probe.load.traces import synthetic
from probe.replay.observation import Check, LoadPlan, Observation
from probe.replay.scenarios.load_scenario import LoadScenario


@dataclass(frozen=True)
class MetricsUnknown(LoadScenario):
    """A few requests, all answered, and nothing to see of them."""

    requests: int = 8
    time_scale: float = 0.02

    id = "metrics-unknown"
    title = "Metrics unknown: the engine answers and its series are gone"
    hypothesis = (
        "--disable-log-stats takes more than log lines away: /metrics is left with the process's own series. The "
        "engine serves, and every alert on it is blind. Without the flag its series are back."
    )

    @property
    def article_case(self) -> Mapping[str, Any]:
        """A flag that does more than its name says."""
        return {"case": "vLLM with --disable-log-stats: no vllm: series on /metrics", "computed": False}

    def flags(self) -> list[str]:
        """Somebody wanted a quiet log."""
        return ["--max-num-seqs", "16", "--disable-log-stats"]

    def load(self, endpoint: Endpoint) -> LoadPlan:
        """Short questions, two at a time."""
        plan = synthetic(
            self.requests, prompt_tokens=32, max_tokens=16, vocab_size=endpoint.vocab_size, name="question"
        )
        options = LoadOptions(concurrency=2, model=endpoint.model, request_timeout_s=60, max_duration_s=60)
        return LoadPlan(tuple(plan), options, f"{self.requests} short questions, two at a time", quiet_s=4.0)

    def shown(self, before: Observation) -> list[Check]:
        """Requests were answered, and no counter says so."""
        done = before.load.completed if before.load else 0
        finished = before.metrics.get("finished")
        seen = f"{done} answered, the counter says {finished}"
        return [Check("answers that no counter counts", done > 0 and finished is None, seen, "answered, no counter")]

    def mended(self, after: Observation) -> list[Check]:
        """The counter is back."""
        finished = after.metrics.get("finished")  # those before the window's first scrape are not among them
        return [Check("the counter is back", finished is not None, finished, "a number")]
