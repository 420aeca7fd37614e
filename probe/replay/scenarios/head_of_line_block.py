"""Head-of-line block: a long prompt that the reserve keeps out, and short ones behind it that would fit.

Somebody has read that --watermark prevents preemptions and has kept 40% of the blocks free with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from probe.load.endpoint import Endpoint
from probe.load.generator import LoadOptions
from probe.load.traces import synthetic
from probe.replay.observation import Check, LoadPlan, Observation
from probe.replay.scenarios.load_scenario import LoadScenario, measured


@dataclass(frozen=True)
class HeadOfLineBlock(LoadScenario):
    """Three answers hold 38% of the blocks, the head asks for 23%, the reserve is 40%: it waits for the answers."""

    blocks: int = 512
    watermark: float = 0.4
    answers: int = 3
    short: int = 16
    time_scale: float = 0.015
    scrape_interval_s: float = 0.25

    id = "head-of-line-block"
    title = "Head-of-line block: a prompt that does not fit holds up those that would"
    hypothesis = (
        "Admission goes in order and keeps --watermark of the blocks free. A long prompt that fits the free blocks but "
        "not the reserve waits until long answers end, and short requests wait behind it with room to spare. With a "
        "reserve of 5% it gets in, and so do they."
    )

    @property
    def article_case(self) -> Mapping[str, Any]:
        """Where it was seen."""
        return {
            "case": "a short request behind a prompt of 60,000 tokens has its first token after 18.0 s, and after "
            "1.09 s once prompts share steps (noonghunna/club-3090#712)",
            "computed": False,
        }

    def flags(self) -> list[str]:
        """A pool of `blocks`, of which much is kept free."""
        return [
            "--num-gpu-blocks-override", str(self.blocks + 1),
            "--watermark", str(self.watermark),
            "--max-num-seqs", "32",
        ]  # fmt: skip

    def load(self, endpoint: Endpoint) -> LoadPlan:
        """Long answers, then the long prompt, then short requests, a few a second."""
        vocab = endpoint.vocab_size
        answers = synthetic(self.answers, prompt_tokens=1040, max_tokens=960, vocab_size=vocab, name="answer")
        head = synthetic(1, prompt_tokens=1900, max_tokens=8, vocab_size=vocab, name="head")
        short = synthetic(self.short, prompt_tokens=48, max_tokens=8, vocab_size=vocab, name="short")
        plan = [
            *answers,
            replace(head[0], arrival_s=0.3),
            *(replace(r, arrival_s=0.5 + 0.2 * n) for n, r in enumerate(short)),
        ]
        options = LoadOptions(timed=True, model=endpoint.model, request_timeout_s=90, max_duration_s=90)
        return LoadPlan(
            tuple(plan),
            options,
            f"{self.answers} answers of 960 tokens, a prompt of 1900 tokens behind them, {self.short} short requests "
            "behind that",
        )

    def shown(self, before: Observation) -> list[Check]:
        """Blocks were free while requests waited, and nobody was preempted."""
        usage, waiting = measured(before, "kv_usage_peak"), measured(before, "waiting_peak")
        return [
            Check("requests waited", waiting > 1, waiting, "> 1 at the peak"),
            Check("blocks stayed free", usage < 0.9, usage, "< 0.9 at the peak"),
            Check("the head waited for the answers", not _head_got_in(before), _head_words(before), "after them"),
        ]

    def mended(self, after: Observation) -> list[Check]:
        """The head gets in beside the answers."""
        return [Check("the head gets in", _head_got_in(after), _head_words(after), "before the answers end")]


def _times(observation: Observation) -> tuple[float | None, float | None]:
    """Seconds at which the head had its first token and at which the first long answer ended."""
    records = observation.load.records if observation.load else ()
    head = [r.started_s + r.ttft_s for r in records if r.request_id.startswith("head") and r.ttft_s is not None]
    ended = [r.started_s + r.e2e_s for r in records if r.request_id.startswith("answer") and r.e2e_s is not None]
    return min(head, default=None), min(ended, default=None)


def _head_got_in(observation: Observation) -> bool:
    head, answers = _times(observation)
    return head is not None and answers is not None and head < answers


def _head_words(observation: Observation) -> str:
    head, answers = (None if at is None else round(at, 1) for at in _times(observation))
    return f"first token of the head after {head} s, first end of an answer after {answers} s"
