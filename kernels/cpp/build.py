"""Compile the C++ kernels once for this machine, and cache the library: Linux and macOS, with gcc or clang.

It is in the user's cache directory under a hash of everything that it depends on: sources, command, compiler,
CPU. It is written to a temporary file and then renamed, so that processes that start together find all of it
or none. Its digest is in a file next to it: a library that a full disk or a crash truncated is rebuilt.

Apple's clang comes without an OpenMP runtime; torch's copy is linked, because a process with two runtimes is
stopped. Without any, the kernels use one thread.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from minipaged.progress import progress_bar

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of the rows that the kernels read and write."""

POINTER, INTEGER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared")
ANOTHER_FOLDER = "set XDG_CACHE_HOME to a folder of yours"
PROBE = """
#ifndef _OPENMP
#error without OpenMP
#endif
int main() {}
"""


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here; the message says why."""


def find_compiler() -> list[str]:
    """The command of the C++ compiler: $CXX if it is set ("ccache g++", say), else c++, g++ or clang++.

    Raises:
        BuildError: there is none, or $CXX is not a command.
    """
    if sys.platform == "win32":  # gcc's AVX code crashes there: gcc.gnu.org/bugzilla/show_bug.cgi?id=54412
        raise BuildError("they are not built on Windows; in WSL they are")
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for candidate in candidates:
        try:
            program, *options = shlex.split(candidate)
        except ValueError:
            raise BuildError(f'CXX is {candidate!r}; give a command like "ccache g++", or unset it') from None
        if path := shutil.which(program):
            return [path, *options]
    raise BuildError(f"no C++ compiler found (looked for {', '.join(candidates)}): {what_to_install()}")


def what_to_install() -> str:
    """How to get a compiler on this system."""
    return "xcode-select --install" if sys.platform == "darwin" else "install g++ or clang"


def processor_flag() -> str:
    """Use everything that this CPU has; on Arm, not every clang knows `-march=native`."""
    return "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"


def openmp_flags() -> tuple[str, ...]:
    """Flags that turn on OpenMP."""
    if sys.platform != "darwin":
        return ("-fopenmp",)
    runtime = Path(torch.__file__).parent / "lib"
    return ("-Xpreprocessor", "-fopenmp", f"-L{runtime}", "-lomp", f"-Wl,-rpath,{runtime}")


def cache_directory() -> Path:
    """Where compiled libraries are kept: minipaged/ in $XDG_CACHE_HOME or ~/.cache.

    For a user without a home directory, minipaged-UID/ among the temporary files.

    Raises:
        BuildError: that one belongs to somebody else, whose libraries must not be loaded.
    """
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if not cache.startswith("~"):
        return Path(cache) / "minipaged"
    own = Path(tempfile.gettempdir()) / f"minipaged-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    if own.lstat().st_uid != os.getuid():
        raise BuildError(f"{own} belongs to another user; {ANOTHER_FOLDER}")
    return own


def library_path(compiler: list[str], flags: tuple[str, ...]) -> Path:
    """Where the library of these sources, compiler, flags and processor belongs.

    Raises:
        BuildError: the compiler does not run.
    """
    texts = [path.read_text(encoding="utf-8") for path in (*SOURCES, *HEADERS)]
    try:
        version = _run([*compiler, "--version"])
    except BuildError as error:  # macOS has a `c++` that only asks for the real one
        raise BuildError(f"{error}; {what_to_install()}") from error
    parts = [*texts, *compiler, *flags, version, _processor()]
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    return cache_directory() / f"kernels-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}{suffix}"


def is_whole(path: Path) -> bool:
    """Whether there is a library, all of it: a truncated one is a bus error where it is first read."""
    digest = path.with_suffix(".sha256")
    return path.exists() and digest.exists() and digest.read_text(encoding="utf-8") == _digest(path)


@cache
def load_library() -> ctypes.CDLL:
    """The compiled kernels, built if this is the first time.

    Raises:
        BuildError: no compiler, it fails, or the library cannot be written or loaded.
    """
    compiler, plain = find_compiler(), (*FLAGS, processor_flag())
    flags = (*plain, *openmp_flags())
    try:
        path = library_path(compiler, flags)
        if not is_whole(path) and not has_openmp(compiler):
            flags, path = plain, library_path(compiler, plain)
        if not is_whole(path):
            _build([*compiler, *flags], path)
    except OSError as error:
        raise BuildError(f"{error}; {ANOTHER_FOLDER}") from error
    library = _open(path)
    if flags is plain:
        logger.info("C++ kernels use one thread: %s has no OpenMP; install libomp", compiler[0])
    return library


def _open(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        library.write_tokens  # noqa: B018
    except (OSError, AttributeError) as error:
        noexec = "failed to map segment" in str(error)
        raise BuildError(f"{error}; {ANOTHER_FOLDER if noexec else 'set CXX to g++ or clang++'}") from error
    return library


def has_openmp(compiler: list[str]) -> bool:
    """Whether a program with OpenMP compiles and finds its runtime."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "probe.cpp"
        source.write_text(PROBE, encoding="utf-8")
        try:
            _run([*compiler, *openmp_flags(), str(source), "-o", str(source.with_suffix(""))])
        except BuildError:
            return False
    return True


def _build(command: list[str], path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch) / path.name
        logger.info("compiling the C++ kernels for this machine, once, with %s", command[0])
        with progress_bar("compiling"):
            _run([*command, *map(str, SOURCES), "-o", str(built)])
        if not built.exists() or not built.stat().st_size:
            raise BuildError(f"{Path(command[0]).name} wrote no library")
        digest = built.with_suffix(".sha256")
        digest.write_text(_digest(built), encoding="utf-8")
        built.replace(path)
        digest.replace(path.with_suffix(".sha256"))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def declare(name: str, *arguments: Any) -> Any:
    """The function of the library with that name and these argument types; it returns nothing."""
    function = getattr(load_library(), name)
    function.argtypes, function.restype = arguments, None
    return function


def declare_by_dtype(name: str, *arguments: Any) -> dict[torch.dtype, Any]:
    """The functions `{name}_float32`, `{name}_bfloat16` and so on, by the dtype of their rows."""
    return {dtype: declare(f"{name}_{str(dtype).removeprefix('torch.')}", *arguments) for dtype in DTYPES}


def _run(command: list[str]) -> str:
    english = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", env=english)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error.strerror}") from error
    if done.returncode:
        errors = (line for line in done.stderr.splitlines() if "error" in line)
        raise BuildError(f"{Path(command[0]).name} failed: {next(errors, f'exit status {done.returncode}')}")
    return done.stdout


def _processor() -> str:
    """What `-march=native` depends on: the instruction sets, where the system lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
