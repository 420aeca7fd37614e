"""Quality runs as text: one table of arms by task, one of accuracy by turn."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

Row = Sequence[str]


def report(value: dict[str, Any]) -> str:
    """The tables of `probe.quality.command.measure`, and what each arm left out."""
    arms = value["arms"]
    parts = [_heading(value), _grid(_arm_rows(arms))]
    if any(found["turns"] for found in arms):
        parts.append("accuracy by turn, all tasks\n" + _grid(_turn_rows(arms)))
    notes = dict.fromkeys(sentence for found in arms for sentence in found["left_out"])
    if any((found["likelihood"] or {}).get("mean_kl") is not None for found in arms):
        notes["mean KL is a lower bound: tokens outside the 20 likeliest count as one."] = None
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def _heading(value: dict[str, Any]) -> str:
    suite = value["suite"]
    asked = f"{suite['conversations']} conversations of {suite['turns']} turns, {suite['context']} tokens"
    return f"model {value['model']}, suite {suite['kind']}: {asked if suite['tasks'] else 'text only'}"


def _arm_rows(arms: Sequence[dict[str, Any]]) -> list[Row]:
    rows: list[Row] = [
        ("arm", "task", "items", "accuracy", "95% interval", "invalid", "drop", "95% interval", "verdict",
         "bytes/token", "perplexity", "mean KL", "top-1 agr.")
    ]  # fmt: skip
    for found in arms:
        likelihood = found["likelihood"] or {}
        against = found["against"] or {}
        rest = (
            _number(found["facts"].get("kv_bytes_per_token"), "d"),
            _number(likelihood.get("perplexity"), ".3f"),
            _number(likelihood.get("mean_kl"), ".4f"),
            _number(likelihood.get("top1_agreement"), ".3f"),
        )
        rows.append((found["label"], "all", *_cell(found["overall"]), *_difference(against), *rest))
        for task, cell in found["tasks"].items():
            compared = (against.get("tasks") or {}).get(task, {})
            rows.append(("", task, *_cell(cell), *_difference(compared), "", "", "", ""))
    return rows


def _cell(cell: dict[str, Any]) -> tuple[str, str, str, str]:
    if not cell["items"]:
        return "0", "-", "-", "-"
    interval = f"{cell['low']:.3f} to {cell['high']:.3f}"
    return str(cell["items"]), f"{cell['accuracy']:.3f}", interval, f"{cell['invalid'] / cell['items']:.3f}"


def _difference(compared: dict[str, Any]) -> tuple[str, str, str]:
    if not compared or compared["drop"] is None:
        return "-", "-", "-"
    return f"{compared['drop']:+.3f}", f"{compared['low']:+.3f} to {compared['high']:+.3f}", compared["verdict"]


def _turn_rows(arms: Sequence[dict[str, Any]]) -> list[Row]:
    by_arm = [{row["turn"]: row for row in found["turns"] if row["task"] == "all"} for found in arms]
    rows: list[Row] = [("turn", "items", *(found["label"] for found in arms))]
    for turn in sorted({turn for found in by_arm for turn in found}):
        items = max(found[turn]["items"] for found in by_arm if turn in found)
        shares = [_number(found[turn]["accuracy"], ".3f") if turn in found else "-" for found in by_arm]
        rows.append((str(turn), str(items), *shares))
    return rows


def listing(runs: Sequence[dict[str, Any]]) -> str:
    """Stored runs, one a line."""
    rows: list[Row] = [("run", "started (UTC)", "target", "label", "status", "items", "accuracy", "verdict")]
    for run in runs:
        overall = run.get("overall") or {"items": 0}
        at = datetime.fromtimestamp(run["started_at"], UTC).strftime("%Y-%m-%d %H:%M:%S")
        verdict = (run.get("against") or {}).get("verdict", "-")
        accuracy = _number(overall.get("accuracy"), ".3f")
        rows.append(
            (run["run_id"], at, run["target"], run["label"], run["status"], str(overall["items"]), accuracy, verdict)
        )
    return _grid(rows)


def harness(value: dict[str, Any]) -> str:
    """The figures of the lm-eval harness."""
    rows: list[Row] = [("task", "metric", "value")]
    for task, metrics in value["lm_eval"]["results"].items():
        rows += [(task, name, f"{found:.4f}") for name, found in metrics.items() if isinstance(found, (int, float))]
    return f"model {value['model']}, lm-eval\n\n{_grid(rows)}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _grid(rows: Sequence[Row]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)
