"""Which rules an engine's version gets, what stands in them, and that the programs they are for accept them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from probe.alerts.rules import DEFAULT_RULES
from probe.cli import main
from probe.export.alertmanager import alertmanager_text, inhibit_rules
from probe.export.alerts import Options, Selection, alert_name, select
from probe.export.grafana import dashboard, dashboard_text
from probe.export.naming import ExportError
from probe.export.prometheus import prometheusrule_text, rule_groups, rules_text
from runbooks.load import get_runbook

DIALECTS = (
    "vllm@0.33.0",
    "vllm@0.8.5",
    "vllm@0.6.6",
    "kvoncall",
    "sglang@0.5.23",
    "sglang@0.4.6.post5",
    "tensorrt-llm",
    "tensorrt-llm@1.0.0",
    "tgi",
    "triton",
    "triton@0.18.0",
)


def alerts_of(selection: Selection) -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in rule_groups(selection) for rule in group["rules"] if "alert" in rule}


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_rule_gets_lost(dialect: str) -> None:
    selection = select(Options(dialect=dialect))
    exported = {alert.rule_id for alert in selection.alerts}
    left_out = dict(selection.left_out)
    assert exported | set(left_out) == {rule.id for rule in DEFAULT_RULES}
    assert exported.isdisjoint(left_out)
    text = rules_text(selection)
    for rule_id, reason in left_out.items():
        assert reason
        assert f"#   {rule_id}: {reason}." in text


def test_what_each_engine_lacks() -> None:
    def left_out(dialect: str) -> dict[str, str]:
        return dict(select(Options(dialect=dialect)).left_out)

    assert not left_out("kvoncall"), "our engine has all of them"
    assert set(left_out("vllm@0.33.0")) == {"gpu-memory-creep", "cache-thrash"}
    assert "block_size" in left_out("vllm@0.8.5")["prefix-hit-collapse"]
    assert "does not preempt" in left_out("tgi")["eviction-storm"]
    assert "a long answer would look like a stall" in left_out("tgi")["engine-stall"]
    assert "no counter of retractions" in left_out("sglang@0.4.6.post5")["eviction-storm"]
    assert "eviction-storm" not in left_out("sglang@0.5.23")
    assert "gpu-memory-creep" not in left_out("triton")


def test_every_alert_says_how_bad_it_is_and_where_to_go_on() -> None:
    selection = select(Options(dialect="kvoncall", base_url="https://kv.example/ops/"))
    rules = {rule.id: rule for rule in DEFAULT_RULES}
    for name, alert in alerts_of(selection).items():
        rule = rules[alert["labels"]["kvoncall_rule"]]
        assert name in (alert_name(rule.id), "KVAllTargetsMissing")
        assert alert["labels"]["severity"] == rule.severity
        assert alert["annotations"]["runbook_url"] == f"https://kv.example/ops/runbooks?runbook={rule.id}"
        assert get_runbook(rule.id)
        assert alert["annotations"]["dashboard_url"] == "https://kv.example/ops/alerts"
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["description"]
    assert alert_name("eviction-storm") == "KVEvictionStorm"
    assert alert_name("kv-saturated") == "KVSaturated"


def test_hold_times_are_the_rules() -> None:
    alerts = alerts_of(select(Options()))
    assert (alerts["KVSaturated"]["for"], alerts["KVSaturated"]["keep_firing_for"]) == ("2m", "1m")
    assert "for" not in alerts["KVOom"]
    assert "keep_firing_for" not in alerts["KVOom"]


def test_windows_hold_enough_scrapes() -> None:
    assert "[1m]" in alerts_of(select(Options(scrape_interval_s=5)))["KVSaturated"]["expr"]
    assert "[1m30s]" in alerts_of(select(Options(scrape_interval_s=15)))["KVSaturated"]["expr"]
    assert "[6m]" in alerts_of(select(Options(scrape_interval_s=60)))["KVSaturated"]["expr"]


def test_rules_that_are_no_value_read_what_metrics_tell_of_them() -> None:
    alerts = alerts_of(select(Options(jobs=("chat",))))
    restarts = flat(alerts["KVOom"]["expr"])
    assert 'changes(process_start_time_seconds{job="chat"}[10m])) > 0' in restarts
    assert 'and max by (job, instance) (max_over_time(vllm:num_requests_running{job="chat"}[10m]))' in restarts
    assert alerts["KVTargetMissing"]["expr"] == 'max by (job, instance) (up{job="chat"}) < 1'
    assert alerts["KVAllTargetsMissing"]["expr"] == 'absent(up{job="chat"} == 1)'
    assert alerts["KVAllTargetsMissing"]["labels"]["job"] == "chat", "absent() of a comparison has no labels"
    unknown = flat(alerts["KVMetricsUnknown"]["expr"])
    assert unknown.startswith('(max by (job, instance) (up{job="chat"}) == 1) unless')
    assert "vllm:kv_cache_usage_perc" in unknown
    for rule_id in ("kv-quality-drop", "prefix-isolation-breach"):
        expr = alerts[alert_name(rule_id)]["expr"]
        assert expr == f'max by (job, instance, target) (kvoncall_rule_breach{{rule="{rule_id}"}}) == 1'


def test_an_engine_that_does_not_tell_its_start_shows_a_restart_by_its_counters() -> None:
    assert flat(alerts_of(select(Options(dialect="tgi")))["KVOom"]["expr"]) == (
        "max by (job, instance) (resets(tgi_request_success[10m])) > 0"
    )


def test_an_engine_whose_metrics_show_up_late_is_not_unknown_before() -> None:
    unknown = flat(alerts_of(select(Options(dialect="sglang@0.5.23")))["KVMetricsUnknown"]["expr"])
    assert "and max by (job, instance) (sglang:num_requests_total{" in unknown.partition("unless")[0]


def test_latency_is_judged_by_a_bucket_the_engine_has() -> None:
    assert 'le="2.5"' in alerts_of(select(Options()))["KVTtftSloBurn"]["expr"]
    sglang = alerts_of(select(Options(dialect="sglang@0.5.23")))["KVTtftSloBurn"]
    assert r'le=~"2|2\\.0"' in sglang["expr"]
    assert "99% within 2 s" in sglang["annotations"]["description"]


def test_metrics_that_are_not_told_by_replica_are_judged_by_target() -> None:
    selection = select(Options(dialect="sglang@0.5.23"))
    alerts = alerts_of(selection)
    assert "dp_rank" in alerts["KVSaturated"]["expr"]
    assert "dp_rank" not in alerts["KVEngineStall"]["expr"]
    assert any(note.startswith("engine-stall looks at whole targets") for note in selection.notes)


def test_several_jobs_have_an_absence_each() -> None:
    selection = select(Options(jobs=("a", "b")))
    absent = [alert.expr for alert in selection.alerts if alert.name == "KVAllTargetsMissing"]
    assert absent == ['absent(up{job="a"} == 1)', 'absent(up{job="b"} == 1)']


def test_by_model_keeps_the_target() -> None:
    alerts = alerts_of(select(Options(by_model=True)))
    assert "by (job, instance, model_name)" in alerts["KVEvictionStorm"]["expr"]
    assert "model_name" not in alerts["KVTargetMissing"]["expr"]
    assert "model_name" not in alerts["KVMetricsUnknown"]["expr"], "up has no model"


def test_recorded_values_have_the_traffic_floor() -> None:
    recorded = {
        rule["record"]: flat(rule["expr"]) for group in rule_groups(select(Options())) for rule in group["rules"][:]
        if "record" in rule
    }  # fmt: skip
    assert ">= 20" in recorded["instance:kvoncall_eviction_storm:5m"]
    assert ">= 10000" in recorded["instance:kvoncall_prefix_hit_collapse:10m"]
    assert "instance_engine:kvoncall_kv_saturated:1m30s" in recorded


def test_an_assumed_version_is_told() -> None:
    selection = select(Options(dialect="vllm@0.99.0"))
    assert "vllm 0.99.0 is newer than what was read: 0.33.0 is assumed." in selection.notes
    assert "is assumed" in rules_text(selection)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (Options(dialect="mystery@1"), "engine 'mystery' are not known"),
        (Options(base_url="localhost:8501"), "must be http"),
        (Options(base_url="http://user:secret@host"), "must not contain a user or password"),
        (Options(dialect="tgi", by_model=True), "carry no model label"),
        (Options(dialect="sglang", spelling="sg_"), "do not begin with"),
    ],
)
def test_options_that_make_no_sense(options: Options, sentence: str) -> None:
    with pytest.raises(ExportError, match=sentence) as raised:
        select(options)
    assert "secret" not in str(raised.value)


def test_inhibition_is_that_of_the_rules() -> None:
    selection = select(Options(dialect="kvoncall"))
    found: dict[str, set[str]] = {}
    for rule in inhibit_rules(selection):
        if rule["equal"] == ["job"]:
            continue
        source = rule["source_matchers"][0].split('"')[1]
        for target in rule["target_matchers"][0].split('"')[1].split("|"):
            found.setdefault(target, set()).add(source)
    exported = {alert.rule_id for alert in selection.alerts}
    for rule in DEFAULT_RULES:
        if rule.id in exported and rule.id not in ("kv-quality-drop", "prefix-isolation-breach"):
            assert found.get(rule.id, set()) == set(rule.inhibited_by) & exported


@pytest.mark.prometheus
def test_promtool_accepts_every_export(tmp_path: Path, promtool: Callable[..., Any]) -> None:
    files = []
    for dialect in DIALECTS:
        for by_model in (False, True) if dialect in ("vllm@0.33.0", "triton") else (False,):
            selection = select(Options(dialect=dialect, by_model=by_model))
            stem = f"{dialect}{by_model}".replace("@", "-")
            texts = {"rules": rules_text(selection), "board": _as_rules(dashboard(selection).document)}
            if by_model:
                operator = yaml.safe_load(prometheusrule_text(selection))
                assert (operator["apiVersion"], operator["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
                texts["operator"] = json.dumps(operator["spec"])  # JSON is YAML
            for kind, text in texts.items():
                files.append(tmp_path / f"{stem}-{kind}.yaml")
                files[-1].write_text(text)
    done = promtool("check", "rules", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS") == len(files)


def _as_rules(board: dict[str, Any]) -> str:
    """A dashboard's expressions as recording rules, its variables filled in."""
    exprs = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    filled = [
        expr.replace("$__rate_interval", "5m").replace("$job", ".*").replace("$instance", ".*").replace("$model", ".*")
        for expr in exprs
    ]
    assert not [expr for expr in filled if "$" in expr]
    rules = [{"record": f"panel:n{i}", "expr": expr} for i, expr in enumerate(filled)]
    return json.dumps({"groups": [{"name": "board", "rules": rules}]})


