"""LoRA adapters: the same logits as with merged weights, in any mix of a batch; what cannot be served is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen2Config

from engine.cache_identity import Adapter, CacheIdentity
from engine.config import ConfigError
from engine.engine import LLMEngine
from engine.models.lora import CONFIG_FILE, TARGETS, WEIGHTS_FILE
from engine.request import SamplingParams
from engine.testbed import MODEL_DIR
from engine.testbed.adapters import main, write_adapter
from engine.testbed.outliers import OutlierError
from engine.testbed.tasks import conversation

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, sliding_window=9, query_pre_attn_scalar=16),
}


def write_random_adapter(
    out: Path, model: Path, *, rank: int = 4, seed: int = 0, targets: tuple[str, ...] = TARGETS, **config: Any
) -> Path:
    """PEFT's files for random A and B of every target."""
    torch.manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith(".weight") and name.split(".")[-2] in targets:
            prefix = "base_model.model." + name.removesuffix(".weight")
            tensors[prefix + ".lora_A.weight"] = torch.randn(rank, weight.shape[1]) * 0.2
            tensors[prefix + ".lora_B.weight"] = torch.randn(weight.shape[0], rank) * 0.2
    out.mkdir(parents=True)
    save_file(tensors, out / WEIGHTS_FILE)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": list(targets), "bias": "none"}
    (out / CONFIG_FILE).write_text(json.dumps(settings | config))
    return out


def merge(model: Path, adapter: Path, out: Path, scale: float) -> Path:
    """The model with the adapter's products in its weights."""
    shutil.copytree(model, out)
    weights, lora = load_file(model / "model.safetensors"), load_file(adapter / WEIGHTS_FILE)
    for name, a in lora.items():
        if ".lora_A." in name:
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            weights[target] = weights[target] + scale * lora[name.replace("lora_A", "lora_B")] @ a
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


def lora_engine(lab: Any, model: Path, *adapters: Path, **flags: Any) -> LLMEngine:
    modules = tuple(f"{path.name}={path}" for path in adapters)
    engine: LLMEngine = lab.make_engine(model, enable_lora=True, lora_modules=modules, **flags)
    return engine


def identity(engine: LLMEngine, name: str | None) -> CacheIdentity:
    return CacheIdentity(adapter=None if name is None else engine.adapters.find(name))


def logits_of(lab: Any, engine: LLMEngine, asked: list[tuple[list[int], str | None]]) -> list[Tensor]:
    """[tokens, vocab] of each prompt and what the engine answers to it, all in one batch."""
    traced = lab.trace_logits(engine)
    for i, (prompt, name) in enumerate(asked):
        engine.add_request(str(i), prompt, GREEDY, identity=identity(engine, name))
    lab.run_all(engine)
    return [torch.stack([traced[str(i)][p] for p in sorted(traced[str(i)])]) for i in range(len(asked))]


@pytest.mark.parametrize(("kind", "rslora"), [("llama", False), ("llama", True), ("qwen2", False), ("gemma3", False)])
def test_an_adapter_equals_merged_weights(lab: Any, tmp_path: Path, kind: str, rslora: bool) -> None:
    offset = 1.0 if kind == "gemma3" else 0.0
    model = lab.save_random_model(MODELS[kind](), tmp_path / "model", norm_offset=offset)
    adapter = write_random_adapter(tmp_path / "a", model, use_rslora=rslora)
    merged = merge(model, adapter, tmp_path / "merged", 6 / (2 if rslora else 4))
    (prompt,) = lab.prompts(40)
    (base,) = logits_of(lab, lora_engine(lab, model, adapter), [(prompt, None)])
    (found,) = logits_of(lab, lora_engine(lab, model, adapter), [(prompt, "a")])
    (wanted,) = logits_of(lab, lab.make_engine(merged), [(prompt, None)])
    spread = wanted.std()
    assert (found - wanted).abs().max() < 1e-3 * spread
    assert (base - wanted).abs().max() > 0.1 * spread


