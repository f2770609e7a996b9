"""Writing and moving KV blocks of pools `[num_blocks, Hkv, block_size, D]`.

Paper: sections 5.1 (fused reshape and write, fused copy) and 4.5 (swapping).
"""

from torch import Tensor

from minipaged.kernels.layout import block_size_of


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write key [T, Hkv, Dk] and value [T, Hkv, Dv] to the slots of slot_mapping [T] int64; -1 is skipped."""
    written = slot_mapping >= 0
    if not written.all():
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    block_size = block_size_of(key_cache)
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    key_cache[block, :, offset] = key.to(key_cache.dtype)
    value_cache[block, :, offset] = value.to(value_cache.dtype)


def copy_blocks(caches: list[Tensor], source: Tensor, destination: Tensor) -> None:
    """Copy block source[i] to destination[i] ([n] int64) in every pool.

    All reads happen before all writes: of X -> Y and Z -> X, in either order, Y receives the old X.
    """
    for cache in caches:
        cache[destination.to(cache.device)] = cache[source.to(cache.device)]


def swap_blocks(
    source_caches: list[Tensor], destination_caches: list[Tensor], source: Tensor, destination: Tensor
) -> None:
    """Copy block source[i] of source_caches[j] to block destination[i] of destination_caches[j], all i and j.

    The pools may live on different devices. Raises ValueError if the lists differ in length.
    """
    for source_cache, destination_cache in zip(source_caches, destination_caches, strict=True):
        blocks = source_cache[source.to(source_cache.device)]
        destination_cache[destination.to(destination_cache.device)] = blocks.to(destination_cache.device)
