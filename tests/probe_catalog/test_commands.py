"""`kvoncall flags` and `kvoncall catalog`, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from probe.catalog.metrics import metric_facts, metric_versions
from probe.cli import main
from runbooks.catalog_data import read_file
from runbooks.flags import default_of, why_absent


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_of_a_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags", "vllm", "0.33.0", "--kv"]) == 0
    out = capsys.readouterr().out
    assert "--gpu-memory-utilization" in out
    assert "0.92" in out
    assert "--ssl-keyfile" not in out
    found = _json(capsys, "flags", "vllm@0.20.1", "--search", "utilization")
    assert found["version"] == "0.20.0"
    assert "not read" in found["note"]
    assert "--gpu-memory-utilization" in [flag["name"] for flag in found["flags"]]


def test_every_engine_prints(capsys: pytest.CaptureFixture[str]) -> None:
    for engine in ("vllm", "sglang", "tensorrt-llm", "tgi", "triton", "kvoncall"):
        assert _json(capsys, "flags", engine)["flags"]


def test_differences_of_two_versions(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, "flags", "diff", "0.19.1", "0.33.0")
    changes = {(c["what"], c["name"]): c for c in found["changes"]}
    assert changes["default", "--gpu-memory-utilization"]["before"] == 0.9
    assert changes["default", "--gpu-memory-utilization"]["after"] == 0.92
    assert ("removed", "--calculate-kv-scales") in changes
    assert ("added", "--watermark") in changes
    assert "+nvfp4" in changes["choices", "--kv-cache-dtype"]["note"]
    assert ("deprecated", "--mamba-cache-mode") in changes
    assert changes["added", "vllm:request_num_preemptions"]["subject"] == "metric"
    assert ("removed", "vllm:prompt_tokens_recomputed_total") in changes


def test_renames_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags", "diff", "0.5.10.post1", "0.5.23", "--engine", "sglang", "--kv"]) == 0
    out = capsys.readouterr().out
    assert "> --tensor-parallel-size -> --tp-size  (the old name still works)" in out
    assert "+ --tp-size" not in out
    found = _json(capsys, "flags", "diff", "0.8.2", "0.8.3", "--kv")
    renamed = {c["name"]: c["after"] for c in found["changes"] if c["what"] == "renamed"}
    assert renamed["--num-speculative-tokens"] == "--speculative-config"


def test_one_version_against_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags", "diff", "0.33.0", "0.33.0"]) == 0
    assert "nothing changed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["flags", "ollama", "1"], "no flag catalog"),
        (["flags", "diff", "0.19.1"], "two versions"),
        (["flags", "vllm", "1", "2"], "too many words"),
        (["flags", "vllm", "--engine", "sglang"], "--engine"),
        (["flags"], "required"),
        (["catalog", "add"], "needs a release"),
        (["catalog", "add", "/nowhere/vllm.whl"], "There is no"),
    ],
)
def test_errors_are_one_sentence(capsys: pytest.CaptureFixture[str], words: list[str], word: str) -> None:
    assert main(words) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("kvoncall: ")
    assert word in last


def _next(releases: Any, folder: Path, version: str = "0.34.0") -> Path:
    files = dict(releases.VLLM)
    path: Path = releases.make_wheel(folder / f"vllm-{version}-py3-none-any.whl", files, "vllm", version)
    return path


def test_adding_a_release(capsys: pytest.CaptureFixture[str], releases: Any, tmp_path: Path, own_catalog: Path) -> None:
    release = _next(releases, tmp_path)
    assert main(["catalog", "add", str(release)]) == 0
    captured = capsys.readouterr()
    assert "vllm 0.34.0: 25 flags, 9 metrics" in captured.out
    assert "against 0.33.0" in captured.out
    assert "~ --kv-cache-dtype: +int4" in captured.out
    assert "+ --older-way = off" in captured.out
    assert "- --watermark" in captured.out
    assert "- vllm:kv_cache_usage_perc" in captured.out
    assert not own_catalog.exists()
    assert default_of("vllm", "0.34.0", "--port") == 8000  # as 0.33.0, which is the newest known

    assert main(["catalog", "add", str(release), "--write"]) == 0
    assert str(own_catalog / "vllm.json") in capsys.readouterr().out
    assert "0.34.0" in (why_absent("vllm", "0.33.0", "--older-way") or "")
    assert why_absent("vllm", "0.34.0", "--older-way") is None
    assert "last seen" in (why_absent("vllm", "0.34.0", "--watermark") or "")
    assert metric_versions("vllm")[-1] == "0.34.0"
    added = metric_facts("vllm", "0.34.0", "vllm:num_preemptions_total")
    assert added is not None
    assert added.labels == ("model_name", "engine", "reason")
    assert metric_facts("vllm", "0.34.0", "vllm:kv_cache_usage_perc") is None
    assert metric_facts("vllm", "0.33.0", "vllm:time_to_first_token_seconds_bucket") is not None
    found = _json(capsys, "flags", "diff", "0.33.0", "0.34.0")
    assert ("removed", "--watermark") in {(c["what"], c["name"]) for c in found["changes"]}


def test_a_second_release_extends_the_ranges(releases: Any, tmp_path: Path, own_catalog: Path) -> None:
    for version in ("0.35.0", "0.34.0"):
        assert main(["catalog", "add", str(_next(releases, tmp_path, version)), "--write"]) == 0
    data = read_file(own_catalog / "vllm.json")
    assert data.versions == ("0.34.0", "0.35.0")
    assert [(s.first, s.last) for s in data.flags["--port"]] == [("0.34.0", "0.35.0")]
    assert data.metrics["vllm:num_requests_running"][0]["versions"] == "0.34.0..0.35.0"


def test_a_release_that_is_known_already(capsys: pytest.CaptureFixture[str], releases: Any, tmp_path: Path) -> None:
    release = _next(releases, tmp_path)
    assert main(["catalog", "add", str(release), "--write"]) == 0
    capsys.readouterr()
    found = _json(capsys, "catalog", "add", str(release))
    assert (found["known_before"], found["compared_with"], found["changes"]) == (True, "0.34.0", [])


def test_the_catalog_folder_can_be_named(capsys: pytest.CaptureFixture[str], releases: Any, tmp_path: Path) -> None:
    folder = tmp_path / "named"
    assert main(["catalog", "add", str(_next(releases, tmp_path)), "--write", "--catalog-dir", str(folder)]) == 0
    assert (folder / "vllm.json").is_file()
    capsys.readouterr()
    listed = _json(capsys, "catalog", "list", "--catalog-dir", str(folder))
    assert listed["engines"]["vllm"]["versions"][-1] == "0.34.0"


def test_a_folder_that_cannot_be_written(capsys: pytest.CaptureFixture[str], releases: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = ["catalog", "add", str(_next(releases, tmp_path)), "--write", "--catalog-dir", str(tmp_path / "file" / "x")]
    assert main(words) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_broken_own_catalog_is_named(capsys: pytest.CaptureFixture[str], own_catalog: Path) -> None:
    own_catalog.mkdir()
    (own_catalog / "vllm.json").write_text("{")
    assert main(["flags", "vllm"]) == 2
    assert "not a catalog file" in capsys.readouterr().err


def test_reading_a_release_imports_nothing_of_it(releases: Any, tmp_path: Path) -> None:
    tree = releases.make_tree(tmp_path / "tree", releases.VLLM, ("vllm", "0.34.0"))
    code = (
        "import sys; from pathlib import Path; from probe.catalog.add import read_release; "
        f"read_release(Path({str(tree)!r})); assert 'vllm' not in sys.modules; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
