"""Rewrite a model for fast inference on a CPU (on a GPU: `cuda_graph.CUDAGraphRunner`)."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from minipaged.execution.accel.packed_linear import can_pack, pack_linears
from minipaged.progress import progress_bar


def optimize(model: PreTrainedModel, run: Callable[[], object], fuse: bool) -> None:
    """Fuse layers and pack the weights of a CPU model, in place; nobody else can use it afterwards.

    Args:
        model: prepared (see `prepare`).
        run: runs the model once, on a few rows.
        fuse: whether to fuse layers; the C++ kernels must be available.
    """
    if not can_pack():
        return
    with progress_bar("packing weights"):
        if fuse:
            from minipaged.execution.accel.layer_fusion import fuse_layers  # loads the C++ kernels

            fuse_layers(model, run)
        pack_linears(model)
