"""How an engine process starts, refuses to start, and ends: exit codes, sentences, signals, its parent's death."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.supervisor import EngineExit, EngineStartError, EngineSupervisor

pytestmark = pytest.mark.xdist_group("engine_server_life")

REPO = Path(__file__).parents[2]
OVERCOMMITTED = ("--device-memory", "64MiB", "--kv-cache-memory-bytes", "200MiB")


def refused(server: Any, code: int) -> str:
    """The sentence with which a server refused to start."""
    assert server.wait() == code, server.log
    assert "Traceback" not in server.log
    (sentence,) = [line for line in server.log.splitlines() if line.startswith("kvoncall serve: ")]
    return sentence


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--no-such-flag",), "--no-such-flag"),
        (("--max-num-seqs", "many"), "--max-num-seqs"),
        (("--gpu-memory-utilization", "1.5"), "--gpu-memory-utilization"),
        (("--model", "/does/not/exist"), "/does/not/exist"),
    ],
)
def test_bad_flags_and_model_exit_2(start_server: Any, flags: tuple[str, ...], words: str) -> None:
    assert words in refused(start_server(*flags), 2)


def test_a_head_dim_that_the_format_cannot_pack_exits_2(start_server: Any, model_dir: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(model_dir, odd)
    dims = json.loads((odd / "config.json").read_text()) | {"head_dim": 7}
    (odd / "config.json").write_text(json.dumps(dims))
    sentence = refused(start_server("--model", str(odd), "--kv-cache-dtype", "int4_kivi"), 2)
    assert "--kv-cache-dtype int4_kivi" in sentence
    assert "divisible by 2: 7" in sentence


def test_a_quantized_cache_shows_in_metrics_and_facts(
    start_server: Any, model_dir: Path, metric_values: Callable[[str], dict[str, float]]
) -> None:
    flags = ("--kv-cache-dtype", "int4_kivi", "--num-gpu-blocks-override", "40", "--max-num-seqs", "4")
    server = start_server("--model", str(model_dir), *flags).wait_ready()
    body = {"prompt": "x" * 40, "max_tokens": 20, "ignore_eos": True}
    assert httpx.post(server.base_url + "/v1/completions", json=body, timeout=60).status_code == 200
    facts = httpx.get(server.base_url + "/debug/engine").json()
    plan = facts["memory_plan"]
    assert facts["flags"]["--kv-cache-dtype"] == plan["kv_cache_dtype"] == "int4_kivi"
    # 2 layers x 2 KV heads x 16 tokens of 8 channels; keys share 2 fp16 a channel, values have 2 a token.
    assert plan["kv_cache_bytes"] == 40 * 4 * (16 * 4 + 8 * 4 + 16 * 4 + 16 * 4)
    assert plan["open_blocks_bytes"] == 4 * 4 * (16 * 8 * 2) * 4
    assert 'cache_dtype="int4_kivi"' in httpx.get(server.base_url + "/metrics").text
    parts = metric_values(server.base_url)
    assert parts["kvoncall:memory_plan_bytes{part=kv_cache}"] == plan["kv_cache_bytes"]
    assert parts["kvoncall:memory_plan_bytes{part=open_blocks}"] == plan["open_blocks_bytes"]


def test_formats_by_layer_show_in_metrics_and_facts(
    start_server: Any, model_dir: Path, metric_values: Callable[[str], dict[str, float]]
) -> None:
    flags = ("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "1", "--calculate-kv-scales")
    server = start_server("--model", str(model_dir), "--num-gpu-blocks-override", "40", *flags).wait_ready()
    facts = httpx.get(server.base_url + "/debug/engine").json()
    plan = facts["memory_plan"]
    assert (plan["kv_cache_dtype"], plan["kv_layer_dtypes"]) == ("mixed", ["fp8_e4m3", "float32"])
    assert plan["kv_bytes_per_token"] == 2 * 2 * 8 * (1 + 4)  # 2 KV heads of 8 channels, K and V
    assert facts["flags"]["--kv-cache-dtype-skip-layers"] == "1"
    assert facts["kv_scales"] == [{"layer": 0, "k_scale": 1.0, "v_scale": 1.0, "source": "pending"}]
    assert """kv_cache_dtype_skip_layers="['1']\"""" in httpx.get(server.base_url + "/metrics").text
    assert metric_values(server.base_url)["kvoncall:kv_bytes_per_token"] == plan["kv_bytes_per_token"]
    body = {"prompt": "x" * 40, "max_tokens": 4}
    assert httpx.post(server.base_url + "/v1/completions", json=body, timeout=60).status_code == 200
    (scales,) = httpx.get(server.base_url + "/debug/engine").json()["kv_scales"]
    assert scales["source"] == "first batch"
    assert 0 < scales["k_scale"] < 1


def test_corrupt_weights_exit_2(start_server: Any, model_dir: Path, tmp_path: Path) -> None:
    corrupt = tmp_path / "corrupt"
    shutil.copytree(model_dir, corrupt)
    (corrupt / "model.safetensors").write_bytes(b"\x00" * 100)
    assert "model.safetensors" in refused(start_server("--model", str(corrupt)), 2)


def test_a_partial_gguf_exits_2(start_server: Any, tmp_path: Path) -> None:
    file = tmp_path / "partial.gguf"
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (5).to_bytes(8, "little"))
    sentence = refused(start_server("--model", str(file)), 2)
    assert "partial.gguf' is not readable as GGUF" in sentence
    assert "fetch it again" in sentence


