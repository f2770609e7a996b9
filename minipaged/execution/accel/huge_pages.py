"""Weights in huge pages: with pages of 4 KB, the hardware prefetcher stops at the end of each.

The allocator requests pages of 2 MB, but gets them only where a whole such page lies in one tensor and is
touched for the first time there. Of a model with 134 million parameters, this leaves a quarter of the
bytes in small pages in float32, and half of them in 8 bits.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

HUGE_PAGE = 1 << 21
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # <linux/mman.h>
MOST_FAILURES = 8
"""In a row; then memory is too fragmented."""

SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")


def move_into_huge_pages(address: int, num_bytes: int) -> int:
    """Move these bytes, and what shares their huge pages, into huge pages; addresses stay the same.

    Takes a second or more for each GB that has to be moved. Linux 6.1 and newer can; elsewhere, with
    `THP_MEM_ALLOC_ENABLE=0`, or where an administrator has disabled huge pages, nothing happens.

    Returns:
        how many huge pages hold the bytes now.
    """
    if not _are_wanted():
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = address // HUGE_PAGE * HUGE_PAGE
    end = -(-(address + num_bytes) // HUGE_PAGE) * HUGE_PAGE
    madvise(start, end - start, MADV_HUGEPAGE)  # a page that is advised in part only cannot be moved
    num_moved = num_failures = 0
    for page in range(start, end, HUGE_PAGE):
        if madvise(page, HUGE_PAGE, MADV_COLLAPSE) == 0:
            num_moved, num_failures = num_moved + 1, 0
        else:
            num_failures += 1
        if num_failures == MOST_FAILURES:
            break
    return num_moved


def _are_wanted() -> bool:
    if sys.platform != "linux" or os.environ.get("THP_MEM_ALLOC_ENABLE") == "0":
        return False
    try:
        size = int((SETTINGS / "hpage_pmd_size").read_text(encoding="utf-8"))
        return size == HUGE_PAGE and "[never]" not in (SETTINGS / "enabled").read_text(encoding="utf-8")
    except OSError:  # a kernel without them
        return False
