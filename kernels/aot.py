"""Ahead-of-time compilation of the Triton kernels for a GPU that need not be present, and what the code would use.

Compiles to a cubin and reads registers, stack, local and shared memory with the cuobjdump that Triton ships.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class KernelResources:
    """Per thread: registers, stack and local memory (bytes; above 0 means spills). Per block: shared memory (bytes)."""

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int


def compile_kernel(
    name: str,
    types: Mapping[str, str],
    constants: Mapping[str, int],
    *,
    capability: int,
    num_warps: int = 4,
    num_stages: int = 2,
) -> KernelResources:
    """Compile one kernel for compute capability `capability` (80, 90, 100, ...).

    name: "module:kernel". types: Triton types of pointers and floats by argument ("*fp16"); other arguments that
    are not constants are i32. Pointers and strides are taken as divisible by 16, as the launcher would find them.
    Raises ValueError when TRITON_INTERPRET=1 replaced the compiler by the interpreter.
    """
    module, attribute = name.split(":")
    kernel = getattr(importlib.import_module(module), attribute)
    if not isinstance(kernel, JITFunction):
        raise ValueError(f"{name} cannot be compiled: unset TRITON_INTERPRET and start again.")
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names}
    aligned = [i for i, arg in enumerate(kernel.arg_names) if signature[arg].startswith("*") or "_stride" in arg]
    source = ASTSource(
        kernel, signature, constexprs=dict(constants), attrs={(i,): [["tt.divisibility", 16]] for i in aligned}
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = _resource_usage(compiled.asm["cubin"])
    return KernelResources(usage["REG"], usage["STACK"], usage["LOCAL"], compiled.metadata.shared)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(tool), "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
