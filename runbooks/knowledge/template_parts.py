"""The parts of a template's advice: a workload, a flag with its reason, what was left out and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.memory.capacity import CapacityPlan
from engine.memory.deployment import Deployment
from runbooks.knowledge.engine_flags import launch_command
from runbooks.knowledge.text import Text, in_both


@dataclass(frozen=True)
class Template:
    """A workload. Lengths in tokens: of the longest request, and of a typical one at its end.

    objective: "concurrency", "context", "throughput", "latency", "balanced" or "fit"; kv: when 8-bit KV is wanted:
    "if-needed" or "prefer". itl_ms: how long an answer may pause. idle_sessions: how many paused sessions should stay
    in host memory. article: the article's template of the same aim.
    """

    id: str
    title: Text
    summary: Text
    max_model_len: int
    prompt_tokens: int
    output_tokens: int
    objective: str
    kv: str
    shared_prefix: int = 0
    itl_ms: int | None = None
    idle_sessions: int = 0
    features: tuple[str, ...] = ()
    article: str | None = None

    @property
    def tokens_per_request(self) -> int:
        """What a typical request holds when its answer ends."""
        return self.prompt_tokens + self.output_tokens

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; Chinese under `zh`."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("title", "summary")}
        plain["features"] = list(self.features)
        return {
            **plain,
            "tokens_per_request": self.tokens_per_request,
            **in_both(title=self.title, summary=self.summary),
        }


@dataclass(frozen=True)
class FlagChoice:
    """One flag of a template, with the arithmetic of its value and where the flag was read.

    setting: what it sets, whatever the engine calls it: a field of `Deployment` where it has one of that name.
    """

    setting: str
    flag: str
    value: Any
    reason: Text
    source: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; Chinese under `zh`."""
        plain = {name: getattr(self, name) for name in ("setting", "flag", "value", "source")}
        return {**plain, **in_both(reason=self.reason)}


@dataclass(frozen=True)
class LeftOut:
    """What a template would set and does not: the engine has no flag, it is the default, the hardware cannot."""

    setting: str
    value: Any
    reason: Text

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; Chinese under `zh`."""
        return {"setting": self.setting, "value": self.value, **in_both(reason=self.reason)}


@dataclass(frozen=True)
class TemplateAdvice:
    """A template for one server: its flags, the plan with them, and what has to be done besides.

    concurrency: requests of the template's length the pool holds at once. fits is the plan's.
    """

    template: Template
    deployment: Deployment
    plan: CapacityPlan
    flags: tuple[FlagChoice, ...]
    left_out: tuple[LeftOut, ...]
    steps: tuple[Text, ...]
    concurrency: int

    def values(self) -> dict[str, Any]:
        """`{flag: value}`."""
        return {choice.flag: choice.value for choice in self.flags}

    def command(self, model: str | None = None) -> str:
        """The command that starts the server."""
        deployment = self.deployment
        return launch_command(
            deployment.engine, deployment.version, model or deployment.shape.name or "MODEL", self.values()
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; Chinese under `zh`."""
        return {
            "template": self.template.to_dict(),
            "engine": self.deployment.engine,
            "version": self.deployment.version,
            "flags": [choice.to_dict() for choice in self.flags],
            "left_out": [one.to_dict() for one in self.left_out],
            "steps": [in_both(step=step) for step in self.steps],
            "concurrency": self.concurrency,
            "fits": self.plan.fits,
            "verdict": self.plan.verdict,
            "kv_tokens": self.plan.kv_tokens,
            "launch": self.command(),
        }
