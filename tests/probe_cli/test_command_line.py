"""The command map: one sentence and a code for every wrong word, no traceback."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
        (("serve", "--swap-space", "4"), "--swap-space"),
        (("serve", "--model", "/nonexistent/model"), "/nonexistent/model"),
        (("watch", "--target", "http://127.0.0.1:9/"), "127.0.0.1:9"),
        (("replay", "oom", "--data-dir", "/proc/nowhere"), "/proc/nowhere"),
    ],
)
def test_bad_words_are_one_sentence(args: tuple[str, ...], says: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    if args[0] == "watch":
        args = (*args, "--data-dir", str(tmp_path_factory.mktemp("data")))
    result = run(*args)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
