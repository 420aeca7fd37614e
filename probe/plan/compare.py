"""Two or more plans side by side: the figures that an operator weighs, and how far each is from the first."""

from __future__ import annotations

import argparse
import copy
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from engine.memory.capacity import CapacityPlan
from engine.memory.units import gib
from probe.plan.text import table, verdict_word

_FIGURES: dict[str, tuple[Callable[[CapacityPlan], float], Callable[[float], str]]] = {
    "KV tokens": (lambda plan: plan.kv_tokens, lambda value: f"{value:,.0f}"),
    "KV blocks": (lambda plan: plan.kv_blocks, lambda value: f"{value:,.0f}"),
    "requests of full length": (lambda plan: plan.max_concurrency, lambda value: f"{value:,.2f}"),
    "longest request": (lambda plan: plan.largest_model_len, lambda value: f"{value:,.0f}"),
    "KV of one token": (lambda plan: plan.kv_bytes_per_token or 0, lambda value: f"{value:,.0f} B"),
    "KV cache of one GPU": (lambda plan: plan.kv_cache_bytes, gib),
    "weights of one GPU": (lambda plan: plan.part("weights"), gib),
    "activation peak": (lambda plan: plan.part("activation peak") + plan.part("logits and sampler"), gib),
    "CUDA graphs": (lambda plan: plan.part("CUDA graphs"), gib),
    "reserve": (lambda plan: plan.part("reserve"), gib),
    "GPUs of one replica": (lambda plan: plan.deployment.tp * plan.deployment.pp, lambda value: f"{value:.0f}"),
}


def changed_options(options: argparse.Namespace, words: str) -> argparse.Namespace:
    """The options of another plan: those of the first, and the flags in `words` (`--tp 8` or `tp=8 block-size=32`)."""
    parts: list[str] = []
    for word in shlex.split(words):
        plain = re.fullmatch(r"([A-Za-z][\w-]*)(=.*)?", word)
        takes_value = bool(parts) and parts[-1].startswith("--") and "=" not in parts[-1]
        if plain and (plain[2] or not takes_value):
            parts.append(f"--{plain[1].replace('_', '-')}{plain[2] or ''}")
        else:
            parts.append(word)
    parsed: argparse.Namespace = options.again.parse_args(parts, namespace=copy.copy(options))
    split = ("tp", "pp", "dp")
    if any(getattr(parsed, name) != getattr(options, name) for name in split) and parsed.gpus == options.gpus:
        parsed.gpus = None  # another split is on as many GPUs as it needs
    return parsed


def comparison_text(names: Sequence[str], plans: Sequence[CapacityPlan]) -> str:
    """A table with a column for each plan and, from the second on, its distance from the first."""
    rows: list[list[str]] = [["", *names]]
    rows.append(["verdict", *(verdict_word(plan).lower() for plan in plans)])
    for name, (figure, write) in _FIGURES.items():
        first = figure(plans[0])
        values = [figure(plan) for plan in plans]
        if not any(values):
            continue
        rows.append([name, write(first), *(f"{write(value)}{_apart(first, value)}" for value in values[1:])])
    return "Side by side\n" + table([[*row, ""] for row in rows])


def comparison_data(names: Sequence[str], plans: Sequence[CapacityPlan]) -> list[dict[str, Any]]:
    """The same as data: one entry a plan."""
    return [
        {
            "flags": name,
            "verdict": plan.verdict,
            **{figure: read(plan) for figure, (read, _) in _FIGURES.items()},
            "plan": plan.to_dict(),
        }
        for name, plan in zip(names, plans, strict=True)
    ]


def _apart(first: float, value: float) -> str:
    if not first or first == value:
        return ""
    return f" ({value / first - 1:+.1%})" if first > 0 and value > 0 else ""
