"""Public prefixes, the prefix tree, adapters and weight updates over HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient

from engine.config import ConfigError, EngineConfig
from engine.engine import LLMEngine
from engine.models.lora import CONFIG_FILE, WEIGHTS_FILE
from engine.public_prefixes import MAX_PREFIXES

pytestmark = pytest.mark.xdist_group("engine_server_prefix")

SYSTEM = "you are a helpful assistant of the company, and you say so."  # 59 tokens: three whole blocks of 16
Serve = Callable[..., TestClient]


@pytest.fixture(scope="module")
def client(serve: Serve) -> TestClient:
    return serve(prefix_cache_scope="session", enable_lora=True, api_key="secret")


def call(client: TestClient, method: str, path: str, status: int = 200, **body: Any) -> Any:
    headers = {"Authorization": "Bearer secret"}
    response = client.request(method, path, json=body if method == "POST" else None, headers=headers)
    assert response.status_code == status, response.text
    answer = response.json()
    return answer if status == 200 else answer["error"]


def complete(client: TestClient, prompt: str, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = call(client, "POST", "/v1/completions", prompt=prompt, max_tokens=4, temperature=0, **body)
    return answer


def cached(client: TestClient, prompt: str, **body: Any) -> int:
    return int(complete(client, prompt, **body)["usage"]["prompt_tokens_details"]["cached_tokens"])


def metrics(client: TestClient) -> dict[str, float]:
    """Name and own labels -> value."""
    return {
        sample.name
        + "".join(f" {v}" for k, v in sample.labels.items() if k not in ("model_name", "engine")): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if sample.name.startswith("kvoncall:")
    }


def test_all_share_what_is_public_and_nothing_more(client: TestClient) -> None:
    assert call(client, "POST", "/prefix_cache/public", prompt=SYSTEM) == {
        "num_tokens": 59, "num_blocks": 3, "prefixes": 1,
    }  # fmt: skip
    assert call(client, "POST", "/prefix_cache/public", prompt=SYSTEM)["prefixes"] == 1
    question = SYSTEM + " what do you know of my account, and since when?"
    assert cached(client, question, user="ann") == 0
    assert cached(client, question, user="bob") == 48
    assert cached(client, question, user="bob") == 96
    assert call(client, "GET", "/prefix_cache/public") == {
        "prefixes": 1, "lengths": [{"num_tokens": 59, "num_blocks": 3}],
    }  # fmt: skip
    assert call(client, "DELETE", "/prefix_cache/public") == {"prefixes": 0}
    assert cached(client, question, user="eve") == 0


def test_messages_and_token_ids_can_be_public(client: TestClient) -> None:
    messages = [{"role": "system", "content": SYSTEM}]
    assert call(client, "POST", "/prefix_cache/public", messages=messages)["num_tokens"] == len(f"system:{SYSTEM}\n")
    assert call(client, "POST", "/prefix_cache/public", prompt=[1, 2, 3])["prefixes"] == 2
    call(client, "DELETE", "/prefix_cache/public")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [9999]}, "prompt"),
        ({"prompt": "x" * 257}, "prompt"),
        ({"messages": "a"}, "messages"),
        ({"prompt": "a", "scope": "x"}, "scope"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages[0].content[0].image_url.url",
        ),
    ],
)
def test_what_cannot_be_public_is_refused_by_name(client: TestClient, body: dict[str, Any], param: str) -> None:
    assert call(client, "POST", "/prefix_cache/public", 400, **body)["param"] == param


def test_public_prefixes_have_a_limit_and_need_the_key(client: TestClient) -> None:
    for token in range(MAX_PREFIXES):
        call(client, "POST", "/prefix_cache/public", prompt=[token])
    assert "64 public prefixes" in call(client, "POST", "/prefix_cache/public", 400, prompt="more")["message"]
    call(client, "DELETE", "/prefix_cache/public")
    for method in ("GET", "POST", "DELETE"):
        assert client.request(method, "/prefix_cache/public").status_code == 401


def test_public_prefixes_of_the_command_line(serve: Serve, model_dir: Path, tmp_path: Path) -> None:
    text, messages = tmp_path / "system.txt", tmp_path / "system.json"
    text.write_text(SYSTEM)
    messages.write_text(json.dumps([{"role": "system", "content": SYSTEM}]))
    client = serve(prefix_cache_scope="tenant", prefix_cache_public=(str(text), str(messages)))
    assert [p["num_tokens"] for p in call(client, "GET", "/prefix_cache/public")["lengths"]] == [59, 67]
    assert (cached(client, SYSTEM, user="ann"), cached(client, SYSTEM, user="bob")) == (0, 48)

    def refusal(name: str, content: bytes | None) -> str:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        flags = {"model": str(model_dir), "device": "cpu", "num_gpu_blocks_override": 50}
        with pytest.raises(ConfigError) as caught:
            LLMEngine(EngineConfig(**flags, prefix_cache_public=(str(path),)))  # type: ignore[arg-type]
        assert str(path) in str(caught.value)
        return str(caught.value)

    assert "cannot be read" in refusal("missing.txt", None)
    assert "is empty" in refusal("empty.txt", b"")
    assert "is damaged" in refusal("latin.txt", b"\xff")
    assert "is damaged" in refusal("cut.json", b"[{")
    assert "make no prompt" in refusal("number.json", b"5")


def test_the_tree_shows_shape_and_owners_and_no_text(client: TestClient) -> None:
    call(client, "POST", "/reset_prefix_cache")
    cached(client, "tree: " + SYSTEM, user="ann")
    cached(client, "tree: " + SYSTEM, user="bob")
    response = client.get("/debug/prefix")  # open, as all monitoring
    tree = response.json()
    expected = {
        "enabled": True, "scope": "session", "hash_algo": "sha256", "ttl": None, "verify": False, "public_prefixes": 0,
        "block_size": 16,
    }  # fmt: skip
    assert {key: tree[key] for key in expected} == expected
    assert tree["num_cached_blocks"] == 8
    assert [node["num_blocks"] for node in tree["nodes"]] == [4, 4]
    owners = [node["owners"] for node in tree["nodes"]]
    assert len({tuple(labels) for labels in owners}) == 2
    assert not any(word in response.text for word in ("ann", "bob", "helpful"))


def test_metrics_tell_the_price_of_isolation(client: TestClient) -> None:
    before = metrics(client)
    prompt = "metrics: " + SYSTEM
    cached(client, prompt, user="ann")
    cached(client, prompt, user="ann")
    cached(client, prompt, user="bob")
    after = metrics(client)

    def increase(name: str) -> float:
        return after[name] - before[name]

    assert increase("kvoncall:prefix_hits_by_scope_total own") == 64
    assert increase("kvoncall:prefix_hits_by_scope_total shared") == 0
    assert increase("kvoncall:prefix_hits_lost_to_isolation_total") == 64
    assert all(
        after[f"kvoncall:isolation_breaches_total {k}"] == 0 for k in ("namespace", "adapter", "image", "weights")
    )
    assert after["kvoncall:prefix_blocks_expired_total"] == 0
    assert sum(v for k, v in after.items() if k.startswith("kvoncall:prefix_cached_blocks ")) >= 8
    assert after["kvoncall:weights_version"] == 0
    stats = client.get("/debug/engine").json()["stats"]
    assert stats["prefix_hits_lost_total"] == after["kvoncall:prefix_hits_lost_to_isolation_total"]
    assert (
        'prefix_cache_scope="session",prefix_cache_ttl="None",prefix_cache_verify="False"'
        in client.get("/metrics").text
    )


def test_choices_share_their_prompt(client: TestClient) -> None:
    before = metrics(client)
    complete(client, "choices: " + SYSTEM, n=3)
    assert metrics(client)["kvoncall:forks_total"] - before["kvoncall:forks_total"] == 2


def write_adapter(out: Path, model_dir: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    weight = load_file(model_dir / "model.safetensors")["model.layers.0.self_attn.v_proj.weight"]
    name = "base_model.model.model.layers.0.self_attn.v_proj.lora_{}.weight"
    out.mkdir(parents=True)
    save_file(
        {name.format("A"): torch.randn(2, weight.shape[1]), name.format("B"): torch.randn(weight.shape[0], 2)},
        out / WEIGHTS_FILE,
    )
    (out / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return out


def test_adapters_come_and_go_by_name(client: TestClient, model_dir: Path, tmp_path: Path) -> None:
    first, second = (str(write_adapter(tmp_path / name, model_dir, seed)) for seed, name in enumerate("ab"))
    prompt = "adapters: " + SYSTEM

    def ask(model: str) -> tuple[str, int]:
        answer = complete(client, prompt, model=model, user="ann")
        assert answer["model"] == model
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    base = ask("testbed")
    assert call(client, "POST", "/v1/load_lora_adapter", lora_name="sql", lora_path=first)["version"] == 1
    adapted = ask("sql")
    assert adapted[0] != base[0]
    assert adapted[1] == 0  # the model's own KV is not the adapter's
    assert ask("sql") == (adapted[0], 64)
    cards = call(client, "GET", "/v1/models")["data"]
    assert [(c["id"], c["parent"], c["root"]) for c in cards] == [
        ("testbed", None, str(model_dir)), ("sql", "testbed", first),
    ]  # fmt: skip
    assert call(client, "GET", "/v1/models/sql")["version"] == 1

    again: dict[str, Any] = {"lora_name": "sql", "lora_path": second}
    assert "loaded already" in call(client, "POST", "/v1/load_lora_adapter", 400, **again)["message"]
    assert call(client, "POST", "/v1/load_lora_adapter", **again, load_inplace=True)["version"] == 2
    replaced = ask("sql")
    assert replaced[0] != adapted[0]
    assert replaced[1] == 0  # nor is the former version's
    call(client, "POST", "/v1/unload_lora_adapter", lora_name="sql")
    error = call(client, "POST", "/v1/completions", 404, prompt="x", model="sql")
    assert error["code"] == "model_not_found"
    assert call(client, "POST", "/v1/unload_lora_adapter", 404, lora_name="sql")["param"] == "lora_name"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"lora_path": "/x"}, "lora_name"),
        ({"lora_name": 5, "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "a\n", "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/x", "load_inplace": 1}, "load_inplace"),
        ({"lora_name": "a", "lora_path": "/x", "is_3d": True}, "is_3d"),
        ({"lora_name": "a", "lora_path": "/nowhere"}, "adapter_config.json cannot be read"),
        ({"lora_name": "testbed", "lora_path": "/x"}, "the name of the model itself"),
    ],
)
def test_bad_adapter_requests_are_refused(client: TestClient, body: dict[str, Any], says: str) -> None:
    assert says in call(client, "POST", "/v1/load_lora_adapter", 400, **body)["message"]


def change_weights(model_dir: Path, out: Path, **config: Any) -> Path:
    """The same model with other numbers, or with other settings."""
    shutil.copytree(model_dir, out)
    weights = load_file(model_dir / "model.safetensors")
    weights["model.layers.0.self_attn.k_proj.weight"] *= -1
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    settings = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(settings | config))
    return out


def test_new_weights_answer_at_once_and_from_nothing_old(serve: Serve, model_dir: Path, tmp_path: Path) -> None:
    client, cold = serve(), serve(model=str(change_weights(model_dir, tmp_path / "new")))
    prompt = "weights: " + SYSTEM

    def answer(client: TestClient) -> tuple[str, int]:
        found = complete(client, prompt, logprobs=1, ignore_eos=True)
        return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    old = answer(client)
    assert answer(client)[1] == 64
    updated = call(client, "POST", "/update_weights_from_disk", model_path=str(tmp_path / "new"))
    assert updated["success"] is True
    assert updated["weights_version"] == 1
    assert answer(client) == answer(cold) != old
    assert metrics(client)["kvoncall:weights_version"] == 1
    assert call(client, "GET", "/v1/models")["data"][0]["root"] == str(tmp_path / "new")


def test_a_weight_update_does_not_end_requests(model_dir: Path, tmp_path: Path) -> None:
    """Tokens so far stay, the others are those of the new weights after them."""
    from engine.request import SamplingParams

    new = change_weights(model_dir, tmp_path / "new")
    flags: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 100, "max_num_seqs": 4}
    engine, cold = (LLMEngine(EngineConfig(model=str(path), **flags)) for path in (model_dir, new))
    prompt = list(range(40, 90))
    engine.add_request("a", prompt, SamplingParams(max_tokens=10, temperature=0, ignore_eos=True))
    tokens = [token for _ in range(4) for output in engine.step() for token in output.new_token_ids]
    assert engine.update_weights(str(new)) == 1
    while engine.has_unfinished_requests():
        tokens += [token for output in engine.step() for token in output.new_token_ids]
    cold.add_request("a", prompt + tokens[:4], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    continued: list[int] = []
    while cold.has_unfinished_requests():
        continued += [token for output in cold.step() for token in output.new_token_ids]
    assert tokens[4:] == continued


def test_other_models_do_not_take_the_place_of_this_one(
    client: TestClient, serve: Serve, model_dir: Path, tmp_path: Path
) -> None:
    def refusal(path: Path, client: TestClient = client) -> str:
        error = call(client, "POST", "/update_weights_from_disk", 400, model_path=str(path))
        assert error["param"] == "model_path"
        return str(error["message"])

    assert "does not exist" in refusal(tmp_path / "nowhere") or "config.json" in refusal(tmp_path / "nowhere")
    shorter = change_weights(model_dir, tmp_path / "shorter", max_position_embeddings=128)
    assert "it has max_position_embeddings 128, this engine runs max_position_embeddings 256" in refusal(shorter)
    cut = change_weights(model_dir, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes(b"cut")
    assert "corrupt or cut short" in refusal(cut)
    assert call(client, "POST", "/update_weights_from_disk", 400)["param"] == "model_path"
    scaled = change_weights(model_dir, tmp_path / "scaled")
    tensors = load_file(scaled / "model.safetensors")
    for layer in range(2):
        for name in ("k_scale", "v_scale"):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(0.5)
    save_file(tensors, scaled / "model.safetensors", {"format": "pt"})
    assert "other scales for the fp8 KV cache" in refusal(scaled, serve(kv_cache_dtype="fp8"))
    assert metrics(client)["kvoncall:weights_version"] == 0


def test_what_does_not_fit_beside_the_model_is_refused_and_the_engine_lives(
    client: TestClient, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr("engine.weights.load_model", no_room)
    monkeypatch.setattr("engine.adapters.read_adapter", no_room)
    update = call(client, "POST", "/update_weights_from_disk", 400, model_path=str(model_dir))
    load = call(client, "POST", "/v1/load_lora_adapter", 400, lora_name="big", lora_path=str(tmp_path))
    for error in (update, load):
        assert "no memory left" in error["message"]
    assert client.get("/health").status_code == 200
    complete(client, "still there")
