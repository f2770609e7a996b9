"""Layer 4 under pytest: the checks of `check_kernels`, which also run without it."""

import pytest
import torch

from tests.gpu.check_kernels import ALONE, CHECKS, NotRunError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
ALL = [*CHECKS, *(pytest.param(name, marks=pytest.mark.alone) for name in ALONE)]


@pytest.mark.parametrize("name", ALL)
def test_kernels_on_a_gpu(name: str) -> None:
    """See the check's own docstring."""
    check = (CHECKS | ALONE)[name]
    try:
        check()
    except NotRunError as missing:
        pytest.skip(str(missing))
