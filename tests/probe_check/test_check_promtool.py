"""The real promtool says the same: what is called dead never fires, and what we write instead fires.

promtool's own `check rules` accepts all of these rules.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
import yaml

RISING = "0+600x40"
CASES = {
    "missing-total": (
        "sum by (namespace) (rate(vllm:num_preemptions[5m])) > 0.5",
        {'vllm:num_preemptions_total{namespace="a",model_name="m",engine="0"}': RISING},
    ),
    "wrong-prefix": (
        "sum(rate(vllm_num_preemptions_total[5m])) > 0.5",
        {'vllm:num_preemptions_total{model_name="m",engine="0"}': RISING},
    ),
    "unknown-metric": ("max(vllm:gpu_cache_usage_perc) > 0.9", {'vllm:kv_cache_usage_perc{engine="0"}': "0.99x40"}),
    "wrong-label": (
        'sum(rate(vllm:request_success_total{finish_reason="error"}[5m])) > 1',
        {'vllm:request_success_total{model_name="m",finished_reason="error"}': RISING},
    ),
    "le-spelling": (
        'sum(rate(vllm:e2e_request_latency_seconds_bucket{le="120"}[5m])) > 1',
        {'vllm:e2e_request_latency_seconds_bucket{model_name="m",le="120.0"}': RISING},
    ),
    "le-compared-with-none": (
        (
            'increase(vllm:e2e_request_latency_seconds_bucket{le="120.0"}[10m])'
            " < increase(vllm:e2e_request_latency_seconds_count[10m])"
        ),
        {
            'vllm:e2e_request_latency_seconds_bucket{model_name="m",le="120.0"}': "0+60x40",
            'vllm:e2e_request_latency_seconds_count{model_name="m"}': RISING,
        },
    ),
    "silent-in-outage": ('count(up{job="vllm"} == 1) < 1', {'up{job="vllm",instance="a"}': "0x40"}),
    "quantile-without-le": (
        "histogram_quantile(0.99, sum by (model_name) (rate(vllm:time_to_first_token_seconds_bucket[5m]))) > 1",
        {
            'vllm:time_to_first_token_seconds_bucket{model_name="m",le="0.5"}': "0+6x40",
            'vllm:time_to_first_token_seconds_bucket{model_name="m",le="5.0"}': RISING,
            'vllm:time_to_first_token_seconds_bucket{model_name="m",le="+Inf"}': RISING,
        },
    ),
    "percent-scale": ("max(vllm:kv_cache_usage_perc) > 90", {'vllm:kv_cache_usage_perc{engine="0"}': "0.99x40"}),
    "average-hides-full": (
        "avg(vllm:kv_cache_usage_perc) > 0.9",
        {'vllm:kv_cache_usage_perc{instance="a"}': "0.99x40", 'vllm:kv_cache_usage_perc{instance="b"}': "0.1x40"},
    ),
    "seconds-scale": (
        (
            "sum(rate(vllm:time_to_first_token_seconds_sum[5m]))"
            " / sum(rate(vllm:time_to_first_token_seconds_count[5m])) > 2000"
        ),
        {
            'vllm:time_to_first_token_seconds_sum{engine="0"}': "0+3000x40",
            'vllm:time_to_first_token_seconds_count{engine="0"}': RISING,
        },
    ),
}


@pytest.mark.skipif(
    shutil.which("promtool") is None and os.environ.get("CI") != "true", reason="promtool is not installed here"
)
def test_dead_rules_never_fire_and_corrected_ones_do(rule, tmp_path):
    tests = []
    rules = []
    for number, (code, (expr, series)) in enumerate(CASES.items()):
        corrected = next(finding.corrected for finding in rule(expr) if finding.code == code)
        for word, text in (("Dead", expr), ("Corrected", corrected)):
            rules.append({"alert": f"{word}{number}", "expr": text, "for": "2m"})
        tests += [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{word}{number}",alertstate="firing"}})',
                        "eval_time": "30m",
                        "exp_samples": [{"labels": "{}", "value": 1}] if word == "Corrected" else [],
                    }
                    for word in ("Dead", "Corrected")
                ],
            }
        ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests})
    )
    for command in (("check", "rules", "rules.yaml"), ("test", "rules", "tests.yaml")):
        done = subprocess.run(["promtool", *command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
