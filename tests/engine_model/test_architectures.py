"""Every architecture on the paged cache against `transformers`, whichever way the tokens reach it.

Weights are drawn wide: at the usual 0.02 attention is nearly uniform, and even a missing RoPE term hardly shows.
Differences are relative to the spread of the logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from engine.config import ConfigError, EngineConfig, ModelDims
from engine.engine import LLMEngine
from engine.memory import kv_bytes_per_token
from engine.models import decoder, deepseek_v2
from engine.models.loader import load_model
from engine.models.rope import RotaryTable
from engine.request import SamplingParams

TOLERANCE = 1e-3
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
GEMMA: dict[str, Any] = SIZES | {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": GEMMA_ROPES,
    "query_pre_attn_scalar": 24,
}
DEEPSEEK: dict[str, Any] = SIZES | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2-window": lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=24),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=11),
    "mistral-no-window": lambda: MistralConfig(**SIZES, sliding_window=None),
    "gemma3": lambda: Gemma3TextConfig(**GEMMA, final_logit_softcapping=20.0),
    "deepseek": lambda: DeepseekV2Config(**DEEPSEEK, q_lora_rank=None, topk_method="greedy"),
    "deepseek-q-lora-groups-yarn": lambda: DeepseekV2Config(
        **DEEPSEEK,
        q_lora_rank=20,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        rope_parameters=YARN,
    ),
}


@dataclass(frozen=True)
class Twin:
    """One model in both implementations."""

    directory: Path
    reference: PreTrainedModel
    lab: Any

    def relative_error(self, engine: LLMEngine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> float:
        """Largest difference of any logit that the engine computed, over the standard deviation of its row's logits."""
        traced = self.lab.trace_logits(engine)
        generated = self.lab.generate(engine, prompts, params)
        worst = 0.0
        for i, (prompt, tokens) in enumerate(zip(prompts, generated, strict=True)):
            expected = self.lab.reference_logits(self.reference, (prompt + tokens)[:-1])
            positions = sorted(traced[str(i)])
            assert positions[-1] == len(expected) - 1
            got = torch.stack([traced[str(i)][position] for position in positions])
            difference = (got - expected[positions]).abs().amax(-1) / expected[positions].std(-1)
            worst = max(worst, difference.max().item())
        return worst


@pytest.fixture(scope="session")
def twins(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Twin]:
    made: dict[str, Twin] = {}

    def get(name: str) -> Twin:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            offset = 1.0 if name.startswith("gemma") else 0.0
            lab.save_random_model(CONFIGS[name](), directory, seed=11, norm_offset=offset)
            made[name] = Twin(directory, lab.load_reference(directory), lab)
        return made[name]

    return get


@pytest.fixture(params=CONFIGS)
def twin(request: pytest.FixtureRequest, twins: Callable[[str], Twin]) -> Twin:
    return twins(request.param)


def test_scores_are_far_from_uniform(twin: Twin, lab: Any) -> None:
    """Without this the comparisons below would prove little."""
    with torch.no_grad():
        attentions = twin.reference(torch.tensor(lab.prompts(48)), output_attentions=True).attentions
    for weights in attentions:  # [1, heads, 48, 48]; a score is the logarithm of its weight, up to a constant
        last = weights[0, :, -1]
        spread = torch.stack([row[row > 0].log().std() for row in last])
        assert spread.mean() > 1


@pytest.mark.parametrize("budget", [2048, 1, 7], ids=["whole", "token-by-token", "chunks"])
def test_prefill_and_decode(twin: Twin, budget: int, lab: Any) -> None:
    engine = lab.make_engine(twin.directory, max_num_batched_tokens=budget, max_num_seqs=1)
    assert twin.relative_error(engine, lab.prompts(61)) < TOLERANCE


def test_ragged_batches(twin: Twin, lab: Any) -> None:
    engine = lab.make_engine(twin.directory, max_num_batched_tokens=20)
    assert twin.relative_error(engine, lab.prompts(1, 15, 16, 17, 64, 33, 5)) < TOLERANCE


def test_after_a_prefix_hit(twin: Twin, lab: Any) -> None:
    engine = lab.make_engine(twin.directory)
    prefix = lab.prompts(40)[0]
    lab.generate(engine, [prefix], GREEDY)
    prompts = [prefix + tail for tail in lab.prompts(1, 9, 20, seed=3)] + [prefix]
    assert twin.relative_error(engine, prompts) < TOLERANCE
    assert engine.stats().prefix_hits_total == 40 * 3 + 36  # a full hit recomputes its last block


