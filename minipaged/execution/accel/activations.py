"""Activations whose results do not depend on where in a tensor an element is, on a CPU.

PyTorch's loops take two vectors at a time, then what is left one by one, and round SiLU and GELU differently
there. With several threads, some is left at the end of each one's share:

    | two vectors | two vectors | left |        thread 0
                                       | two vectors | two vectors | left |        thread 1

Tensors are padded so that nothing is left. Those of usual sizes need it where threads share them unevenly.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS

TWO_VECTORS = 64
"""Elements: of 16 bits, with AVX-512. Smaller vectors divide it."""

LEAST_SHARE = 1 << 15
"""Elements of a thread's share (PyTorch's `GRAIN_SIZE`). GELU uses all threads from 16,385 elements on."""

ACTIVATIONS = {kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()}


class PaddedActivation(nn.Module):
    """An activation of single elements that computes whole vectors."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, rows: Tensor) -> Tensor:
        """Rows of any shape -> the same shape."""
        flat = rows.flatten()
        if spare := padded(len(flat), torch.get_num_threads()) - len(flat):
            flat = torch.constant_pad_nd(flat, (0, spare))
        output: Tensor = self.activation(flat)
        return output[: rows.numel()].view(rows.shape)


def padded(count: int, num_threads: int) -> int:
    """The next number of elements that gives each thread whole vectors, even if not all threads are used."""
    step = TWO_VECTORS * num_threads
    size = -(-count // step) * step
    while size % (TWO_VECTORS * min(num_threads, max(1, -(-size // LEAST_SHARE)))):
        size += step
    return size


def pad_activations(model: nn.Module) -> None:
    """Let all activations of a model compute whole vectors, in place."""
    for module in list(model.modules()):
        if isinstance(module, PaddedActivation):  # (of an earlier runner of the model)
            continue
        for name, child in module.named_children():
            if type(child) in ACTIVATIONS:  # (OpenAI's GPT shares one among all its models)
                setattr(module, name, PaddedActivation(child))
