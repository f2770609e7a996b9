"""Mamba 2 for many tokens of a sequence, on a CPU.

transformers cuts them into chunks of 256, pads the last one, and repeats queries and keys for all heads. This
takes 51 ms for 32 tokens and 131 for 512 (48 heads with states of 32 x 128, one core of Zen 5). Chunks of 32
without padding, whose heads share the products of queries and keys, take 1 and 14.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 32


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None,
    dt_bias: Tensor,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    initial_states: Tensor | None,
    return_final_states: bool,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """What Mamba 2 computes for T tokens (https://arxiv.org/abs/2405.21060, section 6), in float32.

    Each token multiplies the state of a head by exp(A dt) and adds dt x B^T; its output is the state times C,
    plus D x. R sequences, H heads in G groups, which share B and C; transformers' names.

    Args:
        hidden_states: x, [R, T, H, P].
        dt: [R, T, H], before its bias and, with `dt_softplus`, the softplus.
        A: [H] float32.
        B, C: [R, T, G, N].
        D, dt_bias: [H].
        dt_limit: smallest and largest dt.
        initial_states: [R, H, P, N]; None: zeros.
        return_final_states: whether to return the states after the last token, too.
    """
    num_rows, _, num_heads, width = hidden_states.shape
    num_groups, size = B.shape[2:]
    dt = dt + dt_bias.to(dt.dtype)
    dt = (functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
    inputs = hidden_states.float()
    values, decays = (inputs * dt[..., None]).transpose(1, 2), (A.float() * dt).transpose(1, 2)
    keys, queries = (part.float().transpose(1, 2) for part in (B, C))
    states = inputs.new_zeros(num_rows, num_heads, width, size)
    if initial_states is not None:
        states = initial_states.float()
    outputs = []
    for value, key, query, decay in zip(*(part.split(CHUNK, 2) for part in (values, keys, queries, decays))):
        length = decay.shape[2]
        since = decay.double().cumsum(2)  # (differences of large sums follow)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        between = (since[..., None] - since[..., None, :]).float().masked_fill_(later, -torch.inf).exp_()
        since = since.float().exp_()
        scores = (query @ key.mT)[:, :, None] * between.view(num_rows, num_groups, -1, length, length)
        before = query @ states.reshape(num_rows, num_groups, -1, size).mT  # [R, G, L, H / G * P]
        before = before.view(num_rows, num_groups, length, -1, width).transpose(2, 3).reshape(value.shape)
        outputs.append(scores.view(between.shape) @ value + before * since[..., None])
        added = (value * between[:, :, -1, :, None]).mT.reshape(num_rows, num_groups, -1, length) @ key
        states = states * since[..., -1:, None] + added.view(states.shape)
    output = torch.cat(outputs, 2).transpose(1, 2)
    output = output.contiguous() if D is None else torch.add(output.contiguous(), D[:, None] * inputs)
    return (output, states) if return_final_states else output
