"""The lm-eval adapter, with a harness that is only its command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from probe.cli import main
from probe.store import Store

HARNESS = """
import argparse, json, os, pathlib, sys, urllib.request
parser = argparse.ArgumentParser()
for name in ("--model", "--model_args", "--tasks", "--output_path", "--limit"):
    parser.add_argument(name)
args = parser.parse_args()
print("words of the harness")
if args.tasks == "broken":
    sys.exit("no such task")
told = dict(pair.split("=", 1) for pair in args.model_args.split(","))
body = {"model": told["model"], "prompt": "1+2>", "max_tokens": 3}
head = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ.get("OPENAI_API_KEY", "none")}
request = urllib.request.Request(told["base_url"], json.dumps(body).encode(), head)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
text = json.load(opener.open(request))["choices"][0]["text"]
folder = pathlib.Path(args.output_path) / told["model"]
folder.mkdir(parents=True)
found = {args.tasks: {"alias": args.tasks, "exact_match,none": float(text == "3"), "limit": float(args.limit or 0)}}
(folder / "results_2026.json").write_text(json.dumps({"results": found, "n-samples": {args.tasks: {"original": 9}}}))
"""


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(HARNESS)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


def run(tmp_path: Path, *args: str) -> int:
    return main(["quality", "--data-dir", str(tmp_path / "data"), *args])


@pytest.mark.usefixtures("harness")
def test_figures_of_the_harness_are_stored_and_printed(
    tmp_path: Path, server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    args = ("--target", server.url, "--lm-eval", "gsm8k", "--api-key-env", "A_KEY")
    assert run(tmp_path, *args, "--json", "--", "--limit", "5") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["lm_eval"]["results"]["gsm8k"] == {"alias": "gsm8k", "exact_match,none": 1.0, "limit": 5.0}
    assert server.keys[-1] == "Bearer secret"
    with Store.open(tmp_path / "data") as store:
        stored = store.quality.get(value["run_id"])
    assert stored is not None
    assert (stored.label, stored.status, stored.model) == ("lm-eval", "done", "testbed")
    assert stored.suite == {"kind": "lm-eval", "tasks": "gsm8k", "args": ["--limit", "5"]}
    assert stored.result is not None
    assert stored.result["lm_eval"]["n-samples"] == {"gsm8k": {"original": 9}}
    assert run(tmp_path, *args) == 0
    assert "exact_match,none" in capsys.readouterr().out
    assert run(tmp_path, "--list") == 0
    assert capsys.readouterr().out.count("lm-eval") == 2


@pytest.mark.usefixtures("harness")
def test_a_harness_that_fails_is_reported(tmp_path: Path, server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--target", server.url, "--lm-eval", "broken") == 2
    assert "lm-eval ended with code 1" in capsys.readouterr().err
    with Store.open(tmp_path / "data") as store:
        assert store.quality.list()[0].status == "incomplete"


def test_without_the_harness_one_sentence_says_how_to_get_it(
    tmp_path: Path, server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(tmp_path, "--target", server.url, "--lm-eval", "gsm8k") == 2
    assert "pip install 'lm-eval[api]'" in capsys.readouterr().err