def test_after_preemption(twin: Twin, lab: Any) -> None:
    flags = {"num_gpu_blocks_override": 24, "max_model_len": 80, "enable_prefix_caching": False}
    engine = lab.make_engine(twin.directory, **flags)
    assert twin.relative_error(engine, lab.prompts(20, 25, 30, 22, 18)) < TOLERANCE
    assert engine.stats().preemptions_total > 0
    assert engine.stats().kv_usage == 0


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral", "gemma3", "deepseek"])
def test_bfloat16_stays_close(twins: Callable[[str], Twin], name: str, lab: Any) -> None:
    twin = twins(name)
    engine = lab.make_engine(twin.directory, dtype="bfloat16")
    traced = lab.trace_logits(engine)
    (prompt,) = lab.prompts(50)
    lab.generate(engine, [prompt], SamplingParams(max_tokens=1, temperature=0))
    got = torch.stack([traced["0"][position] for position in range(50)]).float()
    expected = lab.reference_logits(twin.reference, prompt)
    correlation = torch.corrcoef(torch.stack((got.flatten(), expected.flatten())))[0, 1].item()
    assert correlation > 0.995


# Variants of a family


def relative_error(lab: Any, directory: Path, config: PreTrainedConfig, norm_offset: float = 0.0) -> float:
    lab.save_random_model(config, directory, seed=5, norm_offset=norm_offset)
    twin = Twin(directory, lab.load_reference(directory), lab)
    engine = lab.make_engine(directory, max_num_batched_tokens=30)
    return twin.relative_error(engine, lab.prompts(40, 61))


def test_gemma_by_pattern_and_with_capped_scores(tmp_path: Path, lab: Any) -> None:
    settings = {key: value for key, value in GEMMA.items() if key not in ("layer_types", "rope_parameters")}
    config = Gemma3TextConfig(**settings, sliding_window_pattern=2)
    assert config.layer_types.count("full_attention") == 2
    assert relative_error(lab, tmp_path, config, norm_offset=1.0) < TOLERANCE


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_head_counts_are_mere_values(tmp_path: Path, kv_heads: int, lab: Any) -> None:
    config = Qwen3Config(**(SIZES | {"num_key_value_heads": kv_heads, "head_dim": 24}))
    assert relative_error(lab, tmp_path, config) < TOLERANCE


def test_deepseek_without_dense_layers(tmp_path: Path, lab: Any) -> None:
    config = DeepseekV2Config(**(DEEPSEEK | {"first_k_dense_replace": 0}), q_lora_rank=20)
    assert relative_error(lab, tmp_path, config) < TOLERANCE


LEGACY_GEMMA = {
    "rope_theta": 100000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "rope_local_base_freq": 1000.0,
}
YARN_SCALING = {key: value for key, value in YARN.items() if key not in ("rope_type", "rope_theta")}
LEGACY_DEEPSEEK = {"rope_theta": 10000.0, "rope_scaling": YARN_SCALING | {"type": "yarn"}}


@pytest.mark.parametrize(
    ("name", "legacy"),
    [("gemma3", LEGACY_GEMMA), ("deepseek-q-lora-groups-yarn", LEGACY_DEEPSEEK)],
    ids=["gemma3", "deepseek"],
)
def test_rope_as_the_published_configs_spell_it(
    twins: Callable[[str], Twin], name: str, legacy: dict[str, Any], tmp_path: Path, lab: Any
) -> None:
    twin = twins(name)
    for file in twin.directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | legacy))
    assert twin.relative_error(lab.make_engine(tmp_path), lab.prompts(61)) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen2-window", "gemma3", "deepseek-q-lora-groups-yarn"])
def test_a_wrong_config_never_ends_in_a_traceback(twins: Callable[[str], Twin], name: str, tmp_path: Path) -> None:
    """Every value of config.json, those of rope too, is replaced by nonsense: refused with a sentence, or loaded.

    Each key gets every other value: half of them, as each costs a load.
    """
    directory = twins(name).directory
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    nonsense: list[Any] = ["x", -1, 0, None, [], {}, 1.5, True, [3], {"a": 1}, 10**9]
    changes = [{key: value} for i, key in enumerate(sorted(config)) for value in nonsense[i % 2 :: 2]]
    for part, rope in ((key, value) for key, value in config["rope_parameters"].items() if isinstance(value, dict)):
        ropes = ({part: rope | {key: value}} for key in rope for value in nonsense)
        changes += [{"rope_parameters": config["rope_parameters"] | change} for change in ropes]
    changes += [{"rope_parameters": {**config["rope_parameters"], key: v}} for key in YARN for v in nonsense[::2]]
    refused = 0
    for change in changes:
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        try:
            dims = ModelDims.from_model_dir(tmp_path)
            load_model(tmp_path, dims, torch.float32, "cpu", max_model_len=64)
        except ConfigError:
            refused += 1
    assert refused > len(changes) / 4


