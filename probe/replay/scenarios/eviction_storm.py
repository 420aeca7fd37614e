"""Eviction storm: a slice of a real chat trace on an engine whose pool is too small for its --max-num-seqs.

The operator has lowered --gpu-memory-utilization (published advice against memory trouble) and left --max-num-seqs
high. Admission counts prompts, answers grow, and running requests take each other's blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import MIB
from probe.load.endpoint import Endpoint
from probe.load.generator import LoadOptions
from probe.load.traces import cut, fit, load_trace, requests_from
from probe.replay.exercise import Bench, LoadExercise
from probe.replay.observation import Check, LoadPlan, Observation, alert_fired, alert_resolved, all_completed

TRACE = "azure_llm_conv_2023"
FIRST_ROW = 135  # answers are long for their prompts here, so requests grow after admission
THRESHOLD = 0.05
LEAST_FINISHED = 20  # below it a rate says little


@dataclass(frozen=True)
class EvictionStorm:
    """Scenario `eviction-storm`; `model` "" is the testbed model."""

    model: str = ""
    device_memory: int = 192 * MIB
    utilization: float = 0.125
    max_num_seqs: int = 48
    max_num_batched_tokens: int = 512
    max_model_len: int = 1024
    requests: int = 50
    rate: float = 20.0  # requests a second on average, with the trace's own bursts
    time_scale: float = 0.03
    scrape_interval_s: float = 0.5
    threads: int | None = None

    id = "eviction-storm"
    title = "Eviction storm: a chat trace on a pool too small for its concurrency"
    rule = "eviction-storm"
    runbook = "eviction-storm"
    hypothesis = (
        "With a pool of a few thousand tokens and a high --max-num-seqs, requests admitted by their prompts outgrow "
        "the pool and preempt each other: more than 5% of the requests in service. With the pool that fits the device "
        "and no more sequences than it holds, the same trace runs without."
    )

    @property
    def article_case(self) -> Mapping[str, Any]:
        """Where the load comes from."""
        trace = load_trace(TRACE)
        return {
            "case": "over-admission: vLLM admits by prompt, answers outgrow the pool (vllm-project/vllm#44594)",
            "measured_there": {"requests": 450, "preemptions": 1065, "kv_tokens": 299584, "max_num_seqs": 256},
            "trace": {"name": trace.name, "source": trace.source, "licence": trace.licence},
            "computed": False,
        }

    def flags(self) -> list[str]:
        """A small pool and many sequences."""
        return [
            *(["--model", self.model] if self.model else []),
            "--device-memory", str(self.device_memory),
            "--gpu-memory-utilization", str(self.utilization),
            "--max-num-seqs", str(self.max_num_seqs),
            "--max-num-batched-tokens", str(self.max_num_batched_tokens),
            "--max-model-len", str(self.max_model_len),
        ]  # fmt: skip

    def exercise(self, bench: Bench) -> LoadExercise:
        """The load below, sent twice."""
        return LoadExercise(bench, self.load)

    def load(self, endpoint: Endpoint) -> LoadPlan:
        """A slice of the Azure conversation trace, fitted to the context, at its own (hastened) times."""
        fitted = fit(load_trace(TRACE), endpoint.max_model_len)
        trace = cut(fitted, start=FIRST_ROW, count=self.requests, rate=self.rate)
        options = LoadOptions(timed=True, model=endpoint.model, request_timeout_s=90, max_duration_s=90)
        return LoadPlan(
            tuple(requests_from(trace, vocab_size=endpoint.vocab_size)),
            options,
            f"{len(trace.rows)} requests of {TRACE} from row {FIRST_ROW}, lengths x {trace.factor:.3f}, "
            f"{self.rate:g} a second",
        )

    def reproduced(self, before: Observation) -> list[Check]:
        """The measured rate is above the threshold and the alert fired."""
        rate = before.metrics.get("eviction_rate")
        above = rate is not None and rate > THRESHOLD
        return [
            Check("eviction rate above the threshold", above, rate, f"> {THRESHOLD}"),
            alert_fired(before, self.rule),
        ]

    def verified(self, after: Observation) -> list[Check]:
        """All requests completed, the rate of the second run is measured and low, and the alert resolved."""
        rate, finished = after.metrics.get("eviction_rate"), after.metrics.get("finished") or 0
        measured = f"{rate} over {finished:g} finished requests"
        low = rate is not None and rate < THRESHOLD and finished >= LEAST_FINISHED
        return [
            all_completed(after),
            Check("eviction rate below the threshold", low, measured, f"< {THRESHOLD}"),
            alert_resolved(after, self.rule),
        ]
