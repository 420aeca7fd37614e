"""The command: exit codes, JSON and text, versions, and a live server on loopback."""

from __future__ import annotations

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from probe.check.command import CheckError, add_options, run, text

BAD = "groups: [{name: g, rules: [{alert: Full, expr: 'vllm:gpu_cache_usage_perc > 0.9', for: 5m}]}]\n"
FOLLOWED = "annotations: {runbook_url: 'https://runbooks.example/x'}"
WARNED = f"groups: [{{name: g, rules: [{{alert: Full, expr: 'vllm:kv_cache_usage_perc > 0.9', {FOLLOWED}}}]}}]\n"


@pytest.fixture
def command(tmp_path):
    lines: list[str] = []

    def of(*args: str):
        parser = argparse.ArgumentParser()
        add_options(parser)
        outcome = run(parser.parse_args(list(args)), lines.append)
        json.dumps(outcome.value)
        return outcome

    of.lines = lines
    return of


@pytest.fixture
def rules(tmp_path):
    def of(content: str, name: str = "rules.yaml") -> str:
        path = tmp_path / name
        path.write_text(content)
        return str(path)

    return of


def test_exit_codes_follow_what_was_found(command, rules, data):
    assert command(str(data / "clean.yaml")).code == 0
    assert command(rules(BAD)).code == 1
    assert command(rules(WARNED)).code == 1
    assert command(rules(WARNED), "--fail-on", "error").code == 0
    broken = command(rules(BAD), rules("groups: [", "broken.yaml"))
    assert broken.code == 2
    assert broken.value["counts"]["error"] == 1
    assert "broken.yaml is not YAML" in broken.value["unreadable"][0]
    assert text(broken.value).endswith("; 1 file could not be read.")
    alone = text(command(rules("groups: [", "broken.yaml")).value)
    assert alone.endswith("nothing was checked; 1 file could not be read.")


def test_notes_alone_never_fail(command, rules):
    outcome = command(rules(WARNED.replace(f"{FOLLOWED}", "for: 5m")))
    assert [finding["code"] for finding in outcome.value["findings"]] == ["no-runbook"]
    assert outcome.code == 0


def test_the_text_says_where_why_and_what_to_write(command, rules):
    outcome = command(rules(BAD))
    said = text(outcome.value).splitlines()
    assert said[0].endswith("rules.yaml:1: error [unknown-metric] Full")
    assert "last in 0.11.2" in said[1]
    assert said[2].strip() == "write: vllm:kv_cache_usage_perc"
    assert said[3].strip() == "corrected: vllm:kv_cache_usage_perc > 0.9"
    assert said[-1].startswith("1 expression in 1 file against vllm 0.33.0")
    assert said[-1].endswith("1 error, 1 note.")


def test_a_folder_is_read(command, data):
    outcome = command(str(data))
    assert len(outcome.value["files"]) == len(list(data.iterdir()))
    assert outcome.code == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--dialect", "vlm"], "vlm"),
        (["--dialect", "vllm@0.9.0", "--dialect", "vllm"], "twice"),
        (["--scrape-interval", "0"], "more than 0"),
        (["--target", "http://127.0.0.1:9"], "cannot"),
        (["--target", "localhost"], "localhost"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(args, says, command, rules):
    with pytest.raises(CheckError) as error:
        command(rules(BAD), *args)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_files_without_queries_are_said(command, rules, tmp_path):
    with pytest.raises(CheckError, match="no rule"):
        command(rules("kind: Service\n"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckError, match="holds no"):
        command(str(tmp_path / "empty"))


def test_a_version_that_was_not_read_is_said(command, rules):
    command(rules(BAD), "--dialect", "vllm@9.0.0")
    assert "newer than what was read" in command.lines[0]


PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="0"} 1
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m",engine="0"} 0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{model_name="m",engine="0"} 0.5
# TYPE vllm:of_our_plugin gauge
vllm:of_our_plugin{model_name="m",tier="gold"} 0.5
# TYPE vllm:request_success counter
vllm:request_success_total{model_name="m",engine="0",finished_reason="stop"} 5
"""


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            answers = {
                "/metrics": (PAGE, "text/plain; version=0.0.4"),
                "/version": ('{"version": "0.11.0"}', "application/json"),
            }
            body, kind = answers.get(self.path, ("", "text/plain"))
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_address[1]}"
    http.shutdown()
    http.server_close()
    thread.join(10)


def test_a_live_server_knows_its_version_and_what_it_really_exposes(command, rules, server):
    content = "\n".join(
        ["groups:", "- name: g", "  rules:"]
        + [
            f"  - {{alert: A{n}, for: 5m, {FOLLOWED}, expr: '{expr}'}}"
            for n, expr in enumerate(
                [
                    "vllm:gpu_cache_usage_perc > 0.9",  # hidden in 0.11.0, but this server shows it
                    'vllm:of_our_plugin{tier="gold"} > 0.9',  # in no version
                    "vllm:gpu_prefix_cache_hit_rate < 0.1",  # gone
                    "rate(vllm:corrupted_requests_total[5m]) > 0",  # not yet
                    "rate(vllm:gpu_prefix_cache_hits_total[5m]) > 0",  # hidden and not shown
                ]
            )
        ]
    )
    outcome = command(rules(content), "--target", server)
    found = {finding["where"]: finding for finding in outcome.value["findings"]}
    assert set(found) == {"A2", "A3", "A4"}
    assert outcome.value["against"]["vllm"] == "0.11.0"
    assert "first in 0.11.1" in found["A3"]["why"]
    assert "--show-hidden-metrics-for-version=0.10" in found["A4"]["write"]
    assert server in text(outcome.value)
