"""`kvoncall plan` from the outside: what it prints, its JSON, its exit codes, one sentence for what cannot be."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from engine.memory.model_presets import model_config
from probe.cli import main

LLAMA_70B = model_config("Llama-3.1-70B")["config"]
DIMS = (
    "--layers",
    "80",
    "--kv-heads",
    "8",
    "--head-dim",
    "128",
    "--kv-gib",
    "36.07",
    "--tp",
    "4",
    "--block-size",
    "16",
)
ON_ONE = ("--model", "Llama-3.1-8B", "--gpu", "H100-80GB", "--max-model-len", "8192", "--engine", "vllm@0.33.0")


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_70B), encoding="utf-8")
    return str(file)


def planned(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    """The JSON of a plan that fits or does not."""
    assert main(["plan", *args, "--json"]) in (0, 1)
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The sentence of a plan that cannot be."""
    assert main(["plan", *args]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert caught.err.startswith("kvoncall: ")
    assert caught.err.count("\n") == 1
    return caught.err


def test_a_config_on_four_gpus(capsys: pytest.CaptureFixture[str], config_file: str) -> None:
    flags = ["--gpu", "H100-80GB", "--gpus", "4", "--tp", "4", "--engine", "vllm@0.33.0", "--max-model-len", "131072"]
    data = planned(capsys, "--model-config", config_file, *flags)
    assert data["kv_bytes_per_token"] == 80 * 2 * 2 * 128 * 2
    assert data["kv_tokens"] // data["block_size"] == data["kv_blocks"]
    assert data["max_concurrency"] == pytest.approx(data["kv_tokens"] / 131072, rel=1e-3)
    assert data["fits"] is True
    assert data["deployment"]["num_gpus"] == 4
    assert data["replicas"] == 1
    assert sum(part["bytes"] for part in data["parts"]) == int(79.1 * 2**30)


def test_stated_kv_memory_as_a_public_log_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys, *DIMS)
    assert data["kv_bytes_per_token"] == 81920
    assert data["kv_tokens"] == pytest.approx(472752, rel=1e-4)  # vllm#15039
    assert data["kv_blocks"] == pytest.approx(29547, abs=2)
    assert data["fits"] is True
    assert any("no context length was given" in note for note in data["notes"])


def test_the_verdict_is_the_first_word_and_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *ON_ONE]) == 0
    assert capsys.readouterr().out.startswith("FITS  Llama-3.1-8B (bfloat16) on 1 x H100-80GB, tp 1, vllm 0.33.0\n")
    assert main(["plan", "--model", "Llama-3.1-70B", "--gpu", "L4", "--engine", "vllm@0.33.0"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("DOES NOT FIT  ")
    assert "first lever" in out


def test_parts_of_the_gpu_are_listed_with_their_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *ON_ONE, "--explain"]) == 0
    out = capsys.readouterr().out
    assert "8.030 billion parameters x 2 bytes = 14.96 GiB" in out
    assert "Memory of one GPU: 79.10 GiB, budget 72.77 GiB at 0.92" in out
    assert "Arithmetic" in out
    assert "131,072 bytes a token" in out


def test_units_are_told_and_change_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", "Llama-3.1-8B", "--max-model-len", "8192", "--engine", "vllm@0.33.0")
    decimal = planned(capsys, *model, "--gpu-memory", "80GB")
    binary = planned(capsys, *model, "--gpu-memory", "80GiB")
    bare = planned(capsys, *model, "--gpu-memory", "80")
    assert decimal["kv_tokens"] < binary["kv_tokens"] == bare["kv_tokens"]
    assert any("80 GiB would be 80.00 GiB, 5.49 GiB more" in note for note in decimal["notes"])
    assert binary["notes"] == []
    assert any("taken as GiB" in note for note in bare["notes"])


def test_more_gpus_than_ranks_are_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys, *ON_ONE, "--gpus", "9", "--tp", "4")
    assert data["replicas"] == 2
    assert any("2 replicas of 4" in note and "1 idle" in note for note in data["notes"])
    one = planned(capsys, *ON_ONE, "--gpus", "4", "--tp", "4")
    assert one["kv_tokens"] == data["kv_tokens"]


def test_several_nodes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(
        capsys, "--model", "DeepSeek-V3", "--gpu", "H100", "--gpus", "16", "--tp", "16", "--max-model-len", "8192"
    )
    assert any("more than one node" in note for note in data["notes"])
    assert data["kv_bytes_per_token"] == 61 * 576 * 2  # a latent is not divided


