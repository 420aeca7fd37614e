"""The data files hang together, and answer as the engines' histories say."""

from __future__ import annotations

import lzma
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import Metric

from engine.config import EngineConfig
from engine.metrics import PER_TOKEN, TTFT, EngineMetrics
from engine.scheduler_output import SchedulerStats
from probe.dialects import ENGINES, DialectError, canonical_names, load_dialect
from probe.dialects.model import base_name
from probe.dialects.versions import MAIN, nearest, version_key


@pytest.mark.parametrize("engine", ENGINES)
def test_sources_are_metrics_that_some_version_exposes(engine: str) -> None:
    dialect = load_dialect(engine)
    process = {"process_start_time_seconds", "process_resident_memory_bytes", "process_cpu_seconds_total"}
    for metric in dialect.metrics:
        assert metric.sources, metric.name
        for source in metric.sources:
            names = [source.name, *([source.over.name] if source.over else [])]
            for name in names:
                forms = dialect.exposed.forms.get(base_name(dialect, name))
                assert forms or name in process, f"{engine}: {name}"
                if forms and name == base_name(dialect, name):
                    assert {f.type for f in forms} <= {metric.type}, f"{engine}: {name}"
            if source.match:
                form = dialect.exposed.forms[base_name(dialect, source.name)][-1]
                assert set(source.match) <= set(form.labels), f"{engine}: {source.name}"


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_named_exists(engine: str) -> None:
    dialect, names = load_dialect(engine), canonical_names()
    assert {m.name for m in dialect.metrics} <= names.keys()
    assert set(dialect.required) <= {m.name for m in dialect.metrics}
    assert set(dialect.absent) <= names.keys()
    assert set(dialect.slo) <= {m.name for m in dialect.metrics if m.buckets}
    assert dialect.slo_source
    for metric in dialect.metrics:
        for source in metric.sources:
            assert {source.since, source.until} - {None} <= set(dialect.known_versions)
    if dialect.info:
        assert dialect.info in dialect.exposed.forms
    assert all(config.name in dialect.exposed.forms for config in dialect.config)
    keys = [version_key(version) for version in dialect.known_versions]
    assert None not in keys
    assert keys == sorted(cast("list[Any]", keys))


@pytest.mark.parametrize("engine", ENGINES)
def test_every_version_has_at_most_one_source_of_a_metric(engine: str) -> None:
    dialect = load_dialect(engine)
    for version in dialect.known_versions or (None,):
        names = dialect.exposed_names(version) | dialect.hidden_names(version)
        for metric in dialect.metrics:
            source = dialect.source_at(metric.name, version)
            if source is not None:
                assert base_name(dialect, source.name) in names
                assert version is None or source.covers(version)


@pytest.mark.parametrize(
    ("engine", "version", "canonical", "name"),
    [
        ("vllm", "0.9.1", "kv_usage_ratio", "vllm:gpu_cache_usage_perc"),
        ("vllm", "0.9.2", "kv_usage_ratio", "vllm:kv_cache_usage_perc"),
        ("vllm", "0.10.1.1", "itl_seconds", "vllm:time_per_output_token_seconds"),
        ("vllm", "0.10.2", "itl_seconds", "vllm:inter_token_latency_seconds"),
        ("vllm", "0.6.6", "prefix_hits_total", None),
        ("vllm", "0.19.1", "requests_waiting_by_reason", None),
        ("vllm", "0.20.0", "requests_waiting_by_reason", "vllm:num_requests_waiting_by_reason"),
        ("vllm", "0.33.0", "kv_block_evictions_total", None),
        ("sglang", "0.5.5.post3", "preemptions_total", None),
        ("sglang", "0.5.10.post1", "preemptions_total", "sglang:num_retracted_requests_total"),
        ("sglang", "0.5.2", "queue_seconds", "sglang:queue_time_s"),
        ("sglang", "0.5.5.post3", "queue_seconds", "sglang:queue_time_seconds"),
        ("tensorrt-llm", "1.1.0rc5", "ttft_seconds", "time_to_first_token_seconds"),
        ("tensorrt-llm", "1.3.0rc5", "ttft_seconds", "trtllm_time_to_first_token_seconds"),
        ("tensorrt-llm", "1.3.0rc5", "requests_running", None),
        ("tensorrt-llm", "1.4.0", "requests_running", "trtllm_num_requests_running"),
        ("tgi", "3.3.7", "preemptions_total", None),
        ("triton", "v0.17.0", "requests_waiting", None),
        ("triton", "v0.18.0", "requests_waiting", "nv_trt_llm_request_metrics"),
        ("triton", MAIN, "kv_usage_ratio", None),
        ("kvoncall", None, "requests_preempted_total", "kvoncall:requests_preempted_total"),
        ("kvoncall", None, "requests_corrupted_total", None),
    ],
)
def test_source_by_version(engine: str, version: str | None, canonical: str, name: str | None) -> None:
    source = load_dialect(engine).source_at(canonical, version)
    assert (source.name if source else None) == name


