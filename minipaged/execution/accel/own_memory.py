"""The memory of a model that is rewritten: none for what was replaced, and none of its file."""

from __future__ import annotations

import ctypes
import sys

from torch import nn


def return_freed_memory() -> None:
    """Give the system what replaced weights took: the allocator may keep it, in pieces too small to use."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):  # (glibc)
        trim(0)


def leave_file(model: nn.Module) -> None:
    """Copy weights that are still mapped: they change with their file, and a single one keeps all of it."""
    for weight in (*model.parameters(), *model.buffers()):
        if not weight.untyped_storage().resizable():
            weight.data = weight.data.clone()
