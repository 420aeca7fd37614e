"""Names by version: renames, hidden and gated metrics, spellings published in articles, and other engines."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from probe.check.check import check_queries
from probe.check.documents import read_text
from probe.check.engines import page_of, vocabulary
from probe.check.query import find_queries
from probe.check.subject import Settings


def _codes(findings):
    return {finding.code for finding in findings if finding.severity != "info"}


@pytest.mark.parametrize(
    ("expr", "writes"),
    [
        ("vllm:cache_usage_percent", "vllm:kv_cache_usage_perc"),
        ("vllm_gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"),
        ("vllm_num_cache_evictions", "vllm:num_preemptions_total"),
        ("vllm_avg_generation_throughput", "rate(vllm:generation_tokens_total[1m])"),
        ("vllm:avg_generation_throughput_toks_per_s", "rate(vllm:generation_tokens_total[1m])"),
        ("vllm_num_requests_running", "vllm:num_requests_running"),
        ("vllm_num_requests_waiting", "vllm:num_requests_waiting"),
        ("vllm:generation_tokens_per_second", "rate(vllm:generation_tokens_total[1m])"),
        ("vllm:prompt_tokens_per_second", "rate(vllm:prompt_tokens_total[1m])"),
        ("rate(vllm_num_preemptions[5m])", "vllm:num_preemptions_total"),
        ("rate(vllm_request_success_total[5m])", "vllm:request_success_total"),
        ("sglang:total_retracted_reqs", "sglang:num_retracted_requests_total"),
        ("rate(sglang:num_retracted_reqs_total[5m])", "sglang:num_retracted_requests_total"),
        ("rate(vllm:request_preemption_total[5m])", "vllm:num_preemptions_total"),
        ("trtllm:kv_cache_utilization", "trtllm_kv_cache_utilization"),
    ],
)
def test_published_wrong_spellings_are_found(expr, writes, panel):
    found = [finding for finding in panel(expr) if finding.code in ("unknown-metric", "wrong-prefix")]
    assert [finding.write for finding in found] == [writes]
    assert found[0].severity == "error"


@pytest.mark.parametrize(
    ("version", "code"),
    [("0.9.1", None), ("0.10.2", None), ("0.11.0", "unknown-metric"), ("0.12.0", "unknown-metric")],
)
def test_an_old_name_is_right_in_its_time(version, code, panel):
    assert _codes(panel("max(vllm:gpu_cache_usage_perc)", dialect=f"vllm@{version}")) == ({code} if code else set())


def test_a_new_name_is_wrong_before_its_time(panel):
    found = panel("max(vllm:kv_cache_usage_perc)", dialect="vllm@0.9.1")
    assert ["first in 0.9.2" in finding.why for finding in found] == [True]
    assert found[0].write == "vllm:gpu_cache_usage_perc"


def test_a_hidden_metric_names_the_flag_and_its_value(panel):
    found = panel("rate(vllm:time_per_output_token_seconds_sum[5m])", dialect="vllm@0.12.0")
    assert "--show-hidden-metrics-for-version=0.11" in found[0].write
    assert found[0].corrected == "rate(vllm:inter_token_latency_seconds_sum[5m])"


def test_a_metric_behind_a_flag_is_a_note(panel):
    found = panel("rate(vllm:kv_block_lifetime_seconds_count[5m])")
    assert [(finding.code, finding.severity) for finding in found] == [("unknown-metric", "info")]
    assert "--kv-cache-metrics" in found[0].why


def test_labels_are_those_of_the_version(panel):
    assert _codes(panel("sum by (engine) (vllm:num_requests_running)", dialect="vllm@0.6.6")) == {"wrong-label"}
    assert _codes(panel("sum by (engine) (vllm:num_requests_running)", dialect="vllm@0.33.0")) == set()


@pytest.mark.parametrize(
    "expr",
    [
        "sglang_token_usage",
        "sglang:token_usage",
        "rate(sglang_num_retracted_requests_total[5m])",
        "tgi_queue_size",
        "rate(tgi_request_count[5m])",
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used"}',
        "rate(nv_inference_queue_duration_us[5m])",
        "trtllm_kv_cache_utilization",
        "rate(vllm:iteration_tokens_total_sum[5m])",
        "vllm:num_requests_running - vllm:num_requests_running offset 5m",
        "vllm:num_requests_waiting / on (pod) group_left (node) kube_pod_info",
        "vllm:cache_config_info",
        "vllm:current_qps",
        "some_team:vllm:kv_usage:max",
        "time() - vllm:num_preemptions_created",
    ],
)
def test_right_names_of_all_engines_are_left_alone(expr, panel):
    assert _codes(panel(expr)) == set()


@pytest.mark.parametrize(
    ("expr", "code"),
    [
        ("rate(sglang:num_retracted_requests[5m])", "missing-total"),
        ("sglang:token_usages", "unknown-metric"),
        ("rate(tgi_request_count_total[5m])", "unknown-metric"),
        ("rate(trtllm_request_success[5m])", "missing-total"),
        ("sum(tgi_request_count)", "no-rate-on-counter"),
        ("rate(sglang:token_usage[5m])", "rate-on-gauge"),
        ("avg(trtllm_kv_cache_utilization)", "average-hides-full"),
    ],
)
def test_wrong_names_of_other_engines_are_found(expr, code, panel):
    assert code in _codes(panel(expr))


def test_names_without_prefix_belong_to_an_engine_only_when_it_is_asked_for(panel):
    expr = "sum(request_success_total)"
    assert _codes(panel(expr)) == set()
    assert _codes(panel(expr, dialect="tensorrt-llm@1.0.0")) == {"no-rate-on-counter"}


def test_the_embedded_engine_has_its_own_names_beside_vllm_s(panel):
    fallback = "max(vllm:kv_cache_usage_perc or vllm:gpu_cache_usage_perc)"
    for expr in ("max(kvoncall:kv_blocks)", "max(vllm:kv_cache_usage_perc)", "kvoncall_of_the_watcher", fallback):
        assert _codes(panel(expr, dialect="kvoncall")) == set()
    for expr in ("max(kvoncall:nothing)", "vllm:num_requests_swapped"):
        assert _codes(panel(expr, dialect="kvoncall")) == {"unknown-metric"}


def test_variables_say_nothing(panel):
    variables = [{"name": "metric", "current": {"value": "vllm:gpu_cache_usage_perc"}}, {"name": "by"}]
    assert _codes(panel("max by ($by) (vllm:num_requests_running) > $limit", variables=variables)) == set()
    assert _codes(panel("max($unknown)", variables=variables)) == set()
    assert _codes(panel("max($metric)", variables=variables)) == {"unknown-metric"}
    assert _codes(panel("rate(${metric}_total[${window}])")) == set()
    assert _codes(panel("topk($n, vllm:num_requests_running) > ${limit:raw}")) == set()
    assert (
        _codes(panel("histogram_quantile($q, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[$w])))"))
        == set()
    )


def test_an_expression_made_of_variables_is_said_to_be_unchecked(panel):
    found = panel("$what[5m $ever]")
    assert [(finding.code, finding.severity) for finding in found] == [("parse-error", "info")]
    assert "ever, what" in found[0].why


def test_replacements_are_names_of_the_version(panel):
    assert panel("max(vllm:cache_usage_percent)", dialect="vllm@0.9.1")[0].write == "vllm:gpu_cache_usage_perc"
    assert panel("max(sglang:total_retracted_reqs)", dialect="sglang@0.5.5.post3")[0].write == "remove it"


def test_units_of_panels(panel):
    assert _codes(panel("max(vllm:kv_cache_usage_perc)", unit="percent")) == {"percent-scale"}
    assert _codes(panel("max(vllm:kv_cache_usage_perc)", unit="percentunit")) == set()
    assert _codes(panel("max(vllm:kv_cache_usage_perc) * 100", unit="percent")) == set()
    p99 = "histogram_quantile(0.99, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[5m])))"
    assert _codes(panel(p99, unit="ms")) == {"seconds-scale"}
    assert _codes(panel(p99, unit="s")) == set()


def test_a_scrape_interval_makes_windows_too_short(rule):
    expr = "rate(vllm:num_preemptions_total[2m]) > 1"
    assert _codes(rule(expr)) == set()
    assert _codes(rule(expr, scrape_s=60)) == {"fixed-window-too-short"}


SGLANG = """\
# TYPE sglang_token_usage gauge
sglang_token_usage{model_name="m"} 0.5
# TYPE sglang_time_to_first_token_seconds histogram
sglang_time_to_first_token_seconds_bucket{model_name="m",le="0.5"} 1
sglang_time_to_first_token_seconds_bucket{model_name="m",le="2.0"} 1
sglang_time_to_first_token_seconds_bucket{model_name="m",le="+Inf"} 1
sglang_time_to_first_token_seconds_sum{model_name="m"} 0.3
sglang_time_to_first_token_seconds_count{model_name="m"} 1
# TYPE sglang_num_retracted_requests counter
"""


@pytest.fixture(scope="module")
def live():
    known, _ = vocabulary({"sglang": "0.5.23"}, page_of(text_string_to_metric_families(SGLANG)))

    def of(expr):
        text = f"groups: [{{rules: [{{record: r, expr: '{expr}'}}]}}]"
        return check_queries(find_queries(read_text(text, "r.yaml"), "r.yaml"), known, Settings())

    return of


def test_a_live_server_decides_the_spelling(live):
    assert _codes(live("max(sglang_token_usage)")) == set()
    found = live("max(sglang:token_usage)")
    assert [(finding.code, finding.corrected) for finding in found] == [("wrong-prefix", "max(sglang_token_usage)")]
    assert _codes(live("rate(sglang_num_retracted_requests_total[5m])")) == set()


def test_a_live_server_knows_its_buckets_and_what_it_does_not_show(live):
    share = 'sum(rate(sglang_time_to_first_token_seconds_bucket{{le="{}"}}[5m]))'
    assert live(share.format("2.0")) == []
    found = live(share.format("2.5"))
    assert [finding.code for finding in found] == ["le-spelling"]
    assert "near it there is 2.0" in found[0].why
    assert [finding.severity for finding in live("sum(sglang_num_running_reqs)")] == ["info"]
