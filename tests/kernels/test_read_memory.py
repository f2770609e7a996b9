"""The reader that `bench --limits` measures memory with reads everything, once."""

from __future__ import annotations

import pytest
import torch

from minipaged.kernels.dispatch import why_not_cpp

if missing := why_not_cpp(torch.device("cpu")):
    pytest.skip(missing, allow_module_level=True)

from minipaged.kernels.cpp.read_memory import sum_floats


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 320, 64 * 13 + 7, 10_000])
def test_every_number_counts_once(count, threads):
    """Catches a stream that ends early: less memory is read than is counted, so a limit is too high."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        numbers = torch.arange(1, count + 1, dtype=torch.float32)
        assert sum_floats(numbers).item() == pytest.approx(count * (count + 1) / 2, rel=1e-6)
    finally:
        torch.set_num_threads(before)
