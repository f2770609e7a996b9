"""Lesson 14, worked: the project's ranks are processes (execution/distributed); these are objects."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minipaged.kernels.metadata import AttentionMetadata
from minipaged.kernels.reference.attention import paged_attention as given_attention


class Rank:
    """One of `size` ranks. It holds its own heads of every block, and no others.

    Attributes:
        number: 0 to size - 1.
        key_pool, value_pool: [num_blocks, own KV heads, block_size, head_dim].
    """

    def __init__(self, number: int, size: int, key_pool: Tensor, value_pool: Tensor) -> None:
        """`key_pool`, `value_pool`: [num_blocks, KV heads, block_size, head_dim], the heads of all ranks."""
        self.number, self.size = number, size
        self.key_pool = key_pool[:, self.own(key_pool.shape[1])].contiguous()
        self.value_pool = value_pool[:, self.own(value_pool.shape[1])].contiguous()

    # -- task 1: whose heads ----------------------------------------------------------------------

    def own(self, num_heads: int) -> slice:
        """Which of `num_heads` heads are this rank's: rank 0 has the first, and all have the same number.

        Raises:
            ValueError: they cannot be divided evenly; the message contains both numbers.
        """
        if num_heads % self.size:
            raise ValueError(f"{num_heads} heads do not divide among {self.size} ranks; give a divisor")
        share = num_heads // self.size
        return slice(self.number * share, (self.number + 1) * share)

    # -- task 2: the same plan --------------------------------------------------------------------

    def follow(
        self, copies: Sequence[tuple[int, int]], slots: Sequence[int], keys: Tensor, values: Tensor
    ) -> None:
        """Apply the plan of a step to this rank's pools.

        Args:
            copies: (source block, destination block), to be made in order, before anything is written.
            slots: where the T new tokens go: slot s is place s % block_size of block s // block_size.
            keys, values: [T, KV heads, head_dim], for all heads of the model.
        """
        for source, destination in copies:
            self.key_pool[destination] = self.key_pool[source]
            self.value_pool[destination] = self.value_pool[source]
        block_size = self.key_pool.shape[2]
        for token, slot in enumerate(slots):
            block, place = slot // block_size, slot % block_size
            self.key_pool[block, :, place] = keys[token, self.own(keys.shape[1])]
            self.value_pool[block, :, place] = values[token, self.own(values.shape[1])]

    def attend(
        self, query: Tensor, metadata: AttentionMetadata, sinks: Tensor | None = None, **parameters
    ) -> Tensor:
        """Attention of this rank's query heads over its pools.

        Args:
            query: [T, Hq, head_dim], for all heads of the model.
            metadata: block tables and lengths, the same on every rank.
            sinks: [Hq], one number per query head; None for most models.
            parameters: `scale` and others that all heads share, for `given_attention`.

        Returns:
            [T, own query heads, head_dim]
        """
        own = self.own(query.shape[1])
        mine = None if sinks is None else sinks[own]
        return given_attention(
            query[:, own], self.key_pool, self.value_pool, metadata, sinks=mine, **parameters
        )

    # -- task 3: the sum --------------------------------------------------------------------------

    def project(self, attended: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """What this rank adds to the output of the layer: the sum over all ranks is the output.

        Args:
            attended: [T, own query heads, head_dim].
            weight: [out, Hq * head_dim], the whole output projection: head h has the columns from
                h * head_dim on.
            bias: [out], added to the output once.

        Returns:
            [T, out]
        """
        head_dim = attended.shape[2]
        own = self.own(weight.shape[1] // head_dim)
        columns = weight[:, own.start * head_dim : own.stop * head_dim]
        part = attended.flatten(1) @ columns.T
        return part if bias is None or self.number else part + bias


# -- given: your ranks in the engine ------------------------------------------------------------


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention on two ranks, [T, Hq, head_dim].

    The engine projects the result itself, so the weight here is the identity.
    """
    parameters = {"scale": scale, "sliding_window": sliding_window, "softcap": softcap}
    heads, head_dim = query.shape[1], value_cache.shape[-1]
    identity = torch.eye(heads * head_dim, dtype=query.dtype, device=query.device)
    ranks = [Rank(number, 2, key_cache, value_cache) for number in range(2)]
    parts = [rank.project(rank.attend(query, metadata, sinks, **parameters), identity) for rank in ranks]
    return (parts[0] + parts[1]).unflatten(1, (heads, head_dim))
