"""A `Deployment` read off a running server, and the pool it measured beside the one a plan computes.

Sources: the labels of the info metric (`vllm:cache_config_info`), `/v1/models`, and the embedded engine's
`/debug/engine`. A figure a server does not tell (its GPUs, its parallelism) comes from the flags, or is named.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from engine.errors import ConfigError
from engine.memory.capacity import CapacityPlan
from engine.memory.deployment import Deployment, Gpu
from engine.memory.model_presets import read_model
from engine.memory.shape import LayerGroup, ModelShape
from probe.targets import TargetError, find_server, look_at
from runbooks.facts import TargetFacts, from_facts
from runbooks.facts_deployment import deployment_of

TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Live:
    """What a server told: as a deployment, and the pool it has now (None where it does not say)."""

    name: str
    deployment: Deployment
    facts: TargetFacts
    notes: tuple[str, ...]
    kv_tokens: int | None = None  # as its log prints them


def read_live(options: argparse.Namespace, where: str) -> Live:
    """Asks the server at `where` (a stored target's name or a URL). Raises `TargetError` or `ConfigError`."""
    from probe.commands.output import open_store

    stored: dict[str, Any] = {}
    if "://" in where:
        name, url = where, where.rstrip("/")
    else:
        with open_store(options) as store:
            name, url = find_server(store, where)
            target = store.targets.get(name)
            stored = {**target.facts, "engine": target.engine} if target else {}
    try:
        look = look_at(url)
    except TargetError as error:
        if not stored:
            raise
        live = live_of(options, name, stored)
        return replace(live, notes=(f"planned from what was last read of {name}: {error}", *live.notes))
    return live_of(options, name, {**stored, **look.facts, **_asked(url, look.detection.engine)})


def live_of(options: argparse.Namespace, name: str, facts: Mapping[str, Any]) -> Live:
    """What is known of a server, as a deployment; nothing is asked. Raises `ConfigError`."""
    notes: list[str] = []
    read = from_facts({**facts, "shape": _shape(options, facts, name, notes)})
    made = deployment_of(read)
    if made is None:
        raise ConfigError(f"{name} does not tell its model; add --model or --model-config")
    labels = facts.get("cache_config_info")
    printed = labels.get("kv_cache_size_tokens") if isinstance(labels, Mapping) else None
    tokens = int(str(printed)) if str(printed).isdigit() else read.kv_cache_size_tokens
    return Live(name, _placed(options, made, read, notes), read, tuple(notes), tokens)


def _asked(url: str, engine: str) -> dict[str, Any]:
    """What the server's own pages tell; what cannot be read is left out."""
    base = url.removesuffix("/metrics").removesuffix("/prometheus")
    found: dict[str, Any] = {}
    with httpx.Client(base_url=base, timeout=TIMEOUT_S, trust_env=False) as client:
        models = _json(client, "/v1/models").get("data")
        if isinstance(models, list) and models and isinstance(models[0], Mapping):
            model = models[0]
            found |= {"model": str(model.get("id") or ""), "model_root": str(model.get("root") or "")}
            if isinstance(model.get("max_model_len"), int):
                found["max_model_len"] = model["max_model_len"]
        if engine == "kvoncall":
            found |= {key: value for key, value in _json(client, "/debug/engine").items() if key != "stats"}
    return found


def _json(client: httpx.Client, path: str) -> dict[str, Any]:
    try:
        answer = client.get(path)
        value = answer.json() if answer.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _shape(options: argparse.Namespace, facts: Mapping[str, Any], name: str, notes: list[str]) -> ModelShape | None:
    """The model: of the flags, of the server's own dimensions, of a folder on this machine, or of a preset."""
    if options.model or options.model_config or options.layers:
        from probe.plan.describe import shape_of

        return shape_of(options)
    dims = facts.get("dims")
    if isinstance(dims, Mapping):
        return _own_shape(dims, str(facts.get("model") or name))
    for word in (facts.get("model_root"), facts.get("model")):
        if not word:
            continue
        folder = Path(str(word)).expanduser()
        try:
            shape = read_model(str(word))
        except ConfigError:
            continue
        notes.append(
            f"model {word}: read from {'its config.json here' if folder.exists() else 'the preset of that name'}"
        )
        return shape
    raise ConfigError(
        f"{name} serves {facts.get('model') or 'a model it does not name'}, which no preset describes; add "
        "--model-config with its config.json, or --layers, --kv-heads and --head-dim"
    )


def _own_shape(dims: Mapping[str, Any], name: str) -> ModelShape:
    """The embedded engine's own dimensions; all its layers keep every token."""
    latent = (dims.get("kv_lora_rank") or 0) + (dims.get("qk_rope_head_dim") or 0)
    layers = int(dims["num_layers"])
    group = (
        LayerGroup(layers, "latent", latent_width=latent)
        if latent
        else LayerGroup(layers, "full", int(dims["num_kv_heads"]), int(dims["head_dim"]))
    )
    return ModelShape(
        name=name,
        layers=(group,),
        architecture=str(dims["architecture"]),
        hidden_size=dims["hidden_size"],
        intermediate_size=dims["intermediate_size"],
        num_q_heads=dims["num_q_heads"],
        vocab_size=dims["vocab_size"],
        max_position_embeddings=dims["max_position_embeddings"],
        dtype=dims["dtype"],
    )


def _placed(options: argparse.Namespace, made: Deployment, facts: TargetFacts, notes: list[str]) -> Deployment:
    """With the GPUs it runs on; where nobody tells them, from the blocks that the server measured."""
    if made.gpu is None and facts.device_memory_bytes:
        made = replace(made, gpu=Gpu("the engine's own memory", facts.device_memory_bytes))
    if made.engine == "kvoncall" and made.non_torch_bytes is None:  # beside the pool: records of blocks, open blocks
        made = replace(made, non_torch_bytes=(facts.bookkeeping_bytes or 0) + (facts.open_blocks_bytes or 0))
    if facts.tp is None and options.tp is None and made.engine != "kvoncall":
        notes.append("the server does not tell its tensor-parallel size: taken as 1; add --tp")
    if made.gpu is None and not (options.gpu or options.gpu_memory) and facts.num_gpu_blocks:
        notes.append(
            "the server does not tell its GPU: the plan starts from the blocks it measured; add --gpu to compute them"
        )
        return replace(made, num_gpu_blocks_override=facts.num_gpu_blocks)
    return made


def measured_data(live: Live, plan: CapacityPlan) -> list[dict[str, Any]]:
    """Measured and computed figures of the pool, and how far apart they are."""
    facts = live.facts
    pairs = [
        ("KV blocks", facts.num_gpu_blocks, plan.kv_blocks),
        ("KV tokens", live.kv_tokens, plan.kv_tokens),
        ("KV bytes of a block", facts.kv_bytes_per_block, plan.kv_bytes_per_block),
        ("weights", facts.weights_bytes, plan.part("weights")),
    ]
    return [
        {
            "what": what,
            "measured": measured,
            "computed": computed,
            "apart": computed / measured - 1 if measured else None,
        }
        for what, measured, computed in pairs
        if measured is not None
    ]


def measured_text(live: Live, plan: CapacityPlan) -> str:
    """The same as lines; nothing measured is said so."""
    rows = measured_data(live, plan)
    if not rows:
        return f"{live.name} does not tell the size of its pool; nothing to compare the plan with."
    lines = [
        f"  {row['what']:20} {row['measured']:>16,}   computed {row['computed']:>16,}   {_words(row['apart'])}"
        for row in rows
    ]
    return f"Measured on {live.name}\n" + "\n".join(lines)


def _words(apart: float | None) -> str:
    if apart is None:
        return ""
    return "the same" if abs(apart) < 5e-5 else f"{abs(apart):.2%} {'more' if apart > 0 else 'less'} than measured"
