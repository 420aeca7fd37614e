"""One generation request and how it is to be sampled.

A request has no prefill or decode phase. It has tokens (prompt, then output) and `num_computed_tokens`, the
number of them whose KV is in its blocks; the scheduler makes the second catch up with the first.
Only the scheduler and the KV cache manager write `status`, `block_ids`, `block_keys` and the counters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from engine.cache_identity import ANONYMOUS, CacheIdentity

if TYPE_CHECKING:
    from engine.block_hash import BlockKeys

MAX_TOKEN_ID = 2**32 - 1  # block hashes encode a token id in 32 bits


class RequestStatus(Enum):
    """Life of a request: WAITING -> RUNNING (<-> PREEMPTED) -> one of FINISHED_*."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"

    @property
    def is_finished(self) -> bool:
        return self in _FINISHED

    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length` or `abort`; `None` while the request is unfinished."""
        return self.value if self in _FINISHED else None


_FINISHED = frozenset({RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH, RequestStatus.FINISHED_ABORTED})


@dataclass(slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Raises `ValueError` naming the parameter that cannot work.

    `top_k` 0 (or -1) keeps the whole vocabulary. `logprobs` and `prompt_logprobs` count the alternatives to
    return per token (0: only the token's own). `stop` strings are found by the output processor.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, 1)
        _check_integer("min_tokens", self.min_tokens, 0)
        _check_integer("top_k", self.top_k, -1)
        self.top_k = max(self.top_k, 0)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        _check_number("temperature", self.temperature)
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        _check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63))
            if self.seed >= 2**63:
                raise ValueError(f"seed must fit in 64 bits, got {self.seed}")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _check_integer(name, count, 0)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError("stop must be a list of strings, none of them empty")
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0)


def _check_integer(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")


class Request:
    """A prompt being continued, with its block table and its counters.

    `all_token_ids` is prompt + output in one growing list; `model_token_ids` is what the model reads at the same
    positions, the same list unless an image stands behind placeholder tokens. `fork_of` is the request whose blocks
    it may start from when it is first admitted, while that one runs. `identity` is who it is to the prefix cache.
    `block_ids` is the block table; token `i` lives in slot `block_ids[i // block_size] * block_size + i % block_size`.
    Of those blocks the first `num_indexed_blocks` are in the prefix cache; all were computed with the weights of
    `weights_version`. `num_cached_tokens` is what it did not have to compute at first admission, -1 before it.
    `stop_token_ids` holds every token that ends the request, eos included unless it is ignored; at `max_num_tokens`
    tokens, prompt included, it ends in any case. Times are seconds of `time.monotonic`.
    """

    __slots__ = (
        "all_token_ids",
        "arrival_time",
        "block_ids",
        "block_keys",
        "eos_token_id",
        "first_scheduled_time",
        "fork_of",
        "identity",
        "max_num_tokens",
        "model_token_ids",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_indexed_blocks",
        "num_preemptions",
        "num_prompt_tokens",
        "output_token_ids",
        "params",
        "priority",
        "prompt_token_ids",
        "request_id",
        "status",
        "stop_reason",
        "stop_token_ids",
        "weights_version",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        identity: CacheIdentity = ANONYMOUS,
        priority: int = 0,
        fork_of: Request | None = None,
        model_token_ids: Sequence[int] | None = None,
        arrival_time: float | None = None,
        eos_token_id: int | None = None,
    ) -> None:
        if not prompt_token_ids:
            raise ValueError("the prompt is empty; it needs at least one token")
        if min(prompt_token_ids) < 0 or max(prompt_token_ids) > MAX_TOKEN_ID:
            raise ValueError("the prompt holds a token id outside the vocabulary")
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.params = params
        self.identity = identity
        self.priority = priority
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.eos_token_id = eos_token_id
        self.stop_token_ids = frozenset(params.stop_token_ids)
        if eos_token_id is not None and not params.ignore_eos:
            self.stop_token_ids |= {eos_token_id}
        self.max_num_tokens = self.num_prompt_tokens + params.max_tokens  # the scheduler applies max_model_len

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None  # the stop token id or stop string; None for eos and length
        self.output_token_ids: list[int] = []
        self.all_token_ids = list(prompt_token_ids)
        self.model_token_ids = self.all_token_ids if model_token_ids is None else list(model_token_ids)
        if len(self.model_token_ids) != self.num_prompt_tokens:
            raise ValueError(f"{len(self.model_token_ids)} model tokens for a prompt of {self.num_prompt_tokens}")
        self.fork_of = fork_of
        self.block_ids: list[int] = []
        self.block_keys: BlockKeys | None = None  # names of its full blocks, filled on demand
        self.num_indexed_blocks = 0
        self.weights_version = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        self.first_scheduled_time: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        """Names of its full blocks, as far as they were asked for."""
        return [] if self.block_keys is None else self.block_keys.hashes

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    def append_output_token(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        self.all_token_ids.append(token_id)
        if self.model_token_ids is not self.all_token_ids:
            self.model_token_ids.append(token_id)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
