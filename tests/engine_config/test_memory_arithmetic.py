"""The memory arithmetic against figures worked out by hand, and the articles' wrong ones beside them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import MIB, ConfigError, EngineConfig, ModelDims
from engine.memory import kv_bytes_per_block, kv_bytes_per_token, num_blocks_for, plan_kv_cache

LLAMA3_70B = ModelDims("LlamaForCausalLM", 80, 64, 8, 128, 8192, 28672, 128256, 131072, "bfloat16")
LLAMA3_8B = ModelDims("LlamaForCausalLM", 32, 32, 8, 128, 4096, 14336, 128256, 131072, "bfloat16")
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


@given(st.integers(64, 1024), st.floats(0.3, 0.99), st.sampled_from([8, 16, 32]), st.integers(0, 15))
def test_a_profiled_plan_never_exceeds_its_share(mib: int, utilization: float, block_size: int, peak_mib: int) -> None:
    config = EngineConfig(device_memory=mib * MIB, gpu_memory_utilization=utilization, block_size=block_size)
    plan = plan_kv_cache(config, TESTBED, weights_bytes=MIB, activation_peak_bytes=peak_mib * MIB // 4)
    total = plan.kv_cache_bytes + plan.weights_bytes + plan.activation_peak_bytes
    assert total <= mib * MIB * utilization
    assert total + kv_bytes_per_block(TESTBED, "auto", block_size) > mib * MIB * utilization - 1
