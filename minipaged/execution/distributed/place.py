"""The position of a rank. Ranks are numbered stage by stage: rank = stage * tensor_size + shard."""

from __future__ import annotations

from typing import NamedTuple

from minipaged.config import EngineConfig


class Place(NamedTuple):
    """A rank among the others."""

    rank: int
    tensor_size: int
    pipeline_size: int

    @classmethod
    def of(cls, rank: int, config: EngineConfig) -> Place:
        """The place of rank `rank`."""
        return cls(rank, config.tensor_parallel_size, config.pipeline_parallel_size)

    @property
    def stage(self) -> int:
        """Which of the stages it computes."""
        return self.rank // self.tensor_size

    @property
    def shard(self) -> int:
        """Which part of each layer it computes."""
        return self.rank % self.tensor_size

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.tensor_size * self.pipeline_size

    @property
    def is_last_stage(self) -> bool:
        """Whether it computes logits."""
        return self.stage == self.pipeline_size - 1

    @property
    def last_stage(self) -> range:
        """The ranks that compute logits."""
        return range(self.size - self.tensor_size, self.size)