def test_each_row_of_a_mixed_batch_has_its_own_adapter(lab: Any, model_dir: Path, tmp_path: Path) -> None:
    """Chunks and decodes of the base model and of two adapters in one step are what each is alone."""
    adapters = [
        write_random_adapter(tmp_path / "a", model_dir, rank=2, seed=1),
        write_random_adapter(tmp_path / "b", model_dir, rank=5, seed=2, targets=("k_proj", "up_proj")),
    ]
    asked = [
        (prompt, name) for prompt, name in zip(lab.prompts(9, 30, 1, 17, 22), ("a", None, "b", "b", "a"), strict=True)
    ]
    mixed = logits_of(lab, lora_engine(lab, model_dir, *adapters, max_num_batched_tokens=16), asked)
    engine = lora_engine(lab, model_dir, *adapters)
    for one, together in zip(asked, mixed, strict=True):
        (alone,) = logits_of(lab, engine, [one])
        assert (alone - together).abs().max() < 1e-3 * alone.std()


def test_a_request_keeps_the_weights_it_was_admitted_with(lab: Any, model_dir: Path, tmp_path: Path) -> None:
    first = write_random_adapter(tmp_path / "first", model_dir, seed=1)
    second = write_random_adapter(tmp_path / "second", model_dir, seed=2)
    (prompt,) = lab.prompts(20)

    def answer(swap: Callable[[LLMEngine], object]) -> list[int]:
        engine: LLMEngine = lab.make_engine(model_dir, enable_lora=True)
        engine.adapters.load("name", str(first))
        engine.add_request("0", prompt, GREEDY, identity=identity(engine, "name"))
        outputs = engine.step()
        swap(engine)
        return [t for o in outputs + lab.run_all(engine)["0"] for t in o.new_token_ids]

    undisturbed = answer(lambda engine: None)
    assert answer(lambda engine: engine.adapters.unload("name")) == undisturbed
    assert answer(lambda engine: engine.adapters.load("name", str(second), replace=True)) == undisturbed


def test_versions_are_never_used_twice(lab: Any, model_dir: Path, tmp_path: Path) -> None:
    path = write_random_adapter(tmp_path / "a", model_dir)
    engine = lora_engine(lab, model_dir, path)
    versions = [engine.adapters.find("a")]
    versions.append(engine.adapters.load("a", str(path), replace=True).adapter)
    engine.adapters.unload("a")
    assert engine.adapters.find("a") is None
    versions.append(engine.adapters.load("a", str(path)).adapter)
    assert versions == [Adapter("a", 1), Adapter("a", 2), Adapter("a", 3)]
    with pytest.raises(ValueError, match="unloaded or replaced meanwhile"):
        engine.add_request("0", [5, 6], GREEDY, identity=CacheIdentity(adapter=Adapter("a", 1)))
    assert not engine.has_unfinished_requests()


def test_start_counts_adapters_as_weights(lab: Any, model_dir: Path, tmp_path: Path) -> None:
    path = write_random_adapter(tmp_path / "a", model_dir, rank=16)
    with_it, without = lora_engine(lab, model_dir, path), lab.make_engine(model_dir)
    assert with_it.plan.weights_bytes - without.plan.weights_bytes == with_it.adapters.num_bytes > 0


def change(path: Path, **config: Any) -> None:
    settings = json.loads((path / CONFIG_FILE).read_text())
    (path / CONFIG_FILE).write_text(json.dumps(settings | config))


def edit(path: Path, function: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / WEIGHTS_FILE)
    function(tensors)
    save_file(tensors, path / WEIGHTS_FILE)


