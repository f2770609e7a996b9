"""What weights took before they were packed goes back to the system."""

import ctypes
import sys
from pathlib import Path

import pytest
import torch

from minipaged.config import config_from
from minipaged.execution.model_runner import ModelRunner
from minipaged.kernels.dispatch import why_not_cpp
from tests.models.zoo import build

MEGABYTE = 1 << 20
needs_cpp = pytest.mark.skipif(
    why_not_cpp(torch.device("cpu")) is not None, reason="the C++ kernels cannot be built here"
)


def anonymous_megabytes() -> int:
    """Memory of this process that is not a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) // 1024


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc can be asked"
)
@pytest.mark.parametrize("backend", ["torch", pytest.param("cpp", marks=needs_cpp)])
def test_memory_that_was_freed_in_the_middle_of_the_heap_goes_back(backend):
    """Catches a quantized model that takes three times the memory of its weights."""
    runner = ModelRunner(build("llama"), config_from({"num_blocks": 8, "attention_backend": backend}))
    pieces = [torch.ones(MEGABYTE // 64) for _ in range(16 * 200)]  # 200 MB, smaller than glibc maps
    kept = pieces[::50]  # (at the end of the heap, freed memory goes back by itself)
    full = anonymous_megabytes()
    del pieces
    assert anonymous_megabytes() > full - 50, "nothing would be caught"
    runner.optimize()
    assert anonymous_megabytes() < full - 150
    del kept
