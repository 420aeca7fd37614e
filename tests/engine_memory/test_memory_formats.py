"""Bytes of a KV slot in the formats of all engines, and of the layers that keep them."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import EngineConfig, ModelDims
from engine.errors import ConfigError
from engine.memory import kv_bytes_per_block, plan_kv_cache
from engine.memory.deployment import Deployment, Gpu
from engine.memory.pages import LayerKind, Rank, heads_per_rank, page_bytes
from engine.memory.plan import plan
from engine.memory.shape import LayerGroup, ModelShape
from engine.memory.slots import canonical_format, head_block_bytes, latent_block_bytes
from kernels.formats import KV_FORMATS

GIB = 1 << 30


@pytest.mark.parametrize(
    ("value", "width", "expected"),
    [
        ("bf16", 128, 512),
        ("fp8", 128, 256),
        ("fp8_inc", 128, 256),
        ("int8", 128, 256),
        ("int8_per_token_head", 128, 264),
        ("fp8_per_token_head", 128, 264),
        ("int4_per_token_head", 128, 136),
        ("nvfp4", 128, 144),
        ("nvfp4_4over6", 128, 144),
        ("ultraquant_4bit", 128, 136),
        ("ultraquant_4bit", 256, 272),
        ("turboquant_k8v4", 128, 196),
        ("turboquant_4bit_nc", 128, 134),
        ("turboquant_k3v4_nc", 128, 118),
        ("turboquant_3bit_nc", 128, 102),
    ],
)
def test_bytes_of_a_slot(value: str, width: int, expected: int) -> None:
    """A token and head, keys and values with their scales, as vLLM 0.32 lays them out."""
    assert head_block_bytes(canonical_format(value, "bfloat16"), width, width, 16) == 16 * expected


@pytest.mark.parametrize(
    ("value", "expected"), [("auto", 1152), ("fp8", 576), ("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352)]
)
def test_bytes_of_a_latent(value: str, expected: int) -> None:
    assert latent_block_bytes(canonical_format(value, "bfloat16"), 576, 64) == 64 * expected


def test_an_unknown_format_is_refused_with_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"fp3.*use auto, bfloat16"):
        canonical_format("fp3", "bfloat16")
    with pytest.raises(ConfigError, match="multi-head latent attention only"):
        head_block_bytes("fp8_ds_mla", 128, 128, 16)


@pytest.mark.parametrize(
    ("heads", "tp", "expected"), [(8, 1, 8), (8, 4, 2), (8, 8, 1), (8, 16, 1), (1, 8, 1), (2, 8, 1)]
)
def test_kv_heads_replicate_below_one_a_rank(heads: int, tp: int, expected: int) -> None:
    assert heads_per_rank(heads, tp) == expected


def test_tensor_parallelism_that_does_not_divide_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match="use one of 1, 2, 4, 8"):
        heads_per_rank(8, 3)
    shape = ModelShape("m", (LayerGroup(2, "full", 8, 64),), num_q_heads=12)
    with pytest.raises(ConfigError, match="does not divide 12 attention heads"):
        plan(Deployment(shape, tp=8, kv_cache_bytes=GIB, max_model_len=128))


def test_a_latent_is_whole_on_every_rank_and_a_state_is_divided() -> None:
    latent = LayerKind(LayerGroup(1, "latent", latent_width=576, index_width=132), "bfloat16")
    state = LayerKind(LayerGroup(1, "recurrent", state_bytes=1000), "bfloat16")
    assert page_bytes(latent, 64, Rank(8)) == 64 * (1152 + 132)
    assert page_bytes(state, 64, Rank(8)) == 125


def test_keys_and_values_of_different_widths_and_shared_keys() -> None:
    def pages(values: int | None) -> int:
        return page_bytes(LayerKind(LayerGroup(1, "full", 4, 192, values), "bfloat16"), 16, Rank(2))

    assert pages(128) == 2 * 16 * (192 + 128) * 2
    assert pages(None) == 2 * 16 * 384 * 2
    assert pages(0) == 2 * 16 * 192 * 2


@pytest.mark.parametrize("kv_dtype", ["auto", *KV_FORMATS])
def test_the_embedded_engine_is_planned_as_it_plans_itself(kv_dtype: str) -> None:
    """The same blocks, to the last one, in every format of `kernels.formats`."""
    dims = ModelDims("LlamaForCausalLM", 4, 8, 2, 32, 256, 512, 512, 2048, "float32")
    config = EngineConfig(kv_cache_dtype=kv_dtype, max_num_seqs=8, max_num_batched_tokens=512, dtype="float32")
    weights, peak, memory = 10 << 20, 5 << 20, 256 << 20
    own = plan_kv_cache(config, dims, weights_bytes=weights, activation_peak_bytes=peak, device_memory_bytes=memory)
    shape = ModelShape(
        "m", (LayerGroup(4, "full", 2, 32),), dtype=config.resolved_dtype(dims), max_position_embeddings=2048
    )
    planned = plan(
        Deployment(
            shape,
            engine="kvoncall",
            gpu=Gpu("process", memory),
            gpu_memory_utilization=config.gpu_memory_utilization,
            kv_cache_dtype=kv_dtype,
            block_size=config.block_size,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            weights_bytes=weights,
            activation_bytes=peak,
        )
    )
    assert planned.kv_bytes_per_block == own.kv_bytes_per_block
    assert planned.kv_blocks == own.num_gpu_blocks
    assert planned.kv_tokens == own.kv_cache_size_tokens
    assert planned.max_concurrency == pytest.approx(own.max_concurrency)
    assert planned.kv_bytes_per_token == own.kv_bytes_per_token


def test_layers_kept_at_full_precision_are_billed_as_such() -> None:
    def bytes_per_token(**more: Any) -> int | None:
        shape = ModelShape("m", (LayerGroup(32, "full", 8, 128),))
        return plan(Deployment(shape, kv_cache_bytes=GIB, max_model_len=1024, **more)).kv_bytes_per_token

    assert bytes_per_token() == 32 * 4096
    assert bytes_per_token(kv_cache_dtype="fp8") == 32 * 2048
    assert bytes_per_token(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("0", "31")) == 30 * 2048 + 2 * 4096
    # these formats keep two layers at each end by themselves
    assert bytes_per_token(kv_cache_dtype="turboquant_k8v4") == 28 * 8 * 196 + 4 * 4096


def test_a_latent_of_the_embedded_engine_costs_as_much_here() -> None:
    dims = ModelDims("DeepseekV2ForCausalLM", 2, 4, 1, 96, 64, 64, 64, 64, "bfloat16", 64, 16)
    own = kv_bytes_per_block(dims, "bfloat16", 16)
    shape = ModelShape("m", (LayerGroup(2, "latent", latent_width=80),), max_position_embeddings=64)
    planned = plan(Deployment(shape, engine="kvoncall", kv_cache_bytes=1 << 20, block_size=16))
    assert planned.kv_bytes_per_block == own
