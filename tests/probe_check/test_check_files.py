"""Forms of files, where findings point to, the published rule sets, and files in which nothing may be found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from probe.check.check import check_files
from probe.check.documents import MAX_BYTES, DocumentError, read_file, read_text
from probe.check.query import find_queries
from probe.check.subject import Settings


@pytest.fixture
def check(data, known):
    def of(name: str):
        checked = check_files([data / name], known("vllm@0.33.0"), Settings())
        assert checked.errors == []
        return {(finding.where, finding.code): finding for finding in checked.findings}

    return of


def test_the_published_vllm_rules(check):
    found = check("vllm_k8s_monitoring.yaml")
    assert set(found) == {
        ("PreemptionSpike", "missing-total"),
        ("SlowRequests", "le-compared-with-none"),
        ("SlowRequests", "le-spelling"),
        ("ReplicaDown", "silent-in-outage"),
        ("ReplicaDown", "fixed-fleet-size"),
    }
    assert "or vector(0)" in found["ReplicaDown", "silent-in-outage"].corrected
    assert 'le="120.0"' in found["SlowRequests", "le-spelling"].corrected


def test_the_published_llm_d_rules(check):
    found = check("llm_d.yaml")
    assert set(found) == {
        ("ManyPreemptions", "missing-total"),
        ("NoBackend", "silent-in-outage"),
        ("AvailabilityBudgetBurn", "burn-rate-is-one"),
    }
    assert found["AvailabilityBudgetBurn", "burn-rate-is-one"].corrected.count("> 14.4 * 0.001") == 2


def test_the_published_gateway_rules(check):
    assert set(check("gateway.yaml")) == {
        ("GatewaySlow", "quantile-without-le"),
        ("PoolCacheFull", "average-hides-full"),
        ("FleetCacheFull", "average-hides-full"),
    }


@pytest.mark.parametrize("dialect", ["vllm@0.33.0", "sglang", "tgi", "triton", "tensorrt-llm"])
def test_a_careful_file_is_clean(dialect, data, known):
    checked = check_files([data / "clean.yaml"], known(dialect), Settings())
    assert checked.queries == 17
    assert [(finding.where, finding.code, finding.why) for finding in checked.findings] == []


def test_a_dashboard_in_today_s_form(check, data):
    found = check("board.json")
    assert set(found) == {
        ("variable 'model'", "unknown-metric"),
        ("annotation 'Preempted'", "missing-total"),
        ("annotation 'Preempted'", "no-rate-on-counter"),
        ("panel 'KV usage'", "percent-scale"),
        ("panel 'KV usage'", "unknown-metric"),
        ("panel 'Tokens'", "interval-in-rate"),
    }
    lines = (data / "board.json").read_text().splitlines()
    for finding in found.values():
        name = finding.why.split(" ")[0]
        assert name in lines[finding.line - 1] or finding.code in ("percent-scale", "interval-in-rate")
    assert 'model_name=~"$model"' in found["panel 'KV usage'", "unknown-metric"].corrected
    assert "[$__rate_interval]" in found["panel 'Tokens'", "interval-in-rate"].corrected


def test_older_and_newer_forms_of_dashboards(check):
    found = {where: finding for (where, _), finding in check("old_forms.json").items()}
    assert found["panel 'Waiting'"].code == "wrong-prefix"
    assert found["panel 'Waiting'"].corrected == "vllm:num_requests_waiting"
    assert "V0" in found["panel 'Shared panel'"].why
    assert found["panel 'Schema two'"].line == 18


def test_manifests_of_all_kinds_point_to_the_line(check, data):
    found = check("manifests.yaml")
    assert set(found) == {
        ("Preempted", "missing-total"),
        ("panel 'Usage'", "unknown-metric"),
        ("model:preemptions:rate1m", "fixed-window-too-short"),
        ("Full", "percent-scale"),
    }
    lines = (data / "manifests.yaml").read_text().splitlines()
    assert "rate(vllm:num_preemptions[5m])" in lines[found["Preempted", "missing-total"].line - 1]
    assert "vllm:cache_usage_percent" in lines[found["panel 'Usage'", "unknown-metric"].line - 1]
    assert "rate1m" in lines[found["model:preemptions:rate1m", "fixed-window-too-short"].line - 2]
    assert found["Full", "percent-scale"].corrected == "vllm:kv_cache_usage_perc > 0.95"


def test_a_grafana_operator_object_and_a_provisioned_alert(find):
    board = {"title": "B", "panels": [{"title": "P", "targets": [{"expr": "vllm:gpu_cache_usage_perc"}]}]}
    operator = f"kind: GrafanaDashboard\nspec:\n  json: |\n    {json.dumps(board)}\n"
    assert [(f.where, f.line) for f in find(operator)] == [("panel 'P'", 4)]
    provisioned = """
groups:
  - name: g
    rules:
      - title: Full
        data: [{refId: A, model: {expr: vllm:gpu_cache_usage_perc}}]
