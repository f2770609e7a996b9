"""Writing and moving KV blocks in Triton: one launch each, however many tokens, blocks or layers.

`write_kv`: one program per token scatters its K and V, all heads, to the token's slot. `copy_blocks` and
`swap_blocks` share a kernel that finds its pools by address, so that one launch serves all of them:

    program (i, p, c) copies piece c of block source[i] of pool p to block destination[i] of pool p'

    pool p,  block 4 = source[i]         [ piece 0 | piece 1 | piece 2 ]     p' is p itself (copy-on-write),
                                              |         |         |          or its counterpart in pinned host
    pool p', block 7 = destination[i]    [ piece 0 | piece 1 | piece 2 ]     memory or back (swap)

Pools are `[num_blocks, Hkv, block_size, D]`.
Paper: sections 5.1 (fused reshape and write, fused copy) and 4.5 (swapping).
"""

# Kernel arguments are Triton's own: pointers, numbers, compile-time constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

import functools
import itertools
import math
from collections import defaultdict

import torch
import triton
import triton.language as tl
from torch import Tensor

from minipaged.kernels.layout import block_size_of, num_kv_heads_of
from minipaged.kernels.on_device import on_device

PIECE = 1024  # words a program copies
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}  # blocks are moved as words of these bytes


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write key [T, Hkv, Dk] and value [T, Hkv, Dv] to the slots of slot_mapping [T] int64; -1 is skipped.

    Rows must be dense in their last dimension; token and head strides are free.
    """
    num_kv_heads, key_dim, value_dim = num_kv_heads_of(key_cache), key.shape[-1], value.shape[-1]
    write_kernel[(key.shape[0],)](
        *(key, value, key_cache, value_cache, slot_mapping),
        *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
        NUM_KV_HEADS=num_kv_heads,
        HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        BLOCK_SIZE=block_size_of(key_cache),
        KEY_DIM=key_dim,
        KEY_DIM_PADDED=triton.next_power_of_2(key_dim),
        VALUE_DIM=value_dim,
        VALUE_DIM_PADDED=triton.next_power_of_2(value_dim),
    )


def copy_blocks(caches: list[Tensor], source: Tensor, destination: Tensor) -> None:
    """Copy block source[i] to destination[i] ([n] int64, best on the host) in every pool of `caches`.

    All reads happen before all writes: of X -> Y and Z -> X, in either order, Y receives the old X. Programs
    run in no order, so copies that overlap pass through a staging pool; others, the rule, take one launch.
    """
    if not set(source.tolist()).isdisjoint(destination.tolist()):
        staged = torch.arange(source.shape[0], device=source.device)
        staging = [cache.new_empty((source.shape[0], *cache.shape[1:])) for cache in caches]
        swap_blocks(caches, staging, source, staged)
        swap_blocks(staging, caches, staged, destination)
    else:
        swap_blocks(caches, caches, source, destination)


def swap_blocks(
    source_caches: list[Tensor], destination_caches: list[Tensor], source: Tensor, destination: Tensor
) -> None:
    """Copy block source[i] of source_caches[j] to block destination[i] of destination_caches[j], all i and j.

    One launch serves all pools whose blocks have the same number of bytes; no block is both read and written.

    Raises ValueError for a host pool that is not pinned (it is reached over the bus), and if the lists
    differ in length.
    """
    pools = [*source_caches, *destination_caches]
    if source.numel() == 0 or not pools:
        return
    device = next((pool.device for pool in pools if pool.is_cuda), pools[0].device)
    if device.type == "cuda" and not all(pool.is_cuda or pool.is_pinned() for pool in pools):
        raise ValueError(
            "a host pool is not pinned, so the device cannot reach it; allocate it with pin_memory=True"
        )
    source, destination = on_device(torch.stack((source, destination)), device)
    pairs_of = defaultdict(list)  # bytes of a block -> addresses
    for theirs, ours in zip(source_caches, destination_caches, strict=True):
        pairs_of[theirs.nbytes // len(theirs)].append((theirs.data_ptr(), ours.data_ptr()))
    for block_bytes, pairs in pairs_of.items():
        alignment = math.gcd(block_bytes, *itertools.chain.from_iterable(pairs))
        word = next(size for size in WORDS if alignment % size == 0)
        words = block_bytes // word
        move_kernel[(source.shape[0], len(pairs), triton.cdiv(words, PIECE))](
            *(address_table(tuple(pairs), device), source, destination, words),
            WORD=WORDS[word],
            ALIGNED=alignment % 16 == 0,
            PIECE=PIECE,
        )


@functools.lru_cache(maxsize=64)
def address_table(pairs: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Pool addresses on the device, [pools, 2] int64; cached, because an engine's pools stay the same."""
    return on_device(pairs, device, torch.int64)


@triton.jit
def write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
):
    """Scatter one token's K and V, all heads, to its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    head = tl.arange(0, HEADS_PADDED)
    # of every head: [heads]
    entry = ((slot // BLOCK_SIZE) * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    key += token * key_stride_token
    value += token * value_stride_token
    write_rows(key, key_stride_head, key_cache, entry, head, NUM_KV_HEADS, KEY_DIM, KEY_DIM_PADDED)
    write_rows(value, value_stride_head, value_cache, entry, head, NUM_KV_HEADS, VALUE_DIM, VALUE_DIM_PADDED)


@triton.jit
def write_rows(
    rows, stride, cache, entry, head, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr
):
    """Copy one row per head, `stride` apart, to the entries of a pool seen as [.., DIM]."""
    dim = tl.arange(0, DIM_PADDED)
    inside = (head[:, None] < NUM_HEADS) & (dim[None, :] < DIM)
    row = tl.load(rows + head[:, None] * stride + dim[None, :], mask=inside)
    tl.store(cache + entry[:, None] * DIM + dim[None, :], row, mask=inside)


@triton.jit
def move_kernel(
    addresses, source, destination, words, WORD: tl.constexpr, ALIGNED: tl.constexpr, PIECE: tl.constexpr
):
    """Copy one piece of one block of one pool."""
    copy, pool, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    read_pool = tl.load(addresses + 2 * pool).to(tl.pointer_type(WORD))
    write_pool = tl.load(addresses + 2 * pool + 1).to(tl.pointer_type(WORD))
    if ALIGNED:  # unknown for addresses from a table; declared, so that 16 bytes move at a time
        read_pool = tl.multiple_of(read_pool, 16)
        write_pool = tl.multiple_of(write_pool, 16)
    word = piece * PIECE + tl.arange(0, PIECE)
    read = read_pool + tl.load(source + copy) * words + word
    write = write_pool + tl.load(destination + copy) * words + word
    tl.store(write, tl.load(read, mask=word < words), mask=word < words)
