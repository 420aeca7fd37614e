"""A tiny random model on disk, real server processes, and a fake LLMEngine for what a real one does too fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from starlette.testclient import TestClient
from tokenizers import decoders, models, pre_tokenizers

REPO = Path(__file__).parents[2]
CONTEXT = 256
EOS = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_model(directory: Path, *, chat_template: bool = True) -> Path:
    """A random two-layer Llama with a byte-level tokenizer (one token a byte, EOS = 256)."""
    hidden, heads, kv_heads, head_dim, layers, vocab = 32, 4, 2, 8, 2, 257
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "dtype": "float32",
    }
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    tensors = {
        "model.embed_tokens.weight": weight(vocab, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": weight(vocab, hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", heads * head_dim, hidden),
            ("self_attn.k_proj", kv_heads * head_dim, hidden),
            ("self_attn.v_proj", kv_heads * head_dim, hidden),
            ("self_attn.o_proj", hidden, heads * head_dim),
            ("mlp.gate_proj", 64, hidden),
            ("mlp.up_proj", 64, hidden),
            ("mlp.down_proj", hidden, 64),
        ):
            tensors[f"{prefix}{name}.weight"] = weight(rows, columns)
        tensors[prefix + "input_layernorm.weight"] = torch.ones(hidden)
        tensors[prefix + "post_attention_layernorm.weight"] = torch.ones(hidden)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    if chat_template:
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def model_dir_without_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "plain", chat_template=False)


class ServerProcess:
    """`python -m engine.server FLAGS`, or another program with these flags; stderr goes to a file."""

    def __init__(self, directory: Path, *flags: str, program: Sequence[str] = ("-m", "engine.server")) -> None:
        self.log_file = directory / "server.log"
        self.base_url = ""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, *flags], stdin=subprocess.DEVNULL, stderr=log, env=environment
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait_ready(self, timeout_s: float = 120) -> ServerProcess:
        deadline = time.monotonic() + timeout_s
        while "listening on " not in self.log:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)
        self.base_url = self.log.split("listening on ")[1].split()[0]
        return self

    def wait(self, timeout_s: float = 120) -> int:
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers on free ports with the tiny model; all are gone when the module ends."""
    started: list[ServerProcess] = []

    def start(*flags: str, **options: Sequence[str]) -> ServerProcess:
        model = () if "--model" in flags else ("--model", str(model_dir))
        port = () if "--port" in flags else ("--port", "0")
        server = ServerProcess(tmp_path_factory.mktemp("server"), *model, *port, *flags, **options)
        started.append(server)
        return server

    yield start
    for server in started:
        server.kill()


@pytest.fixture(scope="module")
def serve(model_dir: Path) -> Iterator[Callable[..., TestClient]]:
    """Serves in this process, the tiny model unless the flags name another; the engines end with the module."""
    from engine.api.app import create_app
    from engine.api.serving import Serving
    from engine.async_engine import AsyncEngine
    from engine.config import EngineConfig
    from engine.engine import LLMEngine
    from engine.metrics import EngineMetrics

    with ExitStack() as stack:

        def start(**flags: Any) -> TestClient:
            settings: dict[str, Any] = {
                "model": str(model_dir), "device": "cpu", "num_gpu_blocks_override": 200, "max_num_seqs": 8,
            }  # fmt: skip
            config = EngineConfig(**(settings | flags))
            metrics = EngineMetrics(config, lambda: engine.stats)
            engine = AsyncEngine(lambda: LLMEngine(config, observer=metrics), on_death=lambda error: None)
            llm = engine.start()
            metrics.set_plan(llm.plan, lambda: None)
            stack.callback(engine.stop)
            app = create_app(Serving(engine, llm, metrics, started_at=0.0))
            return stack.enter_context(TestClient(app, raise_server_exceptions=False))

        yield start


def wait_until(condition: Callable[[], object], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition never came true"
        time.sleep(0.02)


@pytest.fixture(name="wait_until", scope="session")
def wait_until_fixture() -> Callable[..., None]:
    return wait_until


@pytest.fixture(scope="session")
def metric_values() -> Callable[[str], dict[str, float]]:
    """Scrapes a server: `name{label=value,...}` without model_name and engine -> value."""
    from prometheus_client.parser import text_string_to_metric_families

    def scrape(base_url: str) -> dict[str, float]:
        values = {}
        for family in text_string_to_metric_families(httpx.get(base_url + "/metrics").text):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                suffix = "{" + ",".join(f"{k}={v}" for k, v in sorted(labels.items())) + "}" if labels else ""
                values[sample.name + suffix] = sample.value
        return values

    return scrape
