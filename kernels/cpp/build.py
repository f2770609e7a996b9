"""Compile the C++ kernels once for this machine, and keep the result.

The library lies in the user's cache directory under a hash of everything that shaped it: sources, command,
compiler, processor. It is written to a temporary place and then renamed: processes that start together each
find all of it or none. Its digest stands behind it: what a full disk or a crash has cut is built again.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

DTYPES = (torch.float32, torch.bfloat16)
"""Types of the rows that the kernels read and write."""

POINTER, INTEGER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
CPP_FILES = ("paged_attention.cpp", "elementwise.cpp", "panel_product.cpp")
SOURCES = [Path(__file__).with_name(name) for name in CPP_FILES]
HEADER = Path(__file__).with_name("vectors.h")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared")

DIGEST_SIZE = hashlib.sha256().digest_size


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here; the message says why."""


def find_compiler() -> str:
    """The path of the C++ compiler: $CXX if it is set, else the first of c++, g++, clang++.

    Raises:
        BuildError: there is none.
    """
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if path := next(filter(None, map(shutil.which, candidates)), None):
        return path
    raise BuildError(f"no C++ compiler found (looked for {', '.join(candidates)})")


def cache_directory() -> Path:
    """Where compiled libraries are kept: minipaged/ in $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "minipaged"


def library_path(compiler: str) -> Path:
    """Where the library of these sources, compiler and processor belongs.

    Raises:
        BuildError: the compiler does not run.
    """
    texts = [path.read_text() for path in (*SOURCES, HEADER)]
    parts = [*texts, compiler, *FLAGS, _run([compiler, "--version"]), _processor()]
    return cache_directory() / f"kernels-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.so"


def sealed(library: bytes) -> bytes:
    """A library with its digest behind it, where no loader looks."""
    return library + hashlib.sha256(library).digest()


def is_whole(path: Path) -> bool:
    """Whether there is a library, all of it: a truncated one is a bus error where it is first read."""
    data = path.read_bytes() if path.exists() else b""
    return len(data) > DIGEST_SIZE and sealed(data[:-DIGEST_SIZE]) == data


@cache
def load_library() -> ctypes.CDLL:
    """The compiled kernels, built if this is the first time.

    Raises:
        BuildError: no compiler, it fails, or the library cannot be written or loaded.
    """
    compiler = find_compiler()
    try:
        path = library_path(compiler)
        if not is_whole(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                built = Path(scratch) / path.name
                _run([compiler, *FLAGS, *map(str, SOURCES), "-o", str(built)])
                built.write_bytes(sealed(built.read_bytes()))
                built.rename(path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(str(error)) from error


def declare(name: str, *arguments: Any) -> Any:
    """The function of the library with that name and these argument types; it returns nothing."""
    function = getattr(load_library(), name)
    function.argtypes, function.restype = arguments, None
    return function


def declare_by_dtype(name: str, *arguments: Any) -> dict[torch.dtype, Any]:
    """The functions `{name}_float32` and `{name}_bfloat16`, by the dtype of their rows."""
    return {dtype: declare(f"{name}_{str(dtype).removeprefix('torch.')}", *arguments) for dtype in DTYPES}


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = (line for line in done.stderr.splitlines() if "error" in line)
        raise BuildError(f"{Path(command[0]).name} failed: {next(errors, f'exit status {done.returncode}')}")
    return done.stdout


def _processor() -> str:
    """What `-march=native` depends on: the instruction sets, where the system lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
