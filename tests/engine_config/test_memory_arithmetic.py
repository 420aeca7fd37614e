"""The memory arithmetic against figures worked out by hand, and the articles' wrong ones beside them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import MIB, ConfigError, EngineConfig, ModelDims
from engine.memory import kv_bytes_per_block, kv_bytes_per_token, num_blocks_for, open_blocks_bytes, plan_kv_cache
from kernels.formats import KV_CACHE_DTYPES

LLAMA3_70B = ModelDims("LlamaForCausalLM", 80, 64, 8, 128, 8192, 28672, 128256, 131072, "bfloat16")
LLAMA3_8B = ModelDims("LlamaForCausalLM", 32, 32, 8, 128, 4096, 14336, 128256, 131072, "bfloat16")
DEEPSEEK_V2_LITE = ModelDims("DeepseekV2ForCausalLM", 27, 16, 16, 192, 2048, 10944, 102400, 163840, "bfloat16", 512, 64)
TESTBED = ModelDims("LlamaForCausalLM", 4, 4, 2, 32, 128, 384, 128, 2048, "float32")


def test_llama3_70b_at_2048_tokens_is_two_thirds_of_a_gigabyte_not_950() -> None:
    assert kv_bytes_per_token(LLAMA3_70B, "auto") == 80 * 8 * 128 * 2 * 2 == 327_680
    assert kv_bytes_per_token(LLAMA3_70B, "auto") * 2048 == 671_088_640


def test_llama3_8b_at_8192_tokens() -> None:
    assert kv_bytes_per_token(LLAMA3_8B, "auto") * 8192 == 1_073_741_824
    all_heads = dataclasses.replace(LLAMA3_8B, num_kv_heads=32)
    assert kv_bytes_per_token(all_heads, "auto") * 8192 == 4_294_967_296  # what 32 heads would really take


def test_the_articles_oom_case_is_40_gib_a_request() -> None:
    assert kv_bytes_per_token(LLAMA3_70B, "float16") * 131_072 == 40 * 2**30


def test_blocks() -> None:
    assert kv_bytes_per_token(TESTBED, "auto") == 4 * 2 * 32 * 4 * 2 == 2048
    assert kv_bytes_per_block(TESTBED, "auto", 16) == 32_768
    assert kv_bytes_per_token(TESTBED, "float16") == 1024
    assert num_blocks_for(10 * 32_768 + 1, TESTBED, "auto", 16) == 10


@pytest.mark.parametrize(
    ("kv_dtype", "key_and_value"),
    [
        ("auto", 2 * 128 + 2 * 128),
        ("fp8_e4m3", 128 + 128),  # one scale a layer, not in the pool
        ("int8_per_token_head", (128 + 4) + (128 + 4)),
        ("int4_symmetric", (64 + 4) + (64 + 4)),
        ("int4_per_token_head", (64 + 4) + (64 + 4)),  # scale and minimum in half precision
        ("int8k_int4v", (128 + 4) + (64 + 4)),
        ("int4_kivi", (64 + 2 * 2 * 128 // 16) + (64 + 4)),  # a key channel's parameters serve 16 tokens
    ],
)
def test_llama3_8b_bytes_per_token_with_scales(kv_dtype: str, key_and_value: int) -> None:
    assert kv_bytes_per_token(LLAMA3_8B, kv_dtype) == 32 * 8 * key_and_value
    assert kv_bytes_per_block(LLAMA3_8B, kv_dtype, 16) == 32 * 8 * key_and_value * 16


def test_kivi_bytes_fall_with_the_block_size_and_are_rounded_up() -> None:
    assert kv_bytes_per_token(LLAMA3_8B, "int4_kivi", 32) == 32 * 8 * (64 + 16 + 64 + 4)
    assert kv_bytes_per_block(LLAMA3_8B, "int4_kivi", 24) == 32 * 8 * (24 * 64 + 512 + 24 * 68) == 942_080
    assert kv_bytes_per_token(LLAMA3_8B, "int4_kivi", 24) == 39_254  # 942,080 / 24 = 39,253.3


def test_open_blocks_are_one_full_precision_block_a_sequence_and_not_the_pools() -> None:
    config = EngineConfig(kv_cache_dtype="int4_kivi", max_num_seqs=64, device_memory=256 * MIB)
    assert open_blocks_bytes(config, TESTBED) == 64 * 4 * 2 * 16 * 32 * 2 * 4 == 2 * MIB
    assert open_blocks_bytes(dataclasses.replace(config, dtype="float16"), TESTBED) == MIB
    assert open_blocks_bytes(dataclasses.replace(config, kv_cache_dtype="int4_symmetric"), TESTBED) == 0
    plan = plan_kv_cache(config, TESTBED, weights_bytes=MIB, activation_peak_bytes=MIB)
    assert (plan.kv_cache_dtype, plan.open_blocks_bytes) == ("int4_kivi", 2 * MIB)
    assert plan.num_gpu_blocks == (int(256 * MIB * 0.92) - 4 * MIB) // kv_bytes_per_block(TESTBED, "int4_kivi", 16)


@pytest.mark.parametrize("kv_dtype", [dtype for dtype in KV_CACHE_DTYPES if "int4" in dtype])
def test_a_head_dim_that_cannot_be_packed_is_refused(kv_dtype: str) -> None:
    odd = dataclasses.replace(TESTBED, head_dim=33)
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype {kv_dtype}.*head_dim divisible by 2: 33"):
        plan_kv_cache(EngineConfig(kv_cache_dtype=kv_dtype), odd, weights_bytes=0, activation_peak_bytes=0)


def test_a_checkpoint_in_a_dtype_we_do_not_compute_in_is_refused() -> None:
    double = dataclasses.replace(TESTBED, dtype="float64")
    with pytest.raises(ConfigError, match="float64; choose one of float32, float16, bfloat16 with --dtype"):
        EngineConfig().layer_kv_formats(double)
    assert {f.name for f in EngineConfig(dtype="bfloat16").layer_kv_formats(double)} == {"bfloat16"}


def test_a_mixed_map_takes_the_sum_of_its_layers_and_open_blocks_only_where_they_are_kept() -> None:
    config = EngineConfig(
        kv_cache_dtype="int8_per_token_head",
        kv_cache_dtype_skip_layers=("3",),
        kv_cache_dtype_layers="0:int4_kivi,1:float16",
        max_num_seqs=8,
    )
    formats = config.layer_kv_formats(TESTBED)
    assert [f.name for f in formats] == ["int4_kivi", "float16", "int8_per_token_head", "float32"]
    # Two heads of 32 channels, 16 tokens: packed codes, parameters of keys by channel and of values by token, ...
    kivi, half = 2 * (2 * 16 * 16 + 32 * 4 + 16 * 4), 2 * 2 * 32 * 16 * 2
    int8, full = 2 * 2 * (32 + 4) * 16, 2 * 2 * 32 * 16 * 4
    assert kv_bytes_per_block(TESTBED, formats, 16) == kivi + half + int8 + full == 16_000
    assert kv_bytes_per_token(TESTBED, formats) == 1000
    assert open_blocks_bytes(config, TESTBED) == 8 * full  # one of four layers
    plan = plan_kv_cache(
        dataclasses.replace(config, kv_cache_memory_bytes=200 * 16_000),
        TESTBED,
        weights_bytes=0,
        activation_peak_bytes=0,
    )
    assert (plan.num_gpu_blocks, plan.kv_bytes_per_token, plan.open_blocks_bytes) == (200, 1000, 8 * full)
    assert plan.kv_cache_dtype == "mixed"
    assert plan.kv_layer_dtypes == ("int4_kivi", "float16", "int8_per_token_head", "float32")


def test_layers_that_are_all_alike_have_that_formats_name() -> None:
    config = EngineConfig(kv_cache_dtype="int4_kivi", kv_cache_dtype_layers="0-3:fp8", kv_cache_memory_bytes=4 * MIB)
    plan = plan_kv_cache(config, TESTBED, weights_bytes=0, activation_peak_bytes=0)
    assert (plan.kv_cache_dtype, plan.kv_layer_dtypes, plan.open_blocks_bytes) == ("fp8_e4m3", ("fp8_e4m3",) * 4, 0)


def test_pool_is_what_utilization_leaves_after_weights_and_activations() -> None:
    plan = plan_kv_cache(
        EngineConfig(device_memory=256 * MIB, gpu_memory_utilization=0.5),
        TESTBED,
        weights_bytes=8 * MIB,
        activation_peak_bytes=20 * MIB,
    )
    assert plan.source == "profile"
    assert plan.num_gpu_blocks == 100 * MIB // 32_768 == 3200
    assert plan.kv_cache_size_tokens == 3199 * 16  # the null block holds nothing
    assert plan.max_concurrency == 3199 / 128


def test_explicit_pool_sizes_are_taken_without_a_check_against_the_device() -> None:
    plan = plan_kv_cache(
        EngineConfig(device_memory=MIB, kv_cache_memory_bytes=512 * MIB),
        TESTBED,
        weights_bytes=8 * MIB,
        activation_peak_bytes=20 * MIB,
    )
    assert (plan.source, plan.kv_cache_bytes) == ("kv_cache_memory_bytes", 512 * MIB)
    plan = plan_kv_cache(EngineConfig(num_gpu_blocks_override=129), TESTBED, weights_bytes=0, activation_peak_bytes=0)
    assert (plan.source, plan.num_gpu_blocks, plan.max_concurrency) == ("num_gpu_blocks_override", 129, 1.0)


def test_a_pool_smaller_than_one_request_names_the_length_that_fits() -> None:
    config = EngineConfig(num_gpu_blocks_override=128)
    with pytest.raises(ConfigError, match="at most 2032"):
        plan_kv_cache(config, TESTBED, weights_bytes=0, activation_peak_bytes=0)


def test_no_memory_left_says_so() -> None:
    with pytest.raises(ConfigError, match="no memory is left"):
        plan_kv_cache(
            EngineConfig(device_memory=16 * MIB), TESTBED, weights_bytes=8 * MIB, activation_peak_bytes=20 * MIB
        )


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_position_embeddings 2048"):
        plan_kv_cache(EngineConfig(max_model_len=4096), TESTBED, weights_bytes=0, activation_peak_bytes=0)


@given(
    st.integers(64, 1024),
    st.floats(0.3, 0.99),
    st.sampled_from([8, 16, 24, 32]),
    st.integers(0, 15),
    st.sampled_from(KV_CACHE_DTYPES),
    st.sampled_from([0, 768]),
)
def test_a_profiled_plan_never_exceeds_its_share(
    mib: int, utilization: float, block_size: int, peak_mib: int, kv_dtype: str, records: int
) -> None:
    config = EngineConfig(
        device_memory=mib * MIB, gpu_memory_utilization=utilization, block_size=block_size, kv_cache_dtype=kv_dtype
    )
    plan = plan_kv_cache(
        config,
        TESTBED,
        weights_bytes=MIB,
        activation_peak_bytes=peak_mib * MIB // 4,
        bookkeeping_bytes_per_block=records,
    )
    total = plan.kv_cache_bytes + plan.open_blocks_bytes + plan.weights_bytes + plan.activation_peak_bytes
    total += plan.bookkeeping_bytes
    assert total <= mib * MIB * utilization
    assert total + kv_bytes_per_block(TESTBED, kv_dtype, block_size) + records > mib * MIB * utilization - 1
    assert plan.bookkeeping_bytes == plan.num_gpu_blocks * records
    assert plan.kv_cache_bytes == plan.num_gpu_blocks * plan.kv_bytes_per_block
    assert plan.kv_bytes_per_token * block_size - plan.kv_bytes_per_block in range(block_size)


def test_latents_take_their_width_whatever_the_number_of_heads() -> None:
    assert kv_bytes_per_token(DEEPSEEK_V2_LITE, "auto") == 27 * (512 + 64) * 2 == 31_104
    assert kv_bytes_per_block(DEEPSEEK_V2_LITE, "float32", 16) == 27 * 576 * 4 * 16
    expanded = dataclasses.replace(DEEPSEEK_V2_LITE, kv_lora_rank=0, qk_rope_head_dim=0)
    assert kv_bytes_per_token(expanded, "auto") > 10 * kv_bytes_per_token(DEEPSEEK_V2_LITE, "auto")
    with pytest.raises(ConfigError, match="latents are kept in floating point only, not in int8_per_token_head"):
        kv_bytes_per_token(DEEPSEEK_V2_LITE, "int8_per_token_head")


def test_a_plan_for_latents() -> None:
    config = EngineConfig(max_model_len=1024, kv_cache_memory_bytes=2 * 31_104 * 1024)
    plan = plan_kv_cache(config, DEEPSEEK_V2_LITE, weights_bytes=0, activation_peak_bytes=0)
    assert plan.num_gpu_blocks == 128
    assert plan.kv_bytes_per_token == 31_104
