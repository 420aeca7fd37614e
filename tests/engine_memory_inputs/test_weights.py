"""Bytes of weights: by quantization, and of one rank."""

from __future__ import annotations

from typing import Any

import pytest

from engine.memory.hf_config import model_shape
from engine.memory.model_presets import model_config, model_preset
from engine.memory.shape import LayerGroup, ModelShape
from engine.memory.weights import even_stages, rank_weights_bytes

LLAMA_8B = model_config("Llama-3-8B")["config"]
EMBEDDING = 128256 * 4096
NORMS = 65 * 4096
LINEAR = 8030261248 - 2 * EMBEDDING - NORMS


@pytest.mark.parametrize(
    ("config", "name", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8),
        ({"quant_method": "fbgemm_fp8"}, "fp8", 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq", 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq", 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "gptq", 4 + 20 / 32),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", 4.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes", 8),
        ({"quant_method": "mxfp4"}, "mxfp4", 4.25),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 4.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
            8,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True}}
                },
            },
            "w4",
            4 + 16 / 128,
        ),
    ],
)
def test_linear_layers_take_their_bits_and_the_rest_stays_16_bit(
    config: dict[str, Any], name: str, bits: float
) -> None:
    shape = model_shape({**LLAMA_8B, "quantization_config": config})
    assert shape.quantization == name
    assert shape.weights_bytes == pytest.approx(LINEAR * bits / 8 + (2 * EMBEDDING + NORMS) * 2, rel=1e-9)
    assert f"{bits:g} bits" in shape.weights_how


def test_what_a_config_excludes_stays_16_bit() -> None:
    excluded = {"quant_method": "fp8", "ignored_layers": ["lm_head", "re:.*self_attn.*"]}
    shape = model_shape({**LLAMA_8B, "quantization_config": excluded})
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert shape.weights_bytes == (LINEAR - attention) + (attention + 2 * EMBEDDING + NORMS) * 2


def test_experts_alone_are_narrow_in_gpt_oss_and_deepseek_v4() -> None:
    assert model_preset("gpt-oss-120b").weights_bytes == pytest.approx(60.8 * 2**30, rel=0.01)  # its checkpoint
    v4 = model_preset("DeepSeek-V4-Flash")
    assert v4.quantization == "fp8"
    assert v4.weights_bytes is not None
    assert v4.parameters is not None
    assert v4.weights_bytes < 0.6 * v4.parameters


def test_an_unknown_quantization_leaves_the_weights_open_and_says_what_to_state() -> None:
    shape = model_shape({**LLAMA_8B, "quantization_config": {"quant_method": "novel"}})
    assert shape.parameters == 8030261248
    assert shape.weights_bytes is None
    assert any("--weights-gib" in sentence for sentence in shape.assumptions)
    assert rank_weights_bytes(shape, tp=2) is None


def test_ranks_together_hold_the_weights_and_what_each_repeats() -> None:
    shape = model_preset("Llama-3-70B")
    assert shape.weights_bytes is not None
    assert rank_weights_bytes(shape) == shape.weights_bytes
    whole = shape.replicated_bytes
    assert rank_weights_bytes(shape, tp=4) == pytest.approx((shape.weights_bytes - whole) / 4 + whole, abs=8)
    stages = [rank_weights_bytes(shape, tp=2, pp=4, stage=stage) for stage in range(4)]
    assert sum(size or 0 for size in stages) * 2 == pytest.approx(shape.weights_bytes + whole, rel=1e-6)
    assert stages[0] == pytest.approx(stages[3], rel=1e-3)
    assert (stages[1] or 0) < (stages[0] or 0)


def test_kv_projections_are_repeated_where_ranks_outnumber_heads() -> None:
    shape = model_preset("Qwen2.5-7B")  # 4 KV heads
    four, eight = rank_weights_bytes(shape, tp=4), rank_weights_bytes(shape, tp=8)
    assert four is not None
    assert eight is not None
    repeated = shape.kv_projection_bytes * (1 / 4 - 1 / 8)
    assert eight == pytest.approx((four - shape.replicated_bytes) / 2 + shape.replicated_bytes + repeated, rel=1e-6)


def test_a_tied_head_is_held_again_by_a_last_stage_of_its_own() -> None:
    shape = model_preset("Llama-3.2-1B")
    assert shape.head_bytes == 0
    assert shape.weights_bytes is not None
    stages = [rank_weights_bytes(shape, pp=2, stage=stage) or 0 for stage in (0, 1)]
    assert sum(stages) == pytest.approx(shape.weights_bytes + shape.embedding_bytes, rel=1e-6)


def test_latent_down_projections_are_whole_on_every_rank() -> None:
    shape = model_preset("DeepSeek-V3")
    down = 61 * (7168 * (512 + 64) + 512 + 7168 * 1536 + 1536)  # fp8: one byte each
    routers, norms = 58 * (7168 * 256 + 256), (2 * 61 + 1) * 7168
    assert shape.replicated_bytes == down + 2 * (routers + norms)


@pytest.mark.parametrize(
    ("layers", "pp", "stages"),
    [(32, 1, (32,)), (27, 2, (14, 13)), (61, 8, (7, 8, 8, 8, 8, 8, 7, 7)), (80, 4, (20,) * 4)],
)
def test_left_over_layers_go_before_the_last_stage(layers: int, pp: int, stages: tuple[int, ...]) -> None:
    split = even_stages(layers, pp)
    assert sum(split) == layers
    assert max(split) - min(split) <= 1
    assert split[-1] == min(split)
    if layers != 61:
        assert split == stages


def test_stated_stages_win_over_an_even_split() -> None:
    shape = ModelShape("m", (LayerGroup(10, "full", 8, 128),), weights_bytes=1000)
    assert rank_weights_bytes(shape, pp=2, stage=0, stage_layers=(7, 3)) == 700
    assert rank_weights_bytes(shape, pp=2, stage=1, stage_layers=(7, 3)) == 300
