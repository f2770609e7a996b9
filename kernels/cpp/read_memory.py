"""The memory bandwidth that can be reached; the source is `read_memory.cpp`."""

import torch
from torch import Tensor

from minipaged.kernels.cpp.build import INTEGER, POINTER, declare

_sum = declare("sum_floats", POINTER, INTEGER, POINTER, INTEGER)


def sum_floats(numbers: Tensor) -> Tensor:
    """The sum [] of contiguous float32 numbers [N], read in four alternating streams."""
    total = numbers.new_empty(())
    _sum(numbers.data_ptr(), numbers.numel(), total.data_ptr(), torch.get_num_threads())
    return total