K0 = "base_model.model.model.layers.0.self_attn.k_proj."


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda p: shutil.rmtree(p), "adapter_config.json cannot be read"),
        (lambda p: (p / CONFIG_FILE).write_text("{"), "is not JSON"),
        (lambda p: change(p, peft_type="IA3"), "does not say peft_type LORA"),
        (lambda p: change(p, r=17), "rank 17 is above --max-lora-rank 16"),
        (lambda p: change(p, r=0), "needs r, a positive integer"),
        (lambda p: change(p, lora_alpha=None), "lora_alpha, a number"),
        (lambda p: change(p, use_dora=True), "use_dora to True"),
        (lambda p: change(p, alora_invocation_tokens=[1]), "alora_invocation_tokens"),
        (lambda p: change(p, modules_to_save=["lm_head"]), "modules_to_save"),
        (lambda p: change(p, target_modules=["q_proj", "embed_tokens"]), "target embed_tokens cannot be adapted"),
        (lambda p: change(p, r=8), "lora_A of layer 0, mlp.down_proj, has shape [4, 96], but rank 8"),
        (lambda p: (p / WEIGHTS_FILE).unlink(), "adapter_model.safetensors cannot be read"),
        (lambda p: (p / WEIGHTS_FILE).write_bytes(b"x" * 99), "adapter_model.safetensors cannot be read"),
        (lambda p: edit(p, lambda t: t.clear()), "it has no tensors"),
        (lambda p: edit(p, lambda t: t.pop(K0 + "lora_B.weight")), "has no lora_B beside it"),
        (lambda p: edit(p, lambda t: t.pop(K0 + "lora_A.weight")), "not pairs of lora_A and lora_B"),
        (lambda p: edit(p, lambda t: t.update({K0 + "lora_B.weight": torch.ones(32, 3)})), "has shape [32, 3]"),
        (lambda p: edit(p, lambda t: t.update({K0.replace("k_proj", "x") + "lora_A.weight": torch.ones(1)})), "tensor"),
        (
            lambda p: edit(p, lambda t: t.update({K0.replace("rs.0", "rs.9") + "lora_A.weight": torch.ones(1)})),
            "tensor",
        ),
    ],
)
def test_a_bad_adapter_is_refused_in_one_sentence(
    lab: Any, model_dir: Path, tmp_path: Path, spoil: Callable[[Path], object], says: str
) -> None:
    path = write_random_adapter(tmp_path / "a", model_dir)
    spoil(path)
    with pytest.raises(ConfigError) as caught:
        lora_engine(lab, model_dir, path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_adapters_need_their_flag(lab: Any, model_dir: Path, tmp_path: Path) -> None:
    engine = lab.make_engine(model_dir)
    with pytest.raises(ConfigError, match="start it with --enable-lora"):
        engine.adapters.load("a", str(write_random_adapter(tmp_path / "a", model_dir)))


@pytest.fixture(scope="module")
def key_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter") / "keys")


def answers(lab: Any, adapter: Path, names: tuple[str | None, str | None], **flags: Any) -> list[list[bool]]:
    """Whether each turn of held-out conversations is answered right, by one name after the other."""
    settings = {"num_gpu_blocks_override": 1000, "block_size": 16, "max_model_len": 256}
    engine = lora_engine(lab, MODEL_DIR, adapter, **(settings | flags))
    params = SamplingParams(max_tokens=8, temperature=0)
    right = []
    for name in names:
        wanted = {}
        for seed in range(4):
            talk = conversation(seed, turns=5, max_tokens=200)
            for turn in range(1, 6):
                prompt = engine.tokenizer.encode(talk.prompt(turn))
                engine.add_request(f"{seed}.{turn}", prompt, params, identity=identity(engine, name))
                wanted[f"{seed}.{turn}"] = talk.turns[turn - 1].answer
        outputs = lab.run_all(engine)
        right.append(["".join(o.new_text for o in outputs[key]) == answer for key, answer in wanted.items()])
    return right


def test_the_testbed_adapter_changes_keys_and_no_answer(lab: Any, key_adapter: Path) -> None:
    for flags in ({"enable_prefix_caching": False}, {}):
        with_adapter, without = answers(lab, key_adapter, (key_adapter.name, None), **flags)
        assert all(with_adapter)
        assert all(without)


@pytest.mark.parametrize("factor", [16, 1 / 16])
def test_who_reads_the_others_keys_answers_wrong(lab: Any, tmp_path: Path, factor: float) -> None:
    """What happens when the prefix cache leaves the adapter out of its keys."""
    adapter = write_adapter(tmp_path / "keys", factor=factor)
    names = ("keys", None) if factor > 1 else (None, "keys")
    fault: dict[str, Any] = {"prefix_cache_fault": "adapter_key", "allow_unsafe_replay": True}
    first, second = answers(lab, adapter, names, **fault)
    assert all(first)
    assert sum(second) <= 2


def test_the_command_writes_an_adapter_or_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "out"), "--pairs", "3", "--factor", "4"]) == 0
    assert json.loads((tmp_path / "out" / CONFIG_FILE).read_text())["r"] == 8
    assert main(["--out", str(tmp_path / "no"), "--pairs", "99"]) == 2
    assert main(["--out", str(tmp_path / "no"), "--factor", "3"]) == 2
    assert main(["--out", str(tmp_path / "no"), "--model", str(tmp_path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert all(line.startswith("adapters: ") for line in errors)
    assert not (tmp_path / "no").exists()


def test_models_with_biases_get_no_testbed_adapter(lab: Any, tmp_path: Path) -> None:
    model = lab.save_random_model(MODELS["qwen2"](), tmp_path / "model")
    with pytest.raises(OutlierError, match="Qwen2ForCausalLM"):
        write_adapter(tmp_path / "out", model=model)
