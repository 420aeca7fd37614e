"""Reading a JSON body field by field, so that each mistake names its field.

Every reader takes its field out of the body; `reject_rest` then refuses what nobody read. `null` counts as
absent, as in OpenAI's API.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from starlette.requests import Request

from engine.api.errors import APIError, bad_field

MAX_BODY_BYTES = 16 * 1024**2
INT64 = (-(2**63), 2**63 - 1)


async def read_json_object(request: Request) -> dict[str, Any]:
    """The JSON object of a request's body; 400, 413 or 415 when there is none."""
    content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if content_type != "application/json":
        raise APIError(415, "the Content-Type header must be application/json")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise APIError(413, f"the request is larger than {MAX_BODY_BYTES} bytes")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise APIError(400, "the body must be a JSON object")
    return value


class Fields:
    """The fields of one JSON object. `path` prefixes names in messages, for nested objects."""

    def __init__(self, body: Mapping[str, Any], path: str = "") -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._path = path

    def raw(self, name: str) -> Any:
        """The value as it came, `None` when absent."""
        return self._left.pop(name, None)

    def require(self, name: str) -> Any:
        """The value as it came; 400 when absent."""
        if name not in self._left:
            raise bad_field(self._path + name, "this field is required")
        return self._left.pop(name)

    def integer(self, name: str, default: int | None, low: int = INT64[0], high: int = INT64[1]) -> int | None:
        if name not in self._left:
            return default
        value = self._left.pop(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "an integer", value)
        self._check_range(name, value, low, high)
        return value

    def number(self, name: str, default: float, low: float, high: float = math.inf) -> float:
        value = self._left.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._wrong(name, "a finite number", value)
        self._check_range(name, value, low, high)
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._left.pop(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def string(self, name: str) -> str | None:
        value = self._left.pop(name, None)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def strings(self, name: str) -> list[str]:
        """A string or a list of strings, none of them empty."""
        value = self._left.pop(name, [])
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
            raise self._wrong(name, "a non-empty string or a list of them", value)
        return items

    def token_ids(self, name: str, vocab_size: int) -> list[int]:
        value = self._left.pop(name, [])
        if not isinstance(value, list):
            raise self._wrong(name, "a list of token ids", value)
        return check_token_ids(self._path + name, value, vocab_size)

    def nested(self, name: str) -> Fields | None:
        value = self._left.pop(name, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return Fields(value, f"{self._path}{name}.")

    def only(self, name: str, *neutral: Any) -> None:
        """Takes a field this engine cannot honour: 400 unless its value asks for nothing."""
        value = self._left.pop(name, None)
        if value is not None and not any(type(value) is type(n) and value == n for n in neutral):
            raise bad_field(self._path + name, f"{short(value)} is not supported by this engine; leave it out")

    def reject_rest(self, harmless: Collection[str] = ()) -> None:
        """400 for the first field that nobody read, unless ignoring it changes nothing in the answer."""
        for name in self._left:
            if name not in harmless:
                raise bad_field(self._path + name, "this field is unknown here")

    def _check_range(self, name: str, value: float, low: float, high: float) -> None:
        if value < low:
            raise bad_field(self._path + name, f"must be at least {low}, got {value}")
        if value > high:
            raise bad_field(self._path + name, f"must be at most {high}, got {value}")

    def _wrong(self, name: str, wanted: str, value: Any) -> APIError:
        return bad_field(self._path + name, f"must be {wanted}, got {short(value)}")


def check_token_ids(name: str, value: list[Any], vocab_size: int) -> list[int]:
    """`value` when it is a list of ids inside the vocabulary; 400 otherwise."""
    if not all(type(item) is int for item in value):
        raise bad_field(name, "must be a list of token ids (integers)")
    if value and not 0 <= min(value) <= max(value) < vocab_size:
        outside = next(item for item in value if not 0 <= item < vocab_size)
        raise bad_field(name, f"token id {outside} is outside the vocabulary of {vocab_size}")
    return value


def short(value: Any) -> str:
    """A value for an error message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
