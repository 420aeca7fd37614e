"""What a check of the checklist is given, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.memory.capacity import CapacityPlan
from engine.memory.shape import LayerGroup, ModelShape
from runbooks.facts import TargetFacts
from runbooks.in_force import InForce, value_in_force
from runbooks.knowledge.engine_flags import engine_title
from runbooks.knowledge.text import Text

Status = Literal["done", "open", "unknown", "does not apply"]
DONE: Status = "done"
OPEN: Status = "open"
UNKNOWN: Status = "unknown"
NOT_HERE: Status = "does not apply"


@dataclass(frozen=True)
class Answer:
    """A status and which of the item's sentences says why; `what` is what was missing where it is unknown."""

    status: Status
    key: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    what: Text | None = None


def unknown(en: str, zh: str) -> Answer:
    """Nothing tells."""
    return Answer(UNKNOWN, what=Text(en, zh))


NO_TARGET = unknown("no target is attached", "未连接目标")
NO_MODEL = unknown("the model is not known", "模型未知")
NO_PLAN = unknown("there is no plan of this server", "没有该服务器的规划")
NO_TRAFFIC = unknown("no traffic was measured", "没有流量测量数据")


@dataclass(frozen=True)
class Asked:
    """A target, its plan and the report on its metrics; any of them may be missing.

    coverage: the report ("rows" with canonical, status, exposed, todo, required) and, under "watch", what is set up
    around the target: rules_exported (bool), receivers (number), isolation_rounds (number), drills_passed (number).
    """

    facts: TargetFacts | None
    plan: CapacityPlan | None
    coverage: Mapping[str, Any] | None

    @property
    def shape(self) -> ModelShape | None:
        """The model, from the target or the plan."""
        if self.facts is not None and self.facts.shape is not None:
            return self.facts.shape
        return self.plan.deployment.shape if self.plan is not None else None

    @property
    def engine(self) -> str:
        """The engine's name in the catalog."""
        if self.facts is not None:
            return self.facts.engine
        return self.plan.deployment.engine if self.plan is not None else ""

    @property
    def version(self) -> str | None:
        """The engine's version."""
        if self.facts is not None:
            return self.facts.version
        return self.plan.deployment.version if self.plan is not None else None

    @property
    def title(self) -> str:
        """The engine as it writes itself."""
        return engine_title(self.engine)

    @property
    def tp(self) -> int:
        """Tensor parallel degree; 1 where nothing says otherwise."""
        if self.facts is not None and self.facts.tp is not None:
            return self.facts.tp
        return self.plan.deployment.tp if self.plan is not None else 1

    @property
    def watch(self) -> Mapping[str, Any]:
        """What is set up around the target."""
        found = (self.coverage or {}).get("watch")
        return found if isinstance(found, Mapping) else {}

    def in_force(self, flag: str) -> InForce:
        """A flag's value on the target; unknown without one."""
        return InForce(None, "unknown") if self.facts is None else value_in_force(self.facts, flag)

    def row(self, canonical: str) -> Mapping[str, Any] | None:
        """What the report says of a metric."""
        rows = (self.coverage or {}).get("rows") or ()
        return next((row for row in rows if row.get("canonical") == canonical), None)

    def pool_tokens(self) -> int | None:
        """Tokens of the pool that exists, else of the planned one."""
        if self.facts is not None and self.facts.kv_cache_size_tokens is not None:
            return self.facts.kv_cache_size_tokens
        return self.plan.kv_tokens if self.plan is not None else None

    def block_size(self) -> int | None:
        """Tokens of a block."""
        if self.facts is not None and self.facts.block_size is not None:
            return self.facts.block_size
        return self.plan.block_size if self.plan is not None else None

    def kv_group(self) -> LayerGroup | None:
        """The first layers that keep KV."""
        layers = self.shape.layers if self.shape is not None else ()
        return next((group for group in layers if group.attention not in ("none", "recurrent")), None)


Check = Callable[[Asked], Answer]