def test_pipeline_stages_may_be_stated(capsys: pytest.CaptureFixture[str]) -> None:
    latent = ("--layers", "27", "--mla-latent", "576", "--tp", "2", "--pp", "2", "--block-size", "16")
    stages = ("--stage-layers", "14,13", "--stage-kv-gib", "12.13,11.33", "--max-model-len", "1024")
    data = planned(capsys, *latent, *stages, "--engine", "vllm@0.9.2")
    assert data["kv_bytes_per_token"] == 16128
    assert data["kv_tokens"] == pytest.approx(807792, rel=3e-3)  # vllm#20665


def test_levers_say_gain_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys, *ON_ONE, "--levers")
    fp8 = next(lever for lever in data["levers"] if lever["key"] == "kv_fp8")
    assert fp8["kv_tokens"] == pytest.approx(2 * data["kv_tokens"], rel=1e-3)
    assert fp8["gained_tokens"] == fp8["kv_tokens"] - data["kv_tokens"]
    assert fp8["cost"]
    assert main(["plan", *ON_ONE, "--levers"]) == 0
    assert "--kv-cache-dtype fp8" in capsys.readouterr().out


def test_plans_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    other = ("--compare", "--kv-cache-dtype fp8", "--compare", "tp=2 enforce-eager")
    data = planned(capsys, *ON_ONE, "--gpus", "1", *other)
    first, fp8, split = data["compare"]
    assert fp8["KV tokens"] == pytest.approx(2 * first["KV tokens"], rel=1e-3)
    assert split["GPUs of one replica"] == 2
    assert split["CUDA graphs"] == 0
    assert fp8["plan"]["deployment"]["kv_cache_dtype"] == "fp8"
    assert main(["plan", *ON_ONE, *other]) == 0
    out = capsys.readouterr().out
    assert "Side by side" in out
    assert "(+100.0%)" in out


def test_kinds_of_attention_in_true_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys, "--model", "Llama-3-70B", "--kv-gib", "40", "--tp", "4", "--attention-table")
    by_kind = {row["kind"]: row for row in data["attention"]}
    assert [by_kind[kind]["bytes_16"] for kind in ("MHA", "GQA", "MQA")] == [32768, 4096, 512]
    assert by_kind["GQA"]["own"] is True
    assert main(["plan", "--model", "Llama-3-70B", "--kv-gib", "40", "--attention-table"]) == 0
    assert "this model" in capsys.readouterr().out


def test_a_config_from_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(LLAMA_70B)))
    stated = ("--kv-gib", "36.07", "--tp", "4", "--block-size", "16")
    data = planned(capsys, "--model-config", "-", *stated, "--compare", "tp=8")
    assert data["kv_bytes_per_token"] == 81920
    assert data["compare"][1]["KV of one token"] == 40960


def test_other_engines_names_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    sglang = (
        "--engine",
        "sglang@0.5.20",
        "--mem-fraction-static",
        "0.85",
        "--tp-size",
        "2",
        "--context-length",
        "8192",
    )
    data = planned(capsys, "--model", "Llama-3.1-8B", "--gpu", "H100", *sglang)
    assert data["deployment"]["gpu_memory_utilization"] == 0.85
    assert data["deployment"]["tp"] == 2
    assert data["max_model_len"] == 8192


def test_vllms_short_forms_of_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, *ON_ONE[:4], "--max-model-len", "32K")["max_model_len"] == 32768
    assert planned(capsys, *ON_ONE[:4], "--max-model-len", "32k")["max_model_len"] == 32000


def test_auto_length_is_the_longest_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    on_l4 = ("--model", "Llama-3.1-8B", "--gpu", "L4", "--engine", "vllm@0.33.0")
    assert planned(capsys, *on_l4)["fits"] is False
    data = planned(capsys, *on_l4, "--max-model-len", "auto")
    assert data["fits"] is True
    assert data["max_model_len"] == data["largest_model_len"] < 131072
    assert planned(capsys, *on_l4, "--max-model-len", str(data["max_model_len"] + 32))["fits"] is False
    assert planned(capsys, *ON_ONE[:4], "--max-model-len", "auto")["max_model_len"] == 131072


