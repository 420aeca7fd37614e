"""Real engines, end to end: arms of a lab, and what they leave behind (nothing)."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.config import ConfigError
from engine.supervisor import EngineStartError
from probe.cli import main
from probe.quality.lab import Arm, Lab
from probe.quality.suite import QualityError, SuiteSpec
from probe.store import Store

SPEC = SuiteSpec(turns=4, conversations=2, context=256, text_windows=1)


@pytest.fixture
def lab(store: Store, tmp_path: Path) -> Iterator[Lab]:
    with Lab(store, ["--model", "testbed-outliers", "--max-model-len", "512"], log_dir=tmp_path / "logs") as opened:
        yield opened


def engines() -> list[int]:
    """Pids of this process's running engines, by their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1] if words else ""
        except OSError:
            continue
        if b"engine.server" in words and parent == str(os.getpid()):
            found.append(int(entry.name))
    return found


def test_arms_are_measured_on_engines_that_go_away(store: Store, lab: Lab) -> None:
    full, int4 = Arm("full", {"--kv-cache-dtype": "float16"}), Arm("int4", {"--kv-cache-dtype": "int4_symmetric"})
    baseline = lab.measure(full, SPEC)
    other = Arm("int8", {"--kv-cache-dtype": "int8_per_token_head"})
    runs = list(lab.measure_all([other, int4], SPEC, baseline=baseline))
    assert [found.label for found in runs] == ["int8", "int4"]
    run = runs[1]
    assert engines() == []
    assert (baseline.target, baseline.label, baseline.facts["kv_cache_dtype"]) == ("lab", "full", "float16")
    assert run.facts["kv_cache_dtype"] == "int4_symmetric"
    assert run.facts["kv_bytes_per_token"] < baseline.facts["kv_bytes_per_token"] / 2
    assert baseline.result is not None
    assert baseline.result["overall"]["accuracy"] == 1
    assert run.result is not None
    assert run.result["likelihood"]["mean_kl"] > 0.01
    assert run.result["against"]["items"] == 8
    assert store.targets.list(active=None) == []


def test_a_measurement_given_up_leaves_no_engine(lab: Lab) -> None:
    runs = lab.measure_all([Arm("a"), Arm("b"), Arm("c")], SPEC)
    assert next(runs).label == "a"
    runs.close()  # type: ignore[attr-defined]
    assert engines() == []
    with pytest.raises(QualityError, match="was stopped"):
        lab.measure(Arm("d"), SPEC)
    assert engines() == []


def test_leaving_the_lab_ends_what_another_thread_measures(lab: Lab, wait_until: Callable[..., None]) -> None:
    ended: list[Exception] = []

    def measure() -> None:
        try:
            lab.measure(Arm("a"), SPEC)
        except (QualityError, EngineStartError) as error:
            ended.append(error)

    thread = threading.Thread(target=measure)
    thread.start()
    wait_until(lambda: len(engines()) == 1, "the engine")
    lab.close()
    thread.join()
    assert engines() == []
    assert ended


def test_an_engine_that_dies_is_told_with_its_reason_and_the_run_can_go_on(store: Store, tmp_path: Path) -> None:
    def kill(_: str) -> None:
        for pid in engines():
            os.kill(pid, signal.SIGKILL)

    with Lab(store, ["--max-model-len", "512"], log_dir=tmp_path / "logs", progress=kill) as lab:
        with pytest.raises(QualityError, match=r"killed by SIGKILL.*items are kept") as error:
            lab.measure(Arm("auto"), SPEC)
        partial = store.quality.get(error.value.run_id or "")
    assert partial is not None
    assert partial.status == "incomplete"
    with Lab(store, ["--max-model-len", "512"], log_dir=tmp_path / "logs") as lab:
        done = lab.measure(Arm("auto"), SPEC, resume=partial)
    assert (done.id, done.status, len(store.quality.items(done.id))) == (partial.id, "done", 9)


def test_flags_that_make_no_sense_are_refused_before_anything_starts(lab: Lab) -> None:
    with pytest.raises(ConfigError, match="int3"):
        list(lab.measure_all([Arm("good"), Arm("x", {"--kv-cache-dtype": "int3"})], SPEC))
    assert engines() == []


def test_the_command_measures_formats_and_resumes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    args = ["quality", "--data-dir", str(data), "--dtypes", "auto,int8_per_token_head", "--turns", "3"]
    args += ["--conversations", "2", "--context", "256", "--windows", "1", "--json"]
    args += ["--engine-flags", "--max-model-len 512 --api-key secret"]
    assert main(args) == 0
    value = json.loads(capsys.readouterr().out)
    assert [arm["label"] for arm in value["arms"]] == ["auto", "int8_per_token_head"]
    assert [arm["overall"]["accuracy"] for arm in value["arms"]] == [1, 1]
    assert value["arms"][1]["likelihood"]["top1_agreement"] > 0.9
    with Store.open(data) as store:
        store.quality.finish(value["arms"][1]["run_id"], "incomplete", None, "the test says so")
    resume = ["quality", "--data-dir", str(data), "--resume", value["arms"][1]["run_id"], "--json"]
    assert main(resume) == 0
    (arm,) = json.loads(capsys.readouterr().out)["arms"]
    assert (arm["label"], arm["facts"]["kv_cache_dtype"]) == ("int8_per_token_head", "int8_per_token_head")
    assert arm["against"]["baseline_id"] == value["arms"][0]["run_id"]
