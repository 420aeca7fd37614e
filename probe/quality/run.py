"""Carries a suite out against one server and keeps every item in the store as it comes.

Conversations run at once, the turns of one in order, so that its prefix is cached. A server that goes away for
longer than the patience ends the run as "incomplete"; resumed, it asks only what has no answer yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from probe.quality.client import EndpointDown, EndpointRefused, QualityClient
from probe.quality.likelihood import TEXT, window_data
from probe.quality.score import summarize
from probe.quality.server import Server, describe
from probe.quality.suite import QualityError, Question, Suite, SuiteSpec, Window, build_suite, digest
from probe.store import QualityItem, QualityRun, Store

BATCH = 16  # items kept in memory before they are written

Progress = Callable[[str], None]


def run_suite(
    store: Store,
    base_url: str,
    spec: SuiteSpec,
    *,
    target: str,
    label: str,
    baseline: QualityRun | None = None,
    resume: QualityRun | None = None,
    text: str | None = None,
    api_key: str | None = None,
    concurrency: int = 16,
    patience_s: float = 20.0,
    progress: Progress | None = None,
) -> QualityRun:
    """Asks all of the suite and returns the finished run.

    `baseline`: compare with its items. `resume`: go on with this incomplete run (its spec replaces `spec`).
    `text`: a text of the user's to judge instead of the suite's own. Blocks; starts an event loop of its own.
    Raises `QualityError`; when its `run_id` is set, that run kept what was answered and can be resumed.
    """
    text_digest = "" if text is None else digest(text)
    if resume is not None:
        spec = SuiteSpec.from_dict(resume.suite)
        if spec.text_digest != text_digest:
            raise QualityError(f"run {resume.id} judged another text; give the same one to go on", resume.id)
    spec = replace(spec, text_digest=text_digest)
    client = QualityClient(base_url, api_key=api_key, patience_s=patience_s, concurrency=concurrency)
    run = _Run(store, client, target, label, baseline, resume, progress)
    return asyncio.run(run.carry_out(spec, text))


class _Run:
    """State of one run; everything happens on one event loop."""

    def __init__(
        self,
        store: Store,
        client: QualityClient,
        target: str,
        label: str,
        baseline: QualityRun | None,
        resume: QualityRun | None,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._client = client
        self._target = target
        self._label = label
        self._baseline = baseline
        self._resume = resume
        self._progress = progress
        self._items: dict[str, QualityItem] = {}
        self._unwritten: list[QualityItem] = []
        self._left_out: list[str] = []
        self._tokenized: dict[tuple[str, bool], list[int]] = {}
        self._size = 0
        self._told = 0

    async def carry_out(self, spec: SuiteSpec, text: str | None) -> QualityRun:
        async with self._client:
            try:
                server = await describe(self._client)
            except (EndpointDown, EndpointRefused) as error:
                raise QualityError(str(error), self._resume.id if self._resume else None) from None
            suite = build_suite(spec.fitted(server.suite_kind, server.max_model_len), text)
            run = self._open(suite, server)
            return await self._measure(run, suite)

    def _open(self, suite: Suite, server: Server) -> QualityRun:
        spec, baseline = suite.spec, self._baseline
        if baseline is not None and baseline.suite_key != spec.key:
            raise QualityError(
                f"the baseline {baseline.label} ({baseline.id}) was asked other questions (kind, turns or context "
                "differ), so answers do not pair up; measure it again with the same options"
            )
        if baseline is not None:
            known = {item.key for item in self._store.quality.items(baseline.id)}
            if known.isdisjoint(suite.keys()):
                raise QualityError(f"the baseline {baseline.label} ({baseline.id}) shares no item with this suite")
        self._size = len(suite.keys())
        if self._resume is not None:
            if self._resume.suite_key != spec.key or self._resume.model != server.model:
                raise QualityError(
                    f"run {self._resume.id} measured {self._resume.model} with another suite or context than "
                    f"{self._client.base_url} has now; start a new run"
                )
            self._items = {item.key: item for item in self._store.quality.items(self._resume.id)}
            return self._store.quality.reopen(self._resume.id)
        return self._store.quality.start(
            self._target,
            self._label,
            server.model,
            spec.to_dict(),
            spec.key,
            server.facts,
            baseline.id if baseline else None,
        )

    async def _measure(self, run: QualityRun, suite: Suite) -> QualityRun:
        try:
            await self._ask_all(run, suite)
        except (EndpointDown, EndpointRefused) as error:
            self._close(run, "incomplete", str(error))
            kept = f"{len(self._items)} of {self._size} items are kept"
            raise QualityError(f"{error}; {kept}, `kvoncall quality --resume {run.id}` goes on", run.id) from None
        except BaseException as error:
            self._close(run, "incomplete", f"interrupted: {type(error).__name__}")
            raise
        return self._close(run, "done", None)

    async def _ask_all(self, run: QualityRun, suite: Suite) -> None:
        works = [self._judge_windows(run, suite.windows)]
        works += [self._converse(run, questions) for questions in suite.conversations]
        tasks = [asyncio.create_task(work) for work in works]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _converse(self, run: QualityRun, questions: Sequence[Question]) -> None:
        for question in questions:
            if question.key in self._items:
                continue
            if question.messages is not None:
                reply = await self._client.chat(question.messages, question.max_tokens, question.stop)
            else:
                reply = await self._client.complete(question.prompt, question.max_tokens, question.stop)
            right, valid = question.judge(reply.text)
            data = {"answer": reply.text, "expected": question.expected}
            self._keep(run, QualityItem(question.key, question.task, question.turn, right, valid, data))

    async def _judge_windows(self, run: QualityRun, windows: Sequence[Window]) -> None:
        wanted = [window for window in windows if window.key not in self._items]
        try:
            for window in wanted:  # one at a time: an answer tells 20 tokens at each place, which is a lot to hold
                item = await self._judge(window)
                if item is not None:
                    self._keep(run, item)
        except EndpointRefused as error:
            self._left_out.append(f"Perplexity, KL and agreement are left out: {error}.")

    async def _judge(self, window: Window) -> QualityItem | None:
        """The window's item; None for a window behind the end of its text."""
        tokens = await self._tokens(window.text)
        if window.part is not None:
            plain = await self._tokens(window.text, special=False)
            head = tokens[: len(tokens) - len(plain)]  # BOS, where the tokenizer has one
            index, size = window.part
            step = size - len(head)
            tokens = head + plain[index * step : (index + 1) * step]
            if len(tokens) < len(head) + 2:
                return None
        spans = window.spans or ((None, 1, len(tokens)),)
        if spans[-1][2] != len(tokens):
            raise EndpointRefused("the server cuts the text into other tokens than the testbed's tokenizer", 200)
        entries = await self._client.prompt_logprobs(tokens)
        places = [(turn, place) for turn, first, end in spans for place in range(first, end)]
        told = [entries[place] or {} for _, place in places]
        turns = [turn for turn, _ in places if turn is not None]
        data = window_data(told, [tokens[place] for _, place in places], turns or None)
        return QualityItem(window.key, TEXT, None, None, None, data)

    async def _tokens(self, text: str, *, special: bool = True) -> list[int]:
        known = self._tokenized.get((text, special))
        if known is None:
            known = self._tokenized[text, special] = await self._client.tokenize(text, special=special)
        return known

    def _keep(self, run: QualityRun, item: QualityItem) -> None:
        self._items[item.key] = item
        self._unwritten.append(item)
        if len(self._unwritten) >= BATCH:
            self._write(run.id)
        tenths = 10 * len(self._items) // self._size
        if self._progress is not None and tenths > self._told:
            self._told = tenths
            self._progress(f"{self._label}: {len(self._items)} of {self._size} items")

    def _write(self, run_id: str) -> None:
        self._store.quality.add(run_id, self._unwritten)
        self._unwritten = []

    def _close(self, run: QualityRun, status: str, error: str | None) -> QualityRun:
        self._write(run.id)
        baseline = self._baseline or (self._store.quality.get(run.baseline_id) if run.baseline_id else None)
        before = self._store.quality.items(baseline.id) if baseline is not None else None
        result = summarize(
            list(self._items.values()),
            before,
            baseline_id=baseline.id if baseline else None,
            left_out=self._left_out,
        )
        return self._store.quality.finish(run.id, status, result, error)
