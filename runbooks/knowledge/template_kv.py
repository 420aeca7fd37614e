"""Whether a template keeps KV in 8 bits: only where the hardware can, and where it is needed or worth it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.memory.capacity import CapacityPlan
from runbooks.flags import EMBEDDED, why_value_absent
from runbooks.hardware import nearest_working, storage_only, why_not_on
from runbooks.knowledge.engine_flags import flag_for_setting
from runbooks.knowledge.text import Text, gib

if TYPE_CHECKING:
    from runbooks.knowledge.template_values import Draft

# From the finest to the coarsest that are kept in 8 bits, as each engine writes them.
_EIGHT_BITS = {
    "vllm": ("fp8", "int8_per_token_head", "fp8_e5m2"),
    "sglang": ("fp8_e4m3", "fp8_e5m2"),
    "tensorrt-llm": ("fp8",),
    "tgi": ("fp8_e4m3fn", "fp8_e5m2"),
    EMBEDDED: ("int8_per_token_head", "fp8_e4m3"),
}


def choose_format(draft: Draft) -> None:
    """8 bits where one request would not fit otherwise, or where they are preferred and enlarge the pool."""
    wanted = draft.template.kv == "prefer" or not draft.plan.fits
    if not wanted:
        held = draft.held()
        reason = draft.phrase("kv_not_needed", pool=draft.plan.kv_tokens, held=held)
        draft.leave_out("kv_cache_dtype", None, reason)
        return
    value = _format(draft)
    found = draft.tried(kv_cache_dtype=value) if value is not None else None
    if value is None:
        return
    if found is None:
        draft.leave_out("kv_cache_dtype", value, draft.phrase("kv_no_gain", value=value))
        return
    before, after = draft.plan.kv_bytes_per_token, found.kv_bytes_per_token
    if not before or not after or found.kv_tokens <= draft.plan.kv_tokens:
        draft.leave_out("kv_cache_dtype", value, draft.phrase("kv_no_gain", value=value))
        return
    if draft.choose("kv_cache_dtype", value, _why(draft, value, found)):
        draft.adopt(kv_cache_dtype=value)


def _format(draft: Draft) -> str | None:
    """The first 8-bit format of the engine's version that this hardware and checkpoint can keep; None says why not."""
    deployment = draft.deployment
    flag, _ = flag_for_setting(draft.engine, deployment.version, "kv_cache_dtype")
    known = _EIGHT_BITS.get(draft.engine, ())
    if flag is None:
        draft.leave_out("kv_cache_dtype", known[0] if known else None, draft.phrase("no_flag"))
        return None
    values = [v for v in known if why_value_absent(draft.engine, deployment.version, flag, v) is None]
    if draft.engine == EMBEDDED:
        return values[0] if values else None  # its kernels keep every format on every device
    sm = deployment.gpu.compute_capability if deployment.gpu is not None else None
    if sm is None:
        draft.leave_out("kv_cache_dtype", values[0] if values else None, draft.phrase("kv_not_known"))
        return None
    mla = any(group.attention == "latent" for group in deployment.shape.layers)
    checkpoint = deployment.shape.quantization
    found = nearest_working(
        sm, values, checkpoint_quantization=checkpoint, engine=draft.engine, version=deployment.version, mla=mla
    )
    if found is None and values:
        why = why_not_on(
            sm, values[-1], checkpoint_quantization=checkpoint, engine=draft.engine, version=deployment.version, mla=mla
        )
        draft.leave_out("kv_cache_dtype", values[-1], draft.phrase("kv_not_on_hardware", why=why or ""))
    return found


def _why(draft: Draft, value: str, found: CapacityPlan) -> Text:
    before, gpu = draft.plan, draft.deployment.gpu
    figures = {
        "now": found.kv_bytes_per_token,
        "before": before.kv_bytes_per_token,
        "pool_before": max(0, before.kv_tokens),
        "pool_now": max(0, found.kv_tokens),
    }
    if not before.fits:
        problem = draft.phrase(
            "problem_fit", length=before.max_model_len, needed=gib(before.needed_bytes), pool=gib(before.kv_cache_bytes)
        )
        return draft.phrase("kv_needed", problem=problem, **figures)
    sm = gpu.compute_capability if gpu is not None else None
    how = Text("", "")
    if sm is not None:
        stores = storage_only(sm, value) or value == "int8_per_token_head"
        how = draft.phrase("kv_stores" if stores else "kv_computes", sm=f"{sm[0]}.{sm[1]}")
    return draft.phrase("kv_prefer", how=how, **figures)
