"""A plan of a running server: what it tells is read off, its measured pool stands beside the computed one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig, ModelDims
from engine.memory import plan_kv_cache
from engine.memory.model_presets import model_config
from probe.cli import main
from probe.store import Store
from probe.targets import attach_target

BLOCKS = 28137  # what Llama-3.1-70B gets on four H100 with vLLM 0.33.0's defaults


def vllm_page(**labels: str) -> str:
    """Enough of vLLM's page to be told from others, with its cache configuration."""
    told = {
        "block_size": "16",
        "cache_dtype": "auto",
        "gpu_memory_utilization": "0.92",
        "num_gpu_blocks": str(BLOCKS),
        "num_gpu_blocks_override": "None",
        "kv_cache_memory_bytes": "None",
        "kv_cache_size_tokens": str(BLOCKS * 16),
        "enable_prefix_caching": "True",
        **labels,
    }
    written = ",".join(f'{name}="{value}"' for name, value in told.items())
    counters = "".join(
        f'# TYPE vllm:{name} {kind}\nvllm:{name}{suffix}{{model_name="m",engine="0"}} 0\n'
        for name, kind, suffix in (
            ("num_requests_running", "gauge", ""),
            ("num_requests_waiting", "gauge", ""),
            ("kv_cache_usage_perc", "gauge", ""),
            ("num_preemptions", "counter", "_total"),
            ("generation_tokens", "counter", "_total"),
        )
    )
    return f"{counters}# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{written}}} 1\n"


@contextmanager
def server(pages: Mapping[str, str]) -> Iterator[str]:
    """An address that answers these paths and no others."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages.get(self.path)
            self.send_response(404 if body is None else 200)
            text = "text/plain; version=0.0.4" if self.path == "/metrics" else "application/json"
            self.send_header("Content-Type", text)
            self.end_headers()
            self.wfile.write((body or "").encode())

        def log_message(self, *args: Any) -> None:
            return

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


def vllm(model: str, page: str | None = None, length: int = 131072) -> dict[str, str]:
    listed = {"data": [{"id": model, "root": model, "max_model_len": length}]}
    return {"/metrics": page or vllm_page(), "/v1/models": json.dumps(listed), "/version": '{"version": "0.33.0"}'}


def planned(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["plan", *args, "--json"]) in (0, 1)
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def measured(data: Mapping[str, Any], what: str) -> dict[str, Any]:
    row: dict[str, Any] = next(row for row in data["measured"] if row["what"] == what)
    return row


def test_a_vllm_server_with_its_gpus_named(capsys: pytest.CaptureFixture[str]) -> None:
    with server(vllm("meta-llama/Llama-3.1-70B-Instruct")) as url:
        data = planned(capsys, "--target", url, "--gpu", "H100-80GB", "--tp", "4")
    assert data["deployment"]["engine"] == "vllm"
    assert data["deployment"]["version"] == "0.33.0"
    assert data["max_model_len"] == 131072
    assert data["kv_bytes_per_token"] == 81920
    assert measured(data, "KV blocks")["measured"] == BLOCKS
    assert measured(data, "KV blocks")["computed"] == data["kv_blocks"]
    assert abs(measured(data, "KV tokens")["apart"]) < 0.05
    assert any("preset of that name" in note for note in data["notes"])


def test_without_its_gpu_the_plan_starts_from_the_measured_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    with server(vllm("meta-llama/Llama-3.1-70B-Instruct")) as url:
        data = planned(capsys, "--target", url)
        assert main(["plan", "--target", url]) == 0
        out = capsys.readouterr().out
    assert data["kv_blocks"] == BLOCKS
    assert any("does not tell its GPU" in note for note in data["notes"])
    assert any("tensor-parallel size" in note for note in data["notes"])
    assert "the same" in out


def test_flags_given_beside_a_target_are_a_what_if(capsys: pytest.CaptureFixture[str]) -> None:
    with server(vllm("meta-llama/Llama-3.1-70B-Instruct")) as url:
        on = ("--target", url, "--gpu", "H100-80GB", "--tp", "4")
        as_is, halved = planned(capsys, *on), planned(capsys, *on, "--kv-cache-dtype", "fp8")
    assert halved["kv_bytes_per_token"] * 2 == as_is["kv_bytes_per_token"]


def test_a_stored_target_that_died_is_planned_from_what_was_last_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = ("--data-dir", str(tmp_path))
    with server(vllm("meta-llama/Llama-3.1-70B-Instruct")) as url, Store.open(tmp_path) as store:
        attach_target(store, f"prod={url}")
        store.targets.set_facts("prod", {"model": "meta-llama/Llama-3.1-70B-Instruct", "max_model_len": 131072})
    data = planned(capsys, "--target", "prod", "--gpu", "H100-80GB", "--tp", "4", *where)
    assert measured(data, "KV blocks")["measured"] == BLOCKS
    assert data["max_model_len"] == 131072
    assert any("last read of prod" in note for note in data["notes"])


def test_a_model_no_preset_describes_asks_for_its_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(model_config("Qwen3-0.6B")["config"]), encoding="utf-8")
    with server(vllm("acme/house-model", length=4096)) as url:
        assert main(["plan", "--target", url]) == 2
        err = capsys.readouterr().err
        assert "acme/house-model" in err
        assert "--model-config" in err
        data = planned(capsys, "--target", url, "--model-config", str(config))
    assert data["kv_bytes_per_token"] == 114688


def test_a_model_folder_on_this_machine_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config("Qwen3-0.6B")["config"]), encoding="utf-8")
    with server(vllm(str(tmp_path), length=4096)) as url:
        data = planned(capsys, "--target", url)
    assert data["kv_bytes_per_token"] == 114688
    assert any("read from its config.json here" in note for note in data["notes"])


def test_the_embedded_engines_own_plan_is_met_to_the_block(capsys: pytest.CaptureFixture[str]) -> None:
    dims = ModelDims("LlamaForCausalLM", 4, 4, 2, 32, 128, 256, 1046, 2048, "float32")
    config = EngineConfig.from_args(["--device-memory", "512MiB"])
    made = plan_kv_cache(
        config, dims, weights_bytes=3423744, activation_peak_bytes=23805952, bookkeeping_bytes_per_block=768
    )
    debug = {
        "engine": "kvoncall",
        "version": "0.1.0",
        "model": "testbed",
        "flags": config.flag_values(),
        "dims": {name: getattr(dims, name) for name in dims.__dataclass_fields__},
        "memory_plan": made.to_dict(),
    }
    page = vllm_page().replace("vllm:", "kvoncall:")
    pages = {"/metrics": page, "/debug/engine": json.dumps(debug), "/v1/models": '{"data": [{"id": "testbed"}]}'}
    with server(pages) as url:
        data = planned(capsys, "--target", url)
    assert data["deployment"]["engine"] == "kvoncall"
    assert measured(data, "KV blocks") == {
        "what": "KV blocks",
        "measured": made.num_gpu_blocks,
        "computed": made.num_gpu_blocks,
        "apart": 0,
    }
    assert measured(data, "KV tokens")["apart"] == 0
    assert data["kv_bytes_per_token"] == made.kv_bytes_per_token


def test_an_address_that_is_no_engine_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with server({"/metrics": "# TYPE up gauge\nup 1\n"}) as url:
        assert main(["plan", "--target", url]) == 2
    assert "none of an engine known here" in capsys.readouterr().err
