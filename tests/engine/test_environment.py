"""What the command line sets for its process, and what it leaves alone."""

import ctypes
import os
import subprocess
import sys

import pytest

REPORT = """
import ctypes, os
from minipaged.environment import prepare_process

class Info(ctypes.Structure):  # struct mallinfo2 of glibc
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd a b c d e".split()]

prepare_process()
print(os.environ["OMP_WAIT_POLICY"], os.environ["THP_MEM_ALLOC_ENABLE"])
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.mallinfo2.restype = ctypes.c_void_p, Info
before = libc.mallinfo2().hblks
libc.malloc(ctypes.c_size_t(64 << 20))
print(libc.mallinfo2().hblks - before)
"""

needs_glibc = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="settings of glibc, which reports them from 2.33 on",
)


def report(**variables):
    """The settings, and how many of one 64 MB block were mapped for it alone."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MALLOC_", "THP_"))}
    done = subprocess.run(
        [sys.executable, "-c", REPORT], env=kept | variables, capture_output=True, text=True, check=True
    )
    settings, num_mapped = done.stdout.splitlines()
    return settings.split(), int(num_mapped)


@needs_glibc
def test_freed_memory_is_kept_for_the_next_step():
    """Catches large results that are mapped, cleared and unmapped in each step."""
    assert report() == (["passive", "1"], 0)


@needs_glibc
def test_what_the_user_has_set_stays():
    """Catches a user's own measurements overruled."""
    given = {"OMP_WAIT_POLICY": "active", "THP_MEM_ALLOC_ENABLE": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    assert report(**given) == (["active", "0"], 1)
