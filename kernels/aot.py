"""Ahead-of-time report: every kernel compiled for GPUs that need not be present, and what its code uses.

The launchers themselves say what is compiled: they run on small CPU tensors with the kernels replaced by recorders,
so the signatures, tiles and specializations are those of a real launch. Registers, stack and local memory are read
from the cubin by the cuobjdump that Triton ships. `python -m kernels.aot` prints the table and fails on a spill.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels import attention_mass, cache_write, cache_write_open, merge_splits, mla_attention, paged_attention
from kernels.aot_variants import VARIANTS, Variant, run_variant

CAPABILITIES = (80, 90, 100)  # A100, H100 and H200, B200
SHARED_PER_BLOCK = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # CUDA programming guide, table of capabilities
SHARED_PER_SM = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
SHARED_RESERVED = 1 << 10  # per block, by the system
KERNELS = (
    (paged_attention, "paged_attention_kernel"),
    (attention_mass, "attention_mass_kernel"),
    (mla_attention, "mla_attention_kernel"),
    (merge_splits, "merge_splits_kernel"),
    (cache_write, "reshape_and_cache_kernel"),
    (cache_write, "write_latent_kernel"),
    (cache_write_open, "write_open_kernel"),
)
_TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64",
    torch.int8: "*i8", torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
}  # fmt: skip


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel uses. stack and local: bytes a thread; more than 0 means that registers spill.

    shared: bytes a block. blocks_per_sm: how many fit a multiprocessor at once; occupancy: share of its 64 warps.
    """

    kernel: str
    variant: str
    capability: int
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    num_warps: int
    blocks_per_sm: int
    occupancy: float

    @property
    def fits(self) -> bool:
        """No spill, and a block's shared memory exists on that GPU."""
        return not self.stack_bytes and not self.local_bytes and self.shared_bytes <= SHARED_PER_BLOCK[self.capability]


class Recorder:
    """Stands in for a kernel: remembers how it is launched."""

    def __init__(
        self, kernel: JITFunction[Any], launches: list[tuple[JITFunction[Any], dict[str, Any], dict[str, int]]]
    ):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, num_warps: int, num_stages: int = 3, **constants: Any) -> None:
            bound = dict(zip(self.kernel.arg_names, args, strict=False)) | constants
            self.launches.append((self.kernel, bound, {"num_warps": num_warps, "num_stages": num_stages}))

        return launch


@contextmanager
def recorded_launches() -> Iterator[list[tuple[JITFunction[Any], dict[str, Any], dict[str, int]]]]:
    """Within: kernels are not run; the launches are collected in the list."""
    launches: list[tuple[JITFunction[Any], dict[str, Any], dict[str, int]]] = []
    with ExitStack() as stack:
        for module, name in KERNELS:
            kernel = getattr(module, name)
            if not isinstance(kernel, JITFunction):
                raise ValueError("Nothing can be compiled with TRITON_INTERPRET=1: unset it and start again.")
            stack.enter_context(mock.patch.object(module, name, Recorder(kernel, launches)))
        for module in (paged_attention, mla_attention):
            stack.enter_context(mock.patch.object(module, "num_processors", return_value=132))
        yield launches


def compile_variant(variant: Variant, capability: int) -> list[Resources]:
    """Compile the kernels that a variant is about, for one compute capability; passes on Triton's CompilationError."""
    with recorded_launches() as launches:
        run_variant(variant, native_e4m3=capability >= 89)
    if variant.what == "mass":  # the first pass is a variant of its own
        launches = [launch for launch in launches if launch[0].fn.__name__ == "attention_mass_kernel"]
    return [_compile(variant.name, *launch, capability) for launch in launches]


def _compile(
    variant: str, kernel: JITFunction[Any], bound: dict[str, Any], options: dict[str, int], capability: int
) -> Resources:
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = bound[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _TYPES[value.dtype] if isinstance(value, Tensor) else _scalar_type(value)
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = _resource_usage(compiled.asm["cubin"])
    shared, num_warps = compiled.metadata.shared, options["num_warps"]
    blocks = _blocks_per_sm(usage["REG"], shared, num_warps, capability)
    return Resources(
        kernel=kernel.fn.__name__.removesuffix("_kernel"),
        variant=variant,
        capability=capability,
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        local_bytes=usage["LOCAL"],
        shared_bytes=shared,
        num_warps=num_warps,
        blocks_per_sm=blocks,
        occupancy=blocks * num_warps / 64,
    )


def _scalar_type(value: float) -> str:
    return "i32" if isinstance(value, int) else "fp32"


def _blocks_per_sm(registers: int, shared: int, num_warps: int, capability: int) -> int:
    """Limited by the register file (allocated by 256 a warp), shared memory, 64 warps and 32 blocks."""
    by_registers = 65536 // (-(-registers * 32 // 256) * 256 * num_warps)
    by_shared = SHARED_PER_SM[capability] // (shared + SHARED_RESERVED)
    return min(by_registers, by_shared, 64 // num_warps, 32)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(tool), "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


def report(
    capabilities: Sequence[int] = CAPABILITIES, variants: Sequence[Variant] = VARIANTS
) -> tuple[list[Resources], list[str]]:
    """Resources of every variant on every capability, in that order, and a line for each that does not compile."""
    jobs = [(variant, capability) for variant in variants for capability in capabilities]
    rows: list[Resources] = []
    failed: list[str] = []
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        futures = [pool.submit(compile_variant, *job) for job in jobs]
        for (variant, capability), future in zip(jobs, futures, strict=True):
            try:
                rows += future.result()
            except Exception as error:  # whatever the compiler raises, the other variants still count
                failed.append(f"{variant.name} on sm_{capability} does not compile: {str(error).splitlines()[-1]}")
    return rows, failed


def to_markdown(rows: Sequence[Resources]) -> str:
    """One line a kernel and variant; each cell is registers / shared KiB / occupancy, with spills spelled out."""
    capabilities = sorted({row.capability for row in rows})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        spill = f" **stack {row.stack_bytes} local {row.local_bytes}**" if row.stack_bytes or row.local_bytes else ""
        cell = f"{row.registers} / {row.shared_bytes / 1024:.0f} / {row.occupancy:.0%}{spill}"
        cells.setdefault((row.kernel, row.variant), {})[row.capability] = cell
    lines = [
        "Registers a thread / shared memory a block (KiB) / occupancy.",
        "",
        "| kernel | variant | " + " | ".join(f"sm_{c}" for c in capabilities) + " |",
        "|---|---|" + "---|" * len(capabilities),
    ]
    for (kernel, variant), by_capability in cells.items():
        lines.append(f"| {kernel} | {variant} | " + " | ".join(by_capability.get(c, "") for c in capabilities) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit code 1 when a variant does not compile, spills or exceeds a block's shared memory."""
    parser = argparse.ArgumentParser(prog="kvoncall bench aot", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--capability", type=int, action="append", choices=CAPABILITIES, help="default: all")
    options = parser.parse_args(argv)
    rows, failed = report(options.capability or CAPABILITIES)
    if options.json:
        kernels = [asdict(row) for row in rows]
        print(json.dumps({"triton": triton.__version__, "kernels": kernels, "failed": failed}, indent=1))
    else:
        print(f"triton {triton.__version__}\n\n{to_markdown(rows)}")
    failed += [
        f"{row.kernel} ({row.variant}) on sm_{row.capability} spills or needs too much memory"
        for row in rows
        if not row.fits
    ]
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
