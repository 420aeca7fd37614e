"""The embedded engine's live face: what its `/debug/*` endpoints say right now.

Answers are shared between tabs for a second, so that five open tabs do not ask five times.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import httpx

TIMEOUT_S = 2.0
SHARED_FOR_S = 0.9

_answers: dict[str, tuple[float, dict[str, Any] | EngineUnreachableError]] = {}
_lock = threading.Lock()


class EngineUnreachableError(RuntimeError):
    """The engine did not answer; the message is one sentence for the user."""


def ask(base_url: str, path: str) -> dict[str, Any]:
    """The JSON object at `base_url + path`; raises `EngineUnreachableError` with a sentence.

    A failure is shared as well, so that a hung engine costs every tab one timeout and not one per panel.
    """
    url = base_url.rstrip("/") + path
    with _lock:
        kept = _answers.get(url)
    if kept is None or time.monotonic() - kept[0] > SHARED_FOR_S:
        answer: dict[str, Any] | EngineUnreachableError
        try:
            answer = _fetch(url)
        except EngineUnreachableError as error:
            answer = error
        kept = (time.monotonic(), answer)
        with _lock:
            if len(_answers) > 64:
                _answers.clear()
            _answers[url] = kept
    if isinstance(kept[1], EngineUnreachableError):
        raise EngineUnreachableError(str(kept[1]))
    return kept[1]


def _fetch(url: str) -> dict[str, Any]:
    try:
        response = httpx.get(url, timeout=TIMEOUT_S, trust_env=False)
        response.raise_for_status()
        answer = response.json()
    except httpx.TimeoutException:
        raise EngineUnreachableError(f"The engine did not answer within {TIMEOUT_S:.0f} s at {url}.") from None
    except httpx.HTTPStatusError as error:
        raise EngineUnreachableError(f"The engine answered {error.response.status_code} at {url}.") from None
    except httpx.HTTPError:
        raise EngineUnreachableError(
            f"The engine does not answer at {url}; its process is stopped or starting."
        ) from None
    except ValueError:
        raise EngineUnreachableError(f"The answer at {url} is not JSON.") from None
    if not isinstance(answer, Mapping):
        raise EngineUnreachableError(f"The answer at {url} is not a JSON object.")
    return dict(answer)
