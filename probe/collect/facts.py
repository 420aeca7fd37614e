"""What a target says about itself: configuration, version, memory plan. Read now and then, never erased.

The embedded engine answers `/debug/engine`. Others tell their KV configuration by the labels of the dialect's
info metric (`vllm:cache_config_info`), and version and model by `/version` and `/v1/models`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx

from probe.collect.scrape import ScrapeError, fetch
from probe.store import Target

MAX_BYTES = 1024 * 1024
# Changes from second to second: belongs to samples, not to facts.
_VOLATILE = frozenset({"stats", "uptime_seconds", "device_memory_used_bytes"})


async def read_facts(
    client: httpx.AsyncClient, target: Target, info: Mapping[str, str], *, timeout_s: float
) -> dict[str, Any]:
    """Facts to merge into `target.facts`; what cannot be read is left out."""
    base = target.url.rstrip("/").removesuffix("/metrics")
    if target.engine == "kvoncall":
        found = await _json(client, f"{base}/debug/engine", timeout_s)
        return {key: value for key, value in found.items() if key not in _VOLATILE}
    facts: dict[str, Any] = {"engine": target.engine}
    if info:
        facts["cache_config_info"] = dict(info)
    version = (await _json(client, f"{base}/version", timeout_s)).get("version")
    if isinstance(version, str):
        facts["version"] = version
    models = (await _json(client, f"{base}/v1/models", timeout_s)).get("data")
    if isinstance(models, list) and models and isinstance(models[0], dict):
        model = models[0]
        facts |= {
            key: model[name] for key, name in (("model", "id"), ("max_model_len", "max_model_len")) if name in model
        }
    return facts


async def _json(client: httpx.AsyncClient, url: str, timeout_s: float) -> dict[str, Any]:
    try:
        body = await fetch(client, url, timeout_s=timeout_s, max_bytes=MAX_BYTES)
        value = json.loads(body)
    except (ScrapeError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
