"""Expressions as PromQL: names, labels and units of the version, and nothing that it does not expose."""

from __future__ import annotations

import dataclasses

import pytest

from probe.alerts.expr import (
    Aggregate,
    Arithmetic,
    Changes,
    ClampMin,
    Compare,
    Derivative,
    Expr,
    Increase,
    Instant,
    Logical,
    OverTime,
    Quantile,
)
from probe.dialects import load_dialect
from probe.export.naming import ExportError, Names, NotExposedError, le_matcher
from probe.export.promql import duration, promql

QUEUE = "vllm:request_queue_time_seconds"


def names(spec: str, **fields: object) -> Names:
    engine, _, version = spec.partition("@")
    return dataclasses.replace(Names(load_dialect(engine, version or None), version or None), **fields)


def flat(expr: Expr, spec: str = "vllm@0.33.0", **fields: object) -> str:
    return " ".join(promql(expr, names(spec, **fields)).split())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(300, "5m"), (5400, "1h30m"), (86_400, "1d"), (90, "1m30s"), (0.5, "500ms"), (87_000, "1d10m"), (1.25, "1s250ms")],
)
def test_spans_are_written_as_prometheus_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("bound", "matcher"),
    [
        (2.5, 'le="2.5"'),
        (0.1, 'le="0.1"'),
        (1, r'le=~"1|1\\.0"'),
        (120, r'le=~"120|120\\.0"'),
        (1e6, r'le=~"1000000|1e\\+06|1000000\\.0"'),
    ],
)
def test_a_bucket_is_found_in_any_spelling(bound: float, matcher: str) -> None:
    assert le_matcher(bound) == matcher


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (Instant("requests_running"), "vllm:num_requests_running"),
        (Increase("preemptions_total", 300), "increase(vllm:num_preemptions_total[5m])"),
        (
            Increase("prefix_hits_total", 86_400, offset_s=600),
            "increase(vllm:prefix_cache_hits_total[1d] offset 10m)",
        ),
        (OverTime("min", "kv_usage_ratio", 60), "min_over_time(vllm:kv_cache_usage_perc[1m])"),
        (Changes("process_start_time_seconds", 600), "changes(process_start_time_seconds[10m])"),
        (Derivative("process_resident_memory_bytes", 3600), "deriv(process_resident_memory_bytes[1h])"),
        (
            Increase("ttft_seconds_bucket", 60, match=(("le", "2.5"),)),
            'increase(vllm:time_to_first_token_seconds_bucket{le="2.5"}[1m])',
        ),
        (
            Quantile(0.5, "queue_seconds", 60),
            f"histogram_quantile( 0.5, sum by (job, instance, le) (increase({QUEUE}_bucket[1m])) )",
        ),
        (
            Aggregate("sum", Instant("requests_waiting"), ("engine",)),
            "sum by (job, instance, engine) (vllm:num_requests_waiting)",
        ),
        (ClampMin(Instant("requests_running"), 1), "clamp_min(vllm:num_requests_running, 1)"),
        (
            Compare(">", Arithmetic("/", Instant("requests_running"), Instant("requests_waiting")), 0.05),
            "(vllm:num_requests_running / vllm:num_requests_waiting) > 0.05",
        ),
        (
            Logical("unless", Compare("==", Instant("requests_running"), 0), Instant("requests_waiting")),
            "(vllm:num_requests_running == 0) unless vllm:num_requests_waiting",
        ),
    ],
)
def test_each_expression(expr: Expr, text: str) -> None:
    assert flat(expr) == text


def test_names_are_the_versions() -> None:
    usage = OverTime("avg", "kv_usage_ratio", 60)
    assert flat(usage, "vllm@0.8.5") == "avg_over_time(vllm:gpu_cache_usage_perc[1m])"
    assert flat(Instant("itl_seconds_count"), "vllm@0.9.2") == "vllm:time_per_output_token_seconds_count"
    assert flat(Instant("itl_seconds_count")) == "vllm:inter_token_latency_seconds_count"