def test_units_by_version() -> None:
    def factor(version: str) -> str | None:
        source = load_dialect("vllm").source_at("prefix_queries_total", version)
        assert source is not None
        return source.factor_info

    assert [factor(v) for v in ("0.7.3", "0.8.5.post1", "0.9.0", "0.9.2")] == ["block_size", "block_size", None, None]
    ttft = load_dialect("triton").source_at("ttft_seconds")
    assert ttft is not None
    assert ttft.factor == 0.001
    assert ttft.gate == "--metrics-config histogram_latencies=true"


def test_only_counters_that_run_along_are_fit_for_a_stall() -> None:
    def at_finish(engine: str, version: str | None = None) -> bool:
        source = load_dialect(engine).source_at("generation_tokens_total", version)
        assert source is not None
        return source.at_finish

    assert not at_finish("vllm")
    assert not at_finish("kvoncall")
    assert not at_finish("sglang", "0.5.23")
    assert at_finish("sglang", "0.5.2")
    assert at_finish("tgi")
    assert at_finish("tensorrt-llm")


def test_exposed_names_by_version() -> None:
    vllm = load_dialect("vllm")
    assert vllm.exposed_names("0.33.0")["vllm:num_preemptions_total"] == "counter"
    assert vllm.exposed_names("0.33.0")["vllm:iteration_tokens_total"] == "histogram"
    assert vllm.exposed_names("0.33.0")["process_start_time_seconds"] == "gauge"
    assert "vllm:gpu_cache_usage_perc" in vllm.exposed_names("0.10.2")
    assert "vllm:gpu_cache_usage_perc" not in vllm.exposed_names("0.11.0")
    assert "vllm:gpu_cache_usage_perc" in vllm.hidden_names("0.11.0")
    assert "vllm:gpu_cache_usage_perc" not in vllm.hidden_names("0.12.0")
    assert vllm.hidden_names("0.8.3")["vllm:num_requests_swapped"] == "--show-hidden-metrics-for-version=0.7"
    assert vllm.exposed_names() == vllm.exposed_names("0.33.0")
    found = vllm.canonical_of("vllm:gpu_cache_usage_perc")
    assert found is not None
    assert found.name == "kv_usage_ratio"
    assert vllm.canonical_of("vllm:no_such_metric") is None


def test_a_scrape_of_vllm_holds_no_name_the_list_lacks(page: Callable[[str], dict[str, Metric]]) -> None:
    names = load_dialect("vllm").exposed_names("0.33.0")
    families = {n: f for n, f in page("vllm-0.33.0-under-load").items() if not n.endswith("_created")}
    assert {f"{n}_total" if f.type == "counter" else n: f.type for n, f in families.items()}.items() <= names.items()


def test_labels_are_those_of_the_scrape(page: Callable[[str], dict[str, Metric]]) -> None:
    forms = load_dialect("vllm").exposed_at("0.33.0")
    for family in page("vllm-0.33.0-under-load").values():
        for sample in family.samples:
            form = forms.get(sample.name)
            if form is not None and not form.open_labels:
                assert set(sample.labels) == set(form.labels), sample.name


