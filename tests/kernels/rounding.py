"""Rows as they are quantized before a multiplication with quantized weights."""

import torch
from torch import Tensor, nn

STEPS = {"int8": 32639, "int4": 32639, "w8a8": 127}  # from zero to the largest of 64 elements of a row


def rounded(rows: Tensor, format: str) -> list[Tensor]:
    """Rows as a format quantizes them, and where it may round either way: the step there, else 0.

    The largest of 64 elements is STEPS steps from zero, the others whole steps.
    """
    padded = nn.functional.pad(rows.double(), (0, -rows.shape[1] % 64))
    groups = padded.unflatten(1, (-1, 64))
    step = groups.abs().amax(2, keepdim=True) / STEPS[format]
    num_steps = groups / step.clamp(min=1e-30)
    either = torch.where(((num_steps % 1) - 0.5).abs() < 1e-6 * STEPS[format], step, 0)
    return [part.flatten(1)[:, : rows.shape[1]] for part in (num_steps.round() * step, either)]
