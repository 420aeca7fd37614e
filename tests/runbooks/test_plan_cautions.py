"""A plan that fits may still not run: formats and blocks that GPU, checkpoint or version refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.memory.deployment import Deployment
from engine.memory.model_presets import gpu, model_preset
from probe.cli import main
from runbooks.plan_cautions import cautions

LLAMA = Deployment(model_preset("Llama-3.1-8B"), version="0.33.0", gpu=gpu("RTX3090-24GB"))
FP8_WEIGHTS = replace(LLAMA.shape, quantization="fp8")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kv_cache_dtype": "fp8"}, ["needs compute capability 8.9"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, []),
        ({"kv_cache_dtype": "fp8_e5m2", "shape": FP8_WEIGHTS}, ["refused with an fp8 checkpoint"]),
        ({"kv_cache_dtype": "int4_per_token_head", "version": "0.20.0"}, ["exists since vllm 0.25.0"]),
        ({"kv_cache_dtype": "fp8", "gpu": gpu("H100-80GB")}, []),
        ({"kv_cache_dtype": "fp8", "gpu": None}, []),
        ({"block_size": 7}, ["multiples of 16"]),
        ({"block_size": 32}, []),
        ({"block_size": 64, "version": "0.6.6", "gpu": None}, []),
        ({"block_size": 1, "version": "0.6.6", "gpu": None}, ["--block-size"]),
        ({}, []),
    ],
)
def test_what_is_known_against_a_plan(changed: dict[str, Any], words: list[str]) -> None:
    found = cautions(replace(LLAMA, **changed))
    assert len(found) == len(words), found
    assert all(word in reason for word, reason in zip(words, found, strict=True))


def test_a_plan_that_does_not_run_is_no_yes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "Llama-3.1-8B", "--gpu", "RTX3090-24GB", "--max-model-len", "8192"]
    assert main(words) == 0
    assert "DOES NOT RUN SO" not in capsys.readouterr().out
    assert main([*words, "--kv-cache-dtype", "fp8"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("FITS")
    assert "DOES NOT RUN SO\n  - e4m3 needs compute capability 8.9" in out
