"""A store with one of everything an on-call engineer meets, a stand-in for the embedded engine, and a page runner."""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest

import app.runtime as runtime_module
from app.embedded import EmbeddedSnapshot
from app.runtime import Runtime, RuntimeOptions, set_runtime
from engine.config import EngineConfig, ModelDims
from engine.supervisor import EngineExit, SupervisorStatus
from probe.quality.score import summarize
from probe.quality.suite import SuiteSpec
from probe.store import AlertUpdate, QualityItem, QualityRun, Reading, Sample, Store

MAIN = Path(runtime_module.__file__).with_name("main.py")
WINDOW_S = 60.0


def embedded_facts() -> dict[str, Any]:
    """The facts the collector keeps of an engine with too small a pool."""
    config = EngineConfig.from_args(["--max-num-seqs", "48", "--num-gpu-blocks-override", "200"])
    dims = ModelDims("LlamaForCausalLM", 4, 4, 2, 32, 128, 256, 512, 2048, "float32")
    return {
        "engine": "kvoncall",
        "version": "0.1.0",
        "flags": config.flag_values(),
        "dims": dims.__dict__,
        "memory_plan": {
            "device_memory_bytes": 512 * 2**20, "weights_bytes": 3 * 2**20, "activation_peak_bytes": 40 * 2**20,
            "kv_cache_bytes": 200 * 16 * 2048, "kv_bytes_per_token": 2048, "block_size": 16, "num_gpu_blocks": 200,
            "kv_cache_size_tokens": 199 * 16, "max_model_len": 2048, "max_concurrency": 1.55,
            "source": "num_gpu_blocks_override",
        },
        "traffic": {"peak_running": 40, "peak_waiting": 12, "prompt_tokens_mean": 300.0, "output_tokens_mean": 60.0,
                    "tokens_per_request_peak": 500},
    }  # fmt: skip


def write_samples(store: Store, target: str, now: float) -> None:
    """Five minutes of scrapes of two engines behind one target: a preemption storm in the last minute."""
    samples: list[Sample] = []

    def add(metric: str, labels: dict[str, str], ts: float, value: float) -> None:
        samples.append(Sample(target, metric, labels, ts, value))

    for i in range(151):
        ts = now - 300 + 2 * i
        storm = max(0, i - 120)
        add("up", {}, ts, 1.0)
        for engine, usage, running, waiting in (("0", 0.97, 3, 2), ("1", 0.20, 5, 1)):
            labels = {"engine": engine}
            add("kv_usage_ratio", labels, ts, usage)
            add("requests_running", labels, ts, running)
            add("requests_waiting", labels, ts, waiting)
            add("requests_finished_total", labels, ts, 1000 + i)
            add("preemptions_total", labels, ts, 500 + storm)
            add("generation_tokens_total", labels, ts, 100 * i)
            add("prompt_tokens_total", labels, ts, 300 * i)
            add("prefix_queries_total", labels, ts, 300 * i)
            add("prefix_hits_total", labels, ts, 75 * i)
            for le, share in (("0.1", 0.5), ("1.0", 1.0), ("+Inf", 1.0)):
                add("ttft_seconds_bucket", {**labels, "le": le}, ts, share * 10 * i)
    store.samples.write(samples)
    store.samples.flush()


def fire_alert(store: Store, target: str, now: float, rule: str = "eviction-storm") -> None:
    """Walks an alert through pending to firing, as the evaluator does."""
    for ts, value, state, change in ((now - 50, 0.30, "pending", ("inactive", "pending")),
                                     (now - 20, 0.62, "firing", ("pending", "firing"))):  # fmt: skip
        reading = Reading(
            rule, target, "breach", state, value, 0.05, value * 100, 100.0, WINDOW_S,
            f"{value:.0%} of requests in service were preempted", "2 of 2 engines, 60 s of data, no reset", ts,
        )  # fmt: skip
        store.alerts.save([AlertUpdate(reading, "warning", 30.0, rule, 30.0, (change,))])


