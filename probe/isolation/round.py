"""What the checks of one round share: the cast of callers, prompts nobody sent before, and when to give up."""

from __future__ import annotations

import random
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

from probe.isolation.client import Caller, IsolationClient, ProbeError, Prompt
from probe.isolation.options import TAIL_TOKENS, IsolationOptions, Setting
from probe.load.prompts import TOKENS_PER_WORD, token_ids, words
from probe.load.traces import FIRST_TOKEN_ID

ID_PREFIX = "kvoncall-probe"
"""Every tenant, session, user and salt that is sent begins with this and the round's name."""
FAILURES_IN_A_ROW = 3
CALIBRATION_WORDS = 64
_REPORT_EVERY = 20

Progress = Callable[[str], None]
T = TypeVar("T")


class Round:
    """State of one round; everything happens on one event loop, one request at a time.

    Prompts are drawn from the round's own random name, so no earlier round has warmed them. `stopped` says why the
    round is over, once it is.
    """

    def __init__(
        self,
        client: IsolationClient,
        options: IsolationOptions,
        setting: Setting,
        *,
        progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self.client = client
        self.options = options
        self.setting = setting
        self.name = secrets.token_hex(4)
        self.rng = random.Random(self.name)
        self.callers: dict[str, dict[str, str]] = {}
        self.failed = 0
        self.stopped: str | None = None
        self.refused = False
        self._in_a_row = 0
        self._drawn = 0
        self._tokens_per_word = TOKENS_PER_WORD
        self._progress = progress
        self._cancelled = cancelled or (lambda: False)

    def over(self) -> bool:
        """Whether the round was stopped."""
        return self.stopped is not None

    def report(self, line: str) -> None:
        if self._progress is not None:
            self._progress(line)

    def count(self, check: str, done: int, of: int) -> None:
        """Report progress now and then."""
        if done % _REPORT_EVERY == 0:
            self.report(f"{check}: {done} of {of}")

    async def attempt(self, work: Awaitable[T]) -> T | None:
        """The work's value, or None when a request of it failed; a refusal or 3 failures in a row stop the round."""
        try:
            value = await work
        except ProbeError as error:
            self.failed += 1
            self._in_a_row += 1
            self.refused = error.final
            if error.final or self._in_a_row >= FAILURES_IN_A_ROW:
                self.stopped = str(error)
            return None
        self._in_a_row = 0
        if self._cancelled():
            self.stopped = "stopped by the caller"
        return value

    def forgive(self) -> None:
        """Go on after a refusal that was answered to by asking otherwise."""
        self.refused, self.stopped, self._in_a_row = False, None, 0

    def member(self, name: str) -> Caller:
        """A caller of the cast: the result tells what it sent."""
        caller = self.caller(name)
        self.callers[name] = {**caller.headers, **caller.fields}
        return caller

    def caller(self, name: str, *, salted: bool = False) -> Caller:
        """A made-up caller by how the options tell tenants apart; `salted`: with a salt in any case."""
        word = f"{ID_PREFIX}-{self.name}-{name}"
        by = self.options.tenants_by
        tenant, session = (f"{word}-tenant", f"{word}-session") if by in ("all", "header") else (None, None)
        salt = f"{word}-salt" if salted or self.options.salted or by == "salt" else None
        return Caller(tenant, session, word if by in ("all", "user") else None, salt)

    def fresh(self, what: str) -> str:
        """A name that was not used in this round."""
        self._drawn += 1
        return f"{what}-{self._drawn}"

    def prompt(self, prefix: str, tail: str, prefix_tokens: int | None = None) -> Prompt:
        """A prompt of random tokens or words; the same names give the same parts."""
        setting = self.setting
        length = prefix_tokens or setting.prefix_tokens
        parts = [(f"{self.name}:{prefix}", length), (f"{self.name}:{tail}", TAIL_TOKENS)]
        if setting.vocab_size is not None:
            return token_ids(parts, length + TAIL_TOKENS, FIRST_TOKEN_ID, setting.vocab_size)
        scale = TOKENS_PER_WORD / self._tokens_per_word  # `words` counts on its own figure
        scaled = [(seed, max(1, int(count * scale))) for seed, count in parts]
        return self.said(words(scaled, sum(count for _, count in scaled)))

    def said(self, text: str) -> Prompt:
        """A text as the options want it sent."""
        return [{"role": "user", "content": text}] if self.options.chat else text

    async def calibrate(self) -> None:
        """Measures how many tokens a word is, where prompts are text; raises `ProbeError` when that request fails."""
        if self.setting.vocab_size is not None:
            return
        text = words([(f"{self.name}:{self.fresh('calibration')}", 10_000)], round(CALIBRATION_WORDS * TOKENS_PER_WORD))
        answer = await self.client.ask(self.said(text), self.caller("calibration"), max_tokens=1)
        if answer.prompt_tokens:
            self._tokens_per_word = max(0.5, answer.prompt_tokens / len(text.split()))
