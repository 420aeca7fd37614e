"""What a target says about itself: configuration, version, memory plan. Read now and then, never erased.

The embedded engine answers `/debug/engine`. Others tell their KV configuration by the labels of the dialect's
info metric (`vllm:cache_config_info`), their version where the dialect says, and their model by `/v1/models`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx

from probe.collect.exposition import ScrapeError
from probe.collect.scrape import dialect_of, fetch
from probe.store import Target

MAX_BYTES = 1024 * 1024
# Changes from second to second: belongs to samples, not to facts.
_VOLATILE = frozenset({"stats", "uptime_seconds", "device_memory_used_bytes"})


async def read_facts(
    client: httpx.AsyncClient,
    target: Target,
    info: Mapping[str, str],
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Facts to merge into `target.facts`; what cannot be read is left out."""
    facts: dict[str, Any] = {"engine": target.engine}
    if info:
        facts["cache_config_info"] = dict(info)
    if target.source == "prometheus":
        return facts  # the engine itself is out of reach
    base = target.url.rstrip("/").removesuffix("/metrics").removesuffix("/prometheus")

    async def ask(path: str) -> dict[str, Any]:
        return await _json(client, base + path, timeout_s, headers)

    if target.engine == "kvoncall":
        found = await ask("/debug/engine")
        return {key: value for key, value in found.items() if key not in _VOLATILE}
    for path, key in dialect_of(target).version_at:
        version = (await ask(path)).get(key)
        if isinstance(version, str):
            facts["version"] = version
            break
    models = (await ask("/v1/models")).get("data")
    if isinstance(models, list) and models and isinstance(models[0], dict):
        model = models[0]
        facts |= {
            key: model[name] for key, name in (("model", "id"), ("max_model_len", "max_model_len")) if name in model
        }
    return facts


async def _json(
    client: httpx.AsyncClient, url: str, timeout_s: float, headers: Mapping[str, str] | None
) -> dict[str, Any]:
    try:
        body = await fetch(client, url, timeout_s=timeout_s, max_bytes=MAX_BYTES, headers=headers)
        value = json.loads(body)
    except (ScrapeError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