def test_default_bounds_are_bounds_of_buckets() -> None:
    text = lzma.decompress((Path(__file__).parent / "data/vllm-0.33.0-under-load.prom.xz").read_bytes()).decode()
    vllm, own = load_dialect("vllm"), load_dialect("kvoncall")
    for canonical, bound in vllm.slo.items():
        source = vllm.source_at(canonical, "0.33.0")
        assert source is not None
        bounds = re.findall(rf'^{source.name}_bucket\{{.*le="([^"]+)"', text, re.MULTILINE)
        assert bound in map(float, bounds)
    assert own.slo["ttft_seconds"] in TTFT
    assert own.slo["itl_seconds"] in PER_TOKEN
    assert dict(load_dialect("tgi").slo) == {}  # no round time is a bound of its buckets


def test_the_embedded_engine_exposes_what_its_list_says(tmp_path: Path) -> None:
    stats = SchedulerStats(
        running=1, waiting=0, kv_usage=0.5, preemptions_total=1, preempted_requests_total=1, evictions_total=0,
        evicted_before_reuse_total=0, prefix_queries_total=1, prefix_hits_total=1, block_states={"free": 1},
    )  # fmt: skip
    metrics = EngineMetrics(EngineConfig(model=str(tmp_path)), lambda: stats)
    plan: Any = SimpleNamespace(**dict.fromkeys(PLAN, 1))
    metrics.set_plan(plan, lambda: 1)
    families = {family.name: family for family in metrics.registry.collect()}
    names = {f"{n}_total" if f.type == "counter" else n: f.type for n, f in families.items()}
    assert names == load_dialect("kvoncall").exposed_names()


PLAN = (
    "block_size", "max_concurrency", "kv_cache_bytes", "kv_cache_size_tokens", "num_gpu_blocks", "device_memory_bytes",
    "weights_bytes", "activation_peak_bytes", "open_blocks_bytes", "bookkeeping_bytes", "kv_bytes_per_token",
)  # fmt: skip


def test_order_of_versions() -> None:
    order = ["0.8.5.dev1", "0.8.5rc1", "0.8.5", "0.8.5.post1", "0.8.6", "0.10.0", "1.3.0rc5", "1.3.0", MAIN]
    keys: list[Any] = [version_key(version) for version in order]
    assert all(older < newer for older, newer in pairwise(keys))
    assert version_key("v0.18.0") == version_key("0.18.0+cu129") == version_key("0.18")
    assert version_key("nightly") is None


def test_nearest_version_is_said() -> None:
    known = ("0.8.0", "0.9.0", "0.10.0")
    assert nearest("vllm", "0.9.0", known) == ("0.9.0", None)
    assert nearest("vllm", "0.9.5", known)[0] == "0.9.0"
    assert nearest("vllm", "0.1", known) == ("0.8.0", "vllm 0.1 is older than what was read: 0.8.0 is assumed.")
    assert nearest("vllm", "0.11", known)[0] == "0.10.0"
    found, said = nearest("vllm", "nightly", known)
    assert found == "0.10.0"
    assert said is not None
    assert "not a version" in said
    assert nearest("tensorrt-llm", "1.4.0", ("1.0.0", "1.3.0rc5", MAIN))[0] == MAIN


def test_unknown_engines_and_spellings() -> None:
    with pytest.raises(DialectError, match="'abacus' are not known: use one of kvoncall, sglang"):
        load_dialect("abacus")
    with pytest.raises(DialectError, match="do not begin with 'vllm_'"):
        load_dialect("vllm", None, "vllm_")


def test_counters_that_only_grow() -> None:
    counters = load_dialect("vllm").counters
    assert {"preemptions_total", "ttft_seconds_bucket", "queue_seconds_sum"} <= counters
    assert "kv_usage_ratio" not in counters
