"""The process-wide runtime: options, what a broken store does, one replay at a time, one module instance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import app.embedded as embedded_module
import app.runtime as runtime_module
from app.embedded import EmbeddedEngine
from app.runtime import AppError, Runtime, RuntimeOptions, get_runtime, set_runtime
from engine.config import ConfigError, EngineConfig
from engine.supervisor import EngineExit, EngineStartError, SupervisorStatus
from probe.store import Store


def test_options_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVONCALL_DATA", str(tmp_path))
    options = RuntimeOptions.from_env({
        "KVONCALL_DATA": str(tmp_path), "KVONCALL_ENGINE_FLAGS": "--max-num-seqs 8 --model 'a b'",
        "KVONCALL_NO_ENGINE": "1", "KVONCALL_LOAD_RPS": "2.5", "KVONCALL_CANARY_S": "300",
    })  # fmt: skip
    assert options == RuntimeOptions(tmp_path, ("--max-num-seqs", "8", "--model", "a b"), False, 2.5, 300.0)
    assert options.log_dir == tmp_path / "logs"
    url = RuntimeOptions.from_env({"KVONCALL_DATA": "postgresql://db/kv"})
    assert url.data == "postgresql://db/kv"


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("KVONCALL_LOAD_RPS", "fast", "KVONCALL_LOAD_RPS is 'fast'"),
        ("KVONCALL_LOAD_RPS", "-1", "0 to 1000"),
        ("KVONCALL_LOAD_RPS", "nan", "0 to 1000"),
        ("KVONCALL_CANARY_S", "hourly", "KVONCALL_CANARY_S is 'hourly'; give seconds between two rounds"),
        ("KVONCALL_ENGINE_FLAGS", "--model 'x", "cannot be split"),
    ],
)
def test_bad_option_is_one_sentence(name: str, value: str, part: str) -> None:
    with pytest.raises(AppError, match="KVONCALL") as error:
        RuntimeOptions.from_env({name: value})
    assert part in str(error.value)


def test_store_that_cannot_be_opened_leaves_a_problem(tmp_path: Path) -> None:
    (tmp_path / "kvoncall.db").write_bytes(b"this is no database at all, not even nearly" * 100)
    runtime = Runtime.open(RuntimeOptions(tmp_path, engine_enabled=False))
    assert runtime.problem
    assert "kvoncall.db" in runtime.problem
    with pytest.raises(AppError, match=r"kvoncall\.db"):
        _ = runtime.store
    runtime.close()


def test_wrong_engine_flags_leave_the_app_running(tmp_path: Path) -> None:
    runtime = Runtime.open(RuntimeOptions(tmp_path, ("--swap-space", "4")))
    try:
        assert runtime.engine is None
        assert runtime.problem is not None
        assert "--swap-space" in runtime.problem
        assert runtime.store.targets.list() == []
        assert runtime.health()["engine"] == "disabled"
    finally:
        runtime.close()


def test_get_runtime_before_the_start_says_how_to_start() -> None:
    with pytest.raises(AppError, match="streamlit run app"):
        get_runtime()


def test_interrupted_replays_are_marked_at_the_start(tmp_path: Path) -> None:
    code = (
        "import sys, os\nfrom pathlib import Path\nfrom probe.store import Store\n"
        "store = Store.open(Path(sys.argv[1]))\n"
        "store.targets.upsert('drill-9', url='http://127.0.0.1:1', kind='drill')\n"
        "replay = store.replays.create('oom', 'drill-9')\n"
        "store.replays.append(replay.id, 'inject', 'drill engine runs')\nstore.replays.set_step(replay.id, 'inject')\n"
        "os._exit(9)\n"
    )
    root = Path(runtime_module.__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": str(root)}
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, check=False).returncode == 9
    runtime = Runtime.open(RuntimeOptions(tmp_path, engine_enabled=False))
    try:
        (replay,) = runtime.store.replays.list()
        assert (replay.status, replay.step) == ("interrupted", "inject")
        assert runtime.store.targets.list() == []
    finally:
        runtime.close()


class FakeSupervisor:
    """A supervisor without a process."""

    def __init__(self, flags: list[str], *, log_dir: Path, name: str, on_exit: Any) -> None:
        self.flags, self.on_exit, self.state = tuple(flags), on_exit, "stopped"
        self.base_url: str | None = None
        self.fail: EngineExit | None = None

    def status(self) -> SupervisorStatus:
        return SupervisorStatus(self.state, 1, self.base_url, self.flags, 0.0, 0, self.fail)

    def start(self, timeout_s: float = 90.0) -> None:
        self.base_url = "http://127.0.0.1:1"
        if self.fail is not None:
            self.state = "crashed"
            self.on_exit(self.fail)
            raise EngineStartError(self.fail)
        self.state = "running"

    def stop(self) -> None:
        self.state = "stopped"

    def restart(self, flags: list[str] | None = None, timeout_s: float = 90.0) -> None:
        self.flags = self.flags if flags is None else tuple(flags)
        self.start()


@pytest.fixture
def embedded(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedEngine]:
    monkeypatch.setattr(embedded_module, "EngineSupervisor", FakeSupervisor)
    engine = EmbeddedEngine(store, ["--max-num-seqs", "48"], log_dir=tmp_path, load_rps=0)
    yield engine
    engine.close()


def drained(engine: EmbeddedEngine) -> None:
    """Waits until every change asked for so far is done."""
    engine._jobs.join()


def test_start_registers_the_target_and_leaves_an_event(embedded: EmbeddedEngine, store: Store) -> None:
    embedded.start("the app started")
    drained(embedded)
    (target,) = store.targets.list()
    assert (target.name, target.kind, target.engine, target.flags) == (
        "embedded", "embedded", "kvoncall", ["--max-num-seqs", "48"],
    )  # fmt: skip
    assert [e.kind for e in store.events.recent()] == ["engine_start"]


def test_restart_with_flags_records_what_changed_and_why(embedded: EmbeddedEngine, store: Store) -> None:
    embedded.start("the app started")
    embedded.restart("storm", ["--max-num-seqs", "6"])
    drained(embedded)
    events = {e.kind: e for e in store.events.recent()}
    assert events["flags_changed"].data == {
        "from": ["--max-num-seqs", "48"], "to": ["--max-num-seqs", "6"], "reason": "storm",
    }  # fmt: skip
    assert events["engine_restart"].message == "storm"
    assert "unexpected" not in events["engine_restart"].data  # announced: the oom alert must stay quiet
    assert store.targets.list()[0].flags == ["--max-num-seqs", "6"]
    with pytest.raises(ConfigError, match="--swap-space"):
        embedded.restart("wrong", ["--swap-space", "4"])


def test_failed_start_shows_the_sentence_and_the_target(embedded: EmbeddedEngine, store: Store) -> None:
    message = "engine died: out of memory: tried to allocate 2048 bytes (device memory 1024 bytes)"
    embedded.supervisor.fail = EngineExit(12, "oom", message, ("last line",), 5.0, 1.0)  # type: ignore[attr-defined]
    embedded.start("the app started")
    drained(embedded)
    assert embedded.snapshot().problem == message
    assert [t.name for t in store.targets.list()] == ["embedded"]
    (event,) = store.events.recent()
    assert (event.kind, event.severity) == ("engine_exit", "critical")
    assert event.data["reason"] == "oom"
    assert event.data["allocation_bytes"] == 2048
    assert event.data["log_tail"] == ["last line"]


def test_stop_is_recorded_as_meant(embedded: EmbeddedEngine, store: Store) -> None:
    embedded.start("the app started")
    embedded.stop("maintenance")
    drained(embedded)
    event = store.events.recent()[0]
    assert (event.kind, event.data["reason"]) == ("engine_exit", "stopped")
    assert "maintenance" in event.message


def test_load_is_held_while_a_replay_runs(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_module, "EngineSupervisor", FakeSupervisor)
    engine = EmbeddedEngine(store, [], log_dir=tmp_path, load_rps=0.001)
    load = engine._load
    assert load is not None
    load.start()
    try:
        engine.hold_load()
        engine.hold_load()
        engine.release_load()
        assert load.status().state == "paused"
        engine.release_load()
        assert load.status().state in {"waiting", "running"}
    finally:
        engine.close()
    assert load.status().state == "stopped"


def test_lifespan_and_pages_share_one_runtime_module(tmp_path: Path) -> None:
    """As `streamlit run app` does it: the folder `app` on sys.path, `streamlit_app` imported by its bare name."""
    folder = Path(runtime_module.__file__).parent
    code = (
        "import sys, json, asyncio\nsys.path.insert(0, sys.argv[1])\nimport streamlit_app, app.runtime\n"
        "async def main():\n"
        "    async with streamlit_app.lifespan(streamlit_app.app):\n"
        "        from app.ui import overview_page\n"
        "        names = [n for n, m in sys.modules.items() if getattr(m, '__file__', None) and "
        "m.__file__.endswith('app/runtime.py')]\n"
        "        same = overview_page.get_runtime() is app.runtime.get_runtime()\n"
        "        print(json.dumps([names, same, app.runtime.get_runtime().problem]))\n"
        "asyncio.run(main())\n"
    )  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(folder.parent), "KVONCALL_NO_ENGINE": "1", "KVONCALL_DATA": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [["app.runtime"], True, None]


def test_flags_default_to_a_valid_configuration() -> None:
    assert EngineConfig.from_args(list(RuntimeOptions(Path()).engine_flags)) == EngineConfig()


@pytest.fixture(autouse=True)
def no_runtime_left() -> Iterator[None]:
    yield
    set_runtime(None)
