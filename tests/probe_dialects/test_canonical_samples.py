"""Pages of every engine and era in canonical names and units."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from probe.collect.canonical import canonical_samples, missing, wanted_names
from probe.dialects import load_dialect
from probe.store import Sample

Page = Callable[[str], dict[str, Metric]]


def read(page: Page, name: str, engine: str, version: str | None = None) -> tuple[list[Sample], dict[str, str]]:
    return canonical_samples(page(name).values(), load_dialect(engine, version), "t", 1.0)


def values(samples: list[Sample], metric: str) -> list[float]:
    return [s.value for s in samples if s.metric == metric]


def labels(samples: list[Sample], metric: str) -> list[dict[str, str]]:
    return [dict(s.labels) for s in samples if s.metric == metric]


def test_vllm_before_v1(page: Page) -> None:
    samples, info = read(page, "vllm-v0", "vllm", "0.6.6")
    assert values(samples, "kv_usage_ratio") == [0.5]
    assert labels(samples, "kv_usage_ratio") == [{"model_name": "m"}]
    assert values(samples, "preemptions_total") == [7.0]
    assert values(samples, "itl_seconds_count") == [10.0]
    assert not values(samples, "prefix_hits_total")
    assert info == {}


@pytest.mark.parametrize(
    ("version", "queries", "hits"),
    [("0.7.3", 1600.0, 400.0), ("0.8.5.post1", 1600.0, 400.0), ("0.9.0", 100.0, 25.0), ("0.9.1", 100.0, 25.0)],
)
def test_prefix_counters_are_tokens_whatever_vllm_counted(
    page: Page, version: str, queries: float, hits: float
) -> None:
    samples, info = read(page, "vllm-v1-old", "vllm", version)
    assert info["block_size"] == "16"
    assert values(samples, "prefix_queries_total") == [queries]
    assert values(samples, "prefix_hits_total") == [hits]


@pytest.mark.parametrize(("name", "version"), [("vllm-v1-old", None), ("vllm-v1-old-without-config", "0.8.5")])
def test_a_counter_of_unknown_unit_is_left_out(page: Page, name: str, version: str | None) -> None:
    samples, _ = read(page, name, "vllm", version)
    assert not values(samples, "prefix_queries_total")
    assert values(samples, "kv_usage_ratio") == [0.5]


def test_real_vllm(page: Page) -> None:
    for version in (None, "0.33.0"):
        samples, info = read(page, "vllm-0.33.0-under-load", "vllm", version)
        assert len(samples) == 108
        assert values(samples, "kv_usage_ratio") == [0.9787234042553191]
        assert values(samples, "preemptions_total") == [7.0]
        assert {d["le"] for d in labels(samples, "ttft_seconds_bucket")} >= {"2.5", "+Inf"}
        assert info["num_gpu_blocks"] == "48"


def test_sglang_counts_each_replica_once(page: Page) -> None:
    samples, info = read(page, "sglang-new", "sglang", "0.5.23")
    running = {s.labels["engine"]: s.value for s in samples if s.metric == "requests_running"}
    assert running == {"0": 3.0, "1": 5.0}  # ranks of one replica report the same requests
    assert all(not d.keys() & {"tp_rank", "dp_rank"} for d in labels(samples, "requests_running"))
    assert values(samples, "requests_waiting") == [6.0]  # not 12: the rest is the same queue by priority
    assert values(samples, "kv_usage_ratio") == [0.93]
    assert values(samples, "preemptions_total") == [8.0]
    assert values(samples, "preempted_tokens_total") == [64.0]
    assert sorted(values(samples, "requests_finished_total")) == [10.0, 30.0]
    assert values(samples, "prefix_hits_total") == [300.0]
    assert values(samples, "generation_tokens_total") == [550.0]
    assert info == {"page_size": "64"}


def test_sglang_before_retractions_were_counted(page: Page) -> None:
    samples, _ = read(page, "sglang-old", "sglang", "0.5.2")
    assert not values(samples, "preemptions_total")  # the gauge of the last step is no counter
    assert values(samples, "generation_tokens_total") == [500.0]


def test_both_spellings_of_sglang_read_alike(page: Page) -> None:
    colon, _ = read(page, "sglang-new", "sglang")
    underscore, info = read(page, "sglang-underscore", "sglang")
    assert underscore == colon
    assert info == {"page_size": "64"}
    spelled = load_dialect("sglang", None, "sglang_")
    assert canonical_samples(page("sglang-underscore").values(), spelled, "t", 1.0)[0] == colon


def test_three_eras_of_tensorrt_llm(page: Page) -> None:
    first, _ = read(page, "trtllm-first", "tensorrt-llm")
    assert values(first, "requests_finished_total") == [12.0]
    assert values(first, "ttft_seconds_count") == [12.0]
    assert not values(first, "kv_usage_ratio")
    second, _ = read(page, "trtllm-second", "tensorrt-llm")
    assert values(second, "requests_finished_total") == [12.0]
    assert values(second, "kv_usage_ratio") == [0.62]
    assert not values(second, "requests_running")
    third, info = read(page, "trtllm-third", "tensorrt-llm")
    assert (values(third, "requests_running"), values(third, "requests_waiting")) == ([4.0], [2.0])
    assert (values(third, "prefix_queries_total"), values(third, "prefix_hits_total")) == ([800.0], [200.0])
    assert info == {"tokens_per_block": "32", "max_blocks": "100"}


def test_tgi_has_a_ratio_of_its_token_budget(page: Page) -> None:
    samples, info = read(page, "tgi", "tgi")
    assert values(samples, "kv_usage_ratio") == [0.25]
    assert values(samples, "requests_rejected_total") == [3.0]  # not those that were invalid
    assert labels(samples, "requests_rejected_total") == [{}]
    assert values(samples, "prompt_tokens_total") == [6000.0]
    assert values(samples, "request_prompt_tokens_count") == [60.0]
    assert info == {"max_batch_total_tokens": "12000"}


def test_triton_blocks_milliseconds_and_ensembles(page: Page) -> None:
    samples, info = read(page, "triton", "triton")
    assert values(samples, "kv_usage_ratio") == [0.25]
    assert labels(samples, "kv_usage_ratio") == [{"model_name": "tensorrt_llm"}]
    assert values(samples, "requests_running") == [6.0]
    assert values(samples, "requests_finished_total") == [20.0]  # not 60: an ensemble is one request
    assert values(samples, "ttft_seconds_sum") == [4.5]
    assert values(samples, "ttft_seconds_count") == [20.0]
    buckets = {
        d["le"]: v
        for d, v in zip(labels(samples, "ttft_seconds_bucket"), values(samples, "ttft_seconds_bucket"), strict=True)
    }
    assert buckets == {"0.1": 15.0, "2.0": 19.0, "+Inf": 20.0}
    assert labels(samples, "device_memory_used_bytes") == [{"gpu": "GPU-1"}]
    assert not values(samples, "requests_waiting")
    assert values(read(page, "triton-newer", "triton")[0], "requests_waiting") == [5.0]
    assert info == {"tokens_per_block": "64", "max_blocks": "120"}


def test_odd_values_raise_nothing() -> None:
    text = """
