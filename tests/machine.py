"""What some tests need and not every machine has."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from minipaged.kernels.dispatch import why_not_cpp

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
in_interpreter = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None,
        reason="needs the package triton, and no GPU: Triton's interpreter",
    ),
]


def skip_without_compiler(backend: str) -> None:
    """Where the C++ kernels cannot be built, skip what is to run on them."""
    if backend == "cpp" and (missing := why_not_cpp(torch.device("cpu"))) is not None:
        pytest.skip(missing)
