"""From sampled tokens to what a client sees: incremental text, stop strings, finish reasons, timings.

One `_Stream` per unfinished request. Text leaves it only when no later token can change or withdraw it: whole
characters, and nothing that may be the beginning of a stop string. So the pieces a client has read are always
a prefix of the final text, and together they are the final text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.request import Request, RequestStatus
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


class EngineObserver(Protocol):
    """Told what happens, for metrics. Called inside `step` and `abort_request`: it must be quick."""

    def on_step(
        self, step_seconds: float, num_scheduled_tokens: int, num_prompt_tokens: int, num_generation_tokens: int
    ) -> None:
        """A step is over. num_prompt_tokens counts whole prompts whose first token came in this step, as vLLM."""

    def on_first_token(self, ttft_s: float) -> None:
        """A request has its first token, seconds after its arrival."""

    def on_inter_token(self, itl_s: float) -> None:
        """A request has a further token, seconds after the one before."""

    def on_finished(self, output: RequestOutput) -> None:
        """A request is over; the output is its last."""


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
        running = request.status is RequestStatus.RUNNING
        if running:
            text = self.decoder.push(token_id)
        elif request.status is RequestStatus.FINISHED_STOPPED:
            text = self.decoder.flush()  # the token that ended it is not part of the text
        else:
            text = self.decoder.push(token_id) + self.decoder.flush()
        if self.stops is None or len(request.output_token_ids) < request.params.min_tokens:
            return text, None
        text, stop = self.stops.push(text)
        if stop is None and not running:
            text += self.stops.flush()
        return text, stop

    def output(self, text: str, new_token_ids: list[int]) -> RequestOutput:
        """An output with the request's totals, its end if it has come, and no more."""
        request = self.request
        reason = request.status.finish_reason if request.status is not RequestStatus.RUNNING else None
        return RequestOutput(
            request_id=request.request_id,
            new_text=text,
            new_token_ids=new_token_ids,
            logprobs=None,
            finished=reason is not None,
            finish_reason=reason,
            stop_reason=request.stop_reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=max(0, request.num_cached_tokens),
            num_output_tokens=len(request.output_token_ids),
        )

    def timings(self) -> RequestTimings:
        request = self.request
        return RequestTimings(
            arrival=request.arrival_time,
            first_scheduled=request.first_scheduled_time,
            first_token=self.first_token_time,
            last_token=self.last_token_time,
            num_preemptions=request.num_preemptions,
        )


class OutputProcessor:
    """Turns sampled tokens into `RequestOutput`s and tells the observer. Knows every request from `add` to its end."""

    def __init__(self, tokenizer: Tokenizer, observer: EngineObserver | None) -> None:
        self._tokenizer = tokenizer
        self._observer = observer
        self._streams: dict[str, _Stream] = {}

    def add(self, request: Request) -> None:
        """Starts a request's text after its prompt."""
        decoder = self._tokenizer.stream(request.prompt_token_ids)
        self._streams[request.request_id] = _Stream(request, decoder)

    def token(self, request: Request, token_id: int, logprobs: TokenLogprobs | None, now: float) -> RequestOutput:
        """The output for a token the scheduler has booked; a stop string in it makes the output finished."""
        stream = self._streams[request.request_id]
        previous, stream.last_token_time = stream.last_token_time, now
        if previous is None:
            stream.first_token_time = now
        if self._observer is not None:
            if previous is None:
                self._observer.on_first_token(now - request.arrival_time)
            else:
                self._observer.on_inter_token(now - previous)
        text, stop = stream.text_of(token_id)
        output = stream.output(text, [token_id])
        if logprobs is not None:
            output.logprobs = [logprobs]
        if stop is not None:
            output.finished, output.finish_reason, output.stop_reason = True, "stop", stop
        if output.finished:
            self._finish(stream, output)
        return output

    def abort(self, request: Request) -> None:
        """Ends a request that was cut off; only the observer hears of it."""
        stream = self._streams[request.request_id]
        self._finish(stream, stream.output("", []))

    def _finish(self, stream: _Stream, output: RequestOutput) -> None:
        del self._streams[output.request_id]
        output.metrics = stream.timings()
        if self._observer is not None:
            self._observer.on_finished(output)
