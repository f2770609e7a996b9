"""Rewrite a model for fast inference (on a GPU there are CUDA graphs, too: `cuda_graph.CUDAGraphRunner`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from minipaged.config import ConfigError, Quantization
from minipaged.execution.accel.activations import pad_activations
from minipaged.execution.accel.huge_pages import move_into_huge_pages
from minipaged.execution.accel.layer_fusion import fuse_layers
from minipaged.execution.accel.own_memory import leave_file, return_freed_memory
from minipaged.execution.accel.packed_linear import pack_linears
from minipaged.execution.accel.plain_linears import use_plain_linears
from minipaged.kernels.dispatch import Backend
from minipaged.progress import progress_bar


def optimize(
    model: PreTrainedModel, run: Callable[[], object], backend: Backend, quantization: Quantization = "none"
) -> None:
    """Fuse layers, and pack the weights of a CPU model, in place; nobody else can use it afterwards.

    Args:
        model: prepared (see `prepare`).
        run: runs the model once, on a few rows.
        backend: layers are fused if it has operations for them; panels need the C++ kernels.
        quantization: the format of the linear layers' weights; none: as they are.

    Raises:
        ConfigError: the weights cannot be quantized, and why.
    """
    if quantization != "none" and backend.name != "cpp":
        raise ConfigError(
            f"quantization is {quantization}, which needs the C++ kernels for CPUs, but the backend is "
            f"{backend.name}; drop quantization, or set attention_backend to cpp (it needs a C++ compiler)"
        )
    if quantization != "none" and model.dtype == torch.float64:
        raise ConfigError(
            f"quantization is {quantization}, but the weights are {model.dtype}; "
            "set dtype to float32, bfloat16 or float16"
        )
    with progress_bar("preparing layers"):
        if backend.layer is not None:
            fuse_layers(model, run, backend.layer)
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # what was stacked has left its place, cut to its own size
        if model.device.type != "cpu":
            return
        use_plain_linears(model)
        if backend.name != "cpp":
            pack_linears(model)
            leave_file(model)
            return_freed_memory()
            return
        from minipaged.execution.accel import panel_linear, recurrent_kernels  # load C++

        recurrent_kernels.use_recurrent_kernels(model)
        pad_activations(model)
        if quantization == "none":
            panel_linear.use_panels(model)
        else:
            panel_linear.quantize_linears(model, quantization)
        leave_file(model)
        return_freed_memory()
        for panels in filter(None, map(panel_linear.panels_of, model.modules())):
            move_into_huge_pages(panels.address, panels.num_bytes)