@pytest.fixture
def fire() -> Callable[..., None]:
    """`fire_alert`, for one more rule."""
    return fire_alert


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
def seeded(store: Store) -> Store:
    """Target, samples, a firing alert, events."""
    now = time.time()
    store.targets.upsert(
        "embedded", url="http://127.0.0.1:1", kind="embedded", engine="kvoncall",
        flags=["--max-num-seqs", "48", "--num-gpu-blocks-override", "200"], facts=embedded_facts(),
    )  # fmt: skip
    write_samples(store, "embedded", now)
    fire_alert(store, "embedded", now)
    store.events.add("embedded", "engine_start", "the app started", ts=now - 290)
    return store


@dataclass
class FakeEngine:
    """Stands in for `EmbeddedEngine`: remembers what pages asked for."""

    status: SupervisorStatus
    calls: list[tuple[str, str, Sequence[str] | None]] = field(default_factory=list)
    problem: str | None = None
    notice: str | None = None

    def pending_notice(self) -> str | None:
        return self.notice

    def accept_notice(self) -> None:
        self.notice = None

    def hold_load(self) -> None:
        self.calls.append(("hold_load", "", None))

    def release_load(self) -> None:
        self.calls.append(("release_load", "", None))

    @property
    def supervisor(self) -> Any:
        return SimpleNamespace(base_url=self.status.base_url)

    def snapshot(self) -> EmbeddedSnapshot:
        return EmbeddedSnapshot(self.status, None, self.problem, None)

    def start(self, reason: str, flags: Sequence[str] | None = None) -> None:
        self.calls.append(("start", reason, flags))

    def stop(self, reason: str) -> None:
        self.calls.append(("stop", reason, None))

    def restart(self, reason: str, flags: Sequence[str] | None = None) -> None:
        if flags is not None:
            EngineConfig.from_args(list(flags))
        self.calls.append(("restart", reason, flags))


def engine_status(state: str, base_url: str = "http://127.0.0.1:1", last_exit: EngineExit | None = None) -> Any:
    return SupervisorStatus(
        state=state, pid=4711 if state == "running" else None, base_url=base_url,
        flags=["--max-num-seqs", "48", "--num-gpu-blocks-override", "200"],
        started_at=time.time() - 90, restarts=1, last_exit=last_exit,
    )  # fmt: skip


