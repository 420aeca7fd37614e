"""The tokenizer a GGUF file carries in its metadata, rebuilt for the `tokenizers` package.

Two kinds: "llama" is SentencePiece's BPE, a vocabulary without merges, which are recovered from it (a piece is the
merge of any two pieces that make it up; better pieces merge first), with bytes as a last resort; "gpt2" is
byte-level BPE with its merges, told apart by how text is split first (`tokenizer.ggml.pre`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.config import ConfigError
from engine.gguf_file import read_gguf_header
from engine.tokenizer_files import TokenizerFiles

SPACE = "\u2581"  # how SentencePiece spells a space
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "gpt-2": None,  # the split that ByteLevel has built in
    "default": None,
}


def read_gguf_tokenizer(path: Path) -> TokenizerFiles:
    """Rebuilds the tokenizer of a file; raises `ConfigError` when it holds none, or one of another kind."""
    header = read_gguf_header(path)
    prefix = "tokenizer.ggml."
    metadata = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    kind, tokens = metadata.get("model"), metadata.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ConfigError(f"{str(path)!r} holds no tokenizer; the engine needs one to read and write text")
    if kind not in ("llama", "gpt2"):
        raise ConfigError(f"{str(path)!r} has a tokenizer of kind {kind!r}; the engine reads: llama, gpt2")
    try:
        if kind == "llama":
            is_gemma = str(header.metadata.get("general.architecture")).startswith("gemma")
            tokenizer = _sentencepiece(tokens, metadata, is_gemma, path)
        else:
            tokenizer = _byte_level(tokens, metadata, path)
        _add_special_tokens(tokenizer, tokens, metadata, kind)
    except ConfigError:
        raise
    except Exception as error:  # the Rust side raises bare Exception
        raise ConfigError(f"the tokenizer in {str(path)!r} cannot be rebuilt: {str(error)!r}") from None
    specials = {f"{name}_token": tokens[i] for name, i in _special_ids(metadata, len(tokens)).items()}
    template = header.metadata.get("tokenizer.chat_template")
    return TokenizerFiles(
        source=str(path),
        tokenizer=tokenizer,
        specials=specials,
        chat_template=template if isinstance(template, str) else None,
        eos_token_ids=_end_ids(metadata, len(tokens)),
    )


def _sentencepiece(tokens: Sequence[str], metadata: Mapping[str, Any], is_gemma: bool, path: Path) -> Tokenizer:
    # Runs of spaces are user-defined pieces and stored as spaces.
    pieces = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    scores = metadata.get("scores")
    if not is_gemma and (scores is None or len(scores) != len(tokens)):
        raise ConfigError(f"{str(path)!r} has no score for every token; its tokenizer cannot be rebuilt")
    # Gemma's scores do not give the order in which its pieces were learned, their position does.
    rank = (lambda i: i) if is_gemma or scores is None else (lambda i: -scores[i])
    unknown = _special_ids(metadata, len(tokens)).get("unk")
    model = models.BPE(
        vocab=vocab,
        merges=_merges_of(pieces, vocab, rank),
        unk_token=None if unknown is None else pieces[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    replace: list[Any] = [normalizers.Replace(" ", SPACE)]
    undo: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("add_space_prefix", True):
        replace.insert(0, normalizers.Prepend(SPACE))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(replace)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _merges_of(pieces: Sequence[str], vocab: Mapping[str, int], rank: Any) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best pieces first."""
    found: list[tuple[float, int, int, str, str]] = []
    for i, piece in enumerate(pieces):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            left_id = vocab.get(left)
            if left_id is not None:
                right_id = vocab.get(right)
                if right_id is not None:
                    found.append((rank(i), left_id, right_id, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _byte_level(tokens: Sequence[str], metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    merges, pre = metadata.get("merges"), metadata.get("pre", "default")
    if not isinstance(merges, list):
        raise ConfigError(f"{str(path)!r} has a byte-level tokenizer without merges; it is incomplete")
    if pre not in SPLITS:
        raise ConfigError(
            f"{str(path)!r} splits text as {pre!r} before tokenizing; the engine knows: {', '.join(SPLITS)}"
        )
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    split = SPLITS[pre]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is None:
        tokenizer.pre_tokenizer = byte_level
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(split), behavior="isolated"), byte_level]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, tokens: Sequence[str], metadata: Mapping[str, Any], kind: str) -> None:
    types = metadata.get("token_type") or []
    for wanted, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        chosen = [token for token, is_a in zip(tokens, types, strict=False) if is_a == wanted]
        if wanted == _USER_DEFINED and kind == "llama":
            chosen = [token for token in chosen if token.strip(" ")]  # runs of spaces come out of merges
        add([AddedToken(token, normalized=False, special=wanted == _CONTROL) for token in chosen])
    ids = _special_ids(metadata, len(tokens))
    before = metadata.get("add_bos_token", kind == "llama") and "bos" in ids
    after = metadata.get("add_eos_token", False) and "eos" in ids
    if before or after:
        words = (["$bos"] if before else []) + ["$A"] + (["$eos"] if after else [])
        named = {"$bos": ids.get("bos"), "$eos": ids.get("eos")}
        template = [tokens[i] if (i := named.get(word)) is not None else word for word in words]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(tokens[i], i) for i in named.values() if i is not None]
        )


def _special_ids(metadata: Mapping[str, Any], vocab_size: int) -> dict[str, int]:
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: metadata.get(f"{key}_token_id") for name, key in keys.items()}
    return {name: i for name, i in ids.items() if isinstance(i, int) and 0 <= i < vocab_size}


def _end_ids(metadata: Mapping[str, Any], vocab_size: int) -> list[int]:
    """End of text, then end of turn where the model has one of its own."""
    ids = [metadata.get("eos_token_id"), metadata.get("eot_token_id")]
    return list(dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < vocab_size))
