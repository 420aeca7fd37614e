"""Claims about the bytes of a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from runbooks.knowledge.articles_models import (
    DEEPSEEK_V2,
    GB,
    LLAMA2_70B,
    LLAMA_8B,
    LLAMA_70B,
    QWEN2_72B,
    heads_as,
    per_token,
    shape,
    shape_per_token,
)
from runbooks.knowledge.attention import ROPE, AttentionRow, attention_table, row_of
from runbooks.knowledge.outcome import Outcome, same
from runbooks.knowledge.text import data

_SINKS_AND_WINDOW, _MILLION = 4 + 512, 1_000_000


def _request(name: str, tokens: int, kv_dtype: str = "auto") -> tuple[float, str]:
    """GB of one request, and the arithmetic."""
    each = per_token(name, kv_dtype)
    total = each * tokens / GB
    dims = dims_of(name)
    return total, f"{name}, {kv_dtype}: {dims} = {each:,} B a token; x {tokens:,} tokens = {total:.3f} GB"


def dims_of(name: str) -> str:
    """ "80 layers x 8 KV heads x 128"."""
    group = shape(name).layers[0]
    if group.attention == "latent":
        return f"{shape(name).num_layers} layers x {group.latent_width} values"
    return f"{shape(name).num_layers} layers x {group.num_kv_heads} KV heads x {group.head_dim} x 2"


def _llama_70b_2048() -> Outcome:
    gb, line = _request(LLAMA_70B, 2048)
    model = shape(LLAMA_70B)
    return Outcome(
        (line,),
        gb,
        figures={
            "gb": gb,
            "factor": 950 / gb,
            "kv_heads": model.layers[0].num_kv_heads,
            "q_heads": model.num_q_heads,
        },
    )


def _llama_8b_8k() -> Outcome:
    gb, line = _request(LLAMA_8B, 8192)
    model = shape(LLAMA_8B)
    wrong = shape_per_token(heads_as(model, 32)) * 8192 / GB
    figures = {"gb": gb, "wrong_gb": wrong, "kv_heads": model.layers[0].num_kv_heads}
    return Outcome((line, f"the same with 32 KV heads = {wrong:.3f} GB"), gb, "half", figures)


def _llama_8b_32k() -> Outcome:
    gb, line = _request(LLAMA_8B, 32768)
    left = 80.0 - (shape(LLAMA_8B).weights_bytes or 0) / GB
    return Outcome(
        (line, f"(80 GB - weights) / {gb:.2f} GB = {left / gb:.1f}"), gb, figures={"gb": gb, "times": left // gb}
    )


def _llama_70b_32k(kv_dtype: str) -> Callable[[], Outcome]:
    def compute() -> Outcome:
        gb, line = _request(LLAMA_70B, 32768, kv_dtype)
        full = per_token(LLAMA_70B) * 32768 / GB
        return Outcome((line,), gb, figures={"gb": gb, "full": full, "bare": full / 4})

    return compute


def _table(name: str, kind: str, **more: int) -> Callable[[], Outcome]:
    def compute() -> Outcome:
        row = row_of(attention_table(shape(name)), kind)
        figures = {"bytes": row.bytes_16, "elements": row.values_per_token_layer, **more}
        return Outcome((row.how,), float(row.bytes_16), figures=figures)

    return compute


def _deepseek_table() -> list[AttentionRow]:
    config = data("claims")["models"][DEEPSEEK_V2]["config"]
    key = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return attention_table(shape(DEEPSEEK_V2), key_dim=key, value_dim=config["v_head_dim"])


def _deepseek_mla() -> Outcome:
    row = row_of(_deepseek_table(), "MLA")
    figures = {"bytes": row.bytes_16, "latent": row.values_per_token_layer - ROPE, "rope": ROPE}
    return Outcome((row.how,), float(row.bytes_16), figures=figures)


def _deepseek_mha() -> Outcome:
    config, row = data("claims")["models"][DEEPSEEK_V2]["config"], row_of(_deepseek_table(), "MHA")
    qk, v = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    figures = {"bytes": row.bytes_16, "heads": row.kv_heads, "qk": qk, "v": v}
    return Outcome((row.how,), float(row.bytes_16), figures=figures)


def _mla_saving() -> Outcome:
    table = _deepseek_table()
    mla, mha = row_of(table, "MLA").bytes_16, row_of(table, "MHA").bytes_16
    saving = 100 * (1 - mla / mha)
    return Outcome(
        (f"1 - {mla:,} / {mha:,} = {saving:.1f}%",), saving, _by_what_is_left(93.7, saving), {"saving": saving}
    )


def _by_what_is_left(said: float, saving: float) -> Literal["right", "wrong"]:
    """Two percentages near 100 are compared by what is left, not by what is gone."""
    return "right" if abs(said - saving) <= 0.05 * (100 - saving) else "wrong"


def _kv_against_weights() -> Outcome:
    kv, line = _request(LLAMA_70B, 2048)
    weights = (shape(LLAMA_70B).weights_bytes or 0) / GB
    cross = int(weights * GB // per_token(LLAMA_70B))
    figures = {"kv_gb": kv, "weights_gb": weights, "share": 100 * kv / weights, "cross": cross}
    return Outcome(
        (line, f"weights {weights:.1f} GB; {weights:.1f} GB / {per_token(LLAMA_70B):,} B = {cross:,} tokens"),
        verdict="right" if kv > weights else "wrong",
        figures=figures,
        shown=same(f"{kv:.2f} GB : {weights:.0f} GB"),
    )


def _qwen() -> Outcome:
    gb, line = _request(QWEN2_72B, 4096)
    total = per_token(QWEN2_72B) * 4096
    return Outcome((line,), total, figures={"bytes": total, "gb": gb})


def _llama2() -> Outcome:
    gb, line = _request(LLAMA2_70B, 4096)
    mha = shape_per_token(heads_as(shape(LLAMA2_70B), 64)) * 4096 / GB
    kv_heads = shape(LLAMA2_70B).layers[0].num_kv_heads
    figures = {"gb": gb, "mha": mha, "batch": 32 * gb, "kv_heads": kv_heads}
    return Outcome((line, f"with 64 KV heads = {mha:.2f} GB; x 32 = {32 * mha:.1f} GB"), gb, "half", figures)


def _llama_70b_128k() -> Outcome:
    gb, line = _request(LLAMA_70B, 131072)
    return Outcome((line,), gb, figures={"gb": gb})


def _streaming() -> Outcome:
    saving = 100 * (1 - _SINKS_AND_WINDOW / _MILLION)
    full, line = _request(LLAMA_8B, _MILLION)
    small, _ = _request(LLAMA_8B, _SINKS_AND_WINDOW)
    return Outcome(
        (f"1 - {_SINKS_AND_WINDOW} / {_MILLION:,} = {saving:.2f}%", line),
        saving,
        _by_what_is_left(99.7, saving),
        {"kept": _SINKS_AND_WINDOW, "saving": saving, "full": full, "small": small},
    )


COMPUTED: Mapping[str, Callable[[], Outcome]] = {
    "llama3-70b-2048": _llama_70b_2048,
    "llama3-8b-8k-32-heads": _llama_8b_8k,
    "llama3-8b-32k": _llama_8b_32k,
    "llama3-70b-32k-fp16": _llama_70b_32k("auto"),
    "llama3-70b-32k-fp8": _llama_70b_32k("fp8"),
    "llama3-70b-32k-int4": _llama_70b_32k("int4_per_token_head"),
    "table-llama-mha": _table(LLAMA_70B, "MHA"),
    "table-llama-mqa": _table(LLAMA_70B, "MQA"),
    "table-llama-gqa": _table(LLAMA_70B, "GQA"),
    "table-deepseek-mla": _deepseek_mla,
    "table-deepseek-mha": _deepseek_mha,
    "mla-saving": _mla_saving,
    "kv-exceeds-weights": _kv_against_weights,
    "qwen2-72b-4096": _qwen,
    "llama2-70b-mha": _llama2,
    "llama3-70b-128k": _llama_70b_128k,
    "streaming-1m": _streaming,
}
