"""One small table: backend name -> the operations on the KV pool, and the greedy choice.

`torch` runs anywhere; `cpp` needs a CPU and a C++ compiler; `triton` needs a GPU (or, for tests, Triton's
interpreter). The latter two are imported only when they are chosen.
Paper: section 5.1. Does NOT know: models, steps, layers.
"""

import importlib.util
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from minipaged.kernels.cpp.build import BuildError, load_library
from minipaged.kernels.reference import attention as reference_attention
from minipaged.kernels.reference import cache as reference_cache
from minipaged.kernels.reference.sampling import greedy_tokens

logger = logging.getLogger(__name__)


class Backend(NamedTuple):
    """The operations of one backend; `kernels/reference` documents their arguments."""

    name: str
    write_kv: Callable[..., None]
    paged_attention: Callable[..., Tensor]
    copy_blocks: Callable[..., None]
    swap_blocks: Callable[..., None]
    greedy_tokens: Callable[[Tensor], tuple[Tensor, Tensor]]


def _load_torch() -> Backend:
    return Backend(
        "torch",
        reference_cache.write_kv,
        reference_attention.paged_attention,
        reference_cache.copy_blocks,
        reference_cache.swap_blocks,
        greedy_tokens,
    )


def _load_cpp() -> Backend:
    from minipaged.kernels.cpp import attention, elementwise

    return _load_torch()._replace(
        name="cpp",
        write_kv=attention.write_kv,
        paged_attention=attention.paged_attention,
        greedy_tokens=elementwise.greedy_tokens,
    )


def _load_triton() -> Backend:
    from minipaged.kernels.triton import attention, cache

    return _load_torch()._replace(
        name="triton",
        write_kv=cache.write_kv,
        paged_attention=attention.paged_attention,
        copy_blocks=cache.copy_blocks,
        swap_blocks=cache.swap_blocks,
    )


BACKENDS: dict[str, Callable[[], Backend]] = {
    "torch": _load_torch,
    "triton": _load_triton,
    "cpp": _load_cpp,
}


def why_not_triton(device: torch.device) -> str | None:
    """What the Triton backend lacks on this device, or None if it can run."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton kernels run on CUDA and ROCm devices, this one is {device.type!r}"
    return None


def why_not_cpp(device: torch.device) -> str | None:
    """What the C++ backend lacks on this device, or None if it can run. Compiles it, the first time."""
    if device.type != "cpu":
        return f"C++ kernels run on CPUs, this device is {device.type!r}"
    try:
        load_library()
    except BuildError as error:
        return str(error)
    return None


def select_backend(name: str, device: torch.device | str) -> Backend:
    """The backend called `name` ("torch", "triton", "cpp"), or the right one for the device ("auto").

    Raises ValueError for an unknown name, and for one that cannot run, saying what is missing.
    """
    device = torch.device(device)
    why_not = {"triton": why_not_triton, "cpp": why_not_cpp}
    if name == "auto":
        name, remark = "triton" if device.type == "cuda" else "cpp", ""
        if (missing := why_not[name](device)) is not None:
            name, remark = "torch", f"; {name} cannot be used: {missing}"
        logger.info("attention backend: %s (chosen for device %s%s)", name, device, remark)
    elif name in why_not and (missing := why_not[name](device)) is not None:
        raise ValueError(f"attention backend {name!r} cannot be used: {missing}; use 'torch' or 'auto'")
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}: choose auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]()
