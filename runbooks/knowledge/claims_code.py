"""Claims made by the articles' code: its arithmetic, run on examples small enough to follow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from engine.memory.slots import head_block_bytes
from runbooks.knowledge.articles_models import DEEPSEEK_V2, GB, LLAMA_8B, shape
from runbooks.knowledge.attention import ROPE
from runbooks.knowledge.outcome import Outcome, same
from runbooks.knowledge.text import Text

_BLOCK = 16
_QK_NOPE, _VALUE = 128, 128  # DeepSeek-V2, of a head


def _shown(row: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:g}" for value in row) + "]"


# --- INT8 ------------------------------------------------------------------------------------------------------------
def int8_quantize(row: Sequence[float], *, clamp_zero_point: bool) -> tuple[list[int], float, float]:
    """Codes, scale and zero point of one row, as the article has it or with the zero point left alone."""
    low, high = min(row), max(row)
    scale = (high - low) / 255
    zero = float(round(-low / scale))
    zero = min(255.0, max(0.0, zero)) if clamp_zero_point else zero
    return [min(255, max(0, round(value / scale + zero))) for value in row], scale, zero


def int8_dequantize(codes: Sequence[int], scale: float, zero: float) -> list[float]:
    """Values of codes."""
    return [(code - zero) * scale for code in codes]


def _worst(row: Sequence[float], back: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(row, back, strict=True))


def _int8_zero_point() -> Outcome:
    row = [4.0, 6.0, 8.0]
    back = int8_dequantize(*int8_quantize(row, clamp_zero_point=True))
    fine = _worst(row, int8_dequantize(*int8_quantize(row, clamp_zero_point=False)))
    error = _worst(row, back)
    return Outcome(
        (f"{_shown(row)} -> {_shown(back)}", f"largest error {error:g}; unclamped {fine:.3f}"),
        verdict="wrong" if error > 2 * fine else "right",
        figures={"row": _shown(row), "back": _shown(back), "error": error, "fine": fine},
        shown=same(_shown(back)),
    )


def _int8_scales() -> Outcome:
    row, newer = [0.0, 5.0, 10.0], [0.0, 0.5, 1.0]
    codes, _, _ = int8_quantize(row, clamp_zero_point=True)
    _, scale, zero = int8_quantize(newer, clamp_zero_point=True)  # what update() leaves behind
    back = int8_dequantize(codes, scale, zero)
    return Outcome(
        (f"codes {codes} with the scale {scale:.5f} of the newer token -> {_shown(back)}",),
        verdict="wrong" if _worst(row, back) > 0.1 else "right",
        figures={"row": _shown(row), "newer": _shown(newer), "back": _shown(back)},
        shown=same(_shown(back)),
    )


# --- INT4 ------------------------------------------------------------------------------------------------------------
def int4_unpack(packed: int) -> tuple[int, int]:
    """Low and high nibble as the article reads them: never negative."""
    return packed & 0x0F, packed >> 4 & 0x0F


def _int4_sign() -> Outcome:
    codes = range(-7, 8)
    back = {code: int4_unpack(code & 0x0F)[0] for code in codes}
    wrong = [code for code in codes if back[code] != code]
    return Outcome(
        (f"of the codes -7 to 7 come back wrong: {', '.join(f'{c} as {back[c]}' for c in wrong)}",),
        verdict="wrong" if wrong else "right",
        figures={"wrong": len(wrong), "all": len(codes), "example": back[-3]},
        shown=Text(f"{len(wrong)} of {len(codes)} wrong", f"{len(codes)} 个中 {len(wrong)} 个错误"),
    )


def broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape two tensors have together, None where they do not go together."""
    width = max(len(one), len(other))
    pairs = zip((1,) * (width - len(one)) + one, (1,) * (width - len(other)) + other, strict=True)
    found = tuple(max(a, b) if 1 in (a, b) or a == b else 0 for a, b in pairs)
    return None if 0 in found else found