@pytest.mark.prometheus
def test_amtool_accepts_the_configuration(tmp_path: Path, amtool: Callable[..., Any]) -> None:
    path = tmp_path / "alertmanager.yaml"
    for dialect in ("vllm@0.33.0", "tensorrt-llm@1.0.0"):
        path.write_text(alertmanager_text(select(Options(dialect=dialect, base_url="https://kv.example"))))
        done = amtool("check-config", path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "3 receivers" in done.stdout
    routed = amtool("config", "routes", "test", f"--config.file={path}", "kvoncall_rule=oom", "severity=critical")
    assert routed.stdout.strip() == "kvoncall,pager"
    routed = amtool("config", "routes", "test", f"--config.file={path}", "kvoncall_rule=x", "severity=warning")
    assert routed.stdout.strip() == "kvoncall,chat"


@pytest.mark.parametrize("dialect", ["vllm@0.33.0", "kvoncall", "sglang@0.5.23"])
def test_our_own_lint_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], dialect: str) -> None:
    selection = select(Options(dialect=dialect))
    (tmp_path / "rules.yaml").write_text(rules_text(selection))
    (tmp_path / "operator.yaml").write_text(prometheusrule_text(selection))
    (tmp_path / "board.json").write_text(dashboard_text(selection))
    assert main(["check", str(tmp_path), "--dialect", dialect, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["queries"] > 40
    assert found["findings"] == []


def test_the_dashboard_links_its_panels_to_runbooks() -> None:
    board = dashboard(select(Options(base_url="https://kv.example")))
    document = board.document
    charts = [panel for panel in document["panels"] if panel["type"] == "timeseries"]
    urls = {link["url"] for panel in charts for link in panel["links"]}
    assert "https://kv.example/runbooks?runbook=eviction-storm" in urls
    for url in urls:
        assert get_runbook(url.partition("runbook=")[2])
    assert [title for title, _ in board.left_out] == ["Cached blocks evicted"]
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
    assert [variable["name"] for variable in document["templating"]["list"]] == [
        "datasource", "job", "instance", "model",
    ]  # fmt: skip
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in document["panels"]]
    assert len(set(places)) == len(places)
    usage = next(panel for panel in charts if panel["title"] == "KV cache in use")
    assert usage["targets"][0]["expr"].startswith("max by (job, instance, engine)"), "an average hides a full engine"