# Latents instead of keys and values


def test_latents_are_counted_and_allocated(twins: Callable[[str], Twin], lab: Any) -> None:
    directory = twins("deepseek").directory
    engine = lab.make_engine(directory, num_gpu_blocks_override=100)
    dims = ModelDims.from_model_dir(directory)
    assert dims.latent_width == 24 + 8
    assert engine.plan.kv_bytes_per_token == 3 * 32 * 4
    assert kv_bytes_per_token(dims, "float16") == 3 * 32 * 2
    assert sum(cache.nbytes for cache in engine.runner.kv_caches) == engine.plan.kv_cache_bytes


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8_per_token_head", "int4_kivi"])
def test_latents_are_never_quantized(twins: Callable[[str], Twin], kv_cache_dtype: str) -> None:
    dims = ModelDims.from_model_dir(twins("deepseek").directory)
    with pytest.raises(ConfigError, match=r"latents, which are kept in floating point only; use auto or"):
        EngineConfig(kv_cache_dtype=kv_cache_dtype).layer_kv_formats(dims)
    with pytest.raises(ConfigError, match="latents are kept in floating point only"):
        kv_bytes_per_token(dims, kv_cache_dtype)


# Faults the comparison must see: a test that cannot fail proves nothing.


def drop_rope(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RotaryTable, "rotate", lambda self, heads, cos, signed_sin: heads)


def positions_from_zero(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    right = RotaryTable.at
    monkeypatch.setattr(RotaryTable, "at", lambda self, positions: right(self, torch.arange(len(positions))))


def drop_rope_term_of_the_score(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    right = deepseek_v2.mla_attention

    def wrong(q_latent: Tensor, q_rope: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return right(q_latent, torch.zeros_like(q_rope), *args, **kwargs)

    monkeypatch.setattr(deepseek_v2, "mla_attention", wrong)


def scale_by_the_latent_width(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine.runner.model
    model.scale = model.dims.latent_width**-0.5  # type: ignore[attr-defined]


def wrong_head_grouping(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    right = decoder.paged_attention
    order = [0, 2, 1, 3]  # with 2 KV heads: query head h reads KV head h % 2 instead of h // 2

    def wrong(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return right(query[:, order].contiguous(), *args, **kwargs)[:, order].contiguous()

    monkeypatch.setattr(decoder, "paged_attention", wrong)


def widen_windows(engine: LLMEngine, by: int) -> None:
    for layer in engine.runner.model.layers:  # type: ignore[attr-defined]
        options = layer.spec.attention
        if options.sliding_window is not None:
            attention = replace(options, sliding_window=options.sliding_window + by)
            layer.spec = replace(layer.spec, attention=attention)


def window_one_too_wide(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    widen_windows(engine, 1)


def window_one_too_narrow(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    widen_windows(engine, -1)


def one_rope_for_all_layers(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in engine.runner.model.layers:  # type: ignore[attr-defined]
        layer.spec = replace(layer.spec, rope=0)


def drop_bias(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in engine.runner.model.layers:  # type: ignore[attr-defined]
        layer.qkv_bias = None


def drop_qk_norm(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in engine.runner.model.layers:  # type: ignore[attr-defined]
        layer.qk_norm = None


Fault = Callable[[LLMEngine, pytest.MonkeyPatch], None]
DENSE = ("llama", "qwen2", "qwen3", "mistral", "gemma3")
FAULTS: list[tuple[str, Fault]] = [
    *((name, fault) for name in DENSE for fault in (drop_rope, positions_from_zero, wrong_head_grouping)),
    *((name, fault) for name in ("mistral", "gemma3") for fault in (window_one_too_wide, window_one_too_narrow)),
    ("qwen2", drop_bias),
    ("qwen3", drop_qk_norm),
    ("gemma3", drop_qk_norm),
    ("gemma3", one_rope_for_all_layers),
    ("deepseek", drop_rope),
    ("deepseek", drop_rope_term_of_the_score),
    ("deepseek", positions_from_zero),
    ("deepseek", scale_by_the_latent_width),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_the_comparison_sees_faults(
    twins: Callable[[str], Twin], name: str, fault: Fault, monkeypatch: pytest.MonkeyPatch, lab: Any
) -> None:
    twin = twins(name)
    engine = lab.make_engine(twin.directory, max_num_batched_tokens=16)
    fault(engine, monkeypatch)
    params = SamplingParams(max_tokens=1, temperature=0)
    assert twin.relative_error(engine, lab.prompts(48), params) > 100 * TOLERANCE
