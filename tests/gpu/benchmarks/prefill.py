"""Prefill attention: arithmetic a second, against PyTorch's causal attention without pages."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from minipaged.kernels.dispatch import select_backend
from tests.gpu.benchmarks.batches import HEAD_DIM, KV_HEADS, Storage, metadata, storage_bytes
from tests.gpu.benchmarks.decode import SDPA, contiguous
from tests.gpu.benchmarks.timing import Machine

GROUP, BLOCK_SIZE, SCALE = 4, 16, HEAD_DIM**-0.5


def prefill(machine: Machine, storage: Storage) -> None:
    """Whole prompts, and the last chunk of a long one."""
    attend = select_backend("triton", machine.device).paged_attention
    shapes = [(1, 8192, 8192), (8, 1024, 1024), (32, 512, 512), (1, 512, 16384)]
    for batch, query_len, context in [(2, 20, 20), (1, 5, 33)] if machine.dry_run else shapes:
        num_heads, tokens = KV_HEADS * GROUP, batch * query_len
        query = torch.randn(tokens, num_heads, HEAD_DIM, device=machine.device).to(machine.dtype)
        batch_metadata = metadata([(query_len, context)] * batch, BLOCK_SIZE, machine.device)
        num_blocks = batch * -(-context // BLOCK_SIZE)
        visible = query_len * context - query_len * (query_len - 1) // 2  # pairs of one sequence and head
        operations = 4 * batch * num_heads * HEAD_DIM * visible

        def paged(i: int, q: Tensor = query, m: Any = batch_metadata, n: int = num_blocks) -> None:
            attend(q, *storage.pools(n, BLOCK_SIZE, i), m, scale=SCALE)

        rows = query.view(batch, query_len, num_heads, HEAD_DIM).transpose(1, 2)

        def sdpa(
            i: int,
            implementation: SDPBackend,
            q: Tensor = rows,
            shape: tuple[int, int, int] = (batch, query_len, context),
        ) -> None:
            num_prompts, *lengths = shape
            keys, values = contiguous(storage, num_prompts, lengths[1], i)
            mask = None if lengths[0] == lengths[1] else causal_lower_right(*lengths)
            with sdpa_kernel(implementation):
                F.scaled_dot_product_attention(
                    q, keys, values, mask, is_causal=mask is None, scale=SCALE, enable_gqa=True
                )

        runs = {"paged": paged}
        runs |= {f"SDPA {name}": partial(sdpa, implementation=which) for name, which in SDPA.items()}
        took: dict[str, float] = {}
        for name, run in runs.items():
            parameters = f"{batch} x {query_len} new of {context} tokens, GQA {GROUP}: {name}"
            with machine.attempt("prefill", parameters):
                read = storage_bytes(batch * context, machine.dtype)
                took[name] = machine.time_ms(run, reads=read, repeat=10)
                more = {"ratio": took["paged"] / took[name]} if "paged" in took else {}
                machine.record("prefill", parameters, operations / took[name] / 1e9, "TFLOP/s", **more)
