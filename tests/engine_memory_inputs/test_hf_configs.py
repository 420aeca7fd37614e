"""Configs of nineteen architectures: what their layers cache and how many parameters they have.

Sizes are those of the published config.json; parameters are those of the models that `transformers` builds of them.
"""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.memory.hf_config import model_shape, read_config, with_dims
from engine.memory.model_presets import model_config, model_names, model_preset
from engine.memory.shape import ModelShape

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "configs.json").read_text(encoding="utf-8")
)
LLAMA_8B = model_config("Llama-3-8B")["config"]


def kv_bytes_per_token(shape: ModelShape) -> int:
    """Over all layers and heads, in the model's own dtype."""
    width = 4 if shape.dtype == "float32" else 2
    values = 0
    for group in shape.layers:
        if group.attention == "latent":
            values += group.count * group.latent_width
        else:
            values += group.count * group.num_kv_heads * (group.head_dim + (group.v_head_dim or group.head_dim))
    return values * width


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_and_parameters_of_published_configs(name: str) -> None:
    expected = CONFIGS[name]
    shape = model_shape(expected["config"], name)
    assert [[group.count, group.attention] for group in shape.layers] == expected["groups"]
    assert kv_bytes_per_token(shape) == expected["kv_bytes_per_token"]
    assert shape.parameters == pytest.approx(expected["parameters"], rel=1e-3)
    assert shape.active_parameters is not None
    assert shape.parameters is not None
    assert shape.active_parameters <= shape.parameters


@pytest.mark.parametrize("name", model_names())
def test_presets_have_the_parameters_of_their_models(name: str) -> None:
    shape = model_preset(name)
    assert shape.parameters == pytest.approx(model_config(name)["parameters"], rel=5e-3)
    assert shape.weights_bytes
    assert shape.max_position_embeddings
    assert shape.num_layers > 0


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Llama-3-8B", 8.03e9),
        ("Llama-3-70B", 70.55e9),
        ("Llama-2-7B", 6.74e9),
        ("Qwen2.5-7B", 7.62e9),
        ("Mixtral-8x7B", 46.7e9),
        ("DeepSeek-V3", 671e9),
        ("Qwen3-0.6B", 0.596e9),
        ("gemma-2-9b-it", 9.24e9),
        ("opt-125m", 0.125e9),
        ("phi-2", 2.78e9),
    ],
)
def test_well_known_parameter_counts(name: str, parameters: float) -> None:
    assert model_preset(name).parameters == pytest.approx(parameters, rel=1e-2)


def test_active_parameters_of_experts() -> None:
    assert model_preset("Qwen3-30B-A3B").active_parameters == pytest.approx(3.35e9, rel=0.02)
    assert model_preset("DeepSeek-V3").active_parameters == pytest.approx(37.5e9, rel=0.02)
    assert model_preset("Llama-3-8B").active_parameters == model_preset("Llama-3-8B").parameters


def group_of(shape: ModelShape, attention: str) -> Any:
    return next(group for group in shape.layers if group.attention == attention)


def test_windows_of_alternating_models() -> None:
    gpt_oss = model_preset("gpt-oss-120b")
    assert [(g.count, g.attention, g.window) for g in gpt_oss.layers] == [(18, "sliding", 128), (18, "full", None)]
    gemma3 = model_preset("Gemma-3-27B")
    assert [(g.count, g.window) for g in gemma3.layers] == [(52, 1024), (10, None)]
    scout = model_preset("Llama-4-Scout")
    assert [(g.count, g.attention, g.window) for g in scout.layers] == [(36, "chunked", 8192), (12, "full", None)]


def test_layers_of_one_model_may_have_different_heads() -> None:
    gemma4 = model_preset("Gemma-4-31B")
    sliding, full = group_of(gemma4, "sliding"), group_of(gemma4, "full")
    assert (sliding.num_kv_heads, sliding.head_dim) == (16, 256)
    assert (full.num_kv_heads, full.head_dim) == (4, 512)


def test_a_null_window_is_no_window() -> None:
    assert {g.attention for g in model_preset("Mistral-7B-v0.3").layers} == {"full"}
    assert {g.attention for g in model_preset("Mistral-7B-v0.1").layers} == {"sliding"}
    qwen = {**model_config("Qwen2.5-7B")["config"], "use_sliding_window": False, "sliding_window": 131072}
    assert {g.attention for g in model_shape(qwen).layers} == {"full"}


def test_latents_are_kept_once_for_all_heads_and_the_indexer_beside_them() -> None:
    v3, v32 = model_preset("DeepSeek-V3"), model_preset("DeepSeek-V3.2")
    assert (group_of(v3, "latent").latent_width, group_of(v3, "latent").index_width) == (576, 0)
    assert group_of(v32, "latent").index_width == 132  # 128 fp8 values and their float32 scale
    assert group_of(model_preset("Mistral-Small-4-119B"), "latent").latent_width == 320


def test_state_of_gated_delta_layers_is_in_its_own_dtype() -> None:
    state = group_of(model_preset("Qwen3.5-27B"), "recurrent").state_bytes
    assert state == (2 * 16 * 128 + 48 * 128) * 3 * 2 + 48 * 128 * 128 * 4


def test_layers_that_read_anothers_kv_keep_none() -> None:
    config = {**model_config("Gemma-4-31B")["config"]}
    config["text_config"] = {**config["text_config"], "num_kv_shared_layers": 20}
    shape = model_shape(config)
    assert group_of(shape, "none").count == 20
    assert shape.num_layers == 60
    assert any("num_kv_shared_layers" in sentence for sentence in shape.assumptions)


