"""Every code: defects that it finds, and their right forms that it leaves alone; recall and false alarms over all."""

from __future__ import annotations

import promql_parser
import pytest

from probe.check.finding import CODES
from probe.check.grafana import substitute

TTFT = "vllm:time_to_first_token_seconds"
ITL = "vllm:inter_token_latency_seconds"
E2E = "vllm:e2e_request_latency_seconds"
P99 = f"histogram_quantile(0.99, sum by (le) (rate({TTFT}_bucket[5m])))"
RATIO = (
    "sum(rate(vllm:request_success_total{{finished_reason='error'}}[{0}])) / sum(rate(vllm:request_success_total[{0}]))"
)

# code -> (form, defect, right form)
CASES: dict[str, list[tuple[str, str, str]]] = {
    "parse-error": [
        ("rule", "sum(rate(vllm:num_preemptions_total[5m]) > 1", "sum(rate(vllm:num_preemptions_total[5m])) > 1"),
        ("rule", "rate(vllm:num_preemptions_total) > 1", "rate(vllm:num_preemptions_total[5m]) > 1"),
    ],
    "unknown-metric": [
        ("rule", "vllm:gpu_cache_usage_perc > 0.9", "vllm:kv_cache_usage_perc > 0.9"),
        ("rule", "vllm:cache_usage_percent > 0.9", "vllm:kv_cache_usage_perc or vllm:gpu_cache_usage_perc > 0.9"),
        ("rule", f"histogram_quantile(0.9, sum by (le) (rate({TTFT}[5m]))) > 2", f"{P99} > 2"),
        ("panel", "vllm:num_requests_swapped", "vllm:num_requests_waiting"),
        ("panel", '{__name__=~"vllm:gpu_cache.*"}', '{__name__=~"vllm:(gpu|kv)_cache_usage.*"}'),
        ("panel", "vllm:num_requests_runing", "vllm:num_requests_running"),
    ],
    "missing-total": [
        ("rule", "rate(vllm:num_preemptions[5m]) > 1", "rate(vllm:num_preemptions_total[5m]) > 1"),
        ("panel", "rate(vllm:prefix_cache_hits[5m])", "rate(vllm:prefix_cache_hits_total[5m])"),
    ],
    "wrong-prefix": [
        ("rule", "vllm_gpu_cache_usage_perc > 0.9", "vllm:kv_cache_usage_perc > 0.9"),
        ("rule", "rate(vllm_num_cache_evictions[5m]) > 1", "rate(vllm:num_preemptions_total[5m]) > 1"),
        ("panel", "vllm_avg_generation_throughput", "rate(vllm:generation_tokens_total[1m])"),
        ("panel", "vllm_num_requests_running", "vllm:num_requests_running"),
        ("panel", "tgi:queue_size", "tgi_queue_size"),
    ],
    "wrong-label": [
        ("rule", 'rate(vllm:request_success_total{finish_reason="error"}[5m]) > 1',
         'rate(vllm:request_success_total{finished_reason="error"}[5m]) > 1'),
        ("rule", "sum by (model) (rate(vllm:num_preemptions_total[5m])) > 1",
         "sum by (model_name, namespace) (rate(vllm:num_preemptions_total[5m])) > 1"),
        ("rule", 'rate(vllm:num_preemptions_total{reason="capacity"}[5m]) > 1',
         'vllm:num_requests_waiting_by_reason{reason="capacity"} > 1'),
        ("rule", "vllm:kv_cache_usage_perc > 0.9 and on (instance, model) vllm:num_requests_waiting > 0",
         "vllm:kv_cache_usage_perc > 0.9 and on (instance, model_name) vllm:num_requests_waiting > 0"),
        ("panel", 'sum(rate(vllm:generation_tokens_total{model_nam="$model"}[$__rate_interval]))',
         'sum(rate(vllm:generation_tokens_total{model_name="$model"}[$__rate_interval]))'),
    ],
    "le-spelling": [
        ("rule", f'sum(rate({E2E}_bucket{{le="30"}}[5m])) / sum(rate({E2E}_count[5m])) < 0.9',
         f'sum(rate({E2E}_bucket{{le="30.0"}}[5m])) / sum(rate({E2E}_count[5m])) < 0.9'),
        ("panel", f'sum(rate({TTFT}_bucket{{le=~"1|5"}}[5m]))', f'sum(rate({TTFT}_bucket{{le=~"1.0|5.0|.Inf"}}[5m]))'),
    ],
    "le-compared-with-none": [
        ("rule", f'rate({E2E}_bucket{{le="60.0"}}[5m]) < rate({E2E}_count[5m])',
         f'rate({E2E}_bucket{{le="60.0"}}[5m]) < ignoring (le) rate({E2E}_count[5m])'),
        ("panel", f'sum by (le) (rate({E2E}_bucket[5m])) / sum by (pod) (rate({E2E}_count[5m]))',
         f'sum by (le) (rate({E2E}_bucket[5m])) / on () group_left () sum (rate({E2E}_count[5m]))'),
    ],
    "silent-in-outage": [
        ("rule", 'count(up{job="vllm"} == 1) < 1', '(count(up{job="vllm"} == 1) or vector(0)) < 1'),
        ("rule", 'sum(up{job="vllm"}) == 0', 'sum(up{job="vllm"}) == 0 or absent(up{job="vllm"})'),
        ("rule", 'count by (job) (up{job="vllm"} == 1) / count by (job) (up{job="vllm"}) < 0.9',
         'absent(up{job="vllm"} == 1)'),
        ("rule", "count(vllm:num_requests_running) < 1", "absent(vllm:num_requests_running)"),
    ],
    "fixed-fleet-size": [
        ("rule", '(count(up{job="vllm"} == 1) or vector(0)) < 40',
         'count(up{job="vllm"} == 0) / count(up{job="vllm"}) > 0.1'),
    ],
    "quantile-without-le": [
        ("rule", f"histogram_quantile(0.99, sum by (pod) (rate({TTFT}_bucket[5m]))) > 2",
         f"histogram_quantile(0.99, sum by (pod, le) (rate({TTFT}_bucket[5m]))) > 2"),
        ("rule", f"histogram_quantile(0.99, sum(rate({TTFT}_bucket[5m]))) > 2", f"{P99} > 2"),
        ("rule", f"histogram_quantile(0.99, rate({TTFT}_bucket[5m])) > 2",
         f"histogram_quantile(0.99, sum without (engine) (rate({TTFT}_bucket[5m]))) > 2"),
        ("panel", f"histogram_quantile(0.5, sum by (le) (rate({TTFT}_sum[5m])))", P99),
    ],
    "rate-on-gauge": [
        ("rule", "rate(vllm:num_requests_waiting[5m]) > 1", "deriv(vllm:num_requests_waiting[5m]) > 1"),
        ("panel", "rate(sglang:num_retracted_reqs[5m])", "rate(sglang:num_retracted_requests_total[5m])"),
    ],
    "no-rate-on-counter": [
        ("rule", "vllm:num_preemptions_total > 100", "increase(vllm:num_preemptions_total[5m]) > 100"),
        ("rule", f"histogram_quantile(0.99, sum by (le) ({TTFT}_bucket)) > 2", f"{P99} > 2"),
        ("panel", "sum(vllm:prefix_cache_hits_total) / sum(vllm:prefix_cache_queries_total)",
         "sum(rate(vllm:prefix_cache_hits_total[5m])) / sum(rate(vllm:prefix_cache_queries_total[5m]))"),
        ("panel", "delta(vllm:generation_tokens_total[5m])", "increase(vllm:generation_tokens_total[5m])"),
        ("rule", "rate(sum(vllm:num_preemptions_total)[5m:1m]) > 1", "sum(rate(vllm:num_preemptions_total[5m])) > 1"),
        ("panel", "vllm:num_preemptions_total", "count(vllm:num_preemptions_total)"),
    ],
    "gauge-without-for": [
        ("now", "vllm:kv_cache_usage_perc > 0.95", "min_over_time(vllm:kv_cache_usage_perc[5m]) > 0.95"),
        ("now", "up{job='vllm'} == 0", "increase(vllm:corrupted_requests_total[5m]) > 0"),
    ],
    "percent-scale": [
        ("rule", "vllm:kv_cache_usage_perc > 90", "vllm:kv_cache_usage_perc * 100 > 90"),
        ("rule", "100 * max(vllm:kv_cache_usage_perc) > 0.9", "max(vllm:kv_cache_usage_perc) > 0.9"),
        ("rule", "sum(rate(vllm:prefix_cache_hits_total[5m])) / sum(rate(vllm:prefix_cache_queries_total[5m])) < 20",
         "sum(rate(vllm:prefix_cache_hits_total[5m])) / sum(rate(vllm:prefix_cache_queries_total[5m])) < 0.2"),
        ("rule", f"histogram_quantile(99, sum by (le) (rate({TTFT}_bucket[5m]))) > 2", f"{P99} > 2"),
        ("rule", "sglang:token_usage > 95", "sglang:token_usage > 0.95"),
    ],
    "seconds-scale": [
        ("rule", f"{P99} > 2000", f"{P99} > 2"),
        ("rule", f"{P99} * 1000 > 2", f"{P99} * 1000 > 2000"),
        ("rule", f"rate({ITL}_sum[5m]) / rate({ITL}_count[5m]) > 50",
         f"rate({ITL}_sum[5m]) / rate({ITL}_count[5m]) > 0.05"),
    ],
    "average-hides-full": [
        ("rule", "avg(vllm:kv_cache_usage_perc) > 0.9", "max(vllm:kv_cache_usage_perc) > 0.9"),
        ("panel", "avg by (model_name) (vllm:kv_cache_usage_perc)", "avg by (instance) (vllm:kv_cache_usage_perc)"),
        ("panel", "avg without (instance) (sglang:token_usage)", "max without (instance) (sglang:token_usage)"),
    ],
    "ratio-average": [
        ("panel", "avg(rate(vllm:prefix_cache_hits_total[5m]) / rate(vllm:prefix_cache_queries_total[5m]))",
         "sum(rate(vllm:prefix_cache_hits_total[5m])) / sum(rate(vllm:prefix_cache_queries_total[5m]))"),
        ("panel", f"avg(histogram_quantile(0.99, sum by (le, pod) (rate({TTFT}_bucket[5m]))))", P99),
        ("panel", "sum(vllm:kv_cache_usage_perc)", "sum(vllm:num_requests_running)"),
        ("panel", "avg(sglang:cache_hit_rate)", "sum(rate(sglang:cached_tokens_total[5m]))"),
    ],
    "burn-rate-is-one": [
        ("rule", f"{RATIO.format('1h')} > 0.001 and {RATIO.format('5m')} > 0.001",
         f"{RATIO.format('1h')} > 14.4 * 0.001 and {RATIO.format('5m')} > 14.4 * 0.001"),
        ("rule", "job:errors:ratio_rate6h > (1 - 0.99) and job:errors:ratio_rate30m > (1 - 0.99)",
         "job:errors:ratio_rate6h > (6 * 0.01) and job:errors:ratio_rate30m > (6 * 0.01)"),
    ],
    "interval-in-rate": [
        ("panel", "sum(rate(vllm:generation_tokens_total[$__interval]))",
         "sum(rate(vllm:generation_tokens_total[$__rate_interval]))"),
        ("panel", "sum(rate(vllm:generation_tokens_total[${__interval}]))",
         "max_over_time(vllm:num_requests_waiting[$__interval])"),
    ],
    "fixed-window-too-short": [
        ("rule", "rate(vllm:num_preemptions_total[30s]) > 1", "rate(vllm:num_preemptions_total[1m]) > 1"),
    ],
    "no-runbook": [("bare", "rate(vllm:num_preemptions_total[5m]) > 1", "")],
}  # fmt: skip
ALL = [(code, *case) for code, cases in CASES.items() for case in cases]


