"""What `kvoncall plan` does with its flags. Codes: 0 fits, 1 does not fit or not run, or a check missed, 2 not done."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from engine.memory.capacity import CapacityPlan
from engine.memory.deployment import Deployment
from engine.memory.levers import levers
from engine.memory.model_presets import gpu, gpu_names, model_config, model_names, model_preset
from engine.memory.plan import plan
from engine.memory.units import gib
from probe.plan import compare, text
from probe.plan.describe import Described, describe, ranks_of
from runbooks.knowledge.attention import attention_table
from runbooks.knowledge.template_parts import TemplateAdvice
from runbooks.knowledge.templates import advise, template
from runbooks.plan_cautions import cautions

if TYPE_CHECKING:
    from probe.plan.live import Live

FITS, DOES_NOT_FIT = 0, 1


@dataclass(frozen=True)
class Planned:
    """One plan with what belongs to it."""

    described: Described
    plan: CapacityPlan
    live: Live | None = None
    advice: TemplateAdvice | None = None

    @property
    def deployment(self) -> Deployment:
        """As given, or as the template changes it; defaults not filled in."""
        return self.advice.deployment if self.advice else self.described.deployment


def planned(options: argparse.Namespace) -> Planned:
    """Reads the flags or the server and plans. Raises `ConfigError` or `TargetError`."""
    live = _live(options)
    described = describe(options, live.deployment if live else None)
    if live:
        described = Described(described.deployment, (*live.notes, *described.notes))
    if not options.template:
        return Planned(described, plan(described.deployment), live)
    try:
        chosen = template(options.template)
    except KeyError as error:
        raise ConfigError(str(error.args[0])) from None
    advice = advise(chosen, described.deployment)
    return Planned(described, advice.plan, live, advice)


def _live(options: argparse.Namespace) -> Live | None:
    if not options.target:
        return None
    from probe.plan.live import read_live  # the store and HTTP come with it

    return read_live(options, options.target)


def others(options: argparse.Namespace) -> list[tuple[str, Planned]]:
    """The plans of --compare, named by their flags."""
    return [(words, planned(compare.changed_options(options, words))) for words in options.compare]


def against(made: Planned) -> tuple[str, ...]:
    """Why the planned server does not run so, whatever fits."""
    return cautions(made.deployment)


def as_data(options: argparse.Namespace, made: Planned) -> dict[str, Any]:
    """What --json prints: the plan's own keys, and those of the options that ask for more."""
    data = made.plan.to_dict()
    data["notes"] = list(made.described.notes)
    data["cautions"] = list(against(made))
    deployment = made.described.deployment
    data["replicas"] = max(1, deployment.num_gpus // ranks_of(deployment))
    if made.live:
        from probe.plan.live import measured_data

        data["target"], data["measured"] = made.live.name, measured_data(made.live, made.plan)
    if made.advice:
        data["template"] = made.advice.to_dict()
    if options.levers:
        data["levers"] = [
            {
                "key": lever.key,
                "what": lever.what,
                "changes": lever.changes,
                "kv_tokens": lever.plan.kv_tokens,
                "gained_tokens": lever.gained_tokens,
                "max_concurrency": lever.plan.max_concurrency,
                "verdict": lever.plan.verdict,
                "cost": lever.cost,
                "possible": lever.possible,
                "why_not": lever.why_not,
            }
            for lever in levers(made.deployment)
        ]
    if options.attention_table:
        data["attention"] = [row.to_dict() for row in attention_table(made.plan.deployment.shape)]
    if options.compare:
        found = others(options)
        names = ["as given", *(name for name, _ in found)]
        data["compare"] = compare.comparison_data(names, [made.plan, *(one.plan for _, one in found)])
    return data


def as_text(options: argparse.Namespace, made: Planned) -> str:
    """What is printed for a person."""
    sections = [text.plan_text(made.plan, made.described.notes, cautions=against(made), explain=options.explain)]
    if made.live:
        from probe.plan.live import measured_text

        sections.append(measured_text(made.live, made.plan))
    if made.advice:
        sections.append(text.template_text(made.advice))
    if options.levers:
        sections.append(text.levers_text(levers(made.deployment)))
    if options.attention_table:
        sections.append(text.attention_text(attention_table(made.plan.deployment.shape)))
    if options.compare:
        found = others(options)
        names = ["as given", *(name for name, _ in found)]
        sections.append(compare.comparison_text(names, [made.plan, *(one.plan for _, one in found)]))
    return "\n\n".join(sections)


def model_list() -> list[dict[str, Any]]:
    """Presets of models: name, parameters, KV of one token, weights, source."""
    rows = []
    for name in model_names():
        shape, entry = model_preset(name), model_config(name)
        rows.append(
            {
                "name": name,
                "parameters": shape.parameters,
                "quantization": shape.quantization or shape.dtype,
                "weights_bytes": shape.weights_bytes,
                "layers": shape.num_layers,
                "context": shape.max_position_embeddings,
                "source": entry["source"],
            }
        )
    return rows


def model_list_text() -> str:
    """The same as a table."""
    rows = [("model", "parameters", "weights", "layers", "context", "source")]
    rows.extend(
        (
            row["name"],
            f"{row['parameters'] / 1e9:,.2f} B",
            f"{gib(row['weights_bytes'])} {row['quantization']}",
            f"{row['layers']}",
            f"{row['context']:,}",
            row["source"],
        )
        for row in model_list()
    )
    return text.table(rows)


def gpu_list() -> list[dict[str, Any]]:
    """Presets of GPUs: what the driver reports as memory, compute capability, bandwidth."""
    return [
        {
            "name": one.name,
            "memory_bytes": one.memory_bytes,
            "compute_capability": one.compute_capability,
            "memory_bandwidth": one.memory_bandwidth,
            "unified": one.unified,
        }
        for one in map(gpu, gpu_names())
    ]


def gpu_list_text() -> str:
    """The same as a table."""
    rows = [("GPU", "memory the driver reports", "compute capability", "bandwidth", "")]
    for one in map(gpu, gpu_names()):
        capability = ".".join(map(str, one.compute_capability)) if one.compute_capability else "-"
        bandwidth = f"{(one.memory_bandwidth or 0) / 1e9:,.0f} GB/s"
        rows.append(
            (one.name, gib(one.memory_bytes), capability, bandwidth, "shared with the host" if one.unified else "")
        )
    return text.table(rows)