def test_layers_that_share_or_cross_keep_none() -> None:
    shared = model_shape({**LLAMA_8B, "use_cla": True, "cla_share_factor": 2})
    assert [(g.count, g.attention) for g in shared.layers] == [(16, "full"), (16, "none")]
    crossed = model_shape({**LLAMA_8B, "cross_attention_layers": [3, 8, 13]})
    assert [(g.count, g.attention) for g in crossed.layers] == [(29, "full"), (3, "none")]
    assert any("images" in sentence for sentence in crossed.assumptions)


def test_a_class_alone_tells_the_model_type() -> None:
    config = {key: value for key, value in model_config("Gemma-2-9B")["config"].items() if key != "model_type"}
    shape = model_shape(config)
    assert shape.layers == model_preset("Gemma-2-9B").layers
    assert not any("not known here" in sentence for sentence in shape.assumptions)


def test_mistrals_own_names() -> None:
    params = {
        "dim": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 14336,
        "vocab_size": 32768,
        "max_seq_len": 32768,
        "tied_embeddings": False,
        "tie_word_embeddings": False,
    }
    assert model_shape(params).parameters == model_preset("Mistral-7B-v0.3").parameters


def test_variable_kv_heads_of_searched_architectures() -> None:
    blocks = [{"attention": {"n_heads_in_group": 8, "no_op": i % 2 == 1}, "ffn": {"ffn_mult": 2.5}} for i in range(8)]
    shape = model_shape({**LLAMA_8B, "num_hidden_layers": 8, "block_configs": blocks, "model_type": "nemotron-nas"})
    assert [(g.count, g.attention, g.num_kv_heads) for g in shape.layers] == [(4, "full", 4), (4, "none", 0)]


def test_an_unknown_architecture_is_read_by_standard_keys_and_says_so() -> None:
    shape = model_shape({**LLAMA_8B, "architectures": ["FooForCausalLM"], "model_type": "foo"})
    assert shape.parameters == model_preset("Llama-3-8B").parameters
    assert any("FooForCausalLM is not known here" in sentence for sentence in shape.assumptions)


def test_defaults_of_a_class_fill_nested_configs_and_are_named() -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
        },
    }
    shape = model_shape(config)
    assert group_of(shape, "full").num_kv_heads == 4
    assert any("num_key_value_heads is missing" in sentence for sentence in shape.assumptions)


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 8192),
        ({"type": "linear", "factor": 2.0}, 16384),
    ],
)
def test_context_stretched_by_rope_scaling(scaling: dict[str, Any] | None, positions: int) -> None:
    assert model_shape({**LLAMA_8B, "rope_scaling": scaling}).max_position_embeddings == positions


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": None}, "--layers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers must be a positive integer, found '32'"),
        ({"num_hidden_layers": -1}, "--layers"),
        ({"num_attention_heads": 33, "head_dim": 128}, "num_key_value_heads"),
        ({"hidden_size": 4100}, "--head-dim"),
        ({"layer_types": ["full_attention", "wavelet"] * 16}, "'wavelet'"),
        ({"layer_types": ["full_attention"]}, "each of 32 layers"),
        ({"num_key_value_heads": True}, "found True"),
    ],
)
def test_what_is_missing_or_wrong_is_named_with_the_flag_that_gives_it(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        model_shape({**LLAMA_8B, **changes})
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("seed", range(3))
def test_no_mangled_config_escapes_as_anything_but_one_sentence(seed: int) -> None:
    """Keys left out or of another kind, also in nested objects: a shape, or a `ConfigError`."""
    chosen = random.Random(seed)
    sources = [model_config(name)["config"] for name in model_names()] + [one["config"] for one in CONFIGS.values()]
    values: tuple[Any, ...] = (None, 0, -1, 3, 2.5, "x", "8", True, [], {}, [1, 2], {"a": 1}, 10**30, math.nan)
    shapes = 0
    refusals: list[str] = []
    for _ in range(150):
        config = copy.deepcopy(chosen.choice(sources))
        for part in (config, *(inner for inner in list(config.values()) if isinstance(inner, dict))):
            key = chosen.choice(list(part) or [""])
            if chosen.random() < 0.5:
                part.pop(key, None)
            elif chosen.random() < 0.5:
                part[key] = copy.deepcopy(chosen.choice(values))
        try:
            shapes += model_shape(config).num_layers > 0
        except ConfigError as error:
            refusals.append(str(error))
    assert shapes
    assert refusals
    assert not any("\n" in refusal for refusal in refusals)


def test_an_architecture_without_known_keys_asks_for_dims() -> None:
    with pytest.raises(ConfigError, match=r"--layers, --kv-heads and --head-dim"):
        model_shape({"architectures": ["FooModel"], "model_type": "foo"})


def test_dims_fill_a_partial_config_and_may_not_contradict_it() -> None:
    partial = {key: value for key, value in LLAMA_8B.items() if key != "num_hidden_layers"}
    assert model_shape(with_dims(partial, {"num_hidden_layers": 32})).num_layers == 32
    with pytest.raises(ConfigError, match="--layers 40 contradicts"):
        with_dims(LLAMA_8B, {"num_hidden_layers": 40})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '"config"'])
def test_broken_files_are_one_sentence(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        read_config(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_a_config_is_read_from_file_directory_and_text(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(LLAMA_8B), encoding="utf-8")
    assert read_config(str(folder)) == read_config(str(file)) == (LLAMA_8B, "my-model")
    assert read_config(json.dumps(LLAMA_8B)) == (LLAMA_8B, "")