def test_weights_quantized_by_flag(capsys: pytest.CaptureFixture[str]) -> None:
    whole = planned(capsys, *ON_ONE)
    narrow = planned(capsys, *ON_ONE, "--quantization", "fp8")
    weights = [next(p["bytes"] for p in data["parts"] if p["name"] == "weights") for data in (whole, narrow)]
    assert 0.5 < weights[1] / weights[0] < 0.6  # embedding and head stay in 16 bits
    assert "contradicts the checkpoint" in refused(
        capsys, "--model", "DeepSeek-V3", "--gpu", "H200", "--quantization", "awq"
    )
    assert "--quantization magic" in refused(capsys, *ON_ONE, "--quantization", "magic")
    assert planned(capsys, *ON_ONE, "--dtype", "float32")["kv_bytes_per_token"] == 2 * whole["kv_bytes_per_token"]


def test_a_draft_model_takes_its_share(capsys: pytest.CaptureFixture[str]) -> None:
    config = '{"model": "Llama-3.2-1B", "num_speculative_tokens": 4}'
    data = planned(capsys, *ON_ONE, "--speculative-config", config)
    assert any(part["name"] == "draft" and part["bytes"] > 2 * 10**9 for part in data["parts"])
    assert data["deployment"]["num_speculative_tokens"] == 4
    assert data["kv_tokens"] < planned(capsys, *ON_ONE)["kv_tokens"]
    assert "--speculative-config" in refused(capsys, *ON_ONE, "--speculative-config", "eagle")


def test_stated_gib_with_another_unit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys, *DIMS[:6], "--kv-gib", "36.07GB")
    assert data["kv_cache_bytes"] == 36_070_000_000
    assert any("--kv-gib 36.07 was taken as GB (decimal)" in note for note in data["notes"])


def test_a_template_gives_flags_with_reasons_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys, *ON_ONE[:4], "--engine", "vllm@0.33.0", "--template", "high-concurrency-short")
    assert data["template"]["flags"]
    assert data["template"]["launch"].startswith("vllm serve")
    assert main(["plan", *ON_ONE[:4], "--engine", "vllm@0.33.0", "--template", "high-concurrency-short"]) in (0, 1)
    assert "Template high-concurrency-short" in capsys.readouterr().out


