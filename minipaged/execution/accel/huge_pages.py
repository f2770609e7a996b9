"""Weights in huge pages: in pages of 4 KB, a processor has to wait at the beginning of many of them.

The allocator asks for pages of 2 MB, but memory becomes huge only where a whole such page lies in one tensor
and nobody used it before. Of a model with 134 million parameters that leaves a quarter of the bytes in small
pages in float32, and half of them in 8 bits.
"""

from __future__ import annotations

import ctypes
import os
import sys

HUGE_PAGE = 1 << 21
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # <linux/mman.h>


def move_into_huge_pages(address: int, num_bytes: int) -> int:
    """Let huge pages hold these bytes and what lies around them; the addresses stay.

    Linux 6.1 and newer can; elsewhere, and with `THP_MEM_ALLOC_ENABLE=0`, nothing happens.

    Returns:
        how many huge pages hold the bytes now.
    """
    if sys.platform != "linux" or os.environ.get("THP_MEM_ALLOC_ENABLE") == "0":
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = address // HUGE_PAGE * HUGE_PAGE
    end = -(-(address + num_bytes) // HUGE_PAGE) * HUGE_PAGE
    madvise(start, end - start, MADV_HUGEPAGE)  # else areas with and without the advice meet in a page
    return sum(madvise(page, HUGE_PAGE, MADV_COLLAPSE) == 0 for page in range(start, end, HUGE_PAGE))
