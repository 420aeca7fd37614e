"""What widely read articles say about KV caches, beside what comes out when it is computed.

Every figure of ours is computed when asked: bytes and capacity by `engine.memory`, names by the flag and metric
catalogs, code by running its arithmetic on a small example. The verdict follows from comparing both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from runbooks.knowledge import claims_bytes, claims_capacity, claims_code, claims_names
from runbooks.knowledge.claims_names import MetricNames, from_metrics
from runbooks.knowledge.outcome import Outcome
from runbooks.knowledge.text import Text, data, in_both, text_of

Verdict = Literal["right", "half", "wrong"]
TOPICS = ("bytes", "capacity", "behaviour", "hardware", "flags", "metrics", "engines", "code")
TOLERANCE = 0.05  # of the computed figure: the articles round

_COMPUTE: Mapping[str, Callable[[], Outcome]] = {
    **claims_bytes.COMPUTED,
    **claims_capacity.COMPUTED,
    **claims_names.COMPUTED,
    **claims_code.COMPUTED,
}
_SOURCES = {
    "bytes": Text(
        "engine.memory: layers x KV heads x dimension x 2 x bytes, from the model's config.json",
        "engine.memory：按模型 config.json 以 层数 × KV 头 × 维度 × 2 × 字节数 计算",
    ),
    "code": Text("the article's own arithmetic, run on the example shown", "按文中算法在所示示例上运行的结果"),
}


@dataclass(frozen=True)
class Claim:
    """One claim. said: the article's figure as text, number None where it is none. arithmetic: one step a line."""

    id: str
    topic: str
    article: Text
    claim: Text
    said: Text
    said_number: float | None
    computed: Text
    verdict: Verdict
    truth: Text
    arithmetic: tuple[str, ...]
    source: Text

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; Chinese under `zh`."""
        texts = in_both(
            article=self.article,
            claim=self.claim,
            said=self.said,
            computed=self.computed,
            truth=self.truth,
            source=self.source,
        )
        return {
            "id": self.id,
            "topic": self.topic,
            "verdict": self.verdict,
            "said_number": self.said_number,
            "arithmetic": list(self.arithmetic),
            **texts,
        }


def claims(metrics: MetricNames | None = None) -> list[Claim]:
    """All claims, computed now.

    metrics: names of the metrics an engine exposes, by version, ascending. They are known above this layer
    (`probe.catalog.metrics`); without them the claims about metrics are left out.
    """
    compute = {**_COMPUTE, **(from_metrics(metrics) if metrics is not None else {})}
    return [_claim(entry, compute[entry["id"]]()) for entry in data("claims")["claims"] if entry["id"] in compute]


def _claim(entry: Mapping[str, Any], outcome: Outcome) -> Claim:
    said = entry["said"]
    number = said.get("value")
    text = text_of(said["text"]) if number is None else _figure(number, said["unit"])
    return Claim(
        entry["id"],
        entry["topic"],
        text_of(data("claims")["articles"][entry["article"]]),
        text_of(entry["claim"]).filled(),
        text,
        number,
        outcome.shown if number is None or outcome.number is None else _figure(outcome.number, said["unit"]),
        outcome.verdict or judged(number, outcome.number),
        text_of(entry["truth"]).filled(**outcome.figures),
        outcome.lines,
        outcome.source or _SOURCES.get(entry["topic"], _SOURCES["bytes"]),
    )


def judged(said: float | None, computed: float | None) -> Verdict:
    """Right within `TOLERANCE` of the computed figure, else wrong; a claim without figures has to say for itself."""
    if said is None or computed is None:
        raise ValueError("a claim without two figures needs a verdict of its own")
    return "right" if abs(said - computed) <= TOLERANCE * abs(computed) else "wrong"


def _figure(value: float, unit: str) -> Text:
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.2f}".rstrip("0").rstrip(".")
    shown = f"{number}{unit}" if unit in ("%", ":1", "") else f"{number} {unit}"
    return Text(shown, shown)
