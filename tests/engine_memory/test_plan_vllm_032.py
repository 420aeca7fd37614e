"""Pools as vLLM 0.32.0 lays them out: what its own functions return for the layers of known models.

The figures are of `get_kv_cache_groups`, `get_kv_cache_configs` and `get_kv_cache_capacity` of that release, asked with
one spec a layer, two thirds of a request's KV memory a rank, blocks of 16 tokens and 2048 tokens in a step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.memory.activation import capture_sizes
from engine.memory.deployment import Deployment, Gpu
from engine.memory.model_presets import model_preset
from engine.memory.plan import plan
from engine.memory.semantics import resolve, semantics_of
from engine.memory.shape import LayerGroup, ModelShape

GIB = 1 << 30
# model, tensor parallel, pipeline parallel, format, layers that keep the model's format, length; bytes a rank offers;
# bytes of a block, blocks, printed tokens, bytes that a request of that length needs, the longest request that fits
POOLS = [
    ("Llama-3.1-8B", 1, 1, "auto", (), 131_072, 11_455_343_274, 2_097_152, 5462, 87_392, 17_179_869_184, 87_376),
    ("Llama-3.1-70B", 8, 1, "fp8", (), 131_072, 1_789_897_386, 327_680, 5462, 87_392, 2_684_354_560, 87_376),
    ("Falcon-7B", 1, 1, "auto", (), 2048, 11_315_882, 131_072, 86, 1376, 16_777_216, 1360),
    ("GPT-2", 1, 1, "auto", (), 1024, 51_511_296, 1_179_648, 43, 688, 75_497_472, 672),
    ("Phi-2", 1, 1, "int4_per_token_head", (), 2048, 124_474_709, 1_441_792, 86, 1376, 184_549_376, 1360),
    ("Qwen3-4B", 2, 1, "nvfp4", (), 40_960, 566_562_816, 331_776, 1707, 27_312, 849_346_560, 27_296),
    (
        "Qwen3-4B",
        1,
        1,
        "int8_per_token_head",
        (),
        40_960,
        2_077_396_992,
        1_216_512,
        1707,
        27_312,
        3_114_270_720,
        27_296,
    ),
    ("DeepSeek-V3", 8, 1, "auto", (), 163_840, 7_676_700_672, 1_124_352, 6827, 109_232, 11_513_364_480, 109_216),
    ("DeepSeek-V3", 1, 3, "auto", (), 163_840, 2_642_798_592, 387_072, 6827, 109_232, 3_963_617_280, 109_216),
    ("DeepSeek-V3.2", 8, 1, "auto", (), 163_840, 8_556_322_624, 1_253_184, 6827, 109_232, 12_832_604_160, 109_216),
    ("DeepSeek-V3", 8, 1, "fp8_ds_mla", (), 163_840, 4_371_454_549, 640_256, 6827, 109_232, 6_556_221_440, 109_216),
    ("Mistral-7B-v0.1", 1, 1, "auto", (), 32_768, 719_323_136, 2_097_152, 343, 21_909, 1_075_838_976, 5456),
    ("Phi-3-mini-4k", 1, 1, "auto", (), 4096, 1_084_227_584, 6_291_456, 172, 2741, 1_616_904_192, 2720),
    ("Gemma-2-9B", 1, 1, "auto", (), 8192, 1_883_635_712, 2_752_512, 684, 5466, 2_821_324_800, 5456),
    ("Gemma-3-4B", 1, 1, "auto", (), 131_072, 2_210_638_506, 327_680, 6746, 87_389, 3_315_466_240, 77_104),
    ("Gemma-3-4B", 1, 2, "auto", (), 131_072, 1_427_046_400, 196_608, 7258, 87_389, 2_140_274_688, 73_008),
    ("Gemma-3-27B", 1, 3, "auto", (), 131_072, 4_073_892_522, 524_288, 7770, 87_388, 6_110_052_352, 68_912),
    ("Gemma-3-27B", 2, 1, "auto", (), 131_072, 4_421_277_013, 655_360, 6746, 87_389, 6_630_932_480, 77_104),
    ("Gemma-4-31B", 1, 1, "auto", (), 262_144, 17_124_119_893, 2_621_440, 6532, 174_780, 25_682_247_680, 157_632),
    ("Gemma-4-31B", 8, 1, "auto", (), 262_144, 3_930_084_693, 327_680, 11_993, 174_767, 5_894_635_520, 166_192),
    ("Gemma-4-31B", 1, 3, "auto", (), 262_144, 7_744_432_810, 1_048_576, 7385, 174_770, 11_615_076_352, 143_968),
    ("gpt-oss-20b", 1, 1, "auto", (), 131_072, 2_217_345_024, 393_216, 5639, 87_396, 3_325_427_712, 85_968),
    ("gpt-oss-120b", 4, 1, "fp8", (), 131_072, 415_752_192, 73_728, 5639, 87_396, 623_517_696, 85_968),
    (
        "gpt-oss-20b",
        1,
        1,
        "int8_per_token_head",
        ("sliding_window",),
        131_072,
        1_215_078_400,
        417_792,
        2908,
        87_401,
        1_821_990_912,
        84_544,
    ),
    ("Llama-4-Scout", 8, 1, "auto", (), 1_048_576, 4_446_060_544, 98_304, 45_227, 699_055, 6_668_943_360, 686_752),
    ("Qwen3-Next-80B-A3B", 1, 1, "auto", (), 262_144, 4_362_862_592, 13_369_344, 326, 175_120, 6_524_239_872, 173_536),
    ("Qwen3-Next-80B-A3B", 4, 1, "fp8", (), 262_144, 1_090_715_648, 3_342_336, 326, 175_120, 1_631_059_968, 173_536),
    ("Qwen3.5-27B", 1, 1, "auto", (), 262_144, 11_731_817_813, 51_380_224, 228, 175_275, 17_520_656_384, 173_264),
    ("Qwen3.5-27B", 1, 3, "auto", (), 262_144, 4_399_431_680, 19_267_584, 228, 175_275, 6_570_246_144, 173_264),
    ("Qwen3.5-35B-A3B", 2, 1, "auto", (), 262_144, 1_849_098_240, 10_813_440, 171, 175_790, 2_757_427_200, 173_184),
    (
        "gpt-oss-20b",
        1,
        1,
        "int8_per_token_head",
        ("0", "1"),
        131072,
        2_223_046_656,
        65_536,
        33_921,
        87_383,
        3_334_471_680,
        85_824,
    ),
    ("Qwen3.5-27B", 1, 1, "fp8", ("0", "1"), 262_144, 6_011_486_208, 51_380_224, 117, 176_269, 8_940_158_976, 172_480),
    ("Gemma-3-12B", 1, 1, "fp8", ("0", "1"), 131_072, 3_454_271_488, 262_144, 13_177, 87_387, 5_181_014_016, 78_368),
    ("Llama-3.1-8B", 1, 1, "fp8", ("0", "1"), 131_072, 6_086_765_226, 2_228_224, 2731, 87_392, 9_126_805_504, 87_360),
    (
        "Llama-3.1-8B",
        1,
        1,
        "fp8",
        ("sliding_window",),
        131_072,
        5_728_720_213,
        2_097_152,
        2731,
        87_392,
        8_589_934_592,
        87_360,
    ),
    (
        "Llama-3.1-8B",
        1,
        1,
        "turboquant_k8v4",
        (),
        131_072,
        5_271_582_720,
        2_893_824,
        1821,
        87_397,
        7_903_033_344,
        87_360,
    ),
    ("Qwen3-4B", 1, 1, "turboquant_3bit_nc", (), 40_960, 1_165_410_304, 4_079_616, 285, 27_338, 1_741_996_032, 27_264),
]


@pytest.mark.parametrize(
    ("model", "tp", "pp", "kv", "skipped", "length", "offered", "per_block", "blocks", "tokens", "needed", "longest"),
    POOLS,
)
def test_a_pool_is_laid_out_as_vllm_does(
    model: str,
    tp: int,
    pp: int,
    kv: str,
    skipped: tuple[str, ...],
    length: int,
    offered: int,
    per_block: int,
    blocks: int,
    tokens: int,
    needed: int,
    longest: int,
) -> None:
    server = Deployment(
        model_preset(model),
        version="0.32.0",
        tp=tp,
        pp=pp,
        kv_cache_dtype=kv,
        kv_cache_dtype_skip_layers=skipped,
        max_model_len=length,
        max_num_batched_tokens=2048,
        block_size=16,
        kv_cache_bytes=offered,
    )
    planned = plan(server)
    assert planned.kv_bytes_per_block == per_block
    assert planned.kv_blocks == blocks
    assert planned.kv_tokens == tokens
    assert planned.needed_bytes == needed
    assert planned.largest_model_len == longest
    assert not planned.fits
    assert plan(replace(server, kv_cache_bytes=needed + per_block)).fits  # the null block besides
    assert not plan(replace(server, kv_cache_bytes=needed + per_block - 1)).fits


def _server(*layers: LayerGroup, **flags: Any) -> Deployment:
    shape = ModelShape("m", layers, num_q_heads=8, max_position_embeddings=32768)
    return Deployment(shape, **{"version": "0.32.0", "kv_cache_bytes": 4 * GIB, **flags})


FULL = LayerGroup(4, "full", 8, 128)
WINDOW = LayerGroup(12, "sliding", 8, 128, window=1024)
STATES = LayerGroup(12, "recurrent", state_bytes=1 << 20)
LATENT = LayerGroup(12, "latent", latent_width=576)


def test_windows_alone_stay_windows_without_the_hybrid_cache() -> None:
    """Only windows beside full attention are billed in full; recurrent layers cannot be, and vLLM refuses."""
    alone, mixed = _server(WINDOW), _server(FULL, WINDOW)
    assert plan(replace(alone, hybrid_kv_cache=False)).needed_bytes == plan(alone).needed_bytes
    assert plan(replace(mixed, hybrid_kv_cache=False)).needed_bytes > plan(mixed).needed_bytes
    with pytest.raises(ConfigError, match="disable-hybrid-kv-cache-manager"):
        plan(_server(FULL, STATES, hybrid_kv_cache=False))


def test_a_model_without_attention_keeps_one_state_by_default() -> None:
    """Prefix caching, which keeps a second one, is off there."""
    assert plan(_server(STATES)).needed_bytes == 12 << 20
    assert plan(_server(STATES, enable_prefix_caching=True)).needed_bytes == 24 << 20


def test_a_state_has_room_for_speculated_tokens() -> None:
    """Three of them lengthen the convolution: 3,268,608 bytes a layer instead of 3,207,168, and larger blocks."""
    server = Deployment(model_preset("Qwen3.5-27B"), version="0.32.0", kv_cache_bytes=40 * GIB, max_model_len=32768)
    assert plan(server).block_size == 784
    assert plan(replace(server, num_speculative_tokens=3)).block_size == 800


def test_layers_of_a_draft_like_those_of_its_target_share_their_tables() -> None:
    """13 full layers beside 12 windows are two tables of 13; one more kind would be tables of a single layer."""
    target = _server(replace(FULL, count=12), WINDOW)
    same = plan(replace(target, draft=ModelShape("d", (replace(FULL, count=1),))))
    assert same.kv_bytes_per_block == 13 * 65536
    other = plan(replace(target, draft=ModelShape("d", (LayerGroup(1, "full", 4, 128),))))
    assert other.kv_bytes_per_block == 65536


@pytest.mark.parametrize(
    ("capability", "kv", "block"),
    [((9, 0), "auto", 16), ((9, 0), "fp8", 64), ((10, 0), "auto", 32), ((12, 0), "auto", 16)],
)
def test_blocks_of_latent_attention_follow_the_backend(capability: tuple[int, int], kv: str, block: int) -> None:
    gpu = Gpu("g", 80 * GIB, capability)
    assert resolve(_server(LATENT, gpu=gpu, kv_cache_dtype=kv)).block_size == block
    assert resolve(_server(replace(LATENT, index_width=132), gpu=gpu, kv_cache_dtype=kv)).block_size == 64
    assert resolve(_server(LATENT, gpu=gpu, kv_cache_dtype=kv, version="0.10.0")).block_size == 64


def test_a_step_is_no_larger_than_what_all_requests_can_hold() -> None:
    small = _server(FULL, max_num_seqs=2, max_model_len=512)
    assert resolve(small).max_num_batched_tokens == 1024
    assert resolve(replace(small, max_num_batched_tokens=4096)).max_num_batched_tokens == 4096


def test_graphs_are_captured_to_a_size_that_the_gpu_and_the_draft_decide() -> None:
    server = _server(FULL, max_num_seqs=512, max_num_batched_tokens=8192)
    semantics = semantics_of("vllm", "0.32.0")
    assert capture_sizes(server, semantics) == 51
    assert capture_sizes(replace(server, gpu=Gpu("g", 180 * GIB, (10, 0))), semantics) == 83
    assert capture_sizes(replace(server, max_num_seqs=4), semantics) == 4
    assert capture_sizes(replace(server, max_num_seqs=4, num_speculative_tokens=3), semantics) == 7


def test_printed_tokens_are_rounded_as_floating_point_rounds() -> None:
    """The engine prints int(blocks / blocks a request x length): 1001 blocks of 16 are 16,015 tokens at this length."""
    server = _server(FULL, max_model_len=32000, kv_cache_bytes=None, block_size=16)
    assert plan(replace(server, num_gpu_blocks_override=1000)).kv_tokens == 16000
    assert plan(replace(server, num_gpu_blocks_override=1001)).kv_tokens == 16015