# TYPE nv_inference_first_response_histogram_ms untyped
nv_inference_first_response_histogram_ms_sum 5
nv_inference_first_response_histogram_ms_bucket 3
nv_inference_first_response_histogram_ms_bucket{le="soon"} 3
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used"} NaN
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"} 0
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"} +Inf
nv_trt_llm_request_metrics{model="m",request_type="active"} 1
"""
    samples, info = canonical_samples(text_string_to_metric_families(text), load_dialect("triton"), "t", 1.0)
    assert not values(samples, "kv_usage_ratio")  # no ratio of NaN, or over 0
    assert values(samples, "ttft_seconds_sum") == [0.005]
    assert values(samples, "requests_running") == [1.0]
    assert info == {"tokens_per_block": "inf", "max_blocks": "0"}


def test_nothing_is_read_that_is_not_wanted(page: Page) -> None:
    for name, engine in (("sglang-new", "sglang"), ("triton", "triton"), ("vllm-v1-old", "vllm")):
        dialect = load_dialect(engine, "0.8.5" if engine == "vllm" else None)
        wanted = wanted_names(dialect)
        families = list(page(name).values())
        for family in families:
            family.samples = [s for s in family.samples if {s.name, s.name.removesuffix("_total")} & wanted]
        whole = canonical_samples(page(name).values(), dialect, "t", 1.0)
        assert canonical_samples(families, dialect, "t", 1.0) == whole


def test_an_engine_that_has_done_nothing_yet_misses_nothing(page: Page) -> None:
    dialect = load_dialect("sglang")
    assert missing(dialect, []) == ()
    finished = Sample("t", "requests_finished_total", {}, 1.0, 1.0)
    assert missing(dialect, [finished]) == ("requests_running", "requests_waiting", "kv_usage_ratio")
    assert missing(load_dialect("vllm"), [finished]) == ("requests_running", "requests_waiting", "kv_usage_ratio")
    assert missing(load_dialect("vllm"), []) == load_dialect("vllm").required
