"""Rewrite a model for fast inference on a CPU (on a GPU: `cuda_graph.CUDAGraphRunner`)."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from minipaged.config import ConfigError, Quantization
from minipaged.execution.accel.packed_linear import can_pack, pack_linears
from minipaged.progress import progress_bar


def optimize(
    model: PreTrainedModel, run: Callable[[], object], backend: str, quantization: Quantization = "none"
) -> None:
    """Fuse layers and pack the weights of a CPU model, in place; nobody else can use it afterwards.

    Args:
        model: prepared (see `prepare`); on a GPU it stays as it is.
        run: runs the model once, on a few rows.
        backend: the attention backend; what needs the C++ kernels is done if it is theirs.
        quantization: the format of the linear layers' weights; none: as they are.

    Raises:
        ConfigError: the weights cannot be quantized, and why.
    """
    if quantization != "none" and backend != "cpp":
        raise ConfigError(
            f"quantization is {quantization}, which needs the C++ kernels of a CPU, but the backend is "
            f"{backend}; drop quantization, or install a C++ compiler"
        )
    if model.device.type != "cpu":
        return
    with progress_bar("packing weights"):
        if can_pack():
            if backend == "cpp":
                from minipaged.execution.accel.layer_fusion import fuse_layers  # loads the C++ kernels

                fuse_layers(model, run)
            if quantization == "none":
                pack_linears(model)
        if backend == "cpp":
            from minipaged.execution.accel.panel_linear import quantize_linears, use_panels

            if quantization != "none":
                quantize_linears(model, quantization)
            use_panels(model)
