"""Flags parse, print and change without loss, and bad ones are refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import (
    MIB,
    ConfigError,
    EngineConfig,
    ModelDims,
    apply_changes,
    build_parser,
    flag_of,
    parse_bytes,
)

LLAMA3_70B = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}

configs = st.builds(
    EngineConfig,
    max_num_seqs=st.integers(1, 512),
    max_num_batched_tokens=st.integers(512, 1 << 16),
    block_size=st.sampled_from([8, 16, 32]),
    gpu_memory_utilization=st.floats(0.01, 1.0),
    kv_cache_memory_bytes=st.none() | st.integers(1, 1 << 40),
    num_gpu_blocks_override=st.none() | st.integers(2, 1 << 20),
    max_model_len=st.none() | st.integers(1, 1 << 20),
    enable_prefix_caching=st.booleans(),
    enable_chunked_prefill=st.booleans(),
    scheduling_policy=st.sampled_from(["fcfs", "priority"]),
    watermark=st.floats(0, 0.99),
    device_memory=st.integers(1, 1 << 40),
    kv_cache_dtype=st.sampled_from(["auto", "int4_kivi"]),
    kv_cache_dtype_skip_layers=st.lists(st.sampled_from(["0", "3", "17", "sliding_window"]), unique=True).map(tuple),
    kv_cache_dtype_layers=st.sampled_from(["", "1:auto", "4-7:fp8, 2:int4_kivi"]),
    api_key=st.none() | st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1),
)


@given(configs)
def test_a_config_survives_its_command_line(config: EngineConfig) -> None:
    assert EngineConfig.from_args(config.to_args()) == config


def test_every_field_is_a_flag_and_every_flag_a_field() -> None:
    flags = {option for action in build_parser()._actions for option in action.option_strings}
    flags -= {"-h", "--help"}
    flags = {f for f in flags if not f.startswith("--no-")}
    assert flags == {flag_of(f.name) for f in dataclasses.fields(EngineConfig)}


def test_parser_defaults_are_the_dataclass_defaults() -> None:
    assert EngineConfig.from_args([]) == EngineConfig()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--swap-space", "4"], "--swap-space"),
        (["--enable-prefix-caching", "false"], "false"),
        (["--max-num", "4"], "--max-num"),
        (["--port", "http"], "--port"),
        (["--port", "70000"], "--port"),
        (["--kv-cache-dtype", "int5"], "--kv-cache-dtype"),
        (["--device-memory", "lots"], "lots"),
        (["--gpu-memory-utilization", "92"], "--gpu-memory-utilization"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "--max-num-batched-tokens"),
        (["--watermark", "1"], "--watermark"),
        (["--kv-cache-dtype-skip-layers", "0", "first"], "--kv-cache-dtype-skip-layers"),
        (["--kv-cache-dtype-skip-layers", "-1"], "--kv-cache-dtype-skip-layers"),
        (["--kv-cache-dtype-layers", "0"], "cannot read '0'; write LAYER:FORMAT"),
        (["--kv-cache-dtype-layers", "0:int5"], "'int5' is not a format; use one of: auto, float32"),
        (["--kv-cache-dtype-layers", "3-1:auto"], "3 is above 1"),
        (["--kv-cache-dtype-layers", "0-2:auto,2:fp8"], "names layer 2 twice"),
        (["--kv-cache-dtype-skip-layers", "5", "--kv-cache-dtype-layers", "4-6:fp8"], "layer 5 is in both"),
        (["--prefix-cache-ttl", "0"], "--prefix-cache-ttl must be above 0 seconds, got 0"),
        (["--prefix-cache-ttl", "-1.5"], "--prefix-cache-ttl must be above 0 seconds, got -1.5"),
        (["--prefix-cache-ttl", "inf"], "--prefix-cache-ttl"),
        (["--prefix-cache-ttl", "nan"], "--prefix-cache-ttl"),
        (["--prefix-cache-scope", "user"], "--prefix-cache-scope"),
        (["--prefix-caching-hash-algo", "md5"], "--prefix-caching-hash-algo"),
        (["--prefix-caching-hash-algo", "unsafe_truncated"], "see each other's text"),
        (["--prefix-cache-fault", "adapter_key"], "--allow-unsafe-replay"),
        (["--max-lora-rank", "0"], "--max-lora-rank"),
        (["--lora-modules", "a=/x"], "--lora-modules needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "a"], "cannot read --lora-modules 'a'; write NAME=PATH"),
        (["--enable-lora", "--lora-modules", "a=/x", "a=/y"], "gives the name 'a' twice"),
        (["--enable-lora", "--lora-modules", "testbed=/x"], "gives the name 'testbed' twice, or it is the model's"),
    ],
)
def test_bad_flags_are_one_sentence_that_names_the_flag(args: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_args(args)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("268435456", 268435456),
        ("256MiB", 256 * MIB),
        ("256mib", 256 * MIB),
        ("1G", 2**30),
        ("1g", 10**9),
        ("1GB", 10**9),
        ("1.5k", 1500),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "-5", "1e9", "5 parsecs", "0x10", "1GiB2"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


def test_changes_replace_flags_and_none_removes_them() -> None:
    args = ["--kv-cache-memory-bytes", "1G", "--max-num-seqs", "64", "--device-memory", "192MiB"]
    changed = EngineConfig.from_args(apply_changes(args, {"--kv-cache-memory-bytes": None, "--max-num-seqs": 8}))
    assert changed == EngineConfig(max_num_seqs=8, device_memory=192 * MIB)


@pytest.mark.parametrize("changes", [{"--swap-space": 4}, {"max-num-seqs": 4}, {"--max-num-seqs": 0}, {"--port": "x"}])
def test_impossible_changes_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        apply_changes([], changes)


@pytest.mark.parametrize("words", [["0", "3"], ["0,3"], ["0 3"], ["0, 3"], ["0,", "3"]])
def test_skipped_layers_are_words_or_one_word_with_commas(words: list[str]) -> None:
    config = EngineConfig.from_args(["--kv-cache-dtype-skip-layers", *words, "--max-num-seqs", "8"])
    assert config == EngineConfig(kv_cache_dtype_skip_layers=("0", "3"), max_num_seqs=8)
    assert sorted(config.to_args()) == ["--kv-cache-dtype-skip-layers", "--max-num-seqs", "0", "3", "8"]
    assert config.flag_values()["--kv-cache-dtype-skip-layers"] == "0 3"
    assert apply_changes([], {"--kv-cache-dtype-skip-layers": "0 3", "--max-num-seqs": 8}) == config.to_args()


@pytest.mark.parametrize("value", [["0", "3"], [0, 3], "0 3", "0,3"])
def test_a_change_of_skipped_layers_is_a_list_or_text(value: object) -> None:
    args = apply_changes(["--kv-cache-dtype-skip-layers", "1"], {"--kv-cache-dtype-skip-layers": value})
    assert args == ["--kv-cache-dtype-skip-layers", "0", "3"]
    assert apply_changes(args, {"--kv-cache-dtype-skip-layers": None}) == []
    assert apply_changes(args, {"--kv-cache-dtype-skip-layers": ""}) == []


def test_flag_values_can_be_applied_as_they_are_shown() -> None:
    config = EngineConfig(
        kv_cache_dtype="int8k_int4v", kv_cache_dtype_skip_layers=("0", "3"), kv_cache_dtype_layers="1:fp8"
    )
    shown = json.loads(json.dumps(config.flag_values()))
    assert EngineConfig.from_args(apply_changes([], shown)) == config


MIXED = EngineConfig(kv_cache_dtype="int4_kivi", kv_cache_dtype_layers="1:int8_per_token_head,3-4:float16")
MISTRAL = LLAMA3_70B | {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 3, "sliding_window": 32}
GEMMA = LLAMA3_70B | {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, "head_dim": 128}


def test_layers_get_the_format_that_names_them() -> None:
    dims = ModelDims.from_hf_config(LLAMA3_70B | {"num_hidden_layers": 5})
    mixed = dataclasses.replace(MIXED, kv_cache_dtype_skip_layers=("0",))
    names = [kv_format.name for kv_format in mixed.layer_kv_formats(dims)]
    assert names == ["bfloat16", "int8_per_token_head", "int4_kivi", "float16", "float16"]
    assert {f.name for f in EngineConfig(kv_cache_dtype="fp8").layer_kv_formats(dims)} == {"fp8_e4m3"}


def test_sliding_window_names_the_layers_that_have_one() -> None:
    dims = ModelDims.from_hf_config(GEMMA)
    assert dims.sliding_window_layers == (0, 1, 2, 3, 4, 6)  # every sixth is global
    config = EngineConfig(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("sliding_window",))
    assert [f.name for f in config.layer_kv_formats(dims)].index("fp8_e4m3") == 5
    assert ModelDims.from_hf_config(MISTRAL).sliding_window_layers == (0, 1, 2)
    assert ModelDims.from_hf_config(MISTRAL | {"sliding_window": None}).sliding_window_layers == ()
    both = dataclasses.replace(config, kv_cache_dtype_layers="6:int4_kivi")
    with pytest.raises(
        ConfigError, match="layer 6 is in both --kv-cache-dtype-skip-layers and --kv-cache-dtype-layers"
    ):
        both.layer_kv_formats(dims)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"kv_cache_dtype_skip_layers": ("80",)}, "skip-layers names layer 80, but the model has 80 layers: 0 to 79"),
        ({"kv_cache_dtype_layers": "70-90:fp8"}, "dtype-layers names layer 80, but the model has 80 layers"),
        ({"kv_cache_dtype_skip_layers": ("sliding_window",)}, "no layer with a sliding window; name indices"),
    ],
)
def test_layers_the_model_does_not_have_are_refused(flags: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**flags).layer_kv_formats(ModelDims.from_hf_config(LLAMA3_70B))  # type: ignore[arg-type]


def test_dimensions_survive_json() -> None:
    dims = ModelDims.from_hf_config(MISTRAL)
    assert ModelDims(**json.loads(json.dumps(dataclasses.asdict(dims)))) == dims


def test_the_shipped_models_have_names() -> None:
    plain, outliers = EngineConfig().model_dir, EngineConfig(model="testbed-outliers").model_dir
    assert plain != outliers
    assert ModelDims.from_model_dir(plain) == ModelDims.from_model_dir(outliers)


def test_an_api_key_is_never_shown() -> None:
    assert "s3cret" not in str(EngineConfig(api_key="s3cret").flag_values())


def test_dims_of_a_hugging_face_config() -> None:
    dims = ModelDims.from_hf_config(LLAMA3_70B)
    assert (dims.num_layers, dims.num_kv_heads, dims.head_dim, dims.dtype) == (80, 8, 128, "bfloat16")


def test_keys_that_are_null_count_as_missing() -> None:
    dims = ModelDims.from_hf_config(LLAMA3_70B | {"head_dim": None, "num_key_value_heads": None})
    assert (dims.head_dim, dims.num_kv_heads, dims.latent_width) == (128, 64, 0)


def test_latent_attention_is_told_by_its_rank() -> None:
    latent = ModelDims.from_hf_config(LLAMA3_70B | {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert latent.latent_width == 576
    with pytest.raises(ConfigError, match="qk_rope_head_dim"):
        ModelDims.from_hf_config(LLAMA3_70B | {"kv_lora_rank": 512})


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_dynamic_rope_scaling_stretches_the_context(key: str) -> None:
    dims = ModelDims.from_hf_config(LLAMA3_70B | {key: {"type": "dynamic", "factor": 2.0}})
    assert dims.max_position_embeddings == 2 * 131072


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": "80"}, "num_hidden_layers"),
        ({"num_key_value_heads": 7}, "num_key_value_heads"),
        ({"architectures": []}, "architectures"),
    ],
)
def test_bad_model_configs_name_the_key(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ModelDims.from_hf_config(LLAMA3_70B | change)


def test_unreadable_model_directories(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        ModelDims.from_model_dir(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        ModelDims.from_model_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        ModelDims.from_model_dir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="not a JSON object"):
        ModelDims.from_model_dir(tmp_path)


def test_flags_memory_and_runbooks_load_without_torch() -> None:
    code = (
        "import sys, engine.config, engine.memory, engine.supervisor, runbooks.recommend, runbooks.load; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_several_words_of_a_change_are_a_list_or_text() -> None:
    listed = apply_changes(["--enable-lora"], {"--lora-modules": ["a=/x", "b=/y"]})
    assert listed == apply_changes(["--enable-lora"], {"--lora-modules": "a=/x b=/y"})
    assert EngineConfig.from_args(listed).lora_modules == ("a=/x", "b=/y")


def test_unsafe_faults_are_unlocked_by_their_flag() -> None:
    flags = ["--prefix-cache-fault", "copy_on_write", "--prefix-caching-hash-algo", "unsafe_truncated"]
    assert EngineConfig.from_args([*flags, "--allow-unsafe-replay"]).prefix_cache_fault == "copy_on_write"


def test_a_scope_that_does_not_exist_is_refused_in_code_too() -> None:
    with pytest.raises(ConfigError, match="must be one of global, tenant, session"):
        EngineConfig(prefix_cache_scope="user")
