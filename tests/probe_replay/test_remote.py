"""A replay on a server that is not the replay's own: its operator's command restarts it, or nothing does."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.config import MIB
from probe.cli import main
from probe.load.endpoint import Endpoint, EndpointError, describe
from probe.replay.remote import RemoteServer
from probe.replay.restart import RestartCommand, flag_words
from probe.replay.scenario import ON_SERVER, ReplayError, get_server_scenario
from probe.replay.scenarios.storm_on_server import StormOnServer, storm
from probe.store import Store

pytestmark = pytest.mark.xdist_group("replay_e2e")

CHANGES = {"--max-num-seqs": 7, "--enable-prefix-caching": False, "--swap-space": None, "--note": "two words"}


def command(template: str, log: Path, *, answer: bool = True, **more: Any) -> RestartCommand:
    return RestartCommand(template, lambda line: answer, log, **more)


def test_the_command_gets_the_flags_as_words_and_as_data(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    restart = command(
        f"printf '%s\\n' {{flags}} \"$KVONCALL_FLAGS_JSON\" $KVONCALL_REMOVED_FLAGS > {seen}", tmp_path / "log"
    )
    restart.run(CHANGES)
    words = ["--max-num-seqs", "7", "--no-enable-prefix-caching", "--note", "two words"]
    assert flag_words(CHANGES) == words
    assert seen.read_text().splitlines() == [*words, json.dumps(CHANGES), "--swap-space"]
    assert shlex.split(restart.line(CHANGES))[2:7] == words


def test_a_command_that_fails_or_hangs_is_told(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "restart.log"
    with pytest.raises(EndpointError, match=r"ended with code 3; its output is in .*restart\.log"):
        command("echo no such unit; exit 3", log).run({})
    assert log.read_text() == "no such unit\n"
    with pytest.raises(EndpointError, match=r"did not end within 0\.2 s"):
        command("sleep 5", log, timeout_s=0.2).run({})


def test_nothing_restarts_without_a_change_a_command_and_a_yes(tmp_path: Path) -> None:
    shown: list[str] = []

    def server(restart: RestartCommand | None) -> RemoteServer:
        with Store.open(tmp_path) as store:
            return RemoteServer(
                store,
                "s",
                "http://127.0.0.1:9",
                time_scale=1,
                scrape_interval_s=1,
                restart=restart,
                progress=shown.append,
            )

    yes = server(command("restart {flags}", tmp_path / "log"))
    assert yes.why_not_restarted([]) == "nothing is to be changed"
    assert yes.why_not_restarted(yes.changed({"--max-num-seqs": 7})) is None
    assert shown == ["restart command: restart --max-num-seqs 7"]
    no = server(command("restart {flags}", tmp_path / "log", answer=False))
    assert no.why_not_restarted(no.changed({"--max-num-seqs": 7})) == "the restart command was not confirmed"
    none = server(None)
    assert "no restart command is configured" in str(none.why_not_restarted(none.changed({"--max-num-seqs": 7})))


@pytest.mark.parametrize(("pool", "context"), [(1504, 1024), (450_000, 32_768), (300, 4096), (20_000, 512)])
def test_a_storm_fits_by_its_prompts_and_not_by_its_answers(pool: int, context: int) -> None:
    plan = storm(pool, Endpoint("m", context, None))
    prompt, length = plan.requests[0].prompt_tokens, plan.longest_request_tokens
    in_flight = plan.options.concurrency or 0
    assert length <= min(context, pool)
    assert prompt * in_flight < pool < 1.5 * pool <= length * in_flight
    assert len(plan.requests) >= 40
    assert len({request.prompt for request in plan.requests}) == len(plan.requests), "nothing is shared"


def test_what_belongs_together_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        (["eviction-storm", "--yes"], "belong to --target"),
        (
            ["oom", "--target", "http://127.0.0.1:9"],
            "needs a drill engine of its own; against a server there are: eviction-storm",
        ),
        (["eviction-storm", "--target", "elsewhere"], "there is no target 'elsewhere'"),
        (["eviction-storm", "--target", "http://127.0.0.1:9"], "cannot be asked for its model"),
    ):
        assert main(["replay", *words, "--data-dir", str(tmp_path)]) == 2
        assert sentence in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(ReplayError, match="no replay named"):
        get_server_scenario("nothing")


def test_a_real_server_is_restarted_by_its_operators_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ON_SERVER, "eviction-storm", StormOnServer(time_scale=0.03, scrape_interval_s=0.5))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pid, script = tmp_path / "pid", tmp_path / "restart.sh"
    flags = ["--port", port, "--device-memory", 192 * MIB, "--num-gpu-blocks-override", 95, "--max-model-len", 512]
    script.write_text(
        f"""test -f {pid} && kill $(cat {pid}) && while kill -0 $(cat {pid}) 2>/dev/null; do sleep 0.1; done
{sys.executable} -m probe.cli serve {shlex.join(map(str, flags))} --max-num-seqs 32 "$@" > {tmp_path}/server.log 2>&1 &
echo $! > {pid}
"""
    )
    restart = command(f"sh {script} {{flags}}", tmp_path / "log")
    try:
        restart.run({})
        await_server(f"http://127.0.0.1:{port}")
        code = main(
            ["replay", "eviction-storm", "--target", f"http://127.0.0.1:{port}", "--data-dir", str(tmp_path / "data"),
             "--restart-command", f"sh {script} {{flags}}", "--yes", "--json"]
        )  # fmt: skip
        printed = capsys.readouterr()
    finally:
        os.kill(int(pid.read_text()), signal.SIGTERM)
    result = json.loads(printed.out)
    assert f"restart command: sh {script} --max-num-seqs" in printed.err
    assert code == 0, result["checks"]
    assert (result["reproduced"], result["applied"], result["verified"]) == (True, True, True)
    assert result["before"]["eviction_rate"] > 0.05 > result["after"]["eviction_rate"]
    assert result["alerts"][0]["rule"] == "eviction-storm"
    assert result["alerts"][0]["state"] == "resolved"
    assert {change["flag"] for change in result["changes"]} >= {"--max-num-seqs"}


def await_server(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            describe(url)
            return
        except EndpointError:
            assert time.monotonic() < deadline, "the server never came up"
            time.sleep(0.2)
