"""What a template sets besides memory: sharing, isolation, metrics, queues, the tier in host memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from runbooks.flags import EMBEDDED, version_key
from runbooks.isolation_flags import STRONG_ALGOS
from runbooks.knowledge.engine_flags import declared_default, flag_for_setting
from runbooks.knowledge.text import Text, gib

if TYPE_CHECKING:
    from runbooks.knowledge.template_values import Draft

_GIB = 1 << 30
_SALT_SINCE, _EXTRA_KEY_SINCE = (0, 9, 0), (0, 5, 5)
_QUEUE_ROUNDS = 2
_WATERMARK, _LONG_ANSWER = 0.05, 1000  # vllm#44594: the share that took most preemptions away


def choose_extras(draft: Draft) -> None:
    """All of them, in the order in which an operator reads them."""
    _sharing(draft)
    if "prefix-order" in draft.template.features:
        _prefix_order(draft)
    if "isolation" in draft.template.features:
        _isolation(draft)
    if "offload" in draft.template.features:
        _offload(draft)
    if "experts" in draft.template.features:
        _experts(draft)
    _watermark(draft)
    _queue(draft)
    if draft.template.objective == "latency" and _splits_by_default(draft):
        budget = draft.plan.max_num_batched_tokens
        draft.choose("long_prefill", budget // 2, draft.phrase("long_prefill", budget=budget))
    if "residency-metrics" in draft.template.features and draft.has("residency_metrics"):
        draft.choose("residency_metrics", True, draft.phrase("residency_metrics"))
    if draft.has("metrics"):
        draft.choose("metrics", True, draft.phrase("metrics"))


def _sharing(draft: Draft) -> None:
    if not draft.template.shared_prefix:
        return
    block = draft.plan.block_size
    draft.steps.append(draft.phrase("prompt_order", block=block) if block > 1 else draft.phrase("prompt_order_tokens"))
    if draft.has("prefix_caching"):
        draft.choose("prefix_caching", True, draft.phrase("prefix_caching", shared=draft.template.shared_prefix))


def _splits_by_default(draft: Draft) -> bool:
    """vLLM before 0.8.0 heeds the threshold only with several partial prefills at once."""
    flag, _ = flag_for_setting(draft.engine, draft.deployment.version, "chunked_prefill")
    return draft.engine != "vllm" or (
        flag is not None and bool(declared_default("vllm", draft.deployment.version, flag))
    )


def _spaced(text: Text) -> Text:
    return Text(f" {text.en}", f" {text.zh}")


def _prefix_order(draft: Draft) -> None:
    """SGLang can admit by what is cached."""
    flag, _ = flag_for_setting(draft.engine, draft.deployment.version, "schedule_policy")
    if flag is not None:
        default = declared_default(draft.engine, draft.deployment.version, flag)
        draft.choose("schedule_policy", "lpm", draft.phrase("schedule_policy", default=default))


def _isolation(draft: Draft) -> None:
    flag, _ = flag_for_setting(draft.engine, draft.deployment.version, "hash_algo")
    default = declared_default(draft.engine, draft.deployment.version, flag) if flag else None
    if default is not None and default not in STRONG_ALGOS:
        draft.choose("hash_algo", STRONG_ALGOS[0], draft.phrase("hash_algo", default=default))
    if draft.engine == EMBEDDED:
        draft.choose("prefix_scope", "tenant", draft.phrase("prefix_scope"))
    draft.steps.append(_salt(draft))


def _salt(draft: Draft) -> Text:
    here = version_key(draft.deployment.version or "")
    if draft.engine == EMBEDDED or (draft.engine == "vllm" and here >= _SALT_SINCE):
        return draft.phrase("salt")
    if draft.engine == "vllm":
        return draft.phrase("salt_absent")
    if draft.engine == "sglang" and here >= _EXTRA_KEY_SINCE:
        return draft.phrase("extra_key")
    return draft.phrase("salt_none")


def _offload(draft: Draft) -> None:
    """Room in host memory for the sessions that pause; per rank or over all of them, as the engine's flag means it."""
    per_token, ranks = draft.plan.kv_bytes_per_token, draft.deployment.tp * draft.deployment.pp
    if not per_token:
        return
    if not draft.has("offload"):
        draft.choose("offload", None, draft.phrase("metrics"))
        return
    session = min(draft.template.tokens_per_request, draft.plan.max_model_len)
    want = draft.template.idle_sessions * session * per_token * ranks
    host = draft.deployment.host_memory_bytes
    total = want if host is None else min(want, host // 2)
    per_rank = draft.engine != "vllm"
    size = total // ranks if per_rank else total
    value = size if draft.engine == "tensorrt-llm" else max(1, math.floor(size / _GIB))
    known = draft.phrase("host_known", host=gib(host)) if host is not None else draft.phrase("host_unknown")
    reason = draft.phrase(
        "offload",
        sessions=draft.template.idle_sessions,
        tokens=session,
        per_token=per_token,
        ranks=_spaced(draft.phrase("offload_ranks", tp=ranks)) if ranks > 1 else Text("", ""),
        want=gib(want),
        host=known,
        one=gib(session * per_token * ranks),
    )
    if draft.has("offload_switch"):
        draft.choose("offload_switch", True, draft.phrase("offload_switch"))
    if draft.choose("offload", value, reason):
        taken = value if draft.engine == "tensorrt-llm" else value * _GIB
        draft.adopt(kv_offloading_bytes=taken * ranks if per_rank else taken)
    flag, _ = flag_for_setting(draft.engine, draft.deployment.version, "offload_backend")
    if flag is not None and declared_default(draft.engine, draft.deployment.version, flag) is None:
        draft.choose("offload_backend", "native", draft.phrase("offload_backend"))


def _experts(draft: Draft) -> None:
    shape, tp = draft.deployment.shape, draft.deployment.tp
    mixture = bool(shape.active_parameters and shape.parameters and shape.active_parameters < shape.parameters)
    if mixture and tp * draft.deployment.dp > 1 and draft.has("expert_parallel"):
        draft.choose("expert_parallel", True, draft.phrase("expert_parallel"))
    if tp > 1 and any(group.attention == "latent" for group in shape.layers):
        draft.steps.append(_apart(draft, tp))


def _apart(draft: Draft, tp: int) -> Text:
    """What attention by data parallelism would hold, where the planner knows it."""
    knows = draft.engine == "sglang" and draft.deployment.dp == 1
    found = draft.tried(dp=tp, enable_dp_attention=True) if knows else None
    if found is None or not found.fits:
        return draft.phrase("mla_tp", tp=tp)
    return draft.phrase("mla_dp", tp=tp, tokens=tp * found.kv_tokens, now=draft.plan.kv_tokens)


def _watermark(draft: Draft) -> None:
    template = draft.template
    if template.objective == "throughput" and template.output_tokens >= _LONG_ANSWER and draft.has("watermark"):
        reason = draft.phrase("watermark", output=template.output_tokens, value=_WATERMARK)
        draft.choose("watermark", _WATERMARK, reason)


def _queue(draft: Draft) -> None:
    """A bound on the queue where the template asks for one; TGI refuses above its bound in any case."""
    running = draft.plan.max_num_seqs
    waiting = _QUEUE_ROUNDS * running
    if draft.engine == "tgi":
        reason = draft.phrase("queue_admission", running=running, waiting=waiting)
        flag, _ = flag_for_setting(draft.engine, draft.deployment.version, "queue")
        default = declared_default(draft.engine, draft.deployment.version, flag) if flag else None
        if default is None or int(default) < running:
            draft.choose("queue", running + waiting, reason)
    elif "bounded-queue" in draft.template.features or draft.template.objective == "latency":
        figures = {"running": running, "value": waiting, "rounds": _QUEUE_ROUNDS}
        draft.choose("queue", waiting, draft.phrase("queue_bounded", **figures))
