"""What is wrong with the templates of the third article, on the card and model it measured them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from engine.memory.capacity import CapacityPlan
from engine.memory.deployment import Deployment
from engine.memory.model_presets import gpu, model_preset
from engine.memory.plan import plan
from runbooks.flags import default_of
from runbooks.knowledge.template_load import own_tokens, requests_at_once
from runbooks.knowledge.template_parts import Template
from runbooks.knowledge.templates import templates
from runbooks.knowledge.text import Text, data, gib, in_both, text_of
from runbooks.remedies.pool import requests_held

Effect = Literal["no effect", "wrong way", "misjudged", "missing", "about right"]
_PLANNED = ("max_num_seqs", "max_model_len", "gpu_memory_utilization", "block_size", "enforce_eager")
_CLOSE = 0.25
_TABLE_ENTRY = 4  # bytes of a block's number
_BETTER_STEP = 8192


@dataclass(frozen=True)
class ArticleFinding:
    """One setting of an article's template. value None: it is missing there."""

    flag: str
    value: Any
    effect: Effect
    text: Text

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; Chinese under `zh`."""
        return {"flag": self.flag, "value": self.value, "effect": self.effect, **in_both(text=self.text)}


def article_config(template: Template) -> dict[str, Any]:
    """The article's settings for the same aim; empty where it has none."""
    found: dict[str, Any] = dict(data("article_templates")["configs"].get(template.article, {}))
    return found


def article_errors(template: Template) -> list[ArticleFinding]:
    """What the article's template sets to no effect, the wrong way or without need, computed on its own rig."""
    return list(_Rig(template).findings()) if template.article else []


def all_article_errors() -> dict[str, list[ArticleFinding]]:
    """By template's id, for those that an article has too."""
    return {one.id: article_errors(one) for one in templates() if one.article}


class _Rig:
    """The article's card and model with its settings, planned."""

    def __init__(self, template: Template) -> None:
        rig = data("article_templates")["rig"]
        self.template, self.config, self.version = template, article_config(template), rig["version"]
        bare = Deployment(model_preset(rig["model"]), version=self.version, gpu=gpu(rig["gpu"]))
        self.bare: CapacityPlan = plan(replace(bare, max_model_len=self.config["max_model_len"]))
        self.deployment = replace(bare, **{k: v for k, v in self.config.items() if k in _PLANNED})
        self.plan: CapacityPlan = plan(self.deployment)

    def findings(self) -> Iterator[ArticleFinding]:
        """Setting by setting, then what is missing."""
        special: Mapping[str, Callable[[Any], ArticleFinding | None]] = {
            "max_num_seqs": self._seqs,
            "gpu_memory_utilization": self._utilization,
            "block_size": self._block,
            "quantization": self._quantization,
            "enable_chunked_prefill": self._chunked,
        }
        for name, value in self.config.items():
            found = special[name](value) if name in special else None
            found = found or self._default(name, value)
            if found is not None:
                yield found
        if "max_num_batched_tokens" not in self.config and self.template.objective == "throughput":
            yield self._missing_step()

    def _say(self, key: str, **figures: Any) -> Text:
        return text_of(data("article_templates")["texts"][key]).filled(**{"version": self.version, **figures})

    def _default(self, name: str, value: Any) -> ArticleFinding | None:
        flag = f"--{name.replace('_', '-')}"
        in_force = getattr(self.bare, name, None) if name != "enforce_eager" else None
        default = in_force if in_force is not None else default_of("vllm", self.version, flag)
        if name == "max_model_len" or default is None or default != value:
            return None
        return ArticleFinding(flag, value, "no effect", self._say("default", value=value))

    def _seqs(self, value: int) -> ArticleFinding | None:
        found, length = self.plan, self.config["max_model_len"]
        if value == self.bare.max_num_seqs:
            return None
        worst = requests_held(found.kv_tokens, length, found.block_size)
        own, held = own_tokens(self.template, found), requests_at_once(self.template, found)
        close = abs(value - held) <= _CLOSE * held
        effect = "seqs_close" if close else "seqs_too_many" if value > held else "seqs_too_few"
        need = gib(value * length * (found.kv_bytes_per_token or 0))
        text = self._say(
            "seqs_worst", seqs=value, length=length, need=need, pool=gib(found.kv_cache_bytes), worst=worst
        )
        text = text.plus(self._say("seqs_typical", own=own, held=held, effect=self._say(effect, seqs=value)))
        return ArticleFinding("--max-num-seqs", value, "about right" if close else "misjudged", text)

    def _utilization(self, value: float) -> ArticleFinding | None:
        default = self.bare.gpu_memory_utilization
        if default is None or value == default:
            return None
        other = plan(replace(self.deployment, gpu_memory_utilization=None))
        change = self.plan.kv_tokens - other.kv_tokens
        share = 100 * abs(change) / other.kv_tokens
        if value < default:
            text = self._say("util_lower", default=default, lost=-change, share=share)
            return ArticleFinding("--gpu-memory-utilization", value, "wrong way", text)
        card = self.deployment.gpu
        outside = gib(card.memory_bytes * (1 - value)) if card is not None else ""
        text = self._say("util_higher", outside=outside, gained=change, share=share)
        return ArticleFinding("--gpu-memory-utilization", value, "misjudged", text)

    def _block(self, value: int) -> ArticleFinding | None:
        before = self.bare.block_size
        if value == before:
            return None
        length = self.config["max_model_len"]
        text = self._say(
            "block_32",
            length=length,
            before=f"{length // before * _TABLE_ENTRY:,}",
            after=f"{length // value * _TABLE_ENTRY:,}",
            lost=value - 1,
            lost_before=before - 1,
        )
        return ArticleFinding("--block-size", value, "misjudged", text)

    def _quantization(self, value: str) -> ArticleFinding:
        weights = self.plan.part("weights")
        smaller = plan(replace(self.deployment, weights_bytes=weights // 2))
        kv_value = "fp8_e5m2"  # what an A100 keeps
        kv = plan(replace(self.deployment, kv_cache_dtype=kv_value))
        text = self._say(
            "quantization",
            saved=gib(weights - weights // 2),
            gained=smaller.kv_tokens - self.plan.kv_tokens,
            per_token=self.plan.kv_bytes_per_token,
            kv_value=kv_value,
            kv_per_token=kv.kv_bytes_per_token,
        )
        return ArticleFinding("--quantization", value, "misjudged", text)

    def _chunked(self, value: bool) -> ArticleFinding:
        prompt = 4 * self.plan.max_num_batched_tokens
        steps = -(-prompt // self.plan.max_num_batched_tokens)
        text = self._say("chunked_ttft", steps=steps, prompt=prompt)
        return ArticleFinding("--enable-chunked-prefill", value, "no effect", text)

    def _missing_step(self) -> ArticleFinding:
        better = plan(replace(self.deployment, max_num_batched_tokens=_BETTER_STEP))
        cost = self.plan.kv_tokens - better.kv_tokens
        text = self._say(
            "missing_step",
            default=self.plan.max_num_batched_tokens,
            better=_BETTER_STEP,
            cost=cost,
            share=100 * cost / self.plan.kv_tokens,
        )
        return ArticleFinding("--max-num-batched-tokens", None, "missing", text)
