"""Deterministic prompts: token ids where the vocabulary is known, else English-like text.

A prompt is made of blocks, each generated from its own seed string, so that two prompts with the same leading block
seeds have the same leading tokens. Stable over processes and Python versions (SHA-256 counter stream).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

TOKENS_PER_WORD = 1.3
_TEXT = (
    "the cache block of a request holds keys and values while its tokens wait for memory so that scheduler pool "
    "budget engine queue prefix decode prefill batch length report answer question number table summary page time "
    "value reason first second other before after under over small large long short open close read write move keep"
)
_WORDS = tuple(_TEXT.split())


def _stream(seed: str) -> Iterator[int]:
    """Endless 32-bit numbers that depend on `seed` alone."""
    counter = 0
    while True:
        digest = hashlib.sha256(f"{seed}:{counter}".encode()).digest()
        for offset in range(0, len(digest), 4):
            yield int.from_bytes(digest[offset : offset + 4], "little")
        counter += 1


def token_ids(blocks: Sequence[tuple[str, int]], length: int, low: int, vocab_size: int) -> tuple[int, ...]:
    """`length` ids in [low, vocab_size), block after block of (seed, tokens in the block)."""
    if vocab_size <= low:
        raise ValueError(f"a vocabulary of {vocab_size} has no ids from {low} on")
    ids: list[int] = []
    for seed, count in blocks:
        stream = _stream(seed)
        ids.extend(low + next(stream) % (vocab_size - low) for _ in range(count))
    return tuple(ids[:length])


def words(blocks: Sequence[tuple[str, int]], length: int) -> str:
    """Text of about `length` tokens at TOKENS_PER_WORD, block after block of (seed, tokens in the block)."""
    text: list[str] = []
    for seed, count in blocks:
        stream = _stream(seed)
        text.extend(_WORDS[next(stream) % len(_WORDS)] for _ in range(max(1, round(count / TOKENS_PER_WORD))))
    return " ".join(text[: max(1, round(length / TOKENS_PER_WORD))])
