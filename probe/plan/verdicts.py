"""An anchor's verdict against the planner's: does one request of max_model_len fit, and is the reserve safe?"""

from __future__ import annotations

import re

from engine.errors import ConfigError
from engine.memory.capacity import CapacityPlan
from probe.plan.anchors import GIB, Anchor
from probe.plan.end_to_end import end_to_end
from probe.plan.finding import Finding, reported_tokens
from probe.plan.pool_of import Pool, divided_plan, last_version, plan_with, stated_pool

_REFUSED = ("does_not_fit", "not_fit", "doesnt_fit", "oom", "fails", "refuse")
_RISK = ("at_risk", "risk")


def verdict_figures(anchor: Anchor) -> list[Finding]:
    """The verdict, and that at another utilization where the anchor's words name one."""
    word = anchor.verdict.strip().lower().replace(" ", "_").replace("-", "_")
    expected = _expected(word)
    if expected is None:
        return []
    got = _verdict(anchor)
    if got is None:
        return [Finding("verdict", expected, None, note="neither memory nor model are stated well enough")]
    return [Finding("verdict", expected, _comparable(expected, got)), *_at_other_utilizations(anchor, word)]


def _expected(word: str) -> str | None:
    if word.startswith("fits"):
        return "fits"
    if word.startswith(_REFUSED):
        return "does_not_fit"
    return "at_risk" if word.startswith(_RISK) else None


def _comparable(expected: str, got: str) -> str:
    """At risk is a way of fitting; where the anchor expects a risk, not fitting is one too."""
    if expected == "fits" and got == "at_risk":
        return "fits"
    return "at_risk" if expected == "at_risk" and got == "does_not_fit" else got


def _verdict(anchor: Anchor) -> str | None:
    if anchor.shape is None:
        return _by_checkpoint(anchor) or _of_table(anchor)
    planned = _planned(anchor)
    return planned.verdict if planned else None


def _planned(anchor: Anchor) -> CapacityPlan | None:
    divided = divided_plan(anchor)
    if divided is not None:
        return divided
    pool = stated_pool(anchor) or _solved_back(anchor)
    if pool is not None:
        return plan_with(anchor, pool)
    if "L3" in anchor.level and anchor.shape is not None and len(anchor.shape.layers) == 1:
        group = anchor.shape.layers[0]
        dims = (group.count, group.num_kv_heads, group.head_dim)
        return end_to_end(anchor, anchor.model, dims, last_version(anchor.version))
    return None


def _solved_back(anchor: Anchor) -> Pool | None:
    """The pool as the log prints it, where no input states its memory."""
    derived = anchor.reported.get("derived_kv_gib")
    if isinstance(derived, int | float) and "L3" not in anchor.level:
        return Pool(round(derived * GIB), None, 0.0, "solved back from the log")
    if anchor.bytes_per_token and "L3" not in anchor.level:
        count = reported_tokens(anchor)
        if isinstance(count, int):
            return Pool(round(count * anchor.bytes_per_token), None, 0.0, "solved back from the log")
    return None


def _by_checkpoint(anchor: Anchor) -> str | None:
    """Without dims: the printed tokens hold a request of full length, or they do not."""
    lengths = {key.removeprefix("mml_"): value for key, value in anchor.reported.items() if key.startswith("mml_")}
    if not lengths:
        return None
    held = [anchor.reported.get(f"tokens_{suffix}", 0) >= length for suffix, length in lengths.items()]
    return "fits" if all(held) else "does_not_fit"


def _of_table(anchor: Anchor) -> str | None:
    """A table of models: the worst of them."""
    table = anchor.reported.get("blocks")
    if not isinstance(table, dict):
        return None
    found = []
    for key in table:
        match = re.match(r"(.*?)\s*\((\d+)\s*,\s*(\d+)\s*,\s*(\d+)\)", str(key))
        if match is None:
            continue
        try:
            dims = (int(match[2]), int(match[3]), int(match[4]))
            found.append(end_to_end(anchor, match[1], dims, last_version(anchor.version)).verdict)
        except ConfigError:
            continue
    if not found:
        return None
    return next((word for word in ("does_not_fit", "at_risk") if word in found), "fits")


def _at_other_utilizations(anchor: Anchor, word: str) -> list[Finding]:
    """ "fits_at_0.90_ooms_at_0.95": a risk there, since graphs and spikes outside the budget end it, not the pool."""
    found = []
    for verb, written in re.findall(r"(fits|ooms|oom|fails|crashes)_at_(\d*\.\d+)", word):
        fraction = float(written)
        divided = divided_plan(anchor, gpu_memory_utilization=fraction)
        if divided is None or fraction == anchor.utilization:
            continue
        expected = "fits" if verb == "fits" else "at_risk"
        got = _comparable(expected, divided.verdict)
        note = divided.reasons[0] if divided.reasons else ""
        found.append(Finding(f"verdict at {written}", expected, got, note=note))
    return found
