"""Log probabilities in the three shapes clients know: completions', chat's, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.engine import RequestOutput
    from engine.sampler import TokenLogprobs
    from engine.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no minus infinity; vLLM's stand-in


def completion_logprobs(output: RequestOutput, tokenizer: Tokenizer, offset: int) -> tuple[dict[str, Any], int]:
    """The `logprobs` object of a completion choice, and the text offset after its tokens.

    Offsets count characters of the choice's text from `offset` on.
    """
    tokens, values, tops, offsets = [], [], [], []
    for entry in output.logprobs or ():
        text = tokenizer.token_text(entry.token_id)
        tokens.append(text)
        values.append(_finite(entry.logprob))
        top = {tokenizer.token_text(token): _finite(logprob) for token, logprob in entry.top}
        tops.append(top | {text: _finite(entry.logprob)})
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset


def chat_logprobs(output: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""

    def item(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.token_text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

    return {
        "content": [
            {
                **item(entry.token_id, entry.logprob),
                "top_logprobs": [item(token, logprob) for token, logprob in entry.top],
            }
            for entry in output.logprobs or ()
        ]
    }


def prompt_logprobs(output: RequestOutput, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per prompt token `{token_id: {logprob, rank, decoded_token}}`, the first `null`."""
    return [None if entry is None else _by_token_id(entry, tokenizer) for entry in output.prompt_logprobs or ()]


def _by_token_id(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)}
    ranked[entry.token_id] = (entry.logprob, entry.rank)
    return {
        str(token): {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token),
        }
        for token, (logprob, rank) in ranked.items()
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
