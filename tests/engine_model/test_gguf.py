"""GGUF files: the same weights as a Hugging Face directory give the same logits, and every way a file can be wrong.

The files are written here with the `gguf` package as llama.cpp's conversion writes them: rows of Llama's queries and
keys reordered for neighbouring pairs, 1 added to Gemma's norm weights.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quantization
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from engine import gemma
from engine.config import ConfigError, EngineConfig, ModelDims
from engine.models.loader import ModelLoadError, load_model
from engine.request import SamplingParams
from engine.tokenizer import Tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "rms_norm_eps": 1e-5,
}
ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**(SIZES | {"head_dim": 32}), tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(
        **(SIZES | {"num_hidden_layers": 7, "head_dim": 32}),
        sliding_window=9,
        query_pre_attn_scalar=32,
        rope_parameters=ROPES,
    ),
}


def write_gguf(directory: Path, file: Path, quantization: Quantization = Quantization.F32) -> Path:
    """The model of a Hugging Face directory as a GGUF file; matrices are quantized, vectors kept."""
    config = json.loads((directory / "config.json").read_text())
    architecture = config["model_type"].removesuffix("_text")
    writer = gguf.GGUFWriter(file, architecture)
    write_dimensions(writer, config)
    write_tokenizer_metadata(writer, directory)
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    heads = {"q_proj.weight": config["num_attention_heads"], "k_proj.weight": config["num_key_value_heads"]}
    for name, tensor in load_file(directory / "model.safetensors").items():
        values = tensor.numpy()
        part = ".".join(name.split(".")[-2:])
        if architecture == "llama" and part in heads:
            values = values.reshape(heads[part], 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if values.ndim == 1:
            writer.add_tensor(target, values)
        else:
            writer.add_tensor(target, gguf.quants.quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_dimensions(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if "factor" in rope:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def write_tokenizer_metadata(writer: gguf.GGUFWriter, directory: Path) -> None:
    content = json.loads((directory / "tokenizer.json").read_text())
    vocab = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocab)
    writer.add_token_types([3 if token in ("<s>", "</s>") else 1 for token in vocab])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}")


@pytest.fixture(scope="module")
def pair(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Architecture -> (directory, file), made once."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            lab.save_random_model(CONFIGS[name], directory, seed=2, norm_offset=1.0 if name == "gemma3" else 0.0)
            made[name] = directory, write_gguf(directory, directory / "model.gguf")
        return made[name]

    return get


@pytest.fixture
def llama_file(pair: Any, tmp_path: Path) -> Path:
    copy = tmp_path / "llama.gguf"
    copy.write_bytes(pair("llama")[1].read_bytes())
    return copy


def load(path: Path) -> Any:
    return load_model(path, ModelDims.from_model_dir(path), torch.float32, "cpu")


def logits(lab: Any, path: Path) -> torch.Tensor:
    engine = lab.make_engine(path)
    traced = lab.trace_logits(engine)
    lab.generate(engine, lab.prompts(60), SamplingParams(max_tokens=1, temperature=0))
    return torch.stack([traced["0"][position] for position in range(60)])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_gives_the_logits_of_the_directory(pair: Any, name: str, lab: Any) -> None:
    directory, file = pair(name)
    expected = lab.reference_logits(lab.load_reference(directory), lab.prompts(60)[0])
    torch.testing.assert_close(logits(lab, file), expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(logits(lab, file), logits(lab, directory), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_quantized_matrices(pair: Any, name: str, kind: str, tmp_path: Path, lab: Any) -> None:
    quantization = Quantization[kind]
    directory = pair(name)[0]
    for file in directory.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    rounded = {}
    for key, tensor in load_file(directory / "model.safetensors").items():
        codes = gguf.quants.quantize(tensor.numpy(), quantization) if tensor.dim() > 1 else None
        rounded[key] = tensor if codes is None else torch.from_numpy(gguf.quants.dequantize(codes, quantization).copy())
    save_file(rounded, tmp_path / "model.safetensors")
    file = write_gguf(directory, tmp_path / "quantized.gguf", quantization)
    torch.testing.assert_close(logits(lab, file), logits(lab, tmp_path), atol=1e-3, rtol=0)


def test_divided_rotary_frequencies(pair: Any, tmp_path: Path, lab: Any) -> None:
    """Llama 3.1 in GGUF: a tensor of divisors, here all 4, which is linear scaling by 4."""
    directory, _ = pair("llama")
    config = json.loads((directory / "config.json").read_text())
    for file in directory.glob("*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config["rope_parameters"] |= {"rope_type": "linear", "factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(directory / "model.safetensors")
    expected = logits(lab, tmp_path)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights | {"rope_freqs.weight": torch.full((8,), 4.0)}, tmp_path / "model.safetensors")
    file = write_gguf(tmp_path, tmp_path / "divided.gguf")
    torch.testing.assert_close(logits(lab, file), expected, atol=1e-4, rtol=0)


def test_tokens_and_templates_are_those_of_the_directory(pair: Any) -> None:
    directory, file = pair("llama")
    ours, plain = Tokenizer(file), FastTokenizer.from_file(str(directory / "tokenizer.json"))
    for text in ("abc bad é☃\n", "<s>hi</s>", "", "  two  spaces"):
        assert ours.encode(text, add_special_tokens=False) == plain.encode(text, add_special_tokens=False).ids
        assert ours.encode(text)[0] == 0
        assert ours.decode(ours.encode(text), skip_special_tokens=True) == plain.decode(plain.encode(text).ids)
    assert ours.eos_token_ids == [1]
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>hi"


def write_sentencepiece(file: Path, architecture: str, pieces: dict[str, float], **flags: bool) -> Path:
    """A file with nothing but a vocabulary: <unk>, <s>, </s>, bytes, then the pieces with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + list(pieces.values()))
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(pieces))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(flags.get("add_space_prefix", True))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_sentencepiece_merges_by_score_in_llama_and_by_position_in_gemma(tmp_path: Path) -> None:
    pieces = {"\u2581": -9.0, "a": -9.0, "b": -9.0, "c": -9.0, "ab": -2.0, "bc": -1.0}
    llama = Tokenizer(write_sentencepiece(tmp_path / "a.gguf", "llama", pieces, add_space_prefix=False))
    gemma3 = Tokenizer(write_sentencepiece(tmp_path / "b.gguf", "gemma3", pieces, add_space_prefix=False))
    ids = {piece: 259 + i for i, piece in enumerate(pieces)}
    assert llama.encode("abc") == [1, ids["a"], ids["bc"]]
    assert gemma3.encode("abc") == [1, ids["ab"], ids["c"]]
    assert llama.encode("a é") == [1, ids["a"], ids["\u2581"], 3 + 0xC3, 3 + 0xA9]
    assert llama.decode(llama.encode("a é c")) == "a é c"


