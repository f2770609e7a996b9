"""Ragged batches over a poisoned pool, for every kernel test.

Whatever a kernel may not read is poison: unused blocks, the tail of a sequence's last block and tokens that
no row can see any more hold NaN, unused block-table entries hold -7. A stray read gives NaN, or crashes.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minipaged.kernels.layout import block_size_of, cache_shape
from minipaged.kernels.metadata import AttentionMetadata
from minipaged.kernels.reference import oracle

UNUSED_BLOCK_ID = -7
UNWRITTEN = 8192.0
"""What the memory of a result holds before the kernel of an exercise writes to it."""
RELATIVE_ERROR = {torch.float64: 1e-6, torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass
class Case:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    metadata: AttentionMetadata
    new_key: Tensor
    new_value: Tensor
    sinks: Tensor
    num_seen: Tensor
    """[T]: how many tokens each query row sees."""


def metadata_of(
    lengths: list[tuple[int, int]], slots: Tensor, tables: Tensor, device: torch.device | str = "cpu"
) -> AttentionMetadata:
    """Metadata from (query length, context length) a sequence, the slots of new tokens and block tables."""
    starts = [0, *itertools.accumulate(query_len for query_len, _ in lengths)]
    contexts = [context for _, context in lengths]
    return AttentionMetadata(
        slot_mapping=slots.to(device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        context_len=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        query_start_list=starts,
        context_len_list=contexts,
        max_query_len=max((query_len for query_len, _ in lengths), default=0),
        max_context_len=max(contexts, default=0),
    )


def make_case(
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dims: tuple[int, int] = (32, 32),
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    sliding_window: int | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """A case from (query length, context length) a sequence; heads = (Hq, Hkv), head_dims = (Dk, Dv)."""
    generator = torch.Generator().manual_seed(seed)
    (num_heads, num_kv_heads), (key_dim, value_dim) = heads, head_dims
    blocks = [-(-context // block_size) for _, context in lengths]
    num_blocks = sum(blocks) + 3
    key_cache = torch.full(cache_shape(num_blocks, block_size, num_kv_heads, key_dim), float("nan"))
    value_cache = torch.full(cache_shape(num_blocks, block_size, num_kv_heads, value_dim), float("nan"))
    tables = torch.full((len(lengths), max(blocks, default=0) + 2), UNUSED_BLOCK_ID, dtype=torch.int32)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    slots, new_keys, new_values, num_seen = [], [], [], []
    for sequence, (query_len, context) in enumerate(lengths):
        mine = [free.pop() for _ in range(blocks[sequence])]
        tables[sequence, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        oldest = 0 if sliding_window is None else max(0, context - query_len - sliding_window + 1)
        positions = torch.arange(oldest, context)
        block, offset = torch.tensor(mine)[positions // block_size], positions % block_size
        key = torch.randn(len(positions), num_kv_heads, key_dim, generator=generator)
        value = torch.randn(len(positions), num_kv_heads, value_dim, generator=generator)
        key_cache[block, :, offset], value_cache[block, :, offset] = key, value
        first_new = len(positions) - query_len
        slots.append((block * block_size + offset)[first_new:])
        new_keys.append(key[first_new:])
        new_values.append(value[first_new:])
        num_seen.append(
            torch.arange(context - query_len, context).add(1).clamp(max=sliding_window or context)
        )
    metadata = metadata_of(lengths, torch.cat(slots), tables, device)
    query = torch.randn(metadata.query_start_list[-1], num_heads, key_dim, generator=generator)
    return Case(
        query=query.to(device, dtype),
        key_cache=key_cache.to(device, dtype),
        value_cache=value_cache.to(device, dtype),
        metadata=metadata,
        new_key=torch.cat(new_keys).to(device, dtype),
        new_value=torch.cat(new_values).to(device, dtype),
        sinks=torch.randn(num_heads, generator=generator).to(device, dtype),
        num_seen=torch.cat(num_seen),
    )


def check_attention(
    paged_attention: Callable[..., Tensor],
    lengths: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.3,
    sliding_window: int | None = None,
    softcap: float | None = None,
    with_sinks: bool = False,
    **shape: Any,
) -> None:
    """The result on such a case has its type, and is the oracle's."""
    case = make_case(lengths, dtype=dtype, sliding_window=sliding_window, **shape)
    options = {"scale": scale, "sliding_window": sliding_window, "softcap": softcap}
    options["sinks"] = case.sinks if with_sinks else None
    inputs = (case.query, case.key_cache, case.value_cache, case.metadata)
    actual = paged_attention(*inputs, **options)
    assert isinstance(actual, Tensor), f"expected a tensor, got {actual!r}"
    assert actual.dtype == dtype, f"expected a result in {dtype}, got {actual.dtype}"
    assert_close(actual, oracle.paged_attention(*inputs, **options), case)


def assert_close(actual: Tensor, expected: Tensor, case: Case) -> None:
    """Relative L2 error of every row and head within the dtype's bound; any NaN fails.

    Values are drawn with variance 1: a mean of n of them is no smaller than n^-1/2, unless they cancel (a
    head of size 1, say). Then the error is measured against half of what was cancelled.
    """
    assert isinstance(actual, Tensor), f"expected a tensor, got {actual!r}"
    actual, expected = actual.double().cpu(), expected.double().cpu()
    shapes = f"expected the shape {list(expected.shape)}, got {list(actual.shape)}"
    assert actual.shape == expected.shape, shapes
    if not actual.numel():
        return
    cancelled = (expected.shape[-1] / case.num_seen.double()).sqrt()[:, None]
    errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).maximum(0.5 * cancelled)
    row, head = divmod(int(errors.nan_to_num(nan=torch.inf).argmax()), errors.shape[1])
    worst, allowed = errors[row, head].item(), RELATIVE_ERROR[case.query.dtype]
    assert worst <= allowed, described(row, head, expected[row, head], actual[row, head], worst, case)


def described(row: int, head: int, expected: Tensor, actual: Tensor, worst: float, case: Case) -> str:
    """Which row differs, by how much, and what that may come from."""
    starts, contexts = case.metadata.query_start_list, case.metadata.context_len_list
    sequence = next(s for s in range(len(contexts)) if starts[s] <= row < starts[s + 1])
    position = contexts[sequence] - starts[sequence + 1] + row
    numbers = [
        "[" + ", ".join(f"{x:.4g}" for x in side[:3].tolist()) + " ...]" for side in (expected, actual)
    ]
    cause = f"relative L2 error {worst:.1e}"
    if (actual == UNWRITTEN).any():
        cause = f"nothing was stored there: {UNWRITTEN:.0f} is what the memory held"
    elif actual.isnan().any():
        cause = "NaN: a slot that it does not see, padding that was loaded, 0 / 0, or an exp that overflows"
    elif case.query.dtype != torch.float32 and worst < 0.1:
        cause += ", so small that something is rounded to 16 bits too early"
    return (
        f"row {row} (sequence {sequence}, position {position}), head {head}: "
        f"expected {numbers[0]}, got {numbers[1]}; {cause}"
    )


def token_at(cache: Tensor, slot: int) -> Tensor:
    """The [Hkv, D] entry a slot names."""
    block_size = block_size_of(cache)
    return cache[slot // block_size, :, slot % block_size]
