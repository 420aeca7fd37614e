"""Reading Hugging Face directories, and every way they can be wrong."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import ConfigError, ModelDims
from engine.models.loader import ModelLoadError, load_model
from engine.request import SamplingParams

WEIGHTS = "model.safetensors"


@pytest.fixture
def copy(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "copy"))


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(directory, ModelDims.from_model_dir(directory), dtype, "cpu")


def edit_config(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(directory: Path, **changes: torch.Tensor | None) -> None:
    tensors: dict[str, torch.Tensor | None] = {**load_file(directory / WEIGHTS), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, directory / WEIGHTS)


def assert_same_logits(
    directory: Path, lab: Any, length: int = 60, reference_length: int | None = None, **flags: object
) -> None:
    """Logits of a prompt; the reference may see further tokens behind it."""
    engine = lab.make_engine(directory, **flags)
    traced = lab.trace_logits(engine)
    tokens = lab.prompts(reference_length or length)[0]
    lab.generate(engine, [tokens[:length]], SamplingParams(max_tokens=1, temperature=0))
    got = torch.stack([traced["0"][i] for i in range(length)])
    expected = lab.reference_logits(lab.load_reference(directory), tokens)[:length]
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)


def test_shards_with_an_index(tmp_path: Path, lab: Any) -> None:
    directory = lab.make_llama(tmp_path, max_shard_size="100KB")
    assert (directory / "model.safetensors.index.json").exists()
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    assert_same_logits(directory, lab)


def test_tied_embeddings_count_once(tmp_path: Path, model_dir: Path, lab: Any) -> None:
    directory = lab.make_llama(tmp_path, tie_word_embeddings=True)
    assert_same_logits(directory, lab)
    model, untied = load(directory), load(model_dir)
    assert model.lm_head is model.embedding
    assert untied.weights_bytes - model.weights_bytes == model.embedding.numel() * 4


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_rope_variants(tmp_path: Path, rope: dict[str, object], lab: Any) -> None:
    assert_same_logits(lab.make_llama(tmp_path, rope_parameters=rope), lab)


@pytest.mark.parametrize(
    "changes",
    [{}, {"beta_fast": 16, "beta_slow": 2}, {"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 1.0}],
    ids=["defaults", "betas", "attention-factor", "mscale"],
)
def test_yarn(tmp_path: Path, changes: dict[str, float], lab: Any) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    assert_same_logits(lab.make_llama(tmp_path, rope_parameters=yarn | changes), lab)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}


def test_dynamic_rope_within_the_original_context(tmp_path: Path, lab: Any) -> None:
    directory = lab.make_llama(tmp_path, rope_parameters=DYNAMIC, max_position_embeddings=80)
    assert_same_logits(directory, lab, max_model_len=80)


def test_dynamic_rope_beyond_it_is_that_of_max_model_len(tmp_path: Path, lab: Any) -> None:
    """Frequencies cannot follow a sequence whose keys are cached: they are those of the longest one allowed."""
    directory = lab.make_llama(tmp_path, rope_parameters=DYNAMIC, max_position_embeddings=20)
    assert ModelDims.from_model_dir(directory).max_position_embeddings == 20 * 4
    assert_same_logits(directory, lab, length=59, max_model_len=60, reference_length=60)
    with pytest.raises(ConfigError, match="max_position_embeddings 80"):
        lab.make_engine(directory, max_model_len=81)


def test_older_spelling_of_the_rope_keys(copy: Path, tmp_path: Path, lab: Any) -> None:
    rope = {"rope_type": "linear", "rope_theta": 777.0, "factor": 2.0}
    new = lab.make_llama(tmp_path / "new", rope_parameters=rope)
    config = json.loads((new / "config.json").read_text())
    del config["rope_parameters"]
    old = Path(shutil.copytree(new, tmp_path / "old"))
    config |= {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (old / "config.json").write_text(json.dumps(config))
    assert torch.equal(load(new).ropes[0].cos, load(old).ropes[0].cos)
    assert not torch.equal(load(new).ropes[0].cos, load(copy).ropes[0].cos)


def test_converts_to_the_dtype_asked_for(model_dir: Path) -> None:
    model = load(model_dir, torch.bfloat16)
    assert model.embedding.dtype is torch.bfloat16
    assert model.layers[0].qkv.dtype is torch.bfloat16


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*does not exist"):
        load(tmp_path / "nowhere")


def test_no_weights(copy: Path) -> None:
    (copy / WEIGHTS).unlink()
    with pytest.raises(ModelLoadError, match=r"holds neither model\.safetensors nor"):
        load(copy)


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"not a tensor in sight, whatever its name says"])
def test_corrupt_weights(copy: Path, content: bytes) -> None:
    (copy / WEIGHTS).write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"not readable as safetensors .* fetch it again"):
        load(copy)


def test_truncated_weights(copy: Path) -> None:
    data = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelLoadError, match="corrupt or cut short"):
        load(copy)


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.5, 0.999])
def test_a_shard_that_is_cut_short(tmp_path: Path, share: float, lab: Any) -> None:
    directory = lab.make_llama(tmp_path, max_shard_size="100KB")
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelLoadError, match=f"{shard.name}.* is not readable as safetensors"):
        load(directory)


def test_a_corrupt_header_never_ends_in_a_traceback(copy: Path) -> None:
    data = (copy / WEIGHTS).read_bytes()
    rng = random.Random(0)
    sentences = []
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(3000)] = rng.randrange(256)
        (copy / WEIGHTS).write_bytes(damaged)
        try:
            load(copy)
        except ModelLoadError as error:
            sentences.append(str(error))
    assert len(sentences) > 200
    assert not [sentence for sentence in sentences if "\n" in sentence]


def test_index_that_names_a_missing_shard(tmp_path: Path, lab: Any) -> None:
    directory = lab.make_llama(tmp_path, max_shard_size="100KB")
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=f"{shard.name}.*does not exist"):
        load(directory)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}'])
def test_corrupt_index(copy: Path, content: str) -> None:
    (copy / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelLoadError, match="is not a safetensors index"):
        load(copy)


def test_missing_tensor(copy: Path) -> None:
    edit_weights(copy, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(copy)


def test_a_tensor_that_the_model_has_no_use_for(copy: Path) -> None:
    edit_weights(copy, **{"model.layers.1.self_attn.q_proj.bias": torch.ones(64)})
    with pytest.raises(ModelLoadError, match=r"q_proj\.bias in .* is none that this engine's LlamaForCausalLM has"):
        load(copy)


def test_tables_of_old_checkpoints_are_left_out(copy: Path) -> None:
    edit_weights(copy, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load(copy)


@pytest.mark.parametrize("shape", [(64, 64, 1), (63, 64), (64, 63), ()])
def test_tensor_of_another_shape(copy: Path, shape: tuple[int, ...]) -> None:
    edit_weights(copy, **{"model.layers.0.self_attn.o_proj.weight": torch.zeros(shape)})
    with pytest.raises(ModelLoadError, match=r"o_proj\.weight in .* has shape .*config\.json\) asks for \[64, 64\]"):
        load(copy)


def test_fused_parts_that_only_fit_in_sum(copy: Path) -> None:
    edit_weights(
        copy,
        **{
            "model.layers.0.mlp.gate_proj.weight": torch.zeros(95, 64),
            "model.layers.0.mlp.up_proj.weight": torch.zeros(97, 64),
        },
    )
    with pytest.raises(ModelLoadError, match=r"gate_proj\.weight"):
        load(copy)


def test_unsupported_architecture_lists_what_is_supported(copy: Path) -> None:
    edit_config(copy, architectures=["MambaForCausalLM"])
    with pytest.raises(ModelLoadError, match=r"MambaForCausalLM is not supported; the engine runs: .*LlamaForCausalLM"):
        load(copy)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope scaling 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "lacks the key 'factor'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "lacks the key 'factor'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_variants(copy: Path, changes: dict[str, object], words: str) -> None:
    edit_config(copy, **changes)
    with pytest.raises(ModelLoadError, match=words):
        load(copy)