def test_a_space_before_the_text(tmp_path: Path) -> None:
    pieces = {"\u2581": -9.0, "a": -9.0, "\u2581a": -1.0}
    tokenizer = Tokenizer(write_sentencepiece(tmp_path / "a.gguf", "llama", pieces))
    assert tokenizer.encode("a") == [1, 261]
    assert tokenizer.decode([1, 261]) == "a"


# What can be wrong


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.gguf.* does not exist; give --model"):
        ModelDims.from_model_dir(tmp_path / "nowhere.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"\x00" * 64, b"not a tensor in sight, whatever its name says"])
def test_corrupt_header(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"not readable as GGUF .*corrupt or cut short, fetch it again"):
        ModelDims.from_model_dir(file)


def test_unknown_version(llama_file: Path) -> None:
    data = llama_file.read_bytes()
    llama_file.write_bytes(data[:4] + (1).to_bytes(4, "little") + data[8:])
    with pytest.raises(ConfigError, match="version 1, not one of 2, 3"):
        load(llama_file)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.03, 0.5, 0.999])
def test_partial_file(llama_file: Path, share: float) -> None:
    data = llama_file.read_bytes()
    llama_file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ConfigError, match=r"cut short.*fetch it again"):
        load(llama_file)


def test_a_corrupt_file_never_ends_in_a_traceback(llama_file: Path) -> None:
    """Random bytes of the header are changed: it loads as something, or is refused with a sentence."""
    data, generator, refusals = llama_file.read_bytes(), random.Random(0), []
    for _ in range(150):
        changed = bytearray(data)
        for _ in range(3):
            changed[generator.randrange(4, 9000)] = generator.randrange(256)
        llama_file.write_bytes(changed)
        try:
            dims = ModelDims.from_model_dir(llama_file)
            Tokenizer(llama_file)
            if dims.num_layers == 2 and dims.max_position_embeddings == 128:
                load(llama_file)
        except ConfigError as error:
            refusals.append(str(error))
    assert len(refusals) > 10
    assert not any("\n" in sentence for sentence in refusals)


def test_unknown_architecture_lists_what_is_supported(tmp_path: Path) -> None:
    file = write_sentencepiece(tmp_path / "a.gguf", "mamba", {})
    with pytest.raises(ConfigError, match=r"GGUF architecture .mamba. .*not supported; the engine runs: llama, qwen2"):
        ModelDims.from_model_dir(file)


def test_missing_dimension(tmp_path: Path) -> None:
    file = write_sentencepiece(tmp_path / "a.gguf", "llama", {})
    with pytest.raises(ConfigError, match=r"llama\.embedding_length must be a positive integer, found None"):
        ModelDims.from_model_dir(file)


def test_a_tensor_that_the_model_has_no_use_for(pair: Any, tmp_path: Path) -> None:
    directory, _ = pair("llama")
    for file in directory.glob("*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(directory / "model.safetensors")
    save_file(weights | {"model.layers.0.self_attn.v_proj.bias": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_v\.bias in .* is none that"):
        load(write_gguf(tmp_path, tmp_path / "more.gguf"))


def test_missing_tensor(pair: Any, tmp_path: Path) -> None:
    directory, _ = pair("llama")
    for file in directory.glob("*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(write_gguf(tmp_path, tmp_path / "incomplete.gguf"))


def test_unknown_quantization(llama_file: Path) -> None:
    data = llama_file.read_bytes()
    name = b"blk.0.attn_output.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions and two sizes
    llama_file.write_bytes(data[:at] + (99).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_output\.weight.* ggml type 99.* upgrade it"):
        load(llama_file)


def test_without_the_gguf_package(llama_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert ModelDims.from_model_dir(llama_file).num_layers == 2
    with pytest.raises(ModelLoadError, match=r"not installed: pip install 'kvoncall\[gemma\]'"):
        load(llama_file)


def test_gemma_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemma, "_PACKAGE", "no_such_package_of_ours")
    with pytest.raises(ConfigError, match=r"--model gemma needs .* pip install 'kvoncall\[gemma\]'"):
        _ = EngineConfig(model="gemma").model_dir


def test_gemma_parts_that_do_not_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = tmp_path / "part00"
    part.write_bytes(np.arange(100, dtype=np.uint8).tobytes())

    class Package:
        MODEL_NAME = "model.gguf"
        EXPECTED_SHA256 = "0" * 64

        @staticmethod
        def chunk_paths() -> list[Path]:
            return [part]

    monkeypatch.setattr(gemma, "_package", lambda: Package)
    with pytest.raises(ConfigError, match="do not add up"):
        gemma.gemma_path(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
