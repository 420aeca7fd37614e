"""What each KV format, and each mix of layers, takes and holds on one model: measured, one engine each.

Which layers deserve full precision is measured too: each is quantized alone, and how far the model's next-token
distributions move (mean KL) ranks them. Rules such as "first and last two" are not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from probe.quality.lab import Arm, Lab
from probe.quality.suite import SuiteSpec
from probe.store import QualityRun

FORMATS = ("fp8_e4m3", "int8_per_token_head", "int8k_int4v", "int4_kivi", "int4_per_token_head")
MOST_LAYERS = 2  # mixes keep the 1, then the 2 most sensitive layers in full precision
DTYPE, LAYERS = "--kv-cache-dtype", "--kv-cache-dtype-layers"


@dataclass(frozen=True)
class Candidate:
    """One way to store the cache, with what was measured. Shares are 0..1; `drop` is against full precision, paired.

    flags: what to set, None to unset. kv_bytes_per_token: scales included, over all layers. low, high: the 95%
    interval of `drop`; accuracy_low, accuracy_high: that of `accuracy`. mean_kl: nats a token, None when left out.
    on_front: no other candidate is as accurate with fewer bytes.
    """

    name: str
    flags: Mapping[str, Any]
    kv_bytes_per_token: int
    items: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    drop: float
    low: float
    high: float
    mean_kl: float | None
    top1_agreement: float | None
    full_precision: bool
    run_id: str
    on_front: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def candidate(name: str, flags: Mapping[str, Any], run: QualityRun, *, full_precision: bool = False) -> Candidate:
    """A finished run as a candidate; the run of full precision itself has nothing to lose."""
    result = run.result or {}
    overall, likelihood = result["overall"], result.get("likelihood") or {}
    against = result.get("against") or {"drop": 0.0, "low": 0.0, "high": 0.0}
    return Candidate(
        name=name,
        flags=dict(flags),
        kv_bytes_per_token=run.facts["kv_bytes_per_token"],
        items=overall["items"],
        accuracy=overall["accuracy"],
        accuracy_low=overall["low"],
        accuracy_high=overall["high"],
        drop=against["drop"],
        low=against["low"],
        high=against["high"],
        mean_kl=0.0 if full_precision else likelihood.get("mean_kl"),
        top1_agreement=1.0 if full_precision else likelihood.get("top1_agreement"),
        full_precision=full_precision,
        run_id=run.id,
    )


def on_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which (bytes, accuracy) are on the Pareto front: no other has as few bytes and as much accuracy, and not both."""
    return [
        not any(size <= bytes_ and right >= accuracy and (size, right) != (bytes_, accuracy) for size, right in points)
        for bytes_, accuracy in points
    ]


def with_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates by bytes, those on the Pareto front marked."""
    ordered = sorted(candidates, key=lambda c: (c.kv_bytes_per_token, -c.accuracy))
    front = on_front([(c.kv_bytes_per_token, c.accuracy) for c in ordered])
    return [replace(found, on_front=mark) for found, mark in zip(ordered, front, strict=True)]


def format_arms(formats: Sequence[str] = FORMATS) -> list[Arm]:
    """One format for all layers."""
    return [Arm(name, {DTYPE: name, LAYERS: None}) for name in formats]


def layer_arms(dtype: str, full: str, num_layers: int) -> list[Arm]:
    """Each layer alone in `dtype`, the others in `full`."""
    return [Arm(f"layer {n} {dtype}", {DTYPE: full, LAYERS: f"{n}:{dtype}"}) for n in range(num_layers)]


def mixed_arms(dtype: str, full: str, layers: Sequence[Mapping[str, Any]]) -> list[Arm]:
    """`dtype` everywhere but in the most sensitive layers, which keep `full`; `layers` as of `layer_figures`."""
    ranked = [layer["layer"] for layer in sorted(layers, key=lambda layer: -layer["mean_kl"])]
    arms = []
    for count in range(1, min(MOST_LAYERS, len(ranked) - 1) + 1):
        kept = sorted(ranked[:count])
        words = ",".join(f"{n}:{full}" for n in kept)
        arms.append(Arm(f"{dtype}, {full} in {_layers(kept)}", {DTYPE: dtype, LAYERS: words}))
    return arms


def _layers(numbers: Sequence[int]) -> str:
    return f"layer{'s' if len(numbers) > 1 else ''} {' and '.join(str(n) for n in numbers)}"


def layer_figures(
    lab: Lab, spec: SuiteSpec, baseline: QualityRun, dtype: str, full: str, num_layers: int
) -> list[dict[str, Any]]:
    """`{"layer", "mean_kl", "top1_agreement"}` of each layer quantized alone.

    `spec` must take likelihoods, which tell small harms apart sooner than right and wrong answers do.
    """
    figures = []
    for layer, run in enumerate(lab.measure_all(layer_arms(dtype, full, num_layers), spec, baseline=baseline)):
        likelihood = (run.result or {})["likelihood"]
        figures.append(
            {"layer": layer, "mean_kl": likelihood["mean_kl"], "top1_agreement": likelihood["top1_agreement"]}
        )
    return figures
