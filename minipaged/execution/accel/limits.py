"""The machine's limits: memory bandwidth and the speed of matrix multiplications (`bench --limits`).

A step of few rows reads every weight and the K/V of its sequences once: bytes x steps per second stays below
the first. A prompt takes two operations per weight and token: their rate stays below the second. Where this
is not so, because a window hides keys, a token has few of the experts, or integers are multiplied, no share
is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from minipaged.execution.accel.packed_linear import PackedLinear, can_pack
from minipaged.execution.model_config import text_config
from minipaged.kernels.dispatch import why_not_cpp

READ_BYTES = 1 << 30
"""Far more than the caches: of 256 MB, an L3 cache of 32 MB kept enough to read 3 % too fast."""


def read_bandwidth() -> float:
    """Bytes per second at which this process reads memory with its threads: the best of ten.

    Our C++ alternates between several streams, which on some CPUs is faster than PyTorch's sum.
    """
    numbers = torch.ones(READ_BYTES // 4)
    seconds = _best(lambda: numbers.sum())
    if why_not_cpp(numbers.device) is None:
        from minipaged.kernels.cpp.read_memory import sum_floats

        seconds = min(seconds, _best(lambda: sum_floats(numbers)))
    return READ_BYTES / seconds


def matrix_rate(dtype: torch.dtype) -> float:
    """Operations per second of a GEMM of 256 rows with a weight [1024, 1024]: the best of ten.

    By oneDNN, where it can pack the weight, or by our C++, whichever is faster.
    """
    with torch.inference_mode():
        plain = nn.Linear(1024, 1024, bias=False, dtype=dtype)
        linear = PackedLinear(plain) if can_pack(dtype) else plain
        rows = torch.ones(256, 1024, dtype=dtype)
        seconds = _best(lambda: linear(rows))
        if why_not_cpp(rows.device) is None:
            from minipaged.execution.accel.panel_linear import PanelLinear

            panels = PanelLinear(plain.weight, None, str(dtype).removeprefix("torch."))
            seconds = min(seconds, _best(lambda: panels(rows)))
        return 2 * 256 * 1024**2 / seconds


def shares_of_limits(
    model: PreTrainedModel,
    kv_bytes: float | None,
    decode_steps_per_s: float | None,
    prefill_tok_per_s: float | None,
    quantization: str | None = None,
) -> dict[str, float | None]:
    """The limits, and how much of them decode steps and the linear layers of prompts use.

    `kv_bytes` are those of a decode step's tokens in all layers. The output layer counts for decodes; of a
    prompt, only the last row needs it. None, also of a result: not measured, or without meaning.
    """
    layers: list[Any] = [
        m for m in model.modules() if hasattr(m, "in_features") and hasattr(m, "out_features")
    ]
    head = model.get_output_embeddings()
    has_experts = any(name.endswith("experts") for name, _ in model.named_modules())
    read = operations = None
    if kv_bytes is not None and decode_steps_per_s is not None and not has_experts and not _has_window(model):
        read = (sum(map(weight_bytes, layers)) + kv_bytes) * decode_steps_per_s
    if prefill_tok_per_s is not None and not has_experts and quantization != "w8a8":
        products = sum(layer.in_features * layer.out_features for layer in layers if layer is not head)
        operations = 2 * products * prefill_tok_per_s
    bandwidth, rate = read_bandwidth(), matrix_rate(model.dtype)
    return {
        "limit_read_gb_per_s": bandwidth / 1e9,
        "decode_read_gb_per_s": _per(read, 1e9),
        "decode_share_of_limit": _per(read, bandwidth),
        "limit_gflop_per_s": rate / 1e9,
        "prefill_gflop_per_s": _per(operations, 1e9),
        "prefill_share_of_limit": _per(operations, rate),
    }


def _has_window(model: PreTrainedModel) -> bool:
    """Whether a layer may read less than the whole context."""
    config = text_config(model)
    kinds = {*(getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or ())}
    if not kinds:
        return getattr(config, "sliding_window", None) is not None
    return not kinds <= {"full_attention", "global"}  # (the latter in GPT-Neo)


def _per(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def weight_bytes(layer: Any) -> int:
    """Bytes of a linear layer's weight that one row reads."""
    stored = getattr(layer, "num_bytes", None)
    if stored is not None:
        return int(stored)
    weight = layer.packed if isinstance(layer, PackedLinear) else layer.weight
    return layer.in_features * layer.out_features * weight.element_size()


def _best(work: Callable[[], Tensor]) -> float:
    """Seconds of the fastest of ten calls, after a warm-up."""
    work()
    taken = []
    for _ in range(10):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)