def test_the_tokenizer_of_another_model_exits_2(start_server: Any, model_dir: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(model_dir, mixed)
    shutil.copy(REPO / "engine" / "testbed" / "model" / "tokenizer.json", mixed)
    assert "tokenizer and weights do not belong together" in refused(start_server("--model", str(mixed)), 2)


def test_a_layer_that_is_not_there_exits_2(start_server: Any, model_dir: Path) -> None:
    sentence = refused(start_server("--model", str(model_dir), "--kv-cache-dtype-layers", "1-2:fp8"), 2)
    assert "names layer 2, but the model has 2 layers: 0 to 1" in sentence


def test_port_in_use_exits_3(start_server: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in refused(start_server("--port", port), 3)


def test_sigterm_finishes_short_requests_and_exits_0(start_server: Any, model_dir_without_template: Path) -> None:
    server = start_server("--model", str(model_dir_without_template), "--num-gpu-blocks-override", "40").wait_ready()
    error = httpx.post(
        server.base_url + "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}, timeout=60
    )
    assert error.status_code == 400
    assert "chat template" in error.json()["error"]["message"]
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}
        answers.append(httpx.post(server.base_url + "/v1/completions", json=body, timeout=60))

    thread = threading.Thread(target=ask)
    thread.start()
    while not httpx.get(server.base_url + "/debug/requests").json()["requests"] and thread.is_alive():
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0, server.log
    thread.join(30)
    assert answers[0].status_code in (200, 503), "served to its end, or told that the engine is shutting down"
    assert "Traceback" not in server.log
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.base_url + "/health")


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("torch.empty(2**36, dtype=torch.uint8)", 12, "engine died: out of memory: "),
        ("raise RuntimeError('kernel fault')", 1, "engine died: RuntimeError: kernel fault"),
    ],
)
def test_death_in_a_step(start_server: Any, fault: str, code: int, words: str) -> None:
    """A step that really cannot allocate, and one that fails otherwise: the process ends with its own exit code."""
    program = (
        "import sys, torch, engine.engine\nfrom engine.server import main\n"
        f"def step(self):\n    {fault}\n"
        "engine.engine.LLMEngine.step = step\nsys.exit(main(sys.argv[1:]))"
    )
    server = start_server("--num-gpu-blocks-override", "40", program=("-c", program)).wait_ready()
    try:
        answer = httpx.post(server.base_url + "/v1/completions", json={"prompt": "x"}, timeout=60)
        assert (code, answer.status_code, answer.json()["error"]["code"]) == (1, 503, "engine_dead")
    except httpx.RemoteProtocolError:
        assert code == 12, "out of memory ends the process before it can answer"
    assert server.wait() == code, server.log
    assert words in server.log


def test_real_engine_under_the_supervisor(
    model_dir: Path, tmp_path: Path, wait_until: Callable[..., None], metric_values: Callable[..., Any]
) -> None:
    """Start, kill -9, restart into an out-of-memory configuration, and back."""
    exits: list[EngineExit] = []
    flags = ["--model", str(model_dir), "--num-gpu-blocks-override", "40", "--device-memory", "64MiB"]
    supervisor = EngineSupervisor(flags, log_dir=tmp_path, on_exit=exits.append)
    try:
        supervisor.start()
        assert supervisor.base_url
        first_start = metric_values(supervisor.base_url)["process_start_time_seconds"]
        pid = supervisor.status().pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: exits)
        assert (exits[0].reason, supervisor.status().state) == ("killed", "crashed")

        with pytest.raises(EngineStartError) as caught:
            supervisor.restart([*flags[:2], *OVERCOMMITTED])
        assert caught.value.exit.reason == "oom"
        assert caught.value.exit.code == 12
        assert caught.value.exit.message.startswith("engine died: out of memory: ")
        assert str(64 * 1024**2) in caught.value.exit.message

        supervisor.restart(flags)
        assert metric_values(supervisor.base_url)["process_start_time_seconds"] > first_start
    finally:
        supervisor.stop()
    assert supervisor.status().state == "stopped"
    wait_until(lambda: len(exits) == 3)
    assert exits[-1].reason == "stopped"


@pytest.mark.parametrize("moment", ["loading", "running"])
def test_engine_dies_with_a_parent_that_was_killed(
    model_dir: Path, tmp_path: Path, moment: str, wait_until: Callable[..., None]
) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom engine.supervisor import EngineSupervisor\n"
        "import threading\n"
        "s = EngineSupervisor(['--model', sys.argv[1], '--num-gpu-blocks-override', '40'], log_dir=Path(sys.argv[2]))\n"
        "t = threading.Thread(target=s.start, daemon=True); t.start()\n"
        "while s.status().state != sys.argv[3]: time.sleep(0.01)\n"
        "print(s.status().pid, flush=True)\ntime.sleep(600)\n"
    )
    state = {"loading": "starting", "running": "running"}[moment]
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(model_dir), str(tmp_path), state],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert parent.stdout
    child = int(parent.stdout.readline())
    assert Path(f"/proc/{child}").exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()

    def is_over() -> bool:
        try:
            return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    wait_until(is_over, timeout_s=60)  # a zombie is init's to collect, where there is an init
