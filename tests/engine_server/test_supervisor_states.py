"""The supervisor's states, with a scripted child instead of an engine: it must survive every way a child can end."""

from __future__ import annotations

import http.client
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import supervisor as supervisor_module
from engine.config import ConfigError
from engine.supervisor import EngineExit, EngineStartError, EngineSupervisor, read_tail

# Answers /health like the engine; `plan` says how each start ends: serve, hang, exit:N, taken, deaf (ignores SIGTERM).
CHILD = r"""
import http.server, os, pathlib, signal, sys, threading, time
plan, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])
steps = plan.read_text().split()
step, rest = steps[0], steps[1:] or steps[:1]
plan.write_text(" ".join(rest))
threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
print("child starts:", step, file=sys.stderr, flush=True)
if step.startswith("exit:"):
    code = int(step[5:])
    print({2: "kvoncall serve: --model is wrong; give another",
           3: f"kvoncall serve: port {port} is in use",
           12: "2026-01-01T00:00:00 CRITICAL engine died: out of memory: tried to allocate 5 bytes",
           134: "memory allocation of 6144 bytes failed",
           }.get(code, "Traceback\nValueError: boom"), file=sys.stderr, flush=True)
    os.abort() if code == 134 else sys.exit(code)
if step == "hang":
    time.sleep(600)
if step == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path.startswith("/exit/"):
            os._exit(int(self.path[6:]))
        self.send_response(200)
        self.send_header("X-Engine-Pid", "1" if step == "stranger" else str(os.getpid()))
        self.end_headers()
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class ScriptedSupervisor(EngineSupervisor):
    script: Path
    plan: Path

    def _command(self, port: int) -> list[str]:
        return [sys.executable, "-S", str(self.script), str(self.plan), str(port)]


Make = Callable[..., ScriptedSupervisor]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[ScriptedSupervisor] = []

    def build(plan: str, flags: tuple[str, ...] = (), **options: Any) -> ScriptedSupervisor:
        supervisor = ScriptedSupervisor(flags, log_dir=tmp_path / "logs", **options)
        supervisor.script, supervisor.plan = tmp_path / "child.py", tmp_path / "plan"
        supervisor.script.write_text(CHILD)
        supervisor.plan.write_text(plan)
        made.append(supervisor)
        return supervisor

    yield build
    for supervisor in made:
        supervisor.stop()


def is_gone(pid: int) -> bool:
    """Neither running nor a zombie."""
    return not Path(f"/proc/{pid}").exists()


def tell_to_exit(supervisor: EngineSupervisor, code: int) -> None:
    assert supervisor.base_url
    connection = http.client.HTTPConnection(supervisor.base_url.removeprefix("http://"), timeout=10)
    connection.request("GET", f"/exit/{code}")
    with pytest.raises(http.client.HTTPException):
        connection.getresponse()
    connection.close()


def test_start_and_stop(make: Make, wait_until: Callable[..., None]) -> None:
    exits: list[EngineExit] = []
    supervisor = make("serve", on_exit=exits.append)
    assert supervisor.status().state == "stopped"
    supervisor.start()
    status = supervisor.status()
    assert (status.state, status.restarts, status.last_exit) == ("running", 0, None)
    assert status.pid is not None
    supervisor.start()  # running already
    assert supervisor.status().pid == status.pid
    supervisor.stop()
    assert supervisor.status().state == "stopped"
    assert supervisor.status().pid is None
    assert is_gone(status.pid)
    wait_until(lambda: exits)
    assert [(e.reason, e.code) for e in exits] == [("stopped", 0)]
    supervisor.stop()  # stopped already
    assert len(exits) == 1


def test_sigkill_is_noticed_explained_and_leaves_no_zombie(make: Make, wait_until: Callable[..., None]) -> None:
    exits: list[EngineExit] = []
    supervisor = make("serve", on_exit=exits.append)
    supervisor.start()
    pid = supervisor.status().pid
    assert pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: exits)
    assert (exits[0].code, exits[0].reason) == (-9, "killed")
    assert exits[0].message == "killed by SIGKILL: the kernel's OOM killer or an operator"
    assert supervisor.status().state == "crashed"
    assert supervisor.status().last_exit == exits[0]
    assert is_gone(pid)
    supervisor.start()
    assert supervisor.status().state == "running"


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        (134, "oom", "engine died: out of memory: memory allocation of 6144 bytes failed"),
        (12, "oom", "engine died: out of memory: tried to allocate 5 bytes"),
        (2, "config", "--model is wrong; give another"),
        (7, "error", "the engine exited with code 7: ValueError: boom"),
    ],
)
def test_exit_codes_at_start_are_classified(make: Make, code: int, reason: str, message: str) -> None:
    supervisor = make(f"exit:{code}")
    with pytest.raises(EngineStartError) as caught:
        supervisor.start()
    assert caught.value.exit.reason == reason
    assert caught.value.exit.code == (-signal.SIGABRT if code == 134 else code)
    assert caught.value.exit.message == str(caught.value) == message
    assert any("child starts" in line for line in caught.value.exit.log_tail)
    assert supervisor.status().state == "crashed"


def test_exit_while_running_is_classified(make: Make, wait_until: Callable[..., None]) -> None:
    exits: list[EngineExit] = []
    supervisor = make("serve", on_exit=exits.append)
    for code, reason in ((12, "oom"), (1, "error"), (0, "stopped")):
        exits.clear()
        supervisor.start()
        tell_to_exit(supervisor, code)
        wait_until(lambda: exits)
        assert exits[0].reason == reason
        assert supervisor.status().state == ("stopped" if code == 0 else "crashed")


def test_taken_port_is_replaced_when_we_chose_it(make: Make) -> None:
    supervisor = make("exit:3 exit:3 serve")
    supervisor.start()
    assert supervisor.status().state == "running"


def test_taken_port_is_reported_when_it_was_given(make: Make) -> None:
    supervisor = make("exit:3", ("--port", "19999"))
    with pytest.raises(EngineStartError) as caught:
        supervisor.start()
    assert caught.value.exit.reason == "port"
    assert "19999" in str(caught.value)


def test_port_is_kept_over_restarts_and_flags_change(make: Make) -> None:
    supervisor = make("serve")
    supervisor.start()
    url, pid = supervisor.base_url, supervisor.status().pid
    supervisor.restart(["--max-num-seqs", "8"])
    assert supervisor.base_url == url
    assert supervisor.status().pid != pid
    assert supervisor.status().flags == ("--max-num-seqs", "8")
    with pytest.raises(ConfigError):
        supervisor.restart(["--no-such-flag"])


def test_start_that_never_answers_times_out(make: Make) -> None:
    supervisor = make("hang")
    with pytest.raises(EngineStartError, match="did not answer"):
        supervisor.start(timeout_s=0.3)
    assert supervisor.status().state == "crashed"
    assert supervisor.status().pid is None


def test_answer_of_a_stranger_on_the_port_is_not_taken_for_the_child(make: Make) -> None:
    with pytest.raises(EngineStartError, match="did not answer"):
        make("stranger").start(timeout_s=1)


def test_stop_interrupts_a_start(make: Make, wait_until: Callable[..., None]) -> None:
    supervisor = make("hang")
    errors: list[EngineStartError] = []

    def start() -> None:
        try:
            supervisor.start(timeout_s=60)
        except EngineStartError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    wait_until(lambda: supervisor.status().state == "starting")
    supervisor.stop()
    thread.join(30)
    assert [error.exit.reason for error in errors] == ["stopped"]
    assert supervisor.status().state == "stopped"


def test_stop_kills_a_child_that_ignores_sigterm(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "STOP_TIMEOUT_S", 0.2)
    supervisor = make("deaf")
    supervisor.start()
    pid = supervisor.status().pid
    assert pid
    supervisor.stop()
    assert is_gone(pid)
    exit_ = supervisor.status().last_exit
    assert exit_
    assert (exit_.code, exit_.reason) == (-9, "stopped")


def test_auto_restart_backs_off_and_gives_up(
    make: Make, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "RESTART_DELAY_S", 0.01)
    exits: list[EngineExit] = []
    supervisor = make("serve serve exit:12 exit:12 serve", on_exit=exits.append, auto_restart=True)
    supervisor.start()
    tell_to_exit(supervisor, 12)
    wait_until(lambda: supervisor.status().state == "running" and supervisor.status().restarts == 1)
    tell_to_exit(supervisor, 12)  # both tries that are left fail
    wait_until(lambda: len(exits) == 4)
    wait_until(lambda: supervisor.status().restarts == 3)
    time.sleep(0.2)  # there must be no fifth start
    assert supervisor.status().state == "crashed"
    assert [e.reason for e in exits] == ["oom"] * 4
    supervisor.start()  # an explicit start begins anew
    assert (supervisor.status().state, supervisor.status().restarts) == ("running", 0)


def test_stop_ends_auto_restart(make: Make, wait_until: Callable[..., None]) -> None:
    supervisor = make("serve", auto_restart=True)
    supervisor.start()
    tell_to_exit(supervisor, 1)
    wait_until(lambda: supervisor.status().state == "crashed")
    supervisor.stop()
    time.sleep(1.2)  # the first delay is 1 s
    assert supervisor.status().state == "stopped"
    assert supervisor.status().restarts == 0


def test_failing_on_exit_does_not_hurt(make: Make, wait_until: Callable[..., None]) -> None:
    called = threading.Event()

    def on_exit(_: EngineExit) -> None:
        called.set()
        raise RuntimeError("boom")

    supervisor = make("serve", on_exit=on_exit)
    supervisor.start()
    tell_to_exit(supervisor, 1)
    wait_until(called.is_set)
    supervisor.start()
    assert supervisor.status().state == "running"


def test_logs_rotate_with_each_start(make: Make) -> None:
    supervisor = make("exit:7 exit:12 exit:2 exit:7 exit:7 exit:7 exit:7 exit:12")
    for _ in range(8):
        with pytest.raises(EngineStartError):
            supervisor.start()
    logs = sorted(path.name for path in supervisor.log_file.parent.iterdir())
    assert logs == ["embedded.log", *(f"embedded.log.{number}" for number in range(1, 6))]
    assert "out of memory" in supervisor.log_file.read_text()
    assert "exit:2" in (supervisor.log_file.parent / "embedded.log.5").read_text()


def test_tail_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {i} {'x' * 100}\n" for i in range(50_000)))
    tail = read_tail(log)
    assert len(tail) == 40
    assert tail[-1].startswith("line 49999 ")
    assert read_tail(tmp_path / "none") == ()
