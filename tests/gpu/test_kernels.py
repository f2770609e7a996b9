"""Layer 4 under pytest: the checks of `check_kernels`, which also run without it."""

import pytest

from tests.gpu.check_kernels import ALONE, CHECKS, NotRunError
from tests.machine import on_gpu

pytestmark = on_gpu
ALL = [*CHECKS, *(pytest.param(name, marks=pytest.mark.alone) for name in ALONE)]


@pytest.mark.parametrize("name", ALL)
def test_kernels_on_a_gpu(name: str) -> None:
    """See the check's own docstring."""
    check = (CHECKS | ALONE)[name]
    try:
        check()
    except NotRunError as missing:
        pytest.skip(str(missing))
