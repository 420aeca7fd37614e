"""The optimization checklist, whose items look at an attached target themselves.

Five groups as the articles have them. An item is done, open, does not apply, or unknown, and says in one sentence
what it saw. Pure: facts, plan and report in, answers out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.memory.capacity import CapacityPlan
from runbooks.engine_names import flag_for
from runbooks.facts import TargetFacts, TrafficFacts
from runbooks.facts_deployment import deployment_of, planned
from runbooks.knowledge import checklist_memory, checklist_model, checklist_serving, checklist_watch
from runbooks.knowledge.checklist_asked import Asked, Status
from runbooks.knowledge.text import Text, data, in_both, text_of

GROUPS = ("model", "memory", "performance", "monitoring", "operations")
# Items about settings that a plan states, so that they can be answered before there is a server.
_A_PLAN_TELLS = ("utilization", "cuda-graphs", "kv-quality", "sequence-limit", "host-memory", "known-version")
_CHECKS = {
    **checklist_model.CHECKS,
    **checklist_memory.CHECKS,
    **checklist_serving.CHECKS,
    **checklist_watch.CHECKS,
}


@dataclass(frozen=True)
class Item:
    """One item: what to do, why, and how."""

    id: str
    group: str
    text: Text
    why: Text
    how: Text

    def check(
        self,
        facts: TargetFacts | None = None,
        plan: CapacityPlan | None = None,
        coverage: Mapping[str, Any] | None = None,
    ) -> Checked:
        """The item for a target, or for a plan alone; what is not given is unknown.

        Without a plan, the target's own facts are planned.

        coverage: see `checklist_asked.Asked`.
        """
        return self._answered(Asked(facts, plan if plan is not None else _plan_of(facts), coverage))

    def _answered(self, asked: Asked) -> Checked:
        if asked.facts is None and asked.plan is not None and self.id in _A_PLAN_TELLS:
            asked = replace(asked, facts=_facts_of(asked.plan))
        answer = _CHECKS[self.id](asked)
        entry = _entry(self.id)
        if answer.what is not None:
            evidence = text_of(data("checklist")["unknown"]).filled(what=answer.what)
        else:
            evidence = text_of(entry["says"][answer.key]).filled(**answer.figures)
        return Checked(self, answer.status, evidence)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; Chinese under `zh`."""
        return {"id": self.id, "group": self.group, **in_both(text=self.text, why=self.why, how=self.how)}


@dataclass(frozen=True)
class Checked:
    """An item's answer for one target."""

    item: Item
    status: Status
    evidence: Text

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; Chinese under `zh`."""
        found = self.item.to_dict()
        texts = in_both(evidence=self.evidence)
        return {**found, "status": self.status, "evidence": texts["evidence"], "zh": {**found["zh"], **texts["zh"]}}


def group_title(group: str) -> Text:
    """What a group is called."""
    return text_of(data("checklist")["groups"][group])


def items() -> list[Item]:
    """All items, group by group."""
    texts = ("text", "why", "how")
    return [
        Item(entry["id"], entry["group"], *(text_of(entry[name]) for name in texts))
        for entry in data("checklist")["items"]
    ]


def checklist(
    facts: TargetFacts | None = None,
    plan: CapacityPlan | None = None,
    coverage: Mapping[str, Any] | None = None,
) -> list[Checked]:
    """Every item for one target, in order; see `Item.check`."""
    asked = Asked(facts, plan if plan is not None else _plan_of(facts), coverage)
    return [item._answered(asked) for item in items()]


def _facts_of(plan: CapacityPlan) -> TargetFacts:
    """What a plan says of the server it is for; flags that no plan asks for are not in it."""
    deployment, offload = plan.deployment, plan.deployment.kv_offloading_bytes
    flags: dict[str, Any] = {
        flag_for(deployment.engine, "--gpu-memory-utilization"): plan.gpu_memory_utilization,
        flag_for(deployment.engine, "--kv-cache-dtype"): deployment.kv_cache_dtype,
        "--enforce-eager": deployment.enforce_eager,
        "--kv-offloading-size": offload / (1 << 30) if offload else None,
    }
    return TargetFacts(
        engine=deployment.engine,
        version=deployment.version,
        flags={flag: value for flag, value in flags.items() if value is not None},
        device_memory_bytes=deployment.gpu.memory_bytes if deployment.gpu is not None else None,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        traffic=TrafficFacts(tokens_per_request_peak=deployment.tokens_per_request),
        other_processes_bytes=deployment.other_processes_bytes,
        gpu=deployment.gpu,
        num_gpus=deployment.num_gpus,
        tp=deployment.tp,
        pp=deployment.pp,
        shape=deployment.shape,
        checkpoint_quantization=deployment.shape.quantization,
        host_memory_bytes=deployment.host_memory_bytes,
    )


def _plan_of(facts: TargetFacts | None) -> CapacityPlan | None:
    deployment = deployment_of(facts) if facts is not None else None
    found = planned(deployment) if deployment is not None else None
    return found if isinstance(found, CapacityPlan) else None


def _entry(item_id: str) -> Mapping[str, Any]:
    entry: Mapping[str, Any] = next(one for one in data("checklist")["items"] if one["id"] == item_id)
    return entry