@pytest.fixture
def debug_server() -> Iterator[str]:
    """Serves the engine's `/debug` views in its shape; yields its base URL."""
    request = {
        "request_id": "cmpl-7", "status": "running", "num_prompt_tokens": 321, "num_output_tokens": 12,
        "max_tokens": 64, "num_computed_tokens": 333, "num_cached_tokens": 64, "num_blocks": 21,
        "num_preemptions": 2, "priority": 0, "isolated": False, "age_seconds": 3.5,
    }  # fmt: skip
    waiting = {**request, "request_id": "cmpl-8", "status": "waiting", "num_blocks": 0, "num_preemptions": 0}
    told = json.loads(Path(__file__).with_name("isolation.json").read_text())
    answers = {
        "/debug/engine": told["engine"],
        "/debug/prefix": told["tree"],
        "/debug/requests": {"requests": [request, waiting]},
        "/debug/blocks": {"num_blocks": 200, "block_size": 16, "states": [0] * 100 + [1] * 50 + [2] * 40 + [3] * 9},
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers.get(self.path, {})).encode()
            self.send_response(200 if self.path in answers else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def use(tmp_path: Path) -> Iterator[Callable[..., Runtime]]:
    """Makes a runtime around a store (and a stand-in engine) this process's."""

    def install(store: Store | None, engine: Any = None, problem: str | None = None) -> Runtime:
        options = RuntimeOptions(tmp_path / "data", engine_enabled=engine is not None)
        runtime = Runtime(options, store=store, engine=engine, problem=problem)
        set_runtime(runtime)
        return runtime

    yield install
    set_runtime(None)


def unescaped(markdown: str) -> str:
    """Markdown without its backslashes."""
    return re.sub(r"\\(\W|_)", r"\1", markdown)


@dataclass(frozen=True)
class Shown:
    """A page after its run."""

    at: AppTest

    @property
    def text(self) -> str:
        """Everything readable, one piece a line; links with their query."""
        kinds = ("title", "header", "subheader", "markdown", "caption", "error", "warning", "info", "success", "code")
        pieces = [str(element.value) for kind in kinds for element in getattr(self.at, kind)]
        pieces += [f"{m.label} {m.value} {m.delta}" for m in self.at.metric]
        pieces += [frame.value.to_string() for frame in self.at.dataframe]
        pieces += [table.to_string() for table in self.tables]
        pieces += [expander.label for expander in self.at.expander]
        pieces += [f"{link.label} -> {link.proto.page}?{link.proto.query_string}" for link in self.at.page_link]
        return unescaped("\n".join(pieces))

    @property
    def errors(self) -> list[str]:
        """What `st.error` says."""
        return [unescaped(error.value) for error in self.at.error]

    @property
    def tables(self) -> list[pd.DataFrame]:
        """Every `st.table` as it reads."""
        return [table.value.map(unescaped) for table in self.at.table]

    def assert_calm(self) -> None:
        """No traceback and no unexpected failure is shown."""
        assert not self.at.exception
        assert "This part of the page failed" not in self.text

    def button(self, label: str) -> Any:
        """The button with this label."""
        return next(b for b in self.at.button if b.label == label)


@pytest.fixture
def open_page() -> Callable[..., Shown]:
    """Opens a page as a browser does, with a query."""

    def open_(name: str, **query: str) -> Shown:
        at = AppTest.from_file(str(MAIN), default_timeout=60).run()
        at.query_params.update(query)
        return Shown(at.switch_page(f"app_pages/{name}.py").run())

    return open_


@pytest.fixture
def fake_engine() -> Callable[..., FakeEngine]:
    """Builds the stand-in in a state."""

    def build(state: str, base_url: str = "http://127.0.0.1:1", last_exit: EngineExit | None = None) -> FakeEngine:
        return FakeEngine(engine_status(state, base_url, last_exit))

    return build


BYTES = {"float16": 1024, "int8_per_token_head": 576, "int4_symmetric": 320, "int4_kivi": 320}


def answers(name: str) -> list[QualityItem]:
    """120 answers: plain INT4 is wrong in every second question of the later turns and then also says nonsense."""
    items = []
    for seed in range(2000, 2006):
        for turn in range(1, 21):
            task = ("recall", "add", "brackets")[(seed + turn) % 3]
            right = not (name == "int4_symmetric" and turn > 4 and (seed + turn) % 2)
            valid = right or turn < 15
            items.append(QualityItem(f"{task}/{seed}/{turn}", task, turn, right, valid, {"answer": "", "expected": ""}))
    return items


@pytest.fixture
def measured() -> Callable[..., list[QualityRun]]:
    """Puts four formats measured on one model into a store; the first is what the others are compared with."""

    def write(store: Store, model: str = "", target: str = "lab") -> list[QualityRun]:
        spec = SuiteSpec(kind="testbed", conversations=6, context=2048)
        runs: list[QualityRun] = []
        for name, bytes_per_token in BYTES.items():
            flags = {"--model": model, "--kv-cache-dtype": name, "--kv-cache-dtype-skip-layers": ""}
            facts = {"flags": flags, "kv_cache_dtype": name, "kv_bytes_per_token": bytes_per_token}
            base = runs[0] if runs else None
            run = store.quality.start(
                target, name, "testbed", spec.to_dict(), spec.key, facts, base.id if base is not None else None
            )
            store.quality.add(run.id, answers(name))
            before = None if base is None else answers("float16")
            result = summarize(answers(name), before, baseline_id=base.id if base is not None else None)
            runs.append(store.quality.finish(run.id, "done", result))
        return runs

    return write
