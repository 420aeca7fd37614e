"""INT4 degradation: someone switched the KV cache to plain INT4, and the assistant forgets and miscounts.

Two variants of the same model: `outliers` has the large key channels that real models have and the small testbed
lacks (a transform that leaves its full-precision function unchanged, see `engine.testbed.outliers`); `plain` is the
model as trained. What happens is measured on either; where plain INT4 does no harm the replay says so and is not
reproduced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import MIB
from probe.quality.suite import SuiteSpec
from probe.replay.exercise import Bench
from probe.replay.observation import Check, Observation, alert_fired, alert_resolved
from probe.replay.quality import QualityExercise, QualityPlan, fall

FULL, INCIDENT = "float16", "int4_symmetric"
HELD = 0.01  # a remedy holds when at most one point is lost
MOST_BYTES = 0.6  # of full precision's
LEAST_RIGHT = 0.95
MOST_INVALID = 0.05
MODELS = {"outliers": "testbed-outliers", "plain": ""}


@dataclass(frozen=True)
class Int4Degradation:
    """Scenario `int4-degradation`; `variant` is a key of MODELS."""

    variant: str = "outliers"
    turns: int = 20
    conversations: int = 12
    context: int = 1024  # tokens of a whole conversation
    first_seed: int = 2000  # held out of training
    pool_bytes: int = 48 * MIB
    max_num_seqs: int = 16
    time_scale: float = 0.1
    scrape_interval_s: float = 0.5
    threads: int | None = None

    id = "int4-degradation"
    title = "INT4 degradation: after a few turns the assistant forgets and miscounts"
    rule = "kv-quality-drop"
    runbook = "kv-quality-drop"
    hypothesis = (
        "Keys have a few channels many times larger than the rest. A scale per token spends its 15 steps on them and "
        "rounds the others away, the more keys compete the worse: plain INT4 answers wrongly, and more so in later "
        "turns. A format that gives keys their bits, or a scale per channel, brings the answers back at a third to "
        "a half of the bytes."
    )

    @property
    def article_case(self) -> Mapping[str, Any]:
        """What the published case reports, and public measurements of the same kind."""
        return {
            "case": "KV cache switched to INT4 to save cost: from about the tenth turn on more is made up, arithmetic "
            "accuracy falls by 15%, generated code has syntax errors",
            "computed": False,
            "its_scheme": "absmax / 7 per token and head, which is int4_symmetric here",
            "its_advice": "fp8, or the first and last three layers in FP16; here layers are chosen by measuring",
            "public_cases": {
                "Qwen2.5-7B with a per-token INT4 cache (huggingface/transformers#35185)": "98 of 120 right, then 0",
                "Mistral-7B with the same cache": "84 right, then 84: it depends on the model's keys",
            },
        }

    def flags(self) -> list[str]:
        """An engine in full precision; the operator changes it afterwards."""
        model = MODELS[self.variant]
        return [
            *(["--model", model] if model else []),
            "--kv-cache-dtype", FULL,
            "--kv-cache-memory-bytes", str(self.pool_bytes),
            "--max-num-seqs", str(self.max_num_seqs),
        ]  # fmt: skip

    def exercise(self, bench: Bench) -> QualityExercise:
        """Conversations of `turns` turns, asked in every format."""
        spec = SuiteSpec(
            kind="testbed",
            turns=self.turns,
            conversations=self.conversations,
            first_seed=self.first_seed,
            context=self.context,
        )
        return QualityExercise(bench, QualityPlan(spec, FULL, INCIDENT))

    def reproduced(self, before: Observation) -> list[Check]:
        """Full precision answers right, plain INT4 measurably not, more so in later turns, and the alert fired."""
        quality = before.quality or {}
        full, against = quality["full_precision"]["overall"], quality["against"]
        early, late = _half(quality, first=True), _half(quality, first=False)
        return [
            Check("full precision answers right", full["accuracy"] >= LEAST_RIGHT, full["accuracy"], ">= 0.95"),
            Check(
                f"{INCIDENT} answers worse",
                against["verdict"] == "worse",
                fall(against),
                "> 5 points, interval above 0",
            ),
            Check("later turns suffer more", late < early, f"{late:.3f} after {early:.3f}", "fewer right answers"),
            alert_fired(before, self.rule),
        ]

    def verified(self, after: Observation) -> list[Check]:
        """Answers within a point of full precision, at a fraction of its bytes, and the alert resolved."""
        quality = after.quality or {}
        overall, against = quality["overall"], quality["against"]
        share = quality["kv_bytes_per_token"] / quality["full_precision"]["kv_bytes_per_token"]
        invalid = overall["invalid"] / overall["items"]
        return [
            Check("within a point of full precision", against["drop"] <= HELD, fall(against), "<= 1 point"),
            Check("fewer bytes a token", share <= MOST_BYTES, f"{share:.0%} of {FULL}", f"<= {MOST_BYTES:.0%}"),
            Check("answers are valid", invalid <= MOST_INVALID, f"{invalid:.1%} invalid", "<= 5%"),
            alert_resolved(after, self.rule),
        ]


def _half(quality: Mapping[str, Any], *, first: bool) -> float:
    """Accuracy over the first, or the second, half of the turns."""
    cells = [cell for cell in quality["turns"] if cell["task"] == "all"]
    middle = max(cell["turn"] for cell in cells) / 2
    chosen = [cell for cell in cells if (cell["turn"] <= middle) == first]
    return float(sum(cell["right"] for cell in chosen) / sum(cell["items"] for cell in chosen))
