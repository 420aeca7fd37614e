"""What a server says of itself before it is measured: model, context, engine, the format of its KV cache."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from engine.config import ModelDims
from engine.testbed import MODEL_DIR
from probe.quality.client import EndpointRefused, QualityClient

_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Server:
    """`facts`: as in `QualityRun.facts`; what the server does not tell is missing."""

    model: str
    max_model_len: int | None
    facts: dict[str, Any]

    @property
    def suite_kind(self) -> str:
        """The suite that suits the model: "testbed" for ours, by its vocabulary or else its name; else "plain"."""
        vocab_size = (self.facts.get("dims") or {}).get("vocab_size")
        if vocab_size is not None:
            return "testbed" if vocab_size == testbed_vocab_size() else "plain"
        return "testbed" if "testbed" in self.model.lower() else "plain"


@cache
def testbed_vocab_size() -> int:
    """Vocabulary of the shipped testbed model."""
    return ModelDims.from_model_dir(MODEL_DIR).vocab_size


async def describe(client: QualityClient) -> Server:
    """Asks the server and sets `client.model`; raises `EndpointDown` or `EndpointRefused`."""
    models = (await client.get("/v1/models")).get("data")
    if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
        raise EndpointRefused(f"{client.base_url}/v1/models names no model", 200)
    client.model = str(models[0]["id"])
    length = models[0].get("max_model_len")
    return Server(client.model, length if isinstance(length, int) else None, await _facts(client))


async def _facts(client: QualityClient) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    debug = _json(await client.get_text("/debug/engine"))
    if debug.get("engine") == "kvoncall":
        plan = debug.get("memory_plan") or {}
        facts = {key: debug[key] for key in ("engine", "version", "flags", "dims") if key in debug}
        for key in ("kv_cache_dtype", "kv_layer_dtypes", "kv_bytes_per_token"):
            if key in plan:
                facts[key] = plan[key]
        return facts
    info = _INFO.search(await client.get_text("/metrics") or "")
    if info:
        labels = dict(_LABEL.findall(info[1]))
        facts["engine"] = "vllm"
        if "cache_dtype" in labels:
            facts["kv_cache_dtype"] = labels["cache_dtype"]
    version = _json(await client.get_text("/version")).get("version")
    if isinstance(version, str):
        facts["version"] = version
    return facts


def _json(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else None
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}