def _codes(form, rule, panel, expr):
    if form == "panel":
        return panel(expr)
    fields = {"now": {"for": "0s"}, "bare": {"annotations": {}}}.get(form, {})
    return rule(expr, **fields)


@pytest.mark.parametrize(("code", "form", "bad", "good"), ALL)
def test_a_defect_is_found_and_its_right_form_is_not(code, form, bad, good, rule, panel):
    found = [finding for finding in _codes(form, rule, panel, bad) if finding.code == code]
    assert found, bad
    assert found[0].severity == CODES[code][0] or code == "wrong-label"
    assert found[0].line == (1 if form == "panel" else found[0].line)
    if good:
        assert [finding for finding in _codes(form, rule, panel, good) if finding.severity != "info"] == []


def test_every_code_has_a_defect_that_it_finds():
    assert set(CASES) == set(CODES)
    assert len(CASES) >= 15


def test_seeded_defects_are_all_found_and_right_forms_raise_no_alarm(rule, panel):
    missed = [bad for code, form, bad, _ in ALL if code not in {f.code for f in _codes(form, rule, panel, bad)}]
    alarms = [
        good for _, form, _, good in ALL if good and any(f.severity != "info" for f in _codes(form, rule, panel, good))
    ]
    assert missed == []
    assert alarms == []


def test_every_correction_parses_and_no_longer_has_the_defect(rule, panel):
    corrected = 0
    for code, form, bad, _ in ALL:
        for finding in _codes(form, rule, panel, bad):
            if finding.code != code or finding.corrected is None:
                continue
            corrected += 1
            promql_parser.parse(substitute(finding.corrected, {}))
            again = {(other.code, other.why) for other in _codes(form, rule, panel, finding.corrected)}
            assert (finding.code, finding.why) not in again, finding.corrected
    assert corrected >= len(ALL) // 2


def test_a_counter_beside_an_increase_gets_the_same_window(rule):
    found = rule("increase(vllm:num_preemptions_total[15m]) / vllm:request_success_total > 0.05")
    assert "increase(vllm:request_success_total[15m])" in found[0].corrected


def test_a_limit_that_a_ratio_cannot_pass(rule):
    assert [finding.code for finding in rule("max(vllm:kv_cache_usage_perc) > 1")] == ["percent-scale"]
    assert rule("max(vllm:kv_cache_usage_perc) >= 1") == []
