"""From sampled tokens to what a client sees: incremental text, stop strings, finish reasons, timings.

One `_Stream` per unfinished request. Text leaves it only when no later token can change or withdraw it: whole
characters, and nothing that may be the beginning of a stop string. So the pieces a client has read are always
a prefix of the final text, and together they are the final text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.request import Request
from engine.sampler import TokenLogprobs
from engine.tokenizer import DecodeStream, Tokenizer


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Moments in a finished request's life, seconds of `time.monotonic`; `None` where it never came to that."""

    arrival: float
    first_scheduled: float | None
    first_token: float | None
    last_token: float | None
    num_preemptions: int


@dataclass(slots=True)
class RequestOutput:
    """What one step brought one request.

    new_text, new_token_ids and logprobs (one entry a token, `None` when not asked for) are the delta; counts
    are totals. prompt_logprobs comes with the first output. finish_reason is `stop`, `length` or `abort`, and
    stop_reason the stop string or stop token id that ended it. metrics is set on the last output.
    """

    request_id: str
    new_text: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finished: bool
    finish_reason: str | None
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestTimings | None = None


class StopStringBuffer:
    """Holds back text that may turn out to be the beginning of a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes more text; returns what may go out, and the stop string that was completed, if any.

        The stop string that begins first wins; it and what follows are dropped.
        """
        text = self._held + text
        found = [(at, -len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, _, stop = min(found)
            self._held = ""
            return text[:at], stop
        kept = self._unsafe_suffix(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], None

    def flush(self) -> str:
        """What is held, once nothing can follow."""
        held, self._held = self._held, ""
        return held

    def _unsafe_suffix(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


class _Stream:
    """Output state of one request."""

    __slots__ = ("decoder", "first_token_time", "last_token_time", "request", "stops")

    def __init__(self, request: Request, decoder: DecodeStream) -> None:
        self.request = request
        self.decoder = decoder
        self.stops = StopStringBuffer(request.params.stop) if request.params.stop else None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None

    def text_of(self, token_id: int) -> tuple[str, str | None]:
        """The text a sampled token lets out, and the stop string it completes. The request has the token."""
        request = self.request
        ended = request.status.is_finished
        if ended and request.status.finish_reason == "stop":
            text = self.decoder.flush()  # the token that ended it is not part of the text
        else:
            text = self.decoder.push(token_id)
            if ended:
                text += self.decoder.flush()
        if self.stops is None or len(request.output_token_ids) < request.params.min_tokens:
            return text, None
        text, stop = self.stops.push(text)
        if ended and stop is None:
            text += self.stops.flush()
        return text, stop


class OutputProcessor:
    """Turns the tokens of a step into `RequestOutput`s. Knows every request between `add` and its end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[str, _Stream] = {}

    def add(self, request: Request) -> None:
        """Starts a request's text after its prompt."""
        decoder = self._tokenizer.stream(request.prompt_token_ids)
        self._streams[request.request_id] = _Stream(request, decoder)

    def token(self, request: Request, token_id: int, logprobs: TokenLogprobs | None, now: float) -> RequestOutput:
        """The output for a token the scheduler has booked; a stop string in it makes the output finished."""
        stream = self._streams[request.request_id]
        if stream.first_token_time is None:
            stream.first_token_time = now
        stream.last_token_time = now
        text, stop = stream.text_of(token_id)
        finished = stop is not None or request.status.is_finished
        output = RequestOutput(
            request_id=request.request_id,
            new_text=text,
            new_token_ids=[token_id],
            logprobs=None if logprobs is None else [logprobs],
            finished=finished,
            finish_reason="stop" if stop is not None else request.status.finish_reason,
            stop_reason=stop if stop is not None else request.stop_reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=max(0, request.num_cached_tokens),
            num_output_tokens=len(request.output_token_ids),
        )
        if finished:
            output.metrics = self._finish(stream)
        return output

    def abort(self, request: Request) -> RequestOutput:
        """The last output of a request that is cut off; it brings no text."""
        stream = self._streams[request.request_id]
        return RequestOutput(
            request_id=request.request_id,
            new_text="",
            new_token_ids=[],
            logprobs=None,
            finished=True,
            finish_reason="abort",
            stop_reason=None,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=max(0, request.num_cached_tokens),
            num_output_tokens=len(request.output_token_ids),
            metrics=self._finish(stream),
        )

    def last_token_time(self, request: Request) -> float | None:
        """When the request's previous token came, `None` before the first."""
        return self._streams[request.request_id].last_token_time

    def _finish(self, stream: _Stream) -> RequestTimings:
        request = stream.request
        del self._streams[request.request_id]
        return RequestTimings(
            arrival=request.arrival_time,
            first_scheduled=request.first_scheduled_time,
            first_token=stream.first_token_time,
            last_token=stream.last_token_time,
            num_preemptions=request.num_preemptions,
        )
