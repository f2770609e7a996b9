"""Random numbers that depend on what they are for, not on what was drawn before.

The noise of a token is a hash of (stream, position, token id): stream is the request's seed + sample
number, position the number of tokens generated so far. Nothing is stored, so a request that is
preempted and recomputed, alone or in another batch, draws what it drew before. With Gumbel noise
g = -log(-log(u)) the sampled token is argmax(logits + g) (Gumbel 1954; Maddison et al. 2014): no sums
over the vocabulary, so a difference in a logit's last bit changes a token only at a near tie.
"""

from __future__ import annotations

import numpy as np
import torch

from minipaged.kernels.on_device import on_device

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """A bijection of 64-bit integers that scatters every bit (the finalizer of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def noise_key(stream: int, position: int) -> int:
    """The key of one sampling decision, unsigned 64 bits."""
    return mix(mix(stream & _MASK) ^ position)


def gumbel_noise(keys: list[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise [len(keys), vocab_size] float32; row r depends on keys[r] alone.

    Integer arithmetic only until the last step, so the same bits on every device.
    """
    words = on_device(np.array(keys, np.uint64).view(np.int32), device)
    first, second = words.view(-1, 2, 1).unbind(1)  # of each key the low and the high half
    tokens = torch.arange(vocab_size, dtype=torch.int32, device=device) * -1640531527  # 2**32 / golden ratio
    bits = _scatter(tokens ^ first).add_(second)
    bits = _scatter(bits)
    # 23 bits, and a half so that neither log meets 0: 0 < u < 1.
    uniform = (bits >> 9).bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _scatter(bits: torch.Tensor) -> torch.Tensor:
    # "lowbias32" (Wellons, 2018). int32 wraps like uint32; its shifts extend the sign, hence the masks.
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= 0x7FEB352D
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= -2073254261  # 0x846CA68B
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits
