"""What the attention benchmark found, as tables in Markdown, and what it was found on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
TITLES = {"decode": "Decode", "prefill": "Prefill", "write": "Cache write"}
PACKAGES = ("torch", "triton", "numpy", "flash-attn", "flashinfer-python")
# What decode of batch >= 64 and context >= 4096 should reach on an H200, as a share of the copy bandwidth.
GOALS = {
    "float16": 0.85, "bfloat16": 0.85, "fp8_e4m3": 0.75, "fp8_e5m2": 0.75, "int8_per_token_head": 0.75,
    "int4_symmetric": 0.6, "int4_per_token_head": 0.6, "int4_kivi": 0.6, "int8k_int4v": 0.6,
}  # fmt: skip


def describe_device(device: torch.device) -> Row:
    """Device, driver, versions and date (UTC)."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": _cuda(device) if device.type == "cuda" else _cpu(),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda} | _packages(),
    }


def _cuda(device: torch.device) -> Row:
    found = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_bytes": found.total_memory,
        "l2_bytes": getattr(found, "L2_cache_size", None),
        "multiprocessors": found.multi_processor_count,
        "driver": _driver(),
    }


def _driver() -> str | None:
    if not (command := shutil.which("nvidia-smi")):
        return None
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30).stdout.split()
    return lines[0] if lines else None


def _cpu() -> Row:
    return {
        "type": "cpu",
        "name": _cpu_model(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "driver": None,
    }


def _cpu_model() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _packages() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def markdown(report: Row) -> str:
    """The whole report as Markdown."""
    parts = [_head(report), _goals_table(report)]
    timed = [row for row in report["results"] if row["status"] == "ok"]
    for kind, title in TITLES.items():
        rows = [row for row in timed if row["kind"] == kind]
        if rows:
            parts.append(f"## {title}\n\n{_legend(kind)}")
        for name in dict.fromkeys(row["shape"]["name"] for row in timed):
            of_shape = [row for row in rows if row["shape"]["name"] == name]
            if of_shape:
                parts += [f"### {name}", _table(of_shape, report["rates"]["flush_us"])]
    parts.append(_not_timed(report["results"]))
    if report["notes"]:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in report["notes"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(report: Row) -> str:
    device, rates = report["device"], report["rates"]
    copies = ", ".join(f"{name} {gb:.0f}" for name, gb in rates["copy_gb_per_s"].items() if name != "best")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    absent = ", ".join(name for name, version in report["versions"].items() if not version)
    flush = rates["flush_us"]
    machine = {k: v for k, v in device.items() if v is not None and k not in ("type", "name")}
    return "\n".join(
        [
            f"# Attention over the paged KV cache: {device['name']}",
            "",
            f"- {report['date']}, {report['seconds']} s, backend {report['backend']}{', quick' * report['quick']}",
            "- blocks of 16 tokens, 32 where keys are quantized by channel (int4_kivi)",
            f"- {device['type']}: " + ", ".join(f"{key} {value}" for key, value in machine.items()),
            f"- {versions}" + (f"; absent: {absent}" if absent else ""),
            f"- copy bandwidth (read + written, {rates['copy_bytes'] / 1e6:.0f} MB): {copies} GB/s",
            *([f"- † the host took longer to queue the call than {flush:.0f} us: its time may show"] if flush else []),
            f"- matrix product {rates['matmul']}: {rates['matmul_tflop_per_s']:.3g} TFLOP/s",
        ]
    )


def _legend(kind: str) -> str:
    if kind == "decode":
        return (
            "Microseconds (median), and the KV bytes that had to be read per second as a share of the copy bandwidth "
            "(MLA: also the arithmetic as a share of the matrix rate)."
        )
    if kind == "prefill":
        return "Microseconds (median), and the arithmetic as a share of the matrix rate."
    return "Microseconds (median), bytes read and written as a share of the copy bandwidth; error of N(0, 1) vectors."


def _table(rows: list[Row], flush_us: float | None) -> str:
    """One line a batch and length, one column a format, then one a peer."""
    formats = list(dict.fromkeys(row["kv_format"] for row in rows))
    peers = list(dict.fromkeys(name for row in rows for name in row["sides"] if name not in ("kernel", "fp32 path")))
    lines = [_line(["batch x tokens", *formats, *peers]), _line(["---"] * (1 + len(formats) + len(peers)))]
    cells: dict[str, dict[str, str]] = {}
    for row in sorted(rows, key=lambda row: (row["skewed"], row["query_len"], row["batch"], row["context"])):
        line = cells.setdefault(_sizes(row), {})
        line[row["kv_format"]] = _cell(row, flush_us)
        line |= {name: _us(side["median_us"]) for name, side in row["sides"].items() if name in peers}
    for sizes, line in cells.items():
        lines.append(_line([sizes, *(line.get(name, "") for name in (*formats, *peers))]))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _sizes(row: Row) -> str:
    before = row["context"] - row["query_len"]
    if row["kind"] == "decode":
        return f"{row['batch']} x {row['context']}{' skewed' if row['skewed'] else ''}"
    return f"{row['batch']} x {row['query_len']}" + (f" after {before}" if row["kind"] == "prefill" else "")


def _us(us: float) -> str:
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"


def _cell(row: Row, flush_us: float | None) -> str:
    shares = [row["share_of_matmul" if row["kind"] == "prefill" else "share_of_copy"]]
    if row["kind"] == "decode" and row["shape"]["latent_rank"] is not None:
        shares.append(row["share_of_matmul"])
    late = flush_us is not None and row["sides"]["kernel"]["host_us"] > flush_us
    text = f"{_us(row['us'])}{'†' if late else ''}, {' / '.join(f'{share:.0%}' for share in shares)}"
    if "fp32 path" in row["sides"]:
        text += f", {_times(row, 'fp32 path'):.2f}x fp32"
    if "quantization_error" in row:
        text += f", error {row['quantization_error']:.2g}"
    return text


def goals(report: Row) -> list[tuple[str, str, str]]:
    """The figures the project set itself: what, the wanted value, the worst case measured."""
    rows = [row for row in report["results"] if row["status"] == "ok" and row["kind"] == "decode"]
    return _cpu_goals(rows) if report["device"]["type"] == "cpu" else _cuda_goals(rows)


def _goals_table(report: Row) -> str:
    found = goals(report)
    if not found:
        return ""
    lines = [_line(["goal", "wanted", "measured, worst case"]), _line(["---"] * 3), *map(_line, found)]
    return "## Numbers to reach\n\n" + "\n".join(lines)


def _cpu_goals(rows: list[Row]) -> list[tuple[str, str, str]]:
    """Against copies of the fp32 cache's bytes, and the other formats against fp32; each within its own turns."""
    found = []
    rows = [row for row in rows if row["shape"]["latent_rank"] is None and not row["skewed"]]
    for row, name in ((row, name) for row in rows for name in ("torch.clone", "warm copy_") if name in row["sides"]):
        share, best = (1 / _times(row, name, of) for of in ("median_us", "min_us"))
        text = f"{share:.0%}, fastest runs {best:.0%} (half, if what the copy writes counts too)"
        what = f"{row['name']}: bandwidth, of that of {name} of the same bytes"
        found.append((what, "50%" if name == "torch.clone" else "-", text))
    beside = [row for row in rows if "fp32 path" in row["sides"]]
    if beside:
        slowest = max(beside, key=lambda row: _times(row, "fp32 path"))
        times, best = (_times(slowest, "fp32 path", of) for of in ("median_us", "min_us"))
        text = f"{times:.2f}x, fastest runs {best:.2f}x ({slowest['name']}; {len(beside)} formats)"
        found.append(("decode, other formats: time of the fp32 path", "<= 2x", text))
    return found


def _times(row: Row, side: str, of: str = "median_us") -> float:
    """How many times the side's time the kernel took."""
    return float(row["sides"]["kernel"][of] / row["sides"][side][of])


def _cuda_goals(rows: list[Row]) -> list[tuple[str, str, str]]:
    """Shares of the copy bandwidth at batch >= 64 and context >= 4096; and against SDPA over gathered pages in bf16."""
    large = [row for row in rows if row["batch"] >= 64 and row["context"] >= 4096]
    gqa = [row for row in large if row["shape"]["latent_rank"] is None]
    found = []
    for name, goal in GOALS.items():
        of_format = [row for row in gqa if row["kv_format"] == name]
        if of_format:
            text = _worst(of_format, lambda row: float(row["share_of_copy"]), "{:.0%}")
            found.append((f"{name} decode, batch >= 64, context >= 4096: share of copy bandwidth", f"{goal:.0%}", text))
    gathered = {
        (row["shape"]["name"], _sizes(row)): row["sides"]["sdpa, gathered"]["median_us"]
        for row in rows
        if "sdpa, gathered" in row["sides"]
    }
    beside = [row for row in rows if (row["shape"]["name"], _sizes(row)) in gathered]
    if beside:
        text = _worst(beside, lambda row: gathered[row["shape"]["name"], _sizes(row)] / float(row["us"]), "{:.1f}x")
        found.append(("decode, every format: times as fast as bf16 SDPA over gathered pages", "> 1x", text))
    return found


def _worst(rows: list[Row], figure: Callable[[Row], float], form: str) -> str:
    row = min(rows, key=figure)
    return f"{form.format(figure(row))} ({row['name']}; {len(rows)} cases)"


def _not_timed(results: list[Row]) -> str:
    """Wrong, failed and skipped cases, gathered by reason."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in results:
        if row["status"] != "ok":
            by_reason.setdefault((row["status"], row["reason"]), []).append(row["name"])
    lines = [
        f"- {status.upper() if status != 'skipped' else status}: {reason}: {'; '.join(names)}"
        for (status, reason), names in by_reason.items()
    ]
    return "## Not timed\n\n" + "\n".join(lines) if lines else ""