def _int4_shape() -> Outcome:
    batch, heads, length, dim = want = (1, 8, 2048, 128)
    got, scale = (batch, heads, length, dim // 2, 2), (batch, heads, length, 1)
    together = broadcast(got, scale)
    en = "does not broadcast against it" if together is None else f"broadcasts to {together}"
    zh = "无法与之广播" if together is None else f"广播成 {together}"
    return Outcome(
        (f"cat of two (.., {dim // 2}, 1) along the last axis = {got}; x {scale}: {en}",),
        verdict="right" if together == want else "wrong",
        figures={"got": got, "want": want, "scale": scale, "broadcast": Text(en, zh)},
        shown=same(str(got)),
    )


def _int4_ratio() -> Outcome:
    dim = 128
    coded = head_block_bytes("int4_per_token_head", dim, dim, 1)
    exact = head_block_bytes("float16", dim, dim, 1)
    ratio = exact / coded
    return Outcome((f"{exact} B / {coded} B = {ratio:.2f}",), ratio, "half", {"ratio": ratio, "dim": dim})


def _int4_zero_row() -> Outcome:
    row, largest = [0.0, 0.0], 0.0
    back = [value / largest if largest else math.nan for value in row]  # what IEEE division gives
    return Outcome(
        (f"0 / {largest:g} = {back[0]}",),
        verdict="wrong" if any(math.isnan(value) for value in back) else "right",
        figures={"back": "NaN"},
        shown=same("NaN"),
    )


def _int4_symmetric(values: Sequence[float]) -> list[float]:
    """Values as they come back from 15 codes over one scale."""
    scale = max(abs(value) for value in values) / 7
    return [round(value / scale) * scale for value in values]


def _int4_per_channel() -> Outcome:
    """Keys of four tokens and four channels, one channel sixteen times the others, as real keys have them."""
    keys = [[1.0, -0.8, 0.6, 16.0], [-0.7, 0.9, -0.5, 15.0], [0.8, 0.4, -0.9, -16.0], [-0.6, -1.0, 0.7, 14.0]]
    by_token = [_int4_symmetric(row) for row in keys]
    by_channel = list(zip(*(_int4_symmetric(column) for column in zip(*keys, strict=True)), strict=True))

    def lost(back: Sequence[Sequence[float]]) -> float:
        return max(_worst(row[:-1], read[:-1]) for row, read in zip(keys, back, strict=True))

    token, channel = lost(by_token), lost(by_channel)
    return Outcome(
        (f"three small channels, off by up to {token:.2f} with a scale a token, {channel:.2f} with one a channel",),
        verdict="wrong" if token > 2 * channel else "right",
        figures={"token": token, "channel": channel},
        shown=same(f"{token:.2f} / {channel:.2f}"),
    )


def _int4_axis() -> Outcome:
    batch, heads, length, dim = 1, 8, 2048, 128
    said, got = str((batch, heads, length // 2)), str((batch, heads, length, dim // 2))
    return Outcome(
        (f"k_quant[..., ::2] halves the last axis: {(batch, heads, length, dim)} -> {got}",),
        verdict="right" if said == got else "wrong",
        figures={"said": said, "got": got},
        shown=same(got),
    )


# --- H2O -------------------------------------------------------------------------------------------------------------
def _even_attention(prompt: int, steps: int) -> list[list[list[float]]]:
    """Attention of every query over all tokens up to its own: of the prompt, then of one token a step."""
    rows = [[[1 / (i + 1)] * (i + 1) + [0.0] * (prompt - 1 - i) for i in range(prompt)]]
    return rows + [[[1 / (prompt + s + 1)] * (prompt + s + 1)] for s in range(steps)]


def h2o_scores(weights: Sequence[Sequence[Sequence[float]]], *, accumulate: bool) -> list[float]:
    """Scores of tokens after all steps: as H2O means it, or as the article appends the newest column only."""
    scores: list[float] = []
    for rows in weights:
        sums = [sum(column) for column in zip(*rows, strict=True)]
        old = len(scores)
        scores = ([a + b for a, b in zip(scores, sums, strict=False)] if accumulate else scores) + sums[old:]
    return scores


def _h2o_accumulate() -> Outcome:
    steps = 32
    weights = _even_attention(4, steps)
    had, true = h2o_scores(weights, accumulate=False)[0], h2o_scores(weights, accumulate=True)[0]
    return Outcome(
        (f"4 tokens, {steps} steps of even attention: token 0 was given {true:.3f}, the code has {had:.3f}",),
        verdict="right" if math.isclose(had, true) else "wrong",
        figures={"steps": steps, "had": had, "true": true},
        shown=same(f"{had:.2f} / {true:.2f}"),
    )


def _h2o_recent() -> Outcome:
    prompt, steps, room = 8, 16, 8
    scores = h2o_scores(_even_attention(prompt, 0), accumulate=True)
    dropped = 0
    for _ in range(steps):
        scores = [*scores, 1 / (room + 1)]
        least = min(range(1, len(scores)), key=lambda i: scores[i])  # the first token is kept whatever it has
        dropped += least == len(scores) - 1
        del scores[least]
    return Outcome(
        (f"room for {room} tokens, even attention: of {steps} new tokens {dropped} leave in the step they arrive",),
        verdict="wrong" if dropped else "right",
        figures={"dropped": dropped, "steps": steps},
        shown=same(f"{dropped} / {steps}"),
    )


# --- paged cache -----------------------------------------------------------------------------------------------------
def _paged_typo() -> Outcome:
    try:
        eval("num_physical_blocks", {"numPhysicalBlocks": 1000})  # the body's name where the parameter has the other
        error = ""
    except NameError as found:
        error = f"NameError: {found}"
    return Outcome((error,), verdict="wrong" if error else "right", figures={"error": error}, shown=same(error))


def _paged_border() -> Outcome:
    prompt = _BLOCK
    table = list(range(-(-prompt // _BLOCK)))
    try:
        table[prompt // _BLOCK]
        error = ""
    except IndexError as found:
        error = f"IndexError: {found}"
    return Outcome(
        (f"{prompt} tokens / {_BLOCK} = {len(table)} block; token {prompt} is of block {prompt // _BLOCK}: {error}",),
        verdict="wrong" if error else "right",
        figures={"prompt": prompt, "blocks": len(table), "token": prompt, "error": error},
        shown=same(error),
    )


def _paged_axis() -> Outcome:
    blocks, layers, heads, dim = 1000, 32, 32, 128
    kv_heads = shape(LLAMA_8B).layers[0].num_kv_heads
    total = blocks * layers * 2 * heads * dim * _BLOCK * 2
    stride = _BLOCK * 2
    return Outcome(
        (
            f"last axis block_size: neighbours of a key are {_BLOCK} x 2 B = {stride} B apart",
            f"{blocks} x {layers} x 2 x {heads} x {dim} x {_BLOCK} x 2 B = {total / GB:.2f} GB",
        ),
        verdict="wrong" if stride > 2 or heads != kv_heads else "right",
        figures={
            "dim": dim,
            "pieces": dim,
            "stride": stride,
            "run": dim * 2,
            "kv_heads": kv_heads,
            "factor": heads / kv_heads,
            "gb": total / GB,
            "tokens": blocks * _BLOCK,
        },
        shown=same(f"{stride} B, {heads / kv_heads:g}x"),
    )


def _paged_free_list() -> Outcome:
    blocks = 100_000
    moves = sum(range(blocks))  # pop(0) moves all that is left
    return Outcome(
        (f"0 + 1 + ... + {blocks - 1:,} = {moves:,} moves",),
        verdict="wrong" if moves / blocks > 1 else "right",
        figures={"blocks": blocks, "moves": moves, "factor": moves / blocks},
        shown=same(f"{moves:,}"),
    )


def _fork() -> Outcome:
    shared = 20
    table = list(range(-(-shared // _BLOCK)))  # both requests have these
    grown = range(shared, len(table) * _BLOCK)
    writes = Counter((table[token // _BLOCK], token % _BLOCK) for _ in ("parent", "child") for token in grown)
    twice = [place for place, count in writes.items() if count > 1]
    return Outcome(
        (f"ceil({shared} / {_BLOCK}) = {len(table)} blocks shared; slots written by both: {len(twice)}",),
        verdict="wrong" if twice else "right",
        figures={
            "shared": shared,
            "block": table[shared // _BLOCK],
            "slot": shared % _BLOCK,
            "overwritten": len(twice),
            "written": len(writes),
        },
        shown=same(f"{len(twice)} / {len(writes)}"),
    )


# --- MLA and streaming -----------------------------------------------------------------------------------------------
def _mla_rope() -> Outcome:
    whole = _QK_NOPE + ROPE
    return Outcome(
        (f"a score is a product over {_QK_NOPE} + {ROPE} = {whole} dimensions; the code takes {_QK_NOPE}",),
        verdict="wrong" if whole != _QK_NOPE else "right",
        figures={"rope": ROPE, "all": whole},
        shown=same(f"{ROPE} / {whole}"),
    )


def _mla_expands() -> Outcome:
    context, latent = 4096, shape(DEEPSEEK_V2).layers[-1].latent_width - ROPE
    heads = shape(DEEPSEEK_V2).num_q_heads or 0
    expanded = context * latent * heads * (_QK_NOPE + _VALUE) / GB
    absorbed = context * heads * (latent + ROPE + latent) / GB
    return Outcome(
        (
            f"expand: {context} x {latent} x {heads} x ({_QK_NOPE} + {_VALUE}) = {expanded:.1f} G",
            f"absorbed: {context} x {heads} x ({latent} + {ROPE} + {latent}) = {absorbed:.2f} G",
        ),
        verdict="wrong" if expanded > absorbed else "right",
        figures={"expanded": expanded, "absorbed": absorbed, "factor": expanded / absorbed},
        shown=same(f"{expanded:.1f} G / {absorbed:.2f} G"),
    )


def _streaming_hidden() -> Outcome:
    model = shape(LLAMA_8B)
    group = model.layers[0]
    hidden = (model.hidden_size or 0) * 2
    kv = group.num_kv_heads * group.head_dim * 2 * 2
    return Outcome(
        (f"hidden state {model.hidden_size} x 2 B = {hidden:,} B; K and V {kv:,} B",),
        verdict="wrong" if hidden != kv else "right",
        figures={"hidden": hidden, "kv": kv},
        shown=same(f"{hidden:,} B / {kv:,} B"),
    )


def _streaming_overlap() -> Outcome:
    sinks, window, past = 4, 512, 100
    got = len(list(range(past))[:sinks]) + len(list(range(past))[-window:]) + 1
    want = past + 1
    return Outcome(
        (f"{sinks} + min({past}, {window}) + 1 = {got}",),
        verdict="wrong" if got != want else "right",
        figures={"full": sinks + window, "past": past, "got": got, "want": want},
        shown=same(f"{got}"),
    )


COMPUTED: Mapping[str, Callable[[], Outcome]] = {
    "code-mla-rope": _mla_rope,
    "code-mla-expands": _mla_expands,
    "code-int8-zero-point": _int8_zero_point,
    "code-int8-scales": _int8_scales,
    "code-int4-sign": _int4_sign,
    "code-int4-shape": _int4_shape,
    "code-int4-ratio": _int4_ratio,
    "code-int4-axis": _int4_axis,
    "code-int4-per-channel": _int4_per_channel,
    "code-int4-zero-row": _int4_zero_row,
    "code-h2o-accumulate": _h2o_accumulate,
    "code-h2o-recent": _h2o_recent,
    "code-paged-typo": _paged_typo,
    "code-paged-border": _paged_border,
    "code-paged-axis": _paged_axis,
    "code-paged-free-list": _paged_free_list,
    "code-fork-shares-open-block": _fork,
    "code-streaming-hidden": _streaming_hidden,
    "code-streaming-overlap": _streaming_overlap,
}
