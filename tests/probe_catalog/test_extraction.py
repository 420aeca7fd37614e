"""Flags and metrics out of source: every way in which the engines declare them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from probe.catalog.add import read_release
from probe.catalog.archive import open_release
from probe.catalog.source import Modules
from probe.catalog.vllm_flags import vllm_flags
from runbooks.catalog_data import CatalogError, Form


@pytest.fixture(scope="module")
def vllm(releases: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("vllm") / "vllm-0.99.0-py3-none-any.whl"
    return read_release(releases.make_wheel(file, releases.VLLM, "vllm", "0.99.0+cpu"))


@pytest.mark.parametrize(
    ("flag", "form"),
    [
        ("--model", Form("str", "some/model")),
        ("--dtype", Form("choice", "auto", ("fp8", "int4", "auto"))),  # an alias only type checkers import
        ("--load-format", Form("str", "auto")),  # any text counts, so the literals restrict nothing
        ("--max-model-len", Form("int")),
        ("--hf-token", Form("bool-or-value")),
        ("--seed", Form("int", computed="factory compute_seed")),
        ("--block-size", Form("int")),
        ("--gpu-memory-utilization", Form("float", 0.92, aliases=("--device-memory-utilization",))),
        ("--kv-cache-dtype", Form("choice", "auto", ("auto", "fp8", "int4"))),  # a literal within a literal
        ("--kv-cache-dtype-skip-layers", Form("list", [])),
        ("--enable-prefix-caching", Form("bool")),  # the default is laid over the field's
        ("--sizes", Form("list", [8, 16])),
        ("--kv-transfer-config", Form("json")),
        ("--extra", Form("json")),
        ("--prefix-caching-hash-algo", Form("choice", "sha256", ("sha256",))),  # one choice is taken out
        ("--tensor-parallel-size", Form("int", 1, aliases=("-tp",))),
        ("--old-way", Form("bool", deprecated=True)),
        ("--older-way", Form("switch", False, deprecated=True)),
        ("--policy", Form("choice", "fcfs", ("fcfs", "priority"))),
        ("--devices", Form("str", "cpu")),  # choices that only a run would tell
        ("--enable-log-requests", Form("switch", False)),
        ("--port", Form("int", 8000)),
        ("--origins", Form("list", ["*"])),
        ("--api-key", Form("str")),
        ("--headless", Form("switch", False)),
    ],
)
def test_vllm_flags(vllm: Any, flag: str, form: Form) -> None:
    assert vllm.flags[flag] == form


def test_vllm_has_no_other_flags(vllm: Any) -> None:
    assert len(vllm.flags) == 25  # none of the batch runner's, of tests, or of the parser's positionals


@pytest.mark.parametrize(
    ("name", "kind", "labels"),
    [
        ("vllm:num_requests_running", "gauge", ("model_name", "engine")),
        ("vllm:num_preemptions_total", "counter", ("model_name", "engine", "reason")),
        ("vllm:lora_info", "gauge", ("waiting", "running")),
        ("vllm:drafts_total", "counter", ("model_name", "engine")),
        ("vllm:accepted_total", "counter", ("model_name", "engine")),
        ("vllm:offload_loads_total", "counter", ("model_name", "engine")),
        ("vllm:offload_size", "histogram", ("model_name", "engine", "tier")),
        ("vllm:sleep_seconds", "histogram", ("operation",)),
    ],
)
def test_vllm_metrics(vllm: Any, name: str, kind: str, labels: tuple[str, ...]) -> None:
    metric = vllm.metrics[name]
    assert (metric.type, metric.labels, metric.open_labels) == (kind, labels, False)


def test_labels_that_only_a_run_tells_are_open(vllm: Any) -> None:
    assert vllm.metrics["vllm:cache_config_info"].open_labels
    assert len(vllm.metrics) == 9


def test_older_sglang(releases: Any, tmp_path: Path) -> None:
    file = tmp_path / "sglang-0.5.99.tar.gz"
    added = read_release(releases.make_sdist(file, releases.SGLANG_OLD, "sglang", "0.5.99", inner="python/"))
    assert added.flags == {
        "--mem-fraction-static": Form("float"),
        "--page-size": Form("int", 1),
        "--disable-radix-cache": Form("switch", False),
        "--kv-cache-dtype": Form("choice", "auto", ("auto", "fp8_e5m2", "bf16")),
        "--tensor-parallel-size": Form("int", 1, aliases=("--tp-size",)),
        "--forward-hooks": Form("json"),
    }
    retracted, usage = added.metrics["sglang:num_retracted_total"], added.metrics["sglang:token_usage"]
    assert (retracted.labels, retracted.open_labels, usage.type) == (("cause",), True, "gauge")


def test_newer_sglang(releases: Any, tmp_path: Path) -> None:
    tree = releases.make_tree(tmp_path / "tree", releases.SGLANG_NEW, ("sglang", "0.6.0"))
    assert read_release(tree).flags == {
        "--mem-fraction-static": Form("float"),
        "--policy": Form("choice", "lru", ("lru", "lfu", "slru")),
        "--tp-size": Form("int", 1, aliases=("--tensor-parallel-size",)),
        "--enable-hicache": Form("switch", False),
        "--mode": Form("choice", "a", ("a", "b")),
        "--ports": Form("list"),
        "--disable-cuda-graph": Form("value", deprecated=True),
    }


@pytest.mark.parametrize(
    "source",
    [
        "A = B\nB = A\nGROUP = [A]\n",
        "GROUP = 'x' * 10 ** 9\n",
        "GROUP = [1] * 999999999\n",
        "GROUP = open('/etc/passwd').read()\n",
        "GROUP = " + "(" * 90 + "1" + ")" * 90 + "\n",
        "GROUP = __import__('os').getcwd()\n",
        "from vllm.engine.arg_utils import GROUP\n",
    ],
)
def test_hostile_source_is_only_unknown(source: str) -> None:
    calls = "parser.add_argument('--x', type=str, choices=GROUP, default=GROUP)"
    made = f"{source}\nclass AsyncEngineArgs:\n    def add_cli_args(parser):\n        {calls}\n"
    flags = vllm_flags(Modules({"vllm/engine/arg_utils.py": made}))
    assert flags["--x"].choices is None
    assert flags["--x"].default in (None, 1)


def test_a_source_without_flags_is_refused(releases: Any, tmp_path: Path) -> None:
    files = {"vllm/engine/arg_utils.py": "x = 1\n"}
    with pytest.raises(CatalogError, match="No flags of vLLM"):
        read_release(releases.make_tree(tmp_path / "tree", files, ("vllm", "1.0.0")))


def test_source_without_end_is_refused(releases: Any, tmp_path: Path) -> None:
    deep = "GROUP = " + "+".join(["x"] * 2000) + "\n"
    call = (
        "class AsyncEngineArgs:\n    def add_cli_args(parser):\n        parser.add_argument('--x', default=GROUP + y)\n"
    )
    files = {"vllm/engine/arg_utils.py": deep + call.replace("GROUP + y", deep[8:].strip())}
    with pytest.raises(CatalogError, match=r"nested too deeply|No flags"):
        read_release(releases.make_tree(tmp_path / "tree", files, ("vllm", "1.0.0")))


def test_the_engine_and_version_can_be_stated(releases: Any, tmp_path: Path) -> None:
    both = releases.make_tree(tmp_path / "tree", releases.VLLM | releases.SGLANG_OLD)
    release = open_release(both, engine="sglang", version="0.7.0")
    assert (release.engine, release.version) == ("sglang", "0.7.0")
    assert all(name.startswith("sglang/") for name in release.files)


def test_the_version_of_an_unpacked_package(releases: Any, tmp_path: Path) -> None:
    tree = releases.make_tree(tmp_path / "site-packages", releases.VLLM, ("vllm", "0.98.0"))
    assert open_release(tree / "vllm").version == "0.98.0"
    bare = releases.make_tree(
        tmp_path / "bare", releases.VLLM | {"vllm/_version.py": "__version__ = version = '0.97.0'\n"}
    )
    assert open_release(bare).version == "0.97.0"


def test_metadata_of_another_package_does_not_count(releases: Any, tmp_path: Path) -> None:
    tree = releases.make_tree(tmp_path / "tree", releases.VLLM, ("torch", "2.13.0"))
    with pytest.raises(CatalogError, match="does not say its version"):
        open_release(tree)