def test_milliseconds_become_seconds() -> None:
    bucket = Increase("ttft_seconds_bucket", 60, match=(("le", "2"),))
    assert r'le=~"2000|2000\\.0"' in flat(bucket, "triton")
    assert "0.001" not in flat(bucket, "triton"), "the count of a bucket has no unit"
    assert flat(Quantile(0.5, "ttft_seconds", 60), "triton").endswith("* 0.001")
    assert flat(Instant("ttft_seconds_sum"), "triton").endswith("* 0.001")


def test_only_language_models_count_where_a_server_has_others() -> None:
    assert flat(Increase("requests_finished_total", 60), "triton") == (
        "increase(nv_inference_request_success[1m]) and on (job, instance, model) nv_trt_llm_request_metrics"
    )


def test_a_ratio_of_two_metrics() -> None:
    assert flat(OverTime("max", "kv_usage_ratio", 60), "triton@0.18.0") == (
        'max_over_time(nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used"}[1m]) '
        "/ ignoring (kv_cache_block_type) "
        '(avg_over_time(nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"}[1m]) > 0)'
    )
    assert flat(Instant("kv_usage_ratio"), "tgi") == ("tgi_batch_current_max_tokens / (tgi_batch_max_total_tokens > 0)")


def test_ranks_that_tell_the_same_are_counted_once() -> None:
    text = flat(Aggregate("sum", Instant("requests_running"), ("engine",)), "sglang@0.5.23")
    # A matcher for rank 0 would lose replicas: ranks count on from one to the next.
    ranks = "max without (tp_rank, pp_rank, moe_ep_rank)"
    assert text == f'sum by (job, instance, dp_rank) ( {ranks} (sglang:num_running_reqs{{priority=""}}) )'


def test_the_other_spelling_of_sglang() -> None:
    dialect = load_dialect("sglang", "0.5.23", "sglang_")
    text = promql(Instant("requests_running"), Names(dialect, "0.5.23"))
    assert "(sglang_num_running_reqs{" in text


def test_jobs_and_models() -> None:
    running = Aggregate("sum", Instant("requests_running"))
    assert flat(running, jobs=("a",)) == 'sum by (job, instance) (vllm:num_requests_running{job="a"})'
    assert 'job=~"a|b\\\\.c"' in flat(running, jobs=("a", "b.c"))
    assert flat(running, by_model=True) == "sum by (job, instance, model_name) (vllm:num_requests_running)"
    assert flat(Instant("up")) == 'up{job="vllm"}', "up is every exporter's"
    with pytest.raises(ExportError, match="carry no model label"):
        names("tgi", by_model=True)


@pytest.mark.parametrize(
    ("metric", "spec", "why"),
    [
        ("kv_block_evictions_total", "vllm@0.33.0", "no version counts evictions"),
        ("preemptions_total", "sglang@0.4.6.post5", "no counter of retractions"),
        ("preemptions_total", "tgi", "does not preempt"),
        ("prefix_hits_total", "vllm@0.8.5", "block_size"),
        ("device_memory_total_bytes", "vllm@0.33.0", "from the device"),
    ],
)
def test_what_is_not_exposed_says_why(metric: str, spec: str, why: str) -> None:
    with pytest.raises(NotExposedError, match=why):
        promql(Instant(metric), names(spec))


def test_long_expressions_are_laid_out_in_lines_that_can_be_read() -> None:
    part: Expr = Aggregate("sum", Increase("prefix_hits_total", 600))
    whole = Arithmetic("/", part, Aggregate("sum", Increase("prefix_queries_total", 600)))
    text = promql(Compare("<", Arithmetic("/", whole, whole), 0.5), names("vllm@0.33.0"))
    assert max(map(len, text.split("\n"))) <= 120
    assert text.count("(") == text.count(")")
