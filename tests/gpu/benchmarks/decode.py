"""Decode attention: the share of the memory bandwidth it reaches, and what others reach."""

import inspect
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from minipaged.kernels.dispatch import select_backend
from minipaged.kernels.metadata import AttentionMetadata
from tests.gpu.benchmarks.batches import HEAD_DIM, KV_HEADS, Storage, metadata, storage_bytes
from tests.gpu.benchmarks.timing import Machine

SCALE = HEAD_DIM**-0.5
READ_CHUNK = 4096
PEER_GROUP, PEER_BLOCK_SIZE = 4, 16
LONG_BATCHES = (64, 4096), (16, 4096), (64, 512)
FIGURE_18A = tuple(itertools.product((8, 32), (64, 128, 256)))
"""Batches and contexts of the paper's comparison with attention over a contiguous cache."""
PAGED, IN_ORDER = "paged, random blocks", "paged, blocks in order"
SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
"""PyTorch's attention without pages, pinned: which of them it would choose depends on its version."""


@triton.jit
def read_kernel(source, sums, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Read CHUNKS chunks, write one sum: nothing but a stream of loads."""
    offsets = tl.program_id(0).to(tl.int64) * (CHUNK * CHUNKS) + tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.float32)
    for chunk in range(CHUNKS):
        total += tl.load(source + offsets + chunk * CHUNK)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def read_ceiling(machine: Machine) -> float:
    """Bytes a millisecond that a plain read of memory reaches: the best a decode could do."""
    best = 0.0
    num_chunks = 4 if machine.dry_run else 1 << 18  # 4 GiB of float32
    source = torch.ones(num_chunks * READ_CHUNK, device=machine.device)
    for chunks in (1, 2, 4):
        programs = num_chunks // chunks
        sums = torch.empty(programs, device=machine.device)

        def run(_: int, programs: int = programs, chunks: int = chunks, sums: Tensor = sums) -> None:
            read_kernel[(programs,)](source, sums, CHUNK=READ_CHUNK, CHUNKS=chunks, num_warps=8)

        best = max(best, source.nbytes / machine.time_ms(run, reads=source.nbytes, repeat=10))
    return best


def decode_grid(machine: Machine, ceiling: float, storage: Storage) -> None:
    """Batch x context x group x block size, as a share of the ceiling."""
    attend = select_backend("triton", machine.device).paged_attention
    batches, contexts, groups, block_sizes = (1, 16, 64, 256), (512, 4096, 32768), (1, 4, 8), (16, 32, 128)
    if machine.dry_run:
        batches, contexts, groups, block_sizes = (1, 2), (20, 40), (1, 4), (16,)
    for group, block_size, context, batch in itertools.product(groups, block_sizes, contexts, batches):
        parameters = f"batch {batch}, context {context}, GQA {group}, block {block_size}"
        num_blocks = batch * -(-context // block_size)
        if num_blocks * block_size > storage.tokens:
            needed = storage_bytes(num_blocks * block_size, machine.dtype) / 1e9
            machine.skip("decode", parameters, f"{needed:.0f} GB of cache do not fit")
            continue
        query = torch.randn(batch, KV_HEADS * group, HEAD_DIM, device=machine.device).to(machine.dtype)
        one_step = metadata([(1, context)] * batch, block_size, machine.device)

        def run(
            i: int, n: int = num_blocks, b: int = block_size, q: Tensor = query, m: Any = one_step
        ) -> None:
            attend(q, *storage.pools(n, b, i), m, scale=SCALE)

        read = storage_bytes(batch * context, machine.dtype)
        with machine.attempt("decode", parameters):
            took = machine.time_ms(run, reads=read)
            machine.record("decode", parameters, took * 1e3, "us", share=read / took / ceiling)


def decode_peers(machine: Machine, ceiling: float, storage: Storage) -> None:
    """As many tokens attended from consecutive blocks, from a contiguous cache, by other paged kernels."""
    for batch, context in ((1, 128),) if machine.dry_run else (*LONG_BATCHES, *FIGURE_18A):
        read = storage_bytes(batch * context, machine.dtype)
        took: dict[str, float] = {}
        for name, prepare in peers(machine, storage, batch, context).items():
            parameters = f"batch {batch}, context {context}, GQA {PEER_GROUP}: {name}"
            with machine.attempt("decode peers", parameters):
                took[name] = machine.time_ms(prepare(), reads=read)
                share = read / took[name] / ceiling
                machine.record("decode peers", parameters, took[name] * 1e3, "us", share=share)
        for name in (IN_ORDER, *(name for name in took if name.startswith("SDPA"))):
            parameters = f"batch {batch}, context {context}, GQA {PEER_GROUP}: over {name}"
            with machine.attempt("paging overhead", parameters):
                overhead = took[PAGED] / took[name] - 1
                machine.record("paging overhead", parameters, 100 * overhead, "%")


def peers(
    machine: Machine, storage: Storage, batch: int, context: int
) -> dict[str, Callable[[], Callable[[int], Any]]]:
    """Name -> what prepares a run; ours first."""
    attend = select_backend("triton", machine.device).paged_attention
    num_blocks = batch * context // PEER_BLOCK_SIZE
    query = torch.randn(batch, KV_HEADS * PEER_GROUP, HEAD_DIM, device=machine.device).to(machine.dtype)
    lengths = [(1, context)] * batch
    scattered = metadata(lengths, PEER_BLOCK_SIZE, machine.device)
    in_order = metadata(lengths, PEER_BLOCK_SIZE, machine.device, consecutive=True)

    def paged(one_step: AttentionMetadata) -> Callable[[int], Any]:
        return lambda i: attend(query, *storage.pools(num_blocks, PEER_BLOCK_SIZE, i), one_step, scale=SCALE)

    return {
        PAGED: lambda: paged(scattered),
        IN_ORDER: lambda: paged(in_order),
        **{
            f"SDPA {name}, contiguous{', heads packed' * packed}": partial(
                sdpa, storage, query, batch, context, packed=packed, implementation=implementation
            )
            for name, implementation in SDPA.items()
            for packed in (False, True)
        },
        "varlen_attn, block table": lambda: varlen(storage, query, batch, context, scattered),
    }


def sdpa(
    storage: Storage,
    query: Tensor,
    batch: int,
    context: int,
    *,
    packed: bool,
    implementation: SDPBackend,
) -> Callable[[int], Any]:
    """PyTorch's attention over a cache without pages: [batch, heads, context, dim]."""
    group = query.shape[1] // KV_HEADS
    rows = query.view(batch, KV_HEADS, group, HEAD_DIM) if packed else query.view(batch, -1, 1, HEAD_DIM)

    def run(i: int) -> Tensor:
        keys, values = contiguous(storage, batch, context, i)
        with sdpa_kernel(implementation):
            return F.scaled_dot_product_attention(rows, keys, values, scale=SCALE, enable_gqa=not packed)

    return run


def contiguous(storage: Storage, batch: int, context: int, index: int) -> list[Tensor]:
    """The index-th slice of the storage as a key and a value cache [batch, heads, context, dim]."""
    elements = batch * context * KV_HEADS * HEAD_DIM
    first = index % (storage.keys.numel() // elements) * elements
    return [
        flat[first : first + elements].view(batch, KV_HEADS, context, HEAD_DIM)
        for flat in (storage.keys, storage.values)
    ]


def varlen(
    storage: Storage, query: Tensor, batch: int, context: int, one_step: AttentionMetadata
) -> Callable[[int], Any]:
    """`torch.nn.attention.varlen.varlen_attn`, pages of [page, page size, heads, dim]."""
    from torch.nn.attention.varlen import varlen_attn

    needed = {"block_table", "seqused_k", "enable_gqa"}
    if missing := sorted(needed - inspect.signature(varlen_attn).parameters.keys()):
        raise NotImplementedError(f"varlen_attn of torch {torch.__version__} takes no {', '.join(missing)}")
    shape = (batch * context // PEER_BLOCK_SIZE, PEER_BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device)

    def run(i: int) -> Tensor:
        keys, values = (cache.reshape(shape) for cache in contiguous(storage, batch, context, i))
        return varlen_attn(
            query,
            keys,
            values,
            starts,
            None,
            1,
            context,
            scale=SCALE,
            enable_gqa=True,
            seqused_k=one_step.context_len,
            block_table=one_step.block_tables,
        )

    return run


def decode_flex(machine: Machine, ceiling: float, storage: Storage) -> None:
    """`flex_attention` over PyTorch's own page table (pages of 128 tokens): compiled, which takes long."""
    batch, context = (1, 128) if machine.dry_run else LONG_BATCHES[0]
    parameters = f"batch {batch}, context {context}, GQA {PEER_GROUP}: flex_attention, pages"
    query = torch.randn(batch, KV_HEADS * PEER_GROUP, HEAD_DIM, device=machine.device).to(machine.dtype)
    with machine.attempt("decode peers", parameters):
        read = storage_bytes(batch * context, machine.dtype)
        took = machine.time_ms(flex(storage, query, batch, context), reads=read)
        machine.record("decode peers", parameters, took * 1e3, "us", share=read / took / ceiling)


def flex(storage: Storage, query: Tensor, batch: int, context: int) -> Callable[[int], Any]:
    """A run of it; 128 is its block size."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask

    page_size, device = 128, query.device
    tokens = batch * context
    pages = PagedAttention(tokens // page_size, page_size, batch, device=str(device))
    for sequence in range(batch):
        pages.reserve(torch.tensor(sequence, device=device), torch.tensor(context, device=device))
    mask = create_block_mask(noop_mask, batch, None, 1, context, device=str(device), BLOCK_SIZE=page_size)
    mask = pages.convert_logical_block_mask(mask)
    rows = query.view(batch, -1, 1, HEAD_DIM)
    attend = torch.compile(flex_attention) if device.type == "cuda" else flex_attention

    def run(i: int) -> Tensor:
        keys, values = contiguous(storage, 1, tokens, i)
        return attend(rows, keys, values, block_mask=mask, scale=SCALE, enable_gqa=True)

    return run
