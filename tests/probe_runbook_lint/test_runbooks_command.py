"""`kvoncall runbooks`: list, show, lint and advise as a user runs them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from probe.cli import main
from probe.commands.runbooks import FORMS
from probe.store import Store
from runbooks.load import FOLDER, list_runbooks

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVONCALL_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("KVONCALL_RUNBOOKS", raising=False)
    return tmp_path / "data"


def test_list_has_every_page_and_tells_of_those_it_cannot_list(data: Path, capsys: Capture) -> None:
    (data / "runbooks").mkdir(parents=True)
    (data / "runbooks" / "oom.md").write_text("ours?", encoding="utf-8")
    assert main(["runbooks", "list", "--json"]) == 0
    out, err = capsys.readouterr()
    listed = json.loads(out)
    assert [page["id"] for page in listed] == [page.id for page in list_runbooks()]
    assert {"id", "title", "severity", "alert", "incidents", "engines", "lang", "own"} == set(listed[0])
    assert "give the file another name" in err
    assert main(["runbooks", "list"]) == 0
    assert "kv-does-not-fit         critical" in capsys.readouterr().out


def test_show_prints_a_page_in_the_language_asked_for(capsys: Capture) -> None:
    assert main(["runbooks", "show", "oom"]) == 0
    assert capsys.readouterr().out.startswith("# Out of memory")
    assert main(["runbooks", "show", "slow-after-retraction"]) == 0
    assert "No drill of this page has passed yet." in capsys.readouterr().err
    assert main(["runbooks", "show", "oom", "--json", "--lang", "zh"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["sections"]) == 9
    assert (shown["lang"] == "en") == bool(shown["note"])


def test_lint_of_a_file_says_where_and_what_to_write(tmp_path: Path, capsys: Capture) -> None:
    good = (FOLDER / "target-missing.md").read_text(encoding="utf-8")
    file = tmp_path / "target-missing.md"
    file.write_text(good, encoding="utf-8")
    assert main(["runbooks", "lint", str(file)]) == 0
    assert capsys.readouterr().out == "1 pages: nothing wrong.\n"
    file.write_text(good.replace("`kvoncall replay oom`", "`kvoncall replay om`"), encoding="utf-8")
    assert main(["runbooks", "lint", str(file)]) == 1
    first, second, _ = capsys.readouterr().out.splitlines()[:3]
    assert first.startswith(f"{file}:")
    assert "[command]" in first
    assert second.startswith("    write: ")
    assert main(["runbooks", "lint", str(file), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert set(finding) == {"file", "line", "code", "what", "write"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show"], "which runbook?"),
        (["show", "nope"], "no runbook named 'nope'"),
        (["show", "oom", "--lang", "fr"], "write one of en, zh"),
        (["show", "oom", "--as", "json"], "--as belongs to `runbooks advise`"),
        (["list", "oom"], "takes no id"),
        (["lint", "nothing.md"], "there is no file nothing.md"),
        (["advise", "oom"], "say for whom"),
        (["advise", "oom", "kv-saturated", "--facts", "-"], "takes one id"),
        (["advise", "oom", "--facts", "nothing.json"], "cannot be read"),
        (["advise", "oom", "--target", "nobody"], "there is no target 'nobody'"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_sentence(words: list[str], said: str, capsys: Capture) -> None:
    assert main(["runbooks", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def facts_file(folder: Path) -> Path:
    file = folder / "facts.json"
    facts = {
        "engine": "vllm",
        "version": "0.32.0",
        "cache_config_info": {"block_size": "16", "num_gpu_blocks": "1000"},
        "traffic": {"peak_running": 60, "peak_waiting": 20, "tokens_per_request_peak": 900},
    }
    file.write_text(json.dumps(facts), encoding="utf-8")
    return file


@pytest.mark.parametrize("form", FORMS)
def test_advice_from_facts_in_every_form(form: str, tmp_path: Path, capsys: Capture) -> None:
    words = ["runbooks", "advise", "eviction-storm", "--facts", str(facts_file(tmp_path)), "--as", form]
    assert main([*words, "--command", "vllm serve m --max-num-seqs 256"]) == 0
    out = capsys.readouterr().out
    assert "17" in out  # floor(999 blocks x 16 / 900)
    if form == "launch":
        assert "-  --max-num-seqs 256\n+  --max-num-seqs 17" in out
    if form == "json":
        assert json.loads(out)["changes"][0]["to"] == 17


def test_facts_must_name_the_engine(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "f.json").write_text("[]", encoding="utf-8")
    assert main(["runbooks", "advise", "oom", "--facts", str(tmp_path / "f.json")]) == 2
    assert 'must be a JSON object with "engine"' in capsys.readouterr().err


class Vllm(BaseHTTPRequestHandler):
    """A vLLM that says what the advice reads."""

    METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="101",gpu_memory_utilization="0.9",engine="0"} 1
"""
    ANSWERS: ClassVar = {
        "/metrics": METRICS,
        "/version": '{"version": "0.32.0"}',
        "/v1/models": '{"data": [{"id": "m", "max_model_len": 4096}]}',
    }

    def do_GET(self) -> None:
        body = self.ANSWERS.get(self.path, "").encode()
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", "text/plain; version=0.0.4" if self.path == "/metrics" else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Vllm) as httpd:
        Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def test_advice_for_an_address_reads_the_server_itself(server: str, capsys: Capture) -> None:
    assert main(["runbooks", "advise", "head-of-line-block", "--target", server, "--as", "json"]) == 0
    out, err = capsys.readouterr()
    advice = json.loads(out)
    assert (advice["engine"], advice["version"]) == ("vllm", "0.32.0")
    # 101 blocks, one of them the null block: a context of 4,096 tokens never fits the pool of 1,600
    (change,) = [one for one in advice["changes"] if one["flag"] == "--max-model-len"]
    assert change["to"] == 1600
    assert "4096" in change["why"].replace(",", "")
    assert "is not watched" in err


def test_advice_for_a_stored_target_reads_what_is_known_of_it(data: Path, capsys: Capture) -> None:
    info = {"block_size": "16", "num_gpu_blocks": "101"}
    with Store.open(data) as store:
        store.targets.upsert("prod", url="http://127.0.0.1:9/metrics", kind="external", engine="vllm")
        store.targets.set_facts("prod", {"version": "0.32.0", "cache_config_info": info, "max_model_len": 4096})
    words = ["runbooks", "advise", "head-of-line-block", "--target", "prod", "--data-dir", str(data), "--json"]
    assert main(words) == 0
    advice = json.loads(capsys.readouterr().out)
    assert advice["version"] == "0.32.0"
    assert {"--max-model-len": 1600}.items() <= {one["flag"]: one["to"] for one in advice["changes"]}.items()


def test_forms_are_those_of_the_renderer() -> None:
    from runbooks.outputs import FORMS as RENDERED

    assert set(FORMS) == set(RENDERED)