def test_an_unknown_version_is_planned_as_the_nearest_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys, *ON_ONE[:6], "--engine", "vllm@9.9.9")
    assert any("9.9.9" in warning for warning in data["warnings"])
    data = planned(capsys, *ON_ONE[:6], "--engine", "vllm@0.24.9")
    assert any("planned as 0.24.0, the nearest" in note for note in data["notes"])
    data = planned(capsys, *ON_ONE[:6])
    assert any("no version" in warning for warning in data["warnings"])


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--list-gpus"]) == 0
    assert "H100-80GB" in capsys.readouterr().out
    assert main(["plan", "--list-models", "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} >= {"Llama-3.1-8B", "DeepSeek-V3"}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "no model was given"),
        (("--layers", "32", "--kv-heads", "8"), "--head-dim missing"),
        (("--layers", "0", "--kv-heads", "8", "--head-dim", "128"), "at least 1"),
        (("--model", "Llama-3.1-70B"), "no GPU was given"),
        (("--model", "llama-9"), "--model-config"),
        (("--model", "Llama-3.1-8B", "--gpu", "H100-90GB"), "H100-94GB"),
        (("--model", "Llama-3.1-8B", "--gpu-memory", "0GiB"), "more than zero"),
        (("--model", "Llama-3.1-8B", "--gpu-memory", "-80GiB"), "more than zero"),
        (("--model", "Llama-3.1-8B", "--gpu-memory", "eighty"), "80GiB"),
        (("--model", "Llama-3.1-8B", "--gpu", "H100", "--gpu-memory", "40GiB"), "contradicts --gpu H100-80GB"),
        (("--model", "Llama-3.1-70B", "--gpu", "H100", "--tp", "3"), "does not divide 64 attention heads"),
        (("--model", "Llama-3.1-70B", "--gpu", "H100", "--tp", "-2"), "at least 1"),
        (("--model", "Llama-3.1-8B", "--gpu", "H100", "--gpus", "2", "--tp", "4"), "--gpus 2 are fewer than"),
        (("--model", "Llama-3.1-8B", "--gpu", "H100", "--gpu-memory-utilization", "92"), "at most 1"),
        (("--model", "Llama-3.1-8B", "--gpu", "H100", "--gpu-memory-utilization", "0"), "above 0"),
        (("--model", "Llama-3.1-8B", "--gpu", "H100", "--max-model-len", "0"), "at least 1"),
        (("--model", "Llama-3.1-8B", "--gpu", "H100", "--engine", "vlm"), "engine 'vlm' is not known"),
        (("--model", "Llama-3.1-8B", "--gpu", "H100", "--kv-cache-dtype", "fp9"), "fp9"),
        (("--model", "Llama-3.1-8B", "--layers", "32"), "--model and --layers"),
        (("--model", "Llama-3.1-8B", "--model-config", "config.json"), "--model and --model-config"),
        ((*DIMS, "--gpu-memory-utilization", "0.9"), "--kv-gib states the size of the KV cache"),
        ((*DIMS, "--kv-cache-memory-bytes", "10GiB"), "--kv-gib and --kv-cache-memory-bytes"),
        ((*DIMS[:6], "--kv-gib", "0"), "more than 0 GiB"),
        ((*DIMS[:6], "--kv-gib", "-1"), "more than 0 GiB"),
        ((*DIMS, "--mla-latent", "576"), "--mla-latent and --kv-heads"),
        ((*DIMS, "--window", "128"), "--window-layers"),
        ((*DIMS, "--query-heads", "60"), "not a multiple"),
        ((*DIMS, "--template", "no-such-template"), "no-such-template"),
        (("--target", "http://127.0.0.1:9"), "127.0.0.1:9"),
        (("--check", "/nonexistent/anchors.json"), "/nonexistent/anchors.json"),
        (("--model-config", "/nonexistent/config.json"), "/nonexistent/config.json"),
        ((*DIMS, "--frobnicate"), "--frobnicate"),
        ((*DIMS, "--compare", "--frobnicate 1"), "--frobnicate"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: tuple[str, ...], says: str
) -> None:
    where = ("--data-dir", str(tmp_path)) if "--target" in args else ()
    assert says in refused(capsys, *args, *where)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"architectures": ["FooModel"]}', '{"num_hidden_layers": 4}'])
def test_a_broken_or_partial_config_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    refused(capsys, "--model-config", str(file), "--gpu", "H100")


def test_dims_on_the_command_line_complete_a_partial_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    partial = {key: value for key, value in LLAMA_70B.items() if key != "num_hidden_layers"}
    file.write_text(json.dumps(partial), encoding="utf-8")
    data = planned(capsys, "--model-config", str(file), "--layers", "80", "--gpu", "H100", "--tp", "4")
    assert data["kv_bytes_per_token"] == 81920
    assert "--layers 40 contradicts" in refused(
        capsys, "--model-config", str(config_of(tmp_path)), "--layers", "40", "--gpu", "H100"
    )


def config_of(folder: Path) -> Path:
    """A whole config in a folder of its own."""
    (folder / "whole").mkdir()
    file = folder / "whole" / "config.json"
    file.write_text(json.dumps(LLAMA_70B), encoding="utf-8")
    return file


def test_an_anchor_that_is_missed_exits_with_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    anchor = {
        "pa": "PA-06",
        "source": "vllm-project/vllm#15039",
        "engine": "vLLM",
        "version": "0.8.0",
        "model": "Llama-3.3-70B",
        "gpu": "4x 80GB (79.33 GiB)",
        "tp": 4,
        "pp": 1,
        "dims": {"layers": 80, "kv_heads": 8, "head_dim": 128},
        "kv_dtype": "bf16",
        "block_size": 16,
        "kv_bytes_per_token_per_gpu": 81920,
        "inputs": {"kv_gib": 36.07, "max_model_len": 131072},
        "reported": {"tokens": 472752},
        "verdict": "fits",
        "level": "L1",
        "extra_tol_pct": 0.0,
        "kv_gib_decimals": 2,
    }
    file = tmp_path / "anchors.json"
    file.write_text(json.dumps({"planner_anchors": [anchor]}), encoding="utf-8")
    assert main(["plan", "--check", str(file)]) == 0
    assert "PA-06" in capsys.readouterr().out
    file.write_text(json.dumps({"planner_anchors": [{**anchor, "reported": {"tokens": 372752}}]}), encoding="utf-8")
    assert main(["plan", "--check", str(file), "--json"]) == 1
    assert "miss" in capsys.readouterr().out
