"""A small fixed set of questions at a low rate, on a schedule: quality as a time series of a target.

Each round is a stored run, compared with the baseline, and becomes samples that all carry one time:
quality_items, quality_lost, quality_gained, quality_invalid {dtype} and quality_score {task, dtype, turn}. The event
"quality_round" follows once they are on disk, so whoever sees the event finds the samples.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from probe.alerts.quality import ROUND_EVENT
from probe.quality.run import Progress, run_suite
from probe.quality.suite import QualityError, SuiteSpec
from probe.store import QualityRun, Sample, Store

CONVERSATIONS = 6
CONCURRENCY = 2
LABEL = "canary"


def canary_spec(spec: SuiteSpec | None = None) -> SuiteSpec:
    """The spec of a canary: few conversations, no windows of text."""
    return replace(spec or SuiteSpec(), conversations=CONVERSATIONS, text_windows=0)


class Canary:
    """Asks one target again and again. Without `baseline` the first complete round is the baseline."""

    def __init__(
        self,
        store: Store,
        target: str,
        base_url: str,
        spec: SuiteSpec,
        baseline: QualityRun | None = None,
        *,
        api_key: str | None = None,
        concurrency: int = CONCURRENCY,
        progress: Progress | None = None,
    ) -> None:
        """`target` must be registered in the store."""
        self.baseline = baseline
        self._store = store
        self._target = target
        self._base_url = base_url
        self._spec = spec
        self._api_key = api_key
        self._concurrency = concurrency
        self._progress = progress

    def round(self) -> QualityRun:
        """One round, its samples and its event; raises `QualityError`, and then writes neither."""
        run = run_suite(
            self._store,
            self._base_url,
            self._spec,
            target=self._target,
            label=LABEL,
            baseline=self.baseline,
            api_key=self._api_key,
            concurrency=self._concurrency,
            progress=self._progress,
        )
        result = run.result or {}
        first = self.baseline is None
        if first:
            self.baseline = run
        dtype = str(run.facts.get("kv_cache_dtype", "unknown"))
        # Against itself a first round loses and gains nothing.
        against = result["against"] or {"items": result["overall"]["items"], "lost": 0, "gained": 0}
        counts = {key: against[key] for key in ("items", "lost", "gained")}
        counts["invalid"] = result["overall"]["invalid"]
        now = time.time()
        samples = [Sample(self._target, f"quality_{k}", {"dtype": dtype}, now, v) for k, v in counts.items()]
        self._store.samples.write([*samples, *self._scores(result, dtype, now)])
        self._store.samples.flush()
        assert self.baseline is not None
        data = {"run_id": run.id, "baseline_id": self.baseline.id, **counts, "dtype": dtype}
        self._store.events.add(self._target, ROUND_EVENT, _sentence(result, first), data=data)
        return run

    def rounds(self, interval_s: float) -> Iterator[QualityRun | QualityError]:
        """Without end: each round's run, or why it failed; `interval_s` from one round's start to the next's."""
        while True:
            started = time.monotonic()
            outcome: QualityRun | QualityError
            try:
                outcome = self.round()
            except QualityError as error:
                outcome = error
            yield outcome
            time.sleep(max(0.0, interval_s - (time.monotonic() - started)))

    def _scores(self, result: dict[str, Any], dtype: str, now: float) -> Iterator[Sample]:
        cells = [("all", "all", result["overall"])]
        cells += [(task, "all", found) for task, found in result["tasks"].items()]
        cells += [(found["task"], str(found["turn"]), found) for found in result["turns"]]
        for task, turn, found in cells:
            if found["accuracy"] is not None:
                labels = {"task": task, "dtype": dtype, "turn": turn}
                yield Sample(self._target, "quality_score", labels, now, found["accuracy"])


def _sentence(result: dict[str, Any], first: bool) -> str:
    overall, against = result["overall"], result["against"]
    words = f"{overall['right']} of {overall['items']} answers right"
    if first or against is None:
        return f"{words}; this round is the baseline of later ones"
    return f"{words}, {against['lost']} lost and {against['gained']} gained against the baseline: {against['verdict']}"
