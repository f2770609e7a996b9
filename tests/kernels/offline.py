"""Compile the kernels for a chip that is not there, through their own wrappers, and read what they need.

A stand-in driver names the target; every launch of a wrapper becomes a compilation with the wrapper's real
arguments, so that argument lists and alignment hints are the ones a device would see.
"""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TARGETS = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 86, 89, 90, 100, 103, 120)}
TARGETS |= {name: GPUTarget("hip", name, 64) for name in ("gfx942", "gfx950")}
SHARED_MEMORY_BYTES = {  # of one program
    **dict.fromkeys(("sm_86", "sm_89", "sm_120"), 99 * 1024),
    "sm_80": 163 * 1024,
    **dict.fromkeys(("sm_90", "sm_100", "sm_103"), 227 * 1024),
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass
class Compiled:
    """One compiled kernel: what it was compiled from, its assembly, and the resources of a program."""

    name: str
    fingerprint: str
    assembly: str
    registers: int
    spilled: int
    shared_bytes: int
    starts_early: bool  # before the kernel before it ends


class StandInDriver:
    """What Triton asks a driver before it compiles."""

    def __init__(self, architecture: str):
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.architecture]

    def get_current_device(self) -> str:
        return self.architecture  # compiled kernels are kept by device

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def compiling_for(architecture: str) -> Iterator[list[Compiled]]:
    """Within this context a launch compiles, and appends to the list, instead of running."""
    compiled: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, **kwargs: Any) -> None:
        kwargs["warmup"] = True
        compiled.append(describe(run(self, *args, **kwargs)))

    previous = driver._active
    driver.set_active(StandInDriver(architecture))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = previous


def describe(kernel: Any) -> Compiled:
    """Read the resources of a compiled kernel from its binary or, for AMD, its assembly."""
    if "amdgcn" in kernel.asm:
        assembly = kernel.asm["amdgcn"]

        def number(key: str) -> int:
            return int(re.search(rf"\.{key}:\s*(\d+)", assembly)[1])

        # (Scalar registers spill to lanes of vector registers, which costs no memory.)
        spilled = number("vgpr_spill_count") + number("private_segment_fixed_size")
        return Compiled(
            kernel.name, kernel.hash, assembly, number("vgpr_count"), spilled, kernel.metadata.shared, False
        )
    usage = resource_usage(kernel.asm["cubin"])
    spilled = usage["STACK"] + usage["LOCAL"]
    needs = usage["REG"], spilled, kernel.metadata.shared
    return Compiled(kernel.name, kernel.hash, kernel.asm["ptx"], *needs, kernel.metadata.launch_pdl)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL and SHARED of the one kernel in a cubin, as cuobjdump reports them."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [str(CUOBJDUMP), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {key: int(number) for key, number in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", report)}
