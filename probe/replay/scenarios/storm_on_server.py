"""Eviction storm on a real server: requests whose prompts fit its KV pool together and whose answers do not.

All that is needed is the pool's size in tokens and the context length, both of which the server tells. Requests are
sent in a closed loop whose concurrency would hold 1.6 pools of tokens, were every answer complete.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from probe.load.endpoint import Endpoint, EndpointError
from probe.load.generator import LoadOptions
from probe.load.traces import synthetic
from probe.replay.exercise import Bench, LoadExercise
from probe.replay.observation import LoadPlan
from probe.replay.scenarios.eviction_storm import LEAST_FINISHED, EvictionStorm
from runbooks.recommend import from_facts

OVERCOMMIT = 1.6  # pools of tokens that the requests in flight want at their ends
PROMPT_SHARE = 0.4  # of a request; the rest is answer, which grows after admission
LEAST_IN_FLIGHT = 8
LONGEST_REQUEST = 2048
ROUNDS = 4  # requests sent for each one in flight
LOW_IDS = 100  # token ids below it are bytes or common pieces in every vocabulary


@dataclass(frozen=True)
class StormOnServer(EvictionStorm):
    """Scenario `eviction-storm` against a server that is not ours."""

    time_scale: float = 0.1
    scrape_interval_s: float = 1.0

    title = "Eviction storm on a server: more requests than its KV pool holds to their ends"
    hypothesis = (
        "Requests whose prompts fit the pool together and whose answers do not preempt each other: more than 5% of the "
        "requests in service. With no more sequences at once than the pool holds, the same load runs without."
    )

    @property
    def article_case(self) -> Mapping[str, Any]:
        """The published case this is like."""
        return {
            "case": "over-admission: vLLM admits by prompt, answers outgrow the pool (vllm-project/vllm#44594)",
            "measured_there": {"requests": 450, "preemptions": 1065, "kv_tokens": 299584, "max_num_seqs": 256},
            "computed": False,
        }

    def flags(self) -> list[str]:
        """The server's flags are its operator's."""
        return []

    def exercise(self, bench: Bench) -> LoadExercise:
        """The load, sized once from the pool as the server first had it, sent twice."""
        pool = from_facts(bench.facts).kv_cache_size_tokens
        if pool is None:
            raise EndpointError(
                f"{bench.drill.base_url} does not tell how many tokens its KV pool holds, so that no load can be sized"
            )
        return LoadExercise(bench, lambda endpoint: storm(pool, endpoint))


def storm(pool_tokens: int, endpoint: Endpoint) -> LoadPlan:
    """Requests of one length: short enough that several fit the pool, long enough to be few."""
    length = min(endpoint.max_model_len, LONGEST_REQUEST, max(32, pool_tokens // LEAST_IN_FLIGHT))
    prompt = max(4, int(length * PROMPT_SHARE))
    in_flight = math.ceil(OVERCOMMIT * pool_tokens / length)
    count = max(2 * LEAST_FINISHED, ROUNDS * in_flight)
    requests = synthetic(
        count, prompt_tokens=prompt, max_tokens=length - prompt, vocab_size=endpoint.vocab_size or LOW_IDS, name="storm"
    )
    options = LoadOptions(concurrency=in_flight, model=endpoint.model, request_timeout_s=600, max_duration_s=1800)
    return LoadPlan(
        tuple(requests),
        options,
        f"{count} requests of {prompt} prompt tokens and {length - prompt} answer tokens, {in_flight} at a time: at "
        f"their ends those want {in_flight * length} tokens of a pool of {pool_tokens}",
    )
