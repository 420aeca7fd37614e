"""The testbed model with outlier key channels: it is the transform of the plain one, and computes the same function."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.request import SamplingParams
from engine.testbed import MODEL_DIR, OUTLIERS_MODEL_DIR
from engine.testbed.outliers import FACTOR, PAIRS, OutlierError, Outliers, main, scale_key_channels, transform
from engine.testbed.tasks import conversation
from engine.testbed.tokenizer import build_tokenizer

HEAD_DIM = 32
CHANNELS = [14, 30, 15, 31]
"""Of each head: RoPE turns channel i with channel i + 16."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    """One held-out conversation, several turns long."""
    return [int(i) for i in build_tokenizer(2048).encode(conversation(21, 12, 700).text())]


@torch.inference_mode()
def logits_and_keys(directory: Path, token_ids: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits [len, vocab], and each layer's keys after RoPE [KV heads, len, head_dim], from `transformers`."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    out = model(input_ids=torch.tensor([token_ids]), use_cache=True)
    return out.logits[0], [layer.keys[0] for layer in out.past_key_values.layers]


@torch.inference_mode()
def engine_logits(directory: Path, token_ids: list[int], kv_cache_dtype: str = "auto") -> Tensor:
    """Logits [len, vocab] of the embedded engine, prefilled in chunks."""
    engine = LLMEngine(
        EngineConfig(
            model=str(directory),
            device="cpu",
            num_gpu_blocks_override=100,
            max_model_len=1024,
            max_num_batched_tokens=200,
            kv_cache_dtype=kv_cache_dtype,
        )
    )
    model, hidden = engine.runner.model, []
    forward = model.forward

    def traced(*args: object) -> Tensor:
        hidden.append(forward(*args).clone())  # type: ignore[arg-type]
        return hidden[-1]

    model.forward = traced  # type: ignore[method-assign]
    engine.add_request("0", token_ids, SamplingParams(max_tokens=1, temperature=0))
    while engine.has_unfinished_requests():
        engine.step()
    return model.compute_logits(torch.cat(hidden)[: len(token_ids)])


def test_shipped_directory_is_the_transform_of_the_plain_one(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path / "again")]) == 0
    made = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    shipped = {path.name: path.read_bytes() for path in OUTLIERS_MODEL_DIR.iterdir() if path.name != "README.md"}
    assert made == shipped
    assert "README.md" in {path.name for path in OUTLIERS_MODEL_DIR.iterdir()}


def test_config_says_what_was_done_and_nothing_else_changed() -> None:
    plain, outliers = (json.loads((d / "config.json").read_text()) for d in (MODEL_DIR, OUTLIERS_MODEL_DIR))
    assert outliers.pop("key_outliers") == {"factor": FACTOR, "pairs": list(PAIRS)}
    assert outliers == plain


def test_logits_are_the_same_to_the_last_bit_and_the_keys_have_the_channels(token_ids: list[int]) -> None:
    plain, plain_keys = logits_and_keys(MODEL_DIR, token_ids)
    outliers, outlier_keys = logits_and_keys(OUTLIERS_MODEL_DIR, token_ids)
    assert torch.equal(outliers, plain)
    others = [channel for channel in range(HEAD_DIM) if channel not in CHANNELS]
    for before, after in zip(plain_keys, outlier_keys, strict=True):
        assert torch.equal(after[..., CHANNELS], before[..., CHANNELS] * FACTOR)
        assert torch.equal(after[..., others], before[..., others])


def test_the_channels_stand_out_of_nearly_every_head(token_ids: list[int]) -> None:
    """What a shared scale must cover, against what the other channels hold: by median over tokens.

    One head of the first layer hardly used these channels before (0.06), and so holds them at the others' size now.
    """
    others = [channel for channel in range(HEAD_DIM) if channel not in CHANNELS]
    for directory, wanted in ((MODEL_DIR, 0), (OUTLIERS_MODEL_DIR, 7)):
        _, keys = logits_and_keys(directory, token_ids)
        ratios = torch.stack([k[..., CHANNELS].abs().amax(-1) / k[..., others].abs().amax(-1) for k in keys])
        standing_out = ratios.median(dim=-1).values > 5
        assert int(standing_out.sum()) == wanted, ratios.median(dim=-1).values


def test_the_engine_gives_the_same_logits_too_until_the_cache_is_quantized(token_ids: list[int]) -> None:
    plain = engine_logits(MODEL_DIR, token_ids)
    assert torch.equal(engine_logits(OUTLIERS_MODEL_DIR, token_ids), plain)
    naive, kivi = (
        [(engine_logits(d, token_ids, name) - plain).abs().mean().item() for d in (MODEL_DIR, OUTLIERS_MODEL_DIR)]
        for name in ("int4_symmetric", "int4_kivi")
    )
    assert naive[1] > 2 * naive[0] > 0
    assert kivi[1] == pytest.approx(kivi[0], rel=0.01), "a scale of its own for each channel takes the factor up"


@pytest.mark.parametrize(("q_heads", "kv_heads", "bias"), [(4, 4, False), (4, 2, True), (4, 1, True)])
def test_any_grouping_of_heads_keeps_its_function(
    q_heads: int, kv_heads: int, bias: bool, tmp_path: Path, token_ids: list[int]
) -> None:
    config = LlamaConfig(
        vocab_size=1046, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=q_heads,
        num_key_value_heads=kv_heads, initializer_range=0.2, attention_bias=bias, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "plain")
    transform(tmp_path / "plain", tmp_path / "outliers", Outliers(64.0, (0, 7)))
    plain, plain_keys = logits_and_keys(tmp_path / "plain", token_ids)
    outliers, keys = logits_and_keys(tmp_path / "outliers", token_ids)
    assert torch.equal(outliers, plain)
    assert torch.equal(keys[0][..., [0, 7, 8, 15]], plain_keys[0][..., [0, 7, 8, 15]] * 64)


def test_scaling_only_the_keys_would_change_the_function(tmp_path: Path, token_ids: list[int]) -> None:
    """So the comparison of logits can fail."""
    shutil.copytree(OUTLIERS_MODEL_DIR, tmp_path / "broken")
    tensors = load_file(OUTLIERS_MODEL_DIR / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = load_file(MODEL_DIR / "model.safetensors")[name]
    save_file(tensors, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
    assert not torch.allclose(
        logits_and_keys(tmp_path / "broken", token_ids)[0], logits_and_keys(MODEL_DIR, token_ids)[0], atol=0.1
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--factor", "10"], "the factor must be a power of two"),
        (["--factor", "-2"], "the factor must be a power of two"),
        (["--factor", "nan"], "the factor must be a power of two"),
        (["--pairs", "14,16"], "has rotary pairs 0 to 15"),
        (["--model", str(OUTLIERS_MODEL_DIR)], "has outlier channels already"),
        (["--model", "no/such/model"], "no readable config.json"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_writes_nothing(
    flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "out"), *flags]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_models_whose_keys_are_normalized_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(OutlierError, match="Qwen3ForCausalLM is not one of"):
        transform(tmp_path, tmp_path / "out", Outliers(FACTOR, PAIRS))


def test_a_factor_that_loses_bits_is_refused() -> None:
    small = torch.full((HEAD_DIM, 4), 1e-38).half().float() + 3e-38
    tensors = {"a.k_proj.weight": torch.ones(HEAD_DIM, 4), "a.q_proj.weight": small}
    with pytest.raises(OutlierError, match="does not survive a factor"):
        scale_key_channels(tensors, HEAD_DIM, Outliers(2.0**20, (0,)))
    with pytest.raises(OutlierError, match="no k_proj"):
        scale_key_channels({}, HEAD_DIM, Outliers(2.0, (0,)))
