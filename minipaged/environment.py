"""Process settings that the command line makes first, because libraries read most of them on import.

Users of the Python package keep their own environment. Variables that are already set are left alone.
"""

from __future__ import annotations

import ctypes
import os
import sys


def prepare_process() -> None:
    """Make the settings that speed up small models on a CPU. Call before torch is imported."""
    # Threads that spin while they wait steal the core they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Weights and KV pools in huge pages: 3 to 10 % less CPU time on models of 3 and 134 million parameters.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if sys.platform == "linux":
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Have glibc keep freed memory: every step needs it again for the large activations of a prefill.

    Else each is mapped and zeroed again, page by page: 6 to 14 % of the CPU time of long prompts in chunks.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        for name, number in (("MALLOC_TRIM_THRESHOLD_", -1), ("MALLOC_MMAP_THRESHOLD_", -3)):  # <malloc.h>
            if name not in os.environ:
                mallopt(number, 1 << 30)
