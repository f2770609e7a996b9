"""A manager that counts cached blocks as if they had to be allocated and computed.

The baseline for the prefix-caching-aware scheduler: it waits for free blocks that the prompt will not need,
and charges cached tokens to the step's budget.
"""

from minipaged.memory import KVManager


class PrefixUnawareKVManager(KVManager):
    """`KVManager`, except for what an admission is charged."""

    def admission_charge(self, cached: set[int], num_tokens: int, num_cached: int) -> tuple[int, int]:
        """Every cached block, every token."""
        return len(cached), num_tokens
