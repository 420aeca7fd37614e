"""Shipped slices of real request logs, fitted to the context length of the model that will serve them.

The fitting rule. Let L be the model's context length and q the 95th percentile of prompt + output over the slice.
Every length is multiplied by L / q (lengths are only ever shrunk: a factor above 1 becomes 1). The 5% of rows that
are still longer than L keep their output and lose prompt tokens, so that prompt + output <= L. No row gets fewer
than MIN_PROMPT prompt tokens or 1 output token.

Prompts are token ids, the same for the same seed. Rows without block ids share nothing. Mooncake's `hash_ids` name
512-token prompt blocks; a scaled block of b = round(512 x factor) tokens is generated from its id alone, so rows
with equal leading ids have equal leading tokens and an engine's prefix cache really hits.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from probe.load.prompts import token_ids, words

MIN_PROMPT = 4
FIRST_TOKEN_ID = 4
MOONCAKE_BLOCK = 512
FIT_QUANTILE = 0.95


class TraceError(ValueError):
    """A trace that does not exist or cannot be read; the message is one sentence for the user."""


@dataclass(frozen=True)
class TraceRow:
    """One request of a log: seconds since the slice began, lengths in tokens, ids of its prompt blocks."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """A slice with its origin. `block_tokens` is the length one hash id stands for (0: the log has none)."""

    name: str
    source: str
    licence: str
    rows: tuple[TraceRow, ...]
    block_tokens: int = 0
    factor: float = 1.0

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.rows[-1].arrival_s - self.rows[0].arrival_s if self.rows else 0.0


@dataclass(frozen=True)
class LoadRequest:
    """One request to send: when (seconds after the start), what, and how many tokens to ask for.

    `prompt` is a tuple of token ids, or text where the target's vocabulary is unknown; `prompt_tokens` is exact for
    ids and an estimate for text.
    """

    request_id: str
    arrival_s: float
    prompt: tuple[int, ...] | str
    prompt_tokens: int
    max_tokens: int
    cache_salt: str | None = None


def available() -> list[str]:
    """Names of the shipped slices."""
    return sorted(_SLICES)


def load_trace(name: str) -> Trace:
    """Reads a shipped slice; raises `TraceError` naming the slices there are."""
    if name not in _SLICES:
        raise TraceError(f"no trace named {name!r}; there are: {', '.join(available())}")
    file, source, licence, block_tokens = _SLICES[name]
    text = (Path(__file__).parent / "data" / file).read_text(encoding="utf-8")
    rows = _read_csv(text) if file.endswith(".csv") else _read_jsonl(text)
    return Trace(name, source, licence, tuple(rows), block_tokens)


def fit(trace: Trace, max_model_len: int, *, quantile: float = FIT_QUANTILE) -> Trace:
    """The trace with its lengths fitted to `max_model_len` by the rule at the top of this module."""
    if not trace.rows:
        raise TraceError(f"trace {trace.name!r} has no rows")
    if max_model_len <= MIN_PROMPT:
        raise TraceError(f"a context length of {max_model_len} tokens is too short to fit a trace to")
    totals = sorted(row.prompt_tokens + row.output_tokens for row in trace.rows)
    reference = totals[min(len(totals) - 1, int(quantile * len(totals)))]
    factor = min(1.0, max_model_len / reference)
    rows = [_fit_row(row, factor, max_model_len) for row in trace.rows]
    block = max(1, round(trace.block_tokens * factor)) if trace.block_tokens else 0
    return replace(trace, rows=tuple(rows), block_tokens=block, factor=factor)


def _fit_row(row: TraceRow, factor: float, max_model_len: int) -> TraceRow:
    output = min(max(1, round(row.output_tokens * factor)), max_model_len - MIN_PROMPT)
    prompt = max(MIN_PROMPT, round(row.prompt_tokens * factor))
    return replace(row, prompt_tokens=min(prompt, max_model_len - output), output_tokens=output)


def cut(trace: Trace, *, start: int = 0, count: int | None = None, rate: float | None = None) -> Trace:
    """`count` rows from row `start`, arrivals from 0; `rate` stretches time to that many requests a second."""
    rows = trace.rows[start : None if count is None else start + count]
    if not rows:
        raise TraceError(f"trace {trace.name!r} has {len(trace.rows)} rows; none from row {start}")
    first, last = rows[0].arrival_s, rows[-1].arrival_s
    stretch = 1.0
    if rate is not None and last > first:
        stretch = (len(rows) - 1) / rate / (last - first)
    return replace(trace, rows=tuple(replace(row, arrival_s=(row.arrival_s - first) * stretch) for row in rows))


def requests_from(trace: Trace, *, vocab_size: int | None, seed: int = 0) -> list[LoadRequest]:
    """All requests of a fitted trace; see `request_at`."""
    return [request_at(trace, index, vocab_size=vocab_size, seed=seed) for index in range(len(trace.rows))]


def request_at(trace: Trace, index: int, *, vocab_size: int | None, seed: int = 0) -> LoadRequest:
    """Request `index` of a fitted trace, its prompt as ids below `vocab_size`, or as text when that is None.

    Ids start at FIRST_TOKEN_ID, above the special tokens of most vocabularies. Deterministic in `seed`.
    """
    row = trace.rows[index]
    seeds = _block_seeds(trace, row, index, seed)
    prompt: tuple[int, ...] | str
    if vocab_size is None:
        prompt = words(seeds, row.prompt_tokens)
    else:
        prompt = token_ids(seeds, row.prompt_tokens, FIRST_TOKEN_ID, vocab_size)
    return LoadRequest(f"{trace.name}-{index}", row.arrival_s, prompt, row.prompt_tokens, row.output_tokens)


def _block_seeds(trace: Trace, row: TraceRow, index: int, seed: int) -> list[tuple[str, int]]:
    """One (seed, length) a prompt block; a row without ids is one block of its own."""
    own = f"{trace.name}/{seed}/row{index}"
    if not row.hash_ids or not trace.block_tokens:
        return [(own, row.prompt_tokens)]
    blocks, left = [], row.prompt_tokens
    for block_id in row.hash_ids:
        if left <= 0:
            break
        # The last block of a prompt is not full; its head still equals that of the same id elsewhere.
        blocks.append((f"{trace.name}/{seed}/block{block_id}", min(trace.block_tokens, left)))
        left -= trace.block_tokens
    if left > 0:
        blocks.append((own, left))
    return blocks


def synthetic(
    count: int, *, prompt_tokens: int, max_tokens: int, vocab_size: int | None, name: str, seed: int = 0
) -> list[LoadRequest]:
    """`count` requests of one shape with unshared prompts, all arriving at once (long-document summaries, probes)."""
    rows = tuple(TraceRow(0.0, prompt_tokens, max_tokens) for _ in range(count))
    return requests_from(Trace(name, "generated", "none", rows), vocab_size=vocab_size, seed=seed)


def _read_csv(text: str) -> list[TraceRow]:
    rows = []
    start: datetime | None = None
    for record in csv.DictReader(text.splitlines()):
        # Seven fractional digits; datetime reads six. The log has no zone and only differences are used.
        at = datetime.fromisoformat(record["TIMESTAMP"][:26] + "+00:00")
        start = start or at
        rows.append(
            TraceRow((at - start).total_seconds(), int(record["ContextTokens"]), int(record["GeneratedTokens"]))
        )
    return rows


def _read_jsonl(text: str) -> list[TraceRow]:
    records = [json.loads(line) for line in text.splitlines()]
    start = records[0]["timestamp"]
    return [
        TraceRow((r["timestamp"] - start) / 1000, r["input_length"], r["output_length"], tuple(r["hash_ids"]))
        for r in records
    ]


_SLICES = {
    "azure_llm_conv_2023": (
        "azure_llm_conv_2023_slice.csv",
        "Azure Public Dataset, LLM inference trace (conversation) 2023; Patel et al., Splitwise, ISCA 2024",
        "CC-BY 4.0",
        0,
    ),
    "mooncake_conversation": (
        "mooncake_conversation_slice.jsonl",
        "Mooncake conversation trace; Qin et al., FAST 2025",
        "Apache-2.0",
        MOONCAKE_BLOCK,
    ),
}
