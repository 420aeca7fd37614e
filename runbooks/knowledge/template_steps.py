"""The tokens of one step, and prompts that are longer than it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runbooks.knowledge.engine_flags import declared_default, flag_for_setting
from runbooks.knowledge.text import gib

if TYPE_CHECKING:
    from runbooks.knowledge.template_values import Draft

SMALL_STEP = 2048
PAGE = 16
_STEP_SIZES = (16384, 8192, 4096)
_STEP_COST = 0.05  # of the pool: more than that a larger step is not worth
_SETTING = "max_num_batched_tokens"


def choose_step(draft: Draft) -> None:
    """The tokens of one step, by what the template is for."""
    default, objective = draft.defaults.max_num_batched_tokens, draft.template.objective
    chosen = draft.deployment.max_num_batched_tokens
    if chosen is not None:
        gained = gib(draft.plan.kv_cache_bytes - draft.defaults.kv_cache_bytes)
        reason = draft.phrase("step_fit", value=chosen, default=default, gained=gained)
        draft.choose(_SETTING, chosen, reason, in_force=default)
    elif objective == "latency" and default > SMALL_STEP:
        _smaller(draft, default)
    elif objective == "throughput":
        _larger(draft, default)


def fit_prompts(draft: Draft) -> None:
    """A prompt longer than a step has to be split; where the engine cannot, the step has to be as long."""
    step, longest = draft.plan.max_num_batched_tokens, longest_prompt(draft)
    if step >= longest or draft.engine not in ("vllm", "tensorrt-llm", "tgi"):
        return
    flag, _ = flag_for_setting(draft.engine, draft.deployment.version, "chunked_prefill")
    if flag is None:
        _whole_prompts(draft)
    elif not declared_default(draft.engine, draft.deployment.version, flag):
        draft.choose("chunked_prefill", True, draft.phrase("chunked_prefill", step=step, length=longest))


def longest_prompt(draft: Draft) -> int:
    """Tokens of the longest prompt: TGI keeps some of a request for its answer."""
    length = draft.plan.max_model_len
    return length - min(draft.template.output_tokens, length // 2) if draft.engine == "tgi" else length


def _whole_prompts(draft: Draft) -> None:
    for _ in range(8):  # a longer step leaves less for KV, and may ask for shorter requests
        found = draft.tried(max_num_batched_tokens=longest_prompt(draft))
        if found is None:
            return
        length = found.largest_model_len // PAGE * PAGE
        if found.fits:
            draft.adopt(max_num_batched_tokens=longest_prompt(draft))
            draft.flags = [choice for choice in draft.flags if choice.setting != _SETTING]
            step = draft.plan.max_num_batched_tokens
            reason = draft.phrase("step_whole", value=step)
            draft.choose(_SETTING, step, reason, in_force=draft.defaults.max_num_batched_tokens)
            return
        if length < 2 * PAGE or length >= draft.plan.max_model_len or draft.tried(max_model_len=length) is None:
            return
        draft.adopt(max_model_len=length)


def _smaller(draft: Draft, default: int) -> None:
    if draft.engine == "tgi" or draft.tried(max_num_batched_tokens=SMALL_STEP) is None:
        return  # TGI takes no step shorter than the longest prompt
    draft.adopt(max_num_batched_tokens=SMALL_STEP)
    prompt = draft.template.prompt_tokens
    reason = draft.phrase(
        "step_latency",
        value=SMALL_STEP,
        default=default,
        prompt=prompt,
        steps=-(-prompt // SMALL_STEP),
        times=SMALL_STEP / default,
        activation=gib(draft.plan.part("activation peak")),
    )
    draft.choose(_SETTING, SMALL_STEP, reason, in_force=default)


def _larger(draft: Draft, default: int) -> None:
    before = draft.plan.kv_tokens
    for size in (size for size in _STEP_SIZES if size > default):
        found = draft.tried(max_num_batched_tokens=size)
        if found is None or not found.fits or before - found.kv_tokens > _STEP_COST * before:
            continue
        draft.adopt(max_num_batched_tokens=size)
        cost = before - found.kv_tokens
        reason = draft.phrase(
            "step_throughput",
            value=size,
            default=default,
            cost=cost,
            share=100 * cost / max(1, before),
            activation=gib(found.part("activation peak")),
        )
        draft.choose(_SETTING, size, reason, in_force=default)
        return
