"""What a request of a hybrid model costs, from two log lines of one server at two lengths.

The log's tokens are concurrency x max_model_len, so a single line says nothing of bytes a token: a request costs a
fixed part (windows, states) and a part that grows.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError


@dataclass(frozen=True)
class LogLine:
    """KV memory of the pool in bytes, --max-model-len, and the KV tokens that the log printed."""

    pool_bytes: int
    max_model_len: int
    tokens: int

    @property
    def request_bytes(self) -> float:
        """Bytes of one request of max_model_len: the pool over the concurrency."""
        return self.pool_bytes * self.max_model_len / self.tokens


@dataclass(frozen=True)
class RequestCost:
    bytes_per_token: float
    fixed_bytes: float


def cost_from_logs(first: LogLine, second: LogLine) -> RequestCost:
    """pool = (tokens / max_model_len) x (fixed + bytes_per_token x max_model_len), solved for both.

    Raises `ConfigError` for lines of one length, or of servers that differ otherwise.
    """
    if first.max_model_len == second.max_model_len or min(first.tokens, second.tokens) <= 0:
        raise ConfigError("two log lines at different --max-model-len are needed to tell fixed and growing cost apart")
    grown = second.request_bytes - first.request_bytes
    per_token = grown / (second.max_model_len - first.max_model_len)
    fixed = first.request_bytes - per_token * first.max_model_len
    if per_token < 0:
        raise ConfigError("the longer request costs less: the two lines are not of the same model and server")
    return RequestCost(per_token, fixed)
