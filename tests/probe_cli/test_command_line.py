"""The command map: one sentence and a code for every wrong word, no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from probe.bench.attention import bench_attention
from probe.cli import main


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "probe.cli", *args], capture_output=True, text=True, check=False)


def test_alone_it_prints_the_map(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    for command in ("serve", "watch", "replay", "runbooks", "bench"):
        assert f"kvoncall {command}" in printed


def test_replays_are_listed() -> None:
    listed = run("replay", "--list", "--json")
    assert listed.returncode == 0
    assert {"oom", "eviction-storm"} <= {entry["id"] for entry in json.loads(listed.stdout)}


def test_runbooks_are_listed_and_shown() -> None:
    listed = json.loads(run("runbooks", "list", "--json").stdout)
    assert {"oom", "eviction-storm", "kv-saturated", "target-missing"} <= {entry["id"] for entry in listed}
    shown = run("runbooks", "show", "oom")
    assert shown.returncode == 0
    assert "## Mitigation" in shown.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("dance",), "dance"),
        (("replay",), "which incident"),
        (("replay", "no-such-incident"), "no-such-incident"),
        (("replay", "oom", "--frobnicate"), "--frobnicate"),
        (("runbooks", "show", "no-such-page"), "no-such-page"),
        (("bench", "nothing"), "nothing"),
        (("bench", "--json", "attention"), "kvoncall bench attention --help"),
        (("bench", "attention", "--frobnicate"), "--frobnicate"),
        (("watch", "--target", "http://127.0.0.1:9/"), "127.0.0.1:9"),
        (("watch", "--prometheus", "http://127.0.0.1:9"), "127.0.0.1:9"),
        (("check", "/nonexistent/rules.yml"), "/nonexistent/rules.yml"),
        (("check", "/dev/null", "--dialect", "no-such-engine"), "no-such-engine"),
        (("rules", "export"), "--to"),
        (("rules", "export", "--to", "prometheus", "--dialect", "no-such-engine"), "no-such-engine"),
        (("backtest", "no-such-rule"), "no-such-rule"),
        (("backtest", "oom", "--since", "soon"), "such as 7d"),
        (("replay", "oom", "--data-dir", "/proc/nowhere"), "/proc/nowhere"),
    ],
)
def test_bad_words_are_one_sentence(
    args: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if args[0] == "watch":
        args = (*args, "--data-dir", str(tmp_path))
    try:
        code = main(args)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    said = capsys.readouterr().err
    assert code == 2
    assert says in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("serve", "--swap-space", "4"), "--swap-space"),
        (("serve", "--model", "/nonexistent/model"), "/nonexistent/model"),
        (("replay", "no-such-incident"), "no-such-incident"),
    ],
)
def test_a_bad_word_ends_the_process_with_its_code(args: tuple[str, ...], says: str) -> None:
    result = run(*args)
    assert result.returncode == 2
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_bench_attention_prints_json_and_writes_both_reports(tmp_path: Path) -> None:
    result = run("bench", "attention", "--quick", "--device", "cpu", "--json", "--output", str(tmp_path))
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report == json.loads((tmp_path / "attention.json").read_text())
    assert report["backend"] == "torch"
    assert {row["status"] for row in report["results"]} == {"ok"}
    assert (tmp_path / "attention.md").read_text().startswith("# Attention over the paged KV cache")


def test_the_kernel_benches_read_their_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "attention", "--help"])
    assert exit_.value.code == 0
    assert "--max-seconds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "module"),
    [("attention", "kernels.bench.attention"), ("aot", "kernels.aot"), ("recall", "kernels.bench.recall")],
)
def test_their_exit_code_is_the_commands(what: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[str] = []

    def run_kernels(args: list[str]) -> int:
        received.extend(args)
        return 1

    monkeypatch.setitem(sys.modules, module, SimpleNamespace(main=run_kernels))
    assert main(["bench", what, "--json", "--capability", "90"]) == 1
    assert received == ["--json", "--capability", "90"]


def test_all_has_the_attention_kernels_too() -> None:
    figures = bench_attention(report=lambda _: None, quick=True)
    assert figures["wrong"] == 0
    assert figures["cases_measured"] > 0
    assert any("torch.clone" in name for name in figures)
