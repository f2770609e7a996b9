"""Backend name -> operations on the KV pool, greedy sampling, and the operations of fused layers.

`torch` runs anywhere; `cpp` needs a CPU and a C++ compiler; `triton` needs a GPU (or, for tests, Triton's
interpreter). The latter two are imported only when they are chosen. Paper: section 5.1.

Shapes, the same for every backend: T query tokens, Hq query heads, Hkv KV heads, head sizes Dk and Dv;
key pool `[num_blocks, Hkv, block_size, Dk]`, value pool `[num_blocks, Hkv, block_size, Dv]`.
"""

import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from minipaged.kernels.cpp.build import BuildError, load_library
from minipaged.kernels.metadata import AttentionMetadata
from minipaged.kernels.reference import attention as reference_attention
from minipaged.kernels.reference import cache as reference_cache

logger = logging.getLogger(__name__)

WriteKV = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(key [T, Hkv, Dk], value [T, Hkv, Dv], key pool, value pool, slot_mapping [T] int64); -1 is skipped."""

CopyBlocks = Callable[[list[Tensor], Tensor, Tensor], None]
"""(pools, source [n] int64, destination [n] int64), in every pool; all reads happen before all writes."""

SwapBlocks = Callable[[list[Tensor], list[Tensor], Tensor, Tensor], None]
"""(source pools, destination pools, source [n] int64, destination [n] int64), pool by pool."""

GreedyTokens = Callable[[Tensor], Tensor]
"""Logits [R, V] of a float type -> each row's argmax (the first) and its log-probability, [R, 2] float32:
token ids (below 2^24) are exact."""


class PagedAttention(Protocol):
    """(query [T, Hq, Dk], key pool, value pool, metadata, **`AttentionParameters`) -> [T, Hq, Dv]."""

    def __call__(  # noqa: D102
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


def greedy_tokens(logits: Tensor) -> Tensor:
    """See `GreedyTokens`; with PyTorch's operations."""
    logits = logits.float()
    tokens = logits.argmax(-1, keepdim=True)
    return torch.cat((tokens, logits.gather(1, tokens) - logits.logsumexp(-1, keepdim=True)), dim=1)


class LayerOperations(NamedTuple):
    """A layer's operations between matrix multiplications, one pass each, for rows of any of `dtypes`."""

    dtypes: tuple[torch.dtype, ...]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(rows [..., D], weight [D], epsilon) -> normed rows, rounded before a weight of their own dtype,
    and only after one of float32."""
    add_rms_norm_: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(rows [T, D], residual [T, D], weight, epsilon): rows += residual; -> the normed sum."""
    rms_norm_heads_: Callable[[Tensor, Tensor, float], None]
    """(heads [T, H, D], weight [D], epsilon): each head in place."""
    rotate_heads_: Callable[[Tensor, Tensor, Tensor], None]
    """(heads [T, H, D], cosines [T, D], sines [T, D]): RoPE in place."""
    silu_gate: Callable[[Tensor], Tensor]
    """Rows [T, 2 * D], gate before up -> silu(gate) * up [T, D]."""
    gelu_gate: Callable[[Tensor], Tensor]
    """The same with GELU (tanh approximation)."""


class Backend(NamedTuple):
    """The operations of one backend; the defaults are the reference's."""

    name: str = "torch"
    write_kv: WriteKV = reference_cache.write_kv
    paged_attention: PagedAttention = reference_attention.paged_attention
    copy_blocks: CopyBlocks = reference_cache.copy_blocks
    swap_blocks: SwapBlocks = reference_cache.swap_blocks
    greedy_tokens: GreedyTokens = greedy_tokens
    layer: LayerOperations | None = None
    """None: layers stay as they are."""


def _load_cpp() -> Backend:
    from minipaged.kernels.cpp import attention, build, elementwise

    return Backend(
        "cpp",
        write_kv=attention.write_kv,
        paged_attention=attention.paged_attention,
        greedy_tokens=elementwise.greedy_tokens,
        layer=_layer_operations(build.DTYPES, elementwise),
    )


def _load_triton() -> Backend:
    from minipaged.kernels.triton import attention, cache, elementwise, greedy

    return Backend(
        "triton",
        write_kv=cache.write_kv,
        paged_attention=attention.paged_attention,
        copy_blocks=cache.copy_blocks,
        swap_blocks=cache.swap_blocks,
        greedy_tokens=greedy.greedy_tokens,
        layer=_layer_operations(elementwise.DTYPES, elementwise),
    )


def _layer_operations(dtypes: tuple[torch.dtype, ...], own: Any) -> LayerOperations:
    names = LayerOperations._fields[1:]
    return LayerOperations(dtypes, *(getattr(own, name) for name in names))


OLDEST_CHIP = (8, 0)  # older ones have neither asynchronous copies nor bfloat16
BACKENDS = {"torch": Backend, "triton": _load_triton, "cpp": _load_cpp}


def why_not_triton(device: torch.device) -> str | None:
    """What the Triton backend lacks on this device, or None if it can run."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            f"Triton kernels run on CUDA and ROCm devices, this one is {device.type!r} "
            "(with TRITON_INTERPRET=1 they run on a CPU, too, slowly)"
        )
    if device.type == "cuda" and torch.cuda.is_available() and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < OLDEST_CHIP:
            return f"Triton kernels need a chip of sm_80 or newer (Ampere), this one is sm_{major}{minor}"
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

    Raises ValueError for a name that is unknown or cannot run here, saying what is missing.
    """
    device = torch.device(device)
    why_not = {"triton": why_not_triton, "cpp": why_not_cpp}
    if name == "auto":
        name, remark = "triton" if device.type == "cuda" else "cpp", ""
        if (missing := why_not[name](device)) is not None:
            name, remark = "torch", f"; {name} cannot be used: {missing}"
        can_be_mended = device.type == "cuda" or (device.type == "cpu" and sys.platform != "win32")
        level = logging.WARNING if remark and can_be_mended else logging.INFO
        logger.log(level, "attention backend: %s (chosen for device %s%s)", name, device, remark)
    elif name in why_not and (missing := why_not[name](device)) is not None:
        raise ValueError(f"attention backend {name!r} cannot be used: {missing}; use 'torch' or 'auto'")
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}: choose auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]()