"""
    assert [(f.where, f.code, f.line) for f in find(provisioned)] == [("panel 'Full'", "unknown-metric", 6)]


@pytest.mark.parametrize(
    ("panel", "found"),
    [
        ({"fieldConfig": {"defaults": {"unit": "percent"}}}, 1),
        ({"yaxes": [{"format": "percent"}, {"format": "short"}]}, 1),
        ({"type": "singlestat", "format": "percent"}, 1),
        ({"yaxes": [{"format": "percentunit"}]}, 0),
        (
            {
                "fieldConfig": {
                    "defaults": {"unit": "percent"},
                    "overrides": [{"properties": [{"id": "unit", "value": "percentunit"}]}],
                }
            },
            0,
        ),
    ],
)
def test_units_of_old_and_new_panels(panel, found, find):
    panel = {"title": "P", "targets": [{"expr": "max(vllm:kv_cache_usage_perc)"}], **panel}
    assert [one.code for one in find(json.dumps({"panels": [panel]}), "b.json")] == ["percent-scale"] * found


def test_a_mean_beside_the_highest_hides_nothing(find):
    def board(*exprs):
        panels = [{"title": f"P{n}", "targets": [{"expr": expr}]} for n, expr in enumerate(exprs)]
        return [finding.code for finding in find(json.dumps({"panels": panels}), "b.json")]

    assert board("avg(vllm:kv_cache_usage_perc)") == ["average-hides-full"]
    assert board("avg(vllm:kv_cache_usage_perc)", "max(vllm:kv_cache_usage_perc)") == []
    assert board("avg(vllm:kv_cache_usage_perc)", "vllm:kv_cache_usage_perc") == []


def test_an_expression_that_is_a_number_is_read():
    queries = find_queries(read_text("groups: [{rules: [{alert: A, expr: 1}]}]", "r.yaml"), "r.yaml")
    assert [(query.expr, query.line) for query in queries] == [("1", 1)]


def test_aliases_are_walked_once():
    levels = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 6)]
    levels += ["b0: &b0 {expr: up}"] + [f"b{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 9)}]" for n in range(1, 60)]
    assert len(find_queries(read_text("\n".join(levels), "bomb.yaml"), "bomb.yaml")) == 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b'{"expr": ', "a.json is not JSON: line 1"),
        ("a.yaml", b"groups:\n  - name: [x\n", "a.yaml is not YAML: line 3"),
        ("a.yaml", b"{{- if .Values.x }}\ngroups: []\n{{- end }}\n", "helm template"),
        ("a.yaml", b"\xff\xfe\x00", "is not UTF-8"),
        ("a.json", b"[" * 200_000, "nested too deeply"),
        ("a.yaml", b"a: " + b"[" * 20_000, "a.yaml"),
        ("a.yaml", b"a: 2026-13-45\n", "a.yaml is not YAML"),
        ("a.yaml", b"x" * (MAX_BYTES + 1), "are not read"),
    ],
)
def test_broken_files_say_one_sentence(name, content, says, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DocumentError) as error:
        read_file(path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_says_one_sentence(tmp_path):
    with pytest.raises(DocumentError, match="cannot be read"):
        read_file(Path(tmp_path / "none.yaml"))


def test_unknown_yaml_tags_do_not_matter(find):
    text = "x: !secret abc\ngroups: [{rules: [{alert: A, expr: 'vllm:gpu_cache_usage_perc > 0.9', for: 1m}]}]\n"
    assert {finding.code for finding in find(text)} == {"unknown-metric", "no-runbook"}


def test_an_unrendered_template_in_an_expression_is_named(find):
    found = find("groups: [{rules: [{alert: A, expr: 'up > {{ .Values.limit }}'}]}]")
    assert [(finding.code, "helm template" in finding.why) for finding in found] == [("parse-error", True)]


@pytest.mark.parametrize(
    ("counted", "absent", "silent"),
    [
        ('sum(up{job="a"}) == 0', 'absent(up{job="a"})', False),
        ('sum(up{job="a"}) == 0', "absent(up)", False),
        ('sum(up{job="a"}) == 0', 'absent(up{job="b"})', True),
        ('count(up{job="a"} == 1) < 1', 'absent(up{job="a"})', True),
        ('count(up{job="a"} == 1) < 1', 'absent(up{job="a"} == 1)', False),
    ],
)
def test_another_alert_may_speak_in_an_outage(counted, absent, silent, find):
    text = f"groups: [{{rules: [{{alert: A, expr: '{counted}', for: 1m}}, {{alert: B, expr: '{absent}', for: 1m}}]}}]"
    assert ("silent-in-outage" in {finding.code for finding in find(text)}) is silent


@pytest.mark.parametrize("expr", ["(" * 50_000 + "up", "-" * 50_000 + "up", "+".join(["up"] * 50_000)])
def test_an_endless_expression_is_not_followed(expr, find):
    found = find(json.dumps({"alert": "A", "expr": expr, "for": "1m"}), "a.json")
    assert [(finding.code, finding.severity) for finding in found] == [("parse-error", "warning")]
    assert len(found[0].expr) <= 200


def test_a_long_expression_is_followed(find):
    assert find(json.dumps({"record": "r", "expr": "+".join(["up"] * 150)}), "a.json") == []
