"""`kvoncall quality` on running servers: baselines, exit codes, resuming, canary, tables, sentences for mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from probe.cli import main
from probe.store import Store

SMALL = ("--turns", "4", "--conversations", "12", "--windows", "1")


@pytest.fixture
def quality(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`quality(*args)` -> exit code, stdout, stderr of `kvoncall quality`, over one data directory."""

    def run(*args: str, small: bool = True) -> tuple[int, str, str]:
        code = main(["quality", "--data-dir", str(tmp_path / "data"), *(SMALL if small else ()), *args])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


Quality = Callable[..., tuple[int, str, str]]


def wrong_at_turn_4(prompt: str, right: str) -> str:
    return "?" if prompt.count("<eos>") == 3 else right


def test_a_server_is_measured_against_a_baseline_server(quality: Quality, servers: Callable[[], Any]) -> None:
    good, bad = servers(), servers()
    bad.answer = wrong_at_turn_4
    code, out, err = quality("--target", bad.url, "--baseline", good.url, "--json")
    assert code == 1
    value = json.loads(out)
    baseline, arm = value["arms"]
    assert (baseline["label"], baseline["against"]) == ("baseline", None)
    assert (arm["label"], arm["against"]["lost"], arm["against"]["verdict"]) == (bad.url, 12, "worse")
    assert arm["against"]["baseline_id"] == baseline["run_id"]
    assert (value["model"], value["suite"]["turns"]) == ("testbed", 4)
    assert f"{bad.url}: 49 of 49 items" in err


def test_a_stored_baseline_and_a_table(quality: Quality, server: Any) -> None:
    _, out, _ = quality("--target", server.url, "--json")
    run_id = json.loads(out)["arms"][0]["run_id"]
    code, out, _ = quality("--target", server.url, "--baseline", run_id)
    assert code == 0
    header, first, *_ = out.split("\n\n")[1].splitlines()
    assert header.split()[:3] == ["arm", "task", "items"]
    assert first.split()[:4] == [server.url, "all", "48", "1.000"]
    assert "inconclusive" in first or "no worse" in first
    assert "accuracy by turn" in out
    code, out, _ = quality("--list", small=False)
    assert (code, len(out.splitlines()), run_id in out) == (0, 3, True)


def test_an_endpoint_that_dies_midway_is_resumed_by_the_command_it_names(quality: Quality, server: Any) -> None:
    server.fault = lambda n: 400 if n == 20 else 0
    code, out, err = quality("--target", server.url)
    assert (code, out) == (2, "")
    words = err.splitlines()[-1]
    assert words.startswith("kvoncall: ")
    command = words[words.index("`kvoncall quality ") + 1 : words.rindex("`")].split()
    code, out, _ = quality(*command[2:], "--json", small=False)
    assert code == 0
    (arm,) = json.loads(out)["arms"]
    assert (arm["run_id"], arm["status"], arm["overall"]["items"]) == (command[-1], "done", 48)
    code, _, err = quality(*command[2:], small=False)
    assert (code, "nothing to resume" in err) == (2, True)


def test_a_users_text_is_judged_and_resumed_only_with_it(quality: Quality, server: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("ab cd ef gh ij kl mn")
    server.fault = lambda n: 500 if n == 0 else 0
    server.model = "other"
    arguments = ("--target", server.url, "--tasks", "none", "--text", str(text), "--json")
    code, out, _ = quality(*arguments)
    assert code == 0  # one 500 is tried again
    (arm,) = json.loads(out)["arms"]
    assert arm["likelihood"]["tokens"] == 7
    assert arm["likelihood"]["perplexity"] == pytest.approx(1 / 0.9, rel=1e-4)
    server.fault = lambda n: 404
    server.has_logprobs = False
    code, _, err = quality("--target", server.url, "--tasks", "add", "--text", str(text))
    assert code == 2
    run_id = err[err.rindex("--resume ") :].split()[1].rstrip("`")
    assert run_id
    code, _, err = quality("--resume", run_id, small=False)
    assert (code, "judged another text" in err) == (2, True)


def test_the_canary_attaches_its_target_and_runs_its_rounds(quality: Quality, server: Any, tmp_path: Path) -> None:
    server.metrics = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0.0\n"
    arguments = ("--target", server.url, "--canary", "--every", "0", "--rounds", "2", "--turns", "3", "--json")
    code, out, err = quality(*arguments, small=False)
    assert code == 0
    first, second = json.loads(out)["arms"]
    assert second["against"]["baseline_id"] == first["run_id"]
    assert "this round is the baseline" in err
    with Store.open(tmp_path / "data") as store:
        (target,) = store.targets.list()
        assert len(store.events.recent(target=target.name, kinds=["quality_round"])) == 2
    server.fault = lambda n: 404
    code, _, err = quality("--target", target.name, *arguments[2:], small=False)
    assert (code, err.count("failed")) == (2, 2)


def test_the_api_key_comes_from_the_environment(quality: Quality, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = quality("--target", server.url, "--api-key-env", "NO_SUCH_KEY")
    assert (code, "NO_SUCH_KEY is empty" in err) == (2, True)
    monkeypatch.setenv("A_KEY", "secret")
    code, _, _ = quality("--target", server.url, "--api-key-env", "A_KEY")
    assert code == 0
    assert set(server.keys) == {"Bearer secret"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--target", "nobody"), "there is no target 'nobody'"),
        (("--baseline", "x"), "there is no quality run 'x'"),
        (("--tasks", "dance"), "there is no task 'dance'"),
        (("--target", "http://127.0.0.1:9", "--dtypes", "auto"), "--dtypes needs --target embedded"),
        (("--dtypes", "auto,auto"), "once each"),
        (("--dtypes", "int3"), "--kv-cache-dtype"),
        (("--dtypes", "auto", "--model", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--text", "/nowhere.txt"), "cannot be read"),
        (("--engine-flags", "--seed '1"), "--engine-flags cannot be read"),
        (("--canary",), "needs a running server"),
        (("stray",), "'stray' means nothing here"),
        (("--resume", "x"), "there is no quality run 'x'"),
    ],
)
def test_mistakes_get_one_sentence(quality: Quality, args: tuple[str, ...], words: str) -> None:
    code, out, err = quality(*args)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("kvoncall: ")
    assert words in line
