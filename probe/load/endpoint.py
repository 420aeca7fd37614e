"""What a load needs to know of a server: model name, context length, vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx


class EndpointError(RuntimeError):
    """The server cannot be asked; the message is one sentence for the user."""


@dataclass(frozen=True)
class Endpoint:
    """One served model. `vocab_size` is None where the server does not tell it (then prompts are sent as text)."""

    model: str
    max_model_len: int
    vocab_size: int | None


def describe(base_url: str, *, api_key: str | None = None, timeout_s: float = 5.0) -> Endpoint:
    """Asks `/v1/models`, and `/debug/engine` where there is one; raises `EndpointError`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=base_url, headers=headers, timeout=timeout_s, trust_env=False) as client:
            models = client.get("/v1/models")
            models.raise_for_status()
            debug = client.get("/debug/engine")
            card = models.json()["data"][0]
            facts: dict[str, Any] = debug.json() if debug.status_code == 200 else {}
            length = card.get("max_model_len")
            if not isinstance(length, int):
                raise EndpointError(f"{base_url}/v1/models does not tell max_model_len; the load cannot be fitted")
            vocab_size = (facts.get("dims") or {}).get("vocab_size")
            return Endpoint(str(card["id"]), length, vocab_size if isinstance(vocab_size, int) else None)
    except httpx.HTTPError as error:
        raise EndpointError(f"{base_url} cannot be asked for its model: {error or type(error).__name__}") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise EndpointError(f"{base_url}/v1/models did not answer in the OpenAI shape") from None
