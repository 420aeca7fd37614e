"""Names of models and GPUs as people write them, and amounts of memory in their units."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.memory.model_presets import (
    gpu,
    gpu_from_memory,
    gpu_names,
    model_config,
    model_names,
    model_preset,
    read_model,
)
from engine.memory.units import GIB, gib, parse_memory


@pytest.mark.parametrize("written", ["H100-80GB", "h100", "NVIDIA H100 80GB", "h100-80gb", "H100_80GB"])
def test_gpus_are_found_as_people_write_them(written: str) -> None:
    assert gpu(written).name == "H100-80GB"


@pytest.mark.parametrize(
    ("name", "gib_reported"),
    [("A100-80GB", 79.15), ("A100-40GB", 39.39), ("V100-16GB", 15.77), ("H100", 79.1), ("RTXA6000-48GB", 47.53)],
)
def test_memory_is_what_logs_report_not_what_the_box_says(name: str, gib_reported: float) -> None:
    assert gpu(name).memory_bytes == pytest.approx(gib_reported * GIB, abs=1)


def test_every_gpu_has_less_than_its_name_says_and_a_bandwidth() -> None:
    for name in gpu_names():
        one = gpu(name)
        boxed = int(name.rsplit("-", 1)[1].removesuffix("GB"))
        assert 0.85 * boxed * 10**9 < one.memory_bytes <= boxed * GIB, name
        assert one.memory_bandwidth is not None
        assert one.memory_bandwidth > 1e11
    assert gpu("H100").compute_capability == (9, 0)
    assert gpu("L4").compute_capability == (8, 9)
    assert gpu("MI300X").compute_capability is None
    assert gpu("GB10").unified
    assert not gpu("H100").unified


def test_there_are_enough_presets_with_sources() -> None:
    assert len(model_names()) >= 40
    assert len(gpu_names()) >= 30
    assert all(model_config(name)["source"].startswith("https://huggingface.co/") for name in model_names())


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("deepseek-ai/DeepSeek-R1", "DeepSeek-V3"),
        ("qwen3-0.6b", "Qwen3-0.6B"),
        ("google/gemma-2-9b-it", "Gemma-2-9B"),
    ],
)
def test_models_are_found_by_their_names_elsewhere(written: str, name: str) -> None:
    assert read_model(written).name == name


@pytest.mark.parametrize(
    ("find", "near"), [(lambda: gpu("H101"), "H100-80GB"), (lambda: model_preset("llama-3-80b"), "Llama-3-8B")]
)
def test_an_unknown_name_tells_near_ones(find: object, near: str) -> None:
    with pytest.raises(ConfigError, match=near):
        find()  # type: ignore[operator]


def test_a_model_is_a_preset_a_file_or_text(tmp_path: Path) -> None:
    config = model_config("Qwen3-0.6B")["config"]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = [read_model(str(tmp_path)), read_model(str(tmp_path / "config.json")), read_model(json.dumps(config))]
    assert {shape.parameters for shape in shapes} == {model_preset("Qwen3-0.6B").parameters}


@pytest.mark.parametrize(
    ("text", "size", "says"),
    [
        ("80GiB", 80 * GIB, ""),
        ("80 Gi", 80 * GIB, ""),
        ("512MiB", 512 << 20, ""),
        ("80GB", 80 * 10**9, "80 GiB would be 80.00 GiB, 5.49 GiB more"),
        ("80", 80 * GIB, "80 was taken as GiB"),
        ("80G", 80 * GIB, "80 GB would be 74.51 GiB"),
        ("24gb", 24 * 10**9, "decimal"),
        ("85899345920", 80 * GIB, "bytes"),
        ("85899345920B", 80 * GIB, ""),
        ("1.5TiB", 3 << 39, ""),
    ],
)
def test_units_are_read_and_told(text: str, size: int, says: str) -> None:
    read, note = parse_memory(text)
    assert read == size
    assert says in note
    assert bool(note) == bool(says)


@pytest.mark.parametrize("text", ["0", "0GiB", "-80GiB", "-1", "", "lots", "80iB", "8 0GB", "80GBit", "nan", "inf"])
def test_no_amount_of_memory(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_memory(text)
    assert "80GiB" in str(raised.value)


def test_a_gpu_of_stated_memory() -> None:
    made, note = gpu_from_memory("80GB")
    assert made.memory_bytes == 80 * 10**9
    assert "GiB" in note
    assert gib(made.memory_bytes) == "74.51 GiB"
    assert gib(3 << 20) == "3.00 MiB"
