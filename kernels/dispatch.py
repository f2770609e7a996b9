"""One small table: backend name -> the four operations that touch the KV pool.

`torch` runs anywhere; `triton` needs a GPU (or, for tests, Triton's interpreter) and is imported only when
it is chosen.
Paper: section 5.1. Does NOT know: models, steps, layers.
"""

import importlib.util
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from minipaged.kernels.reference import attention as reference_attention
from minipaged.kernels.reference import cache as reference_cache

logger = logging.getLogger(__name__)


class Backend(NamedTuple):
    """The operations of one backend; `kernels/reference` documents their arguments."""

    name: str
    write_kv: Callable[..., None]
    paged_attention: Callable[..., Tensor]
    copy_blocks: Callable[..., None]
    swap_blocks: Callable[..., None]


def _load_torch() -> Backend:
    return Backend(
        "torch",
        reference_cache.write_kv,
        reference_attention.paged_attention,
        reference_cache.copy_blocks,
        reference_cache.swap_blocks,
    )


def _load_triton() -> Backend:
    from minipaged.kernels.triton import attention, cache

    return Backend("triton", cache.write_kv, attention.paged_attention, cache.copy_blocks, cache.swap_blocks)


BACKENDS: dict[str, Callable[[], Backend]] = {"torch": _load_torch, "triton": _load_triton}


def why_not_triton(device: torch.device) -> str | None:
    """What the Triton backend lacks on this device, or None if it can run."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton kernels run on CUDA and ROCm devices, this one is {device.type!r}"
    return None


def select_backend(name: str, device: torch.device | str) -> Backend:
    """The backend called `name` ("torch", "triton"), or the right one for the device ("auto").

    Raises ValueError for an unknown name, and for "triton" where it cannot run, saying what is missing.
    """
    device = torch.device(device)
    if name == "auto":
        name = "triton" if device.type == "cuda" and why_not_triton(device) is None else "torch"
        logger.info("attention backend: %s (chosen for device %s)", name, device)
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}: choose auto, {', '.join(BACKENDS)}")
    if name == "triton" and (missing := why_not_triton(device)) is not None:
        raise ValueError(f"attention backend 'triton' cannot be used: {missing}; use 'torch' or 'auto'")
    return BACKENDS[name]()
