"""Scales of fp8 caches: 1 saturates, those of the first batch and of a checkpoint do not, and none ever changes."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.models.loader import ModelLoadError
from engine.request import SamplingParams

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)
LARGE = 1024.0  # a power of two: scores stay what they were


@pytest.fixture(scope="module")
def large_keys(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose keys are beyond what fp8 holds; its queries make up for it."""
    directory: Path = lab.make_llama(tmp_path_factory.mktemp("large-keys"))
    edit_weights(directory, lambda weights: {n: t * _factor(n) for n, t in weights.items()})
    return directory


def _factor(name: str) -> float:
    return LARGE if "k_proj" in name else 1 / LARGE if "q_proj" in name else 1.0


def edit_weights(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def with_scales(model: Path, target: Path, scales: dict[str, Tensor]) -> Path:
    shutil.copytree(model, target)
    edit_weights(target, lambda weights: weights | scales)
    return target


def logits_of(lab: Any, engine: Any, prompt: list[int]) -> Tensor:
    traced = lab.trace_logits(engine)
    lab.generate(engine, [prompt], ONE_TOKEN)
    return torch.stack([traced["0"][position] for position in range(len(prompt))])


@pytest.fixture(scope="module")
def usual_error(model_dir: Path, lab: Any) -> float:
    """What fp8 costs the same model before its keys were made large: nothing saturates there."""
    (prompt,) = lab.prompts(60)
    expected = logits_of(lab, lab.make_engine(model_dir), prompt)
    return relative_error(logits_of(lab, lab.make_engine(model_dir, kv_cache_dtype="fp8"), prompt), expected)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


def test_calculated_scales_keep_keys_that_scale_1_cuts_off(large_keys: Path, usual_error: float, lab: Any) -> None:
    (prompt,) = lab.prompts(60)
    expected = logits_of(lab, lab.make_engine(large_keys), prompt)
    cut_off = lab.make_engine(large_keys, kv_cache_dtype="fp8")
    assert relative_error(logits_of(lab, cut_off, prompt), expected) > 4 * usual_error
    assert {(s.k_scale, s.v_scale, s.source) for s in cut_off.runner.kv_scales()} == {(1.0, 1.0, "default")}
    calculated = lab.make_engine(large_keys, kv_cache_dtype="fp8", calculate_kv_scales=True)
    assert {scales.source for scales in calculated.runner.kv_scales()} == {"pending"}
    assert relative_error(logits_of(lab, calculated, prompt), expected) < 1.5 * usual_error
    assert {scales.source for scales in calculated.runner.kv_scales()} == {"first batch"}


def test_scales_stay_whatever_comes_later(large_keys: Path, lab: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = lab.make_engine(large_keys, kv_cache_dtype="fp8", calculate_kv_scales=True, num_gpu_blocks_override=65)
    with caplog.at_level(logging.INFO, logger="engine"):
        lab.generate(engine, lab.prompts(10), ONE_TOKEN)
    (line,) = [record.message for record in caplog.records if "KV scales taken" in record.message]
    assert "first batch of 10 tokens" in line
    first = engine.runner.kv_scales()
    prompts = lab.prompts(40, 70, 90, seed=2)
    answers = lab.generate(engine, prompts, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    assert engine.runner.kv_scales() == first
    again = lab.generate(engine, prompts[:1], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    assert again == answers[:1]  # what the prefix cache kept is read with the scale it was stored with


def test_a_map_calculates_only_in_its_fp8_layers(large_keys: Path, lab: Any) -> None:
    flags = {"kv_cache_dtype": "int8_per_token_head", "kv_cache_dtype_layers": "1:fp8"}
    engine = lab.make_engine(large_keys, calculate_kv_scales=True, **flags)
    lab.generate(engine, lab.prompts(30), ONE_TOKEN)
    (scales,) = engine.runner.kv_scales()
    assert (scales.layer, scales.source) == (1, "first batch")
    assert scales.k_scale > 1


def test_asking_for_scales_that_nothing_uses_is_said(
    model_dir: Path, lab: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lab.make_engine(model_dir, calculate_kv_scales=True)
    assert "--calculate-kv-scales changes nothing" in caplog.text


@pytest.mark.parametrize(
    ("key_name", "value_name"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_scales_of_the_checkpoint(
    key_name: str, value_name: str, large_keys: Path, usual_error: float, tmp_path: Path, lab: Any
) -> None:
    calculated = lab.make_engine(large_keys, kv_cache_dtype="fp8", calculate_kv_scales=True)
    (prompt,) = lab.prompts(60)
    lab.generate(calculated, [prompt], ONE_TOKEN)
    wanted = calculated.runner.kv_scales()
    scales = {f"model.layers.{s.layer}.self_attn.{key_name}": torch.tensor([s.k_scale]) for s in wanted}
    scales |= {f"model.layers.{s.layer}.self_attn.{value_name}": torch.tensor(s.v_scale) for s in wanted}
    scales["model.layers.0.self_attn.q_scale"] = torch.tensor(0.5)  # of another arithmetic
    model = with_scales(large_keys, tmp_path / "scaled", scales)
    config = json.loads((model / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    engine = lab.make_engine(model, kv_cache_dtype="fp8")
    assert engine.runner.model.weights_bytes == calculated.runner.model.weights_bytes
    assert {s.source for s in engine.runner.kv_scales()} == {"checkpoint"}
    for got, want in zip(engine.runner.kv_scales(), wanted, strict=True):
        assert (got.k_scale, got.v_scale) == pytest.approx((want.k_scale, want.v_scale))
    expected = logits_of(lab, lab.make_engine(large_keys), prompt)
    assert relative_error(logits_of(lab, engine, prompt), expected) < 1.5 * usual_error
    exact = lab.make_engine(model)  # not fp8: the scales are left alone
    assert exact.runner.kv_scales() == []
    assert torch.equal(logits_of(lab, exact, prompt), expected)


def test_one_scale_for_both_and_layers_without(model_dir: Path, tmp_path: Path, lab: Any) -> None:
    model = with_scales(model_dir, tmp_path / "scaled", {"model.layers.2.self_attn.kv_scale": torch.tensor(0.25)})
    got = lab.make_engine(model, kv_cache_dtype="fp8_e5m2").runner.kv_scales()
    assert [(s.k_scale, s.v_scale, s.source) for s in got] == [(1.0, 1.0, "default")] * 2 + [(0.25, 0.25, "checkpoint")]


@pytest.mark.parametrize(
    ("scales", "says"),
    [
        ({"k_scale": torch.tensor(0.5)}, "layer 0 for K alone; the checkpoint is incomplete"),
        ({"k_scale": torch.tensor(0.0), "v_scale": torch.tensor(1.0)}, "k_scale in .* is 0.0; a scale is a positive"),
        (
            {"k_scale": torch.ones(2), "v_scale": torch.ones(2)},
            r"k_scale in .* has shape \[2\], but .* one number a layer",
        ),
    ],
)
def test_scales_that_cannot_be_used(
    scales: dict[str, Tensor], says: str, model_dir: Path, tmp_path: Path, lab: Any
) -> None:
    named = {f"model.layers.0.self_attn.{name}": scale for name, scale in scales.items()}
    with pytest.raises(ModelLoadError, match=says):
        lab.make_engine(with_scales(model_dir, tmp_path / "scaled", named), kv_cache_dtype="fp8")


def test_quantized_weights_are_still_refused(model_dir: Path, tmp_path: Path, lab: Any) -> None:
    model = with_scales(model_dir, tmp_path / "quantized", {})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"]}},
        "kv_cache_scheme": {"num_bits": 8},
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="unquantized weights only"):
        lab.make_engine(model)
