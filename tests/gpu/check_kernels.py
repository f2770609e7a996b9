"""Layer 4: the Triton kernels on a GPU, in every dtype, at sizes that fill the chip.

    python -m tests.gpu.check_kernels [--out DIR] [--jobs N] [--alone] [--dry-run]

Needs torch and triton only. Expected values come from the PyTorch path in float64 on the same device; layer 1
holds that to the oracle. Pools are NaN wherever nothing may be read. `--jobs` shares the checks among
processes, for most of their time is compilation; `--alone` runs those that need the device's memory for
themselves, `--dry-run` all others without a GPU, tiny, in Triton's interpreter. Each result is appended to
DIR/correctness.jsonl at once.
"""

import argparse
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

if __name__ == "__main__" and "--dry-run" in sys.argv:  # before triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from minipaged.kernels.dispatch import Backend, select_backend, why_not_triton
from minipaged.kernels.dispatch import greedy_tokens as reference_greedy_tokens
from minipaged.kernels.layout import cache_shape
from minipaged.kernels.reference import attention as reference
from minipaged.kernels.reference import cache as reference_cache
from tests.gpu.records import Records, reason_of
from tests.kernels.cases import assert_close, make_case
from tests.kernels.layer_formulas import (
    assert_near,
    exact_gate,
    exact_gelu_gate,
    exact_norm,
    exact_rotation,
    random_angles,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BATCHES = {
    "decode": [(1, 1 + 97 * s % 500) for s in range(128)],
    "split": [(1, 1 + 397 * s % 6000) for s in range(64)],
    "prefill": [(1, 1 + 397 * s % 3000) for s in range(32)]
    + [(700, 700), (333, 2048), (1, 1), (129, 130), (64, 4000)],
}
if DEVICE == "cpu":
    DTYPES = DTYPES[:2]  # the interpreter computes bfloat16 wrongly
    BATCHES = {"decode": [(1, 5), (1, 16)], "split": [(1, 33), (1, 75)], "prefill": [(1, 20), (9, 40)]}
NARROW = DTYPES[-1]
FEATURES = [
    {"sliding_window": 1},
    {"sliding_window": 1000},
    {"softcap": 3.0},
    {"with_sinks": True},
    {"sliding_window": 128, "softcap": 3.0, "with_sinks": True},
]


class NotRunError(Exception):
    """What a check needs is not here."""


def triton_backend() -> Backend:
    """The kernels under test; NotRunError says what is missing."""
    if (missing := why_not_triton(torch.device(DEVICE))) is not None:
        raise NotRunError(missing)
    return select_backend("triton", DEVICE)


def attention(batch, *, dtype=NARROW, softcap=None, with_sinks=False, sliding_window=None, **shape):
    """Catches what the interpreter lacks: bfloat16, matrix units, asynchronous copies, real pointers."""
    shape = {"heads": (32, 8), "head_dims": (128, 128), "block_size": 16} | shape
    if DEVICE == "cpu":
        shape["head_dims"] = tuple(dim // 4 for dim in shape["head_dims"])
        shape["heads"] = tuple(heads * 2 // max(2, shape["heads"][1]) for heads in shape["heads"])
    case = make_case(BATCHES[batch], dtype=dtype, sliding_window=sliding_window, device=DEVICE, **shape)
    options = {"scale": 0.09, "softcap": softcap, "sliding_window": sliding_window}
    inputs = case.query, case.key_cache, case.value_cache
    sinks = case.sinks if with_sinks else None
    actual = triton_backend().paged_attention(*inputs, case.metadata, sinks=sinks, **options)
    exact = sinks.double() if with_sinks else None
    inputs = (tensor.double() for tensor in inputs)
    expected = reference.paged_attention(*inputs, case.metadata, sinks=exact, **options)
    assert actual.dtype == dtype
    assert_close(actual, expected, case)


def how_long_other_contexts_are_changes_no_bit():
    """Catches a split length that depends on the longest context of the batch."""
    options = {"heads": (32, 8), "head_dims": (128, 128), "block_size": 16, "dtype": NARROW, "device": DEVICE}
    context, longer = (400, 5000) if DEVICE == "cuda" else (40, 75)
    together = make_case([(1, context), (1, longer)], **options)
    alone = make_case([(1, context)], **options)
    count = -(-context // 16)
    ours = alone.metadata.block_tables[0, :count].long()
    theirs = together.metadata.block_tables[0, :count].long()
    alone.key_cache[ours] = together.key_cache[theirs]
    alone.value_cache[ours] = together.value_cache[theirs]
    alone.query[0] = together.query[0]
    attend = triton_backend().paged_attention
    results = [
        attend(case.query, case.key_cache, case.value_cache, case.metadata, scale=0.09)[0]
        for case in (alone, together)
    ]
    assert torch.equal(*results)


def a_pool_of_more_than_2_to_the_31_elements_is_addressed():
    """Catches an offset computed in 32 bits: the last block of a large pool would land at its beginning."""
    block_size, heads, dim = 16, 8, 128
    num_blocks = 2**31 // (block_size * heads * dim) + 2
    pool_bytes = 2 * num_blocks * block_size * heads * dim
    if DEVICE == "cpu" or torch.cuda.mem_get_info()[0] < 3 * pool_bytes:
        raise NotRunError(f"needs {3 * pool_bytes >> 30} GiB of free device memory")
    small = make_case(
        [(1, 16)], heads=(8, 8), head_dims=(dim, dim), block_size=16, dtype=torch.bfloat16, device="cuda"
    )
    inputs = small.query, small.key_cache, small.value_cache, small.metadata
    expected = triton_backend().paged_attention(*inputs, scale=0.09)
    shape = cache_shape(num_blocks, block_size, heads, dim)
    keys, values = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    last = num_blocks - 1
    slots = last * block_size + torch.arange(16, device="cuda")
    mine = small.metadata.block_tables[0, 0].long()
    tokens = [cache[mine].transpose(0, 1).contiguous() for cache in (small.key_cache, small.value_cache)]
    triton_backend().write_kv(*tokens, keys, values, slots)
    assert torch.equal(keys[last], small.key_cache[mine])
    triton_backend().copy_blocks([keys, values], torch.tensor([last]), torch.tensor([last - 1]))
    small.metadata.block_tables[0, 0] = last - 1
    assert torch.equal(
        triton_backend().paged_attention(small.query, keys, values, small.metadata, scale=0.09), expected
    )


def write_kv_is_bit_equal_to_the_reference(dtype):
    """Catches padding heads or columns written, and a skipped slot written."""
    case = make_case(
        BATCHES["prefill"], heads=(24, 6), head_dims=(80, 64), block_size=16, dtype=dtype, device=DEVICE
    )
    slots = case.metadata.slot_mapping.clone()
    slots[::7] = -1
    expected = [torch.full_like(cache, 9.0) for cache in (case.key_cache, case.value_cache)]
    actual = [cache.clone() for cache in expected]
    reference_cache.write_kv(case.new_key, case.new_value, *expected, slots)
    triton_backend().write_kv(case.new_key, case.new_value, *actual, slots)
    assert all(map(torch.equal, actual, expected))


def passes_between_products_equal_their_formulas(dtype, num_tokens, hidden, head_dim):
    """Catches what the interpreter lacks: true rounding, threads that overwrite what others still read."""
    num_tokens = num_tokens if DEVICE == "cuda" else 3
    layer = triton_backend().layer
    rows, residual = torch.randn(2, num_tokens, hidden, device=DEVICE).to(dtype)
    weight, head_weight = (torch.randn(size, device=DEVICE).to(dtype) for size in (hidden, head_dim))
    assert_near(layer.rms_norm(rows, weight, 1e-5), exact_norm(rows, weight, 1e-5))
    total = rows + residual
    assert_near(layer.add_rms_norm_(rows, residual, weight, 1e-5), exact_norm(total, weight, 1e-5))
    assert_near(rows, total.double())
    product = torch.randn(num_tokens, 44, head_dim, device=DEVICE).to(dtype)
    before = product.clone()
    layer.rms_norm_heads_(product[:, 32:40], head_weight, 1e-5)
    assert_near(product[:, 32:40], exact_norm(before[:, 32:40], head_weight, 1e-5))
    product.copy_(before)
    angles = random_angles(num_tokens, head_dim, dtype, DEVICE)
    layer.rotate_heads_(product[:, :40], *angles)
    assert_near(product[:, :40], exact_rotation(before[:, :40], *angles))
    assert torch.equal(product[:, 40:], before[:, 40:])
    gates = 4 * torch.randn(num_tokens, 2 * hidden + 48, device=DEVICE).to(dtype)
    assert_near(layer.silu_gate(gates), exact_gate(gates))
    assert_near(layer.gelu_gate(gates), exact_gelu_gate(gates))
    wide = 1 + torch.randn(hidden, device=DEVICE)
    assert_near(layer.rms_norm(rows, wide, 1e-5), exact_norm(rows, wide, 1e-5))
    assert layer.rms_norm(rows[:0], weight, 1e-5).shape == (0, hidden)


def greedy_tokens_are_those_of_torch(dtype, vocab_size):
    """Catches what the interpreter lacks: lanes joined across warps, NaN and infinities on the device."""
    logits = (5 * torch.randn(65, vocab_size, device=DEVICE)).to(dtype)
    logits[3:6, vocab_size // 2] = torch.tensor([torch.nan, torch.inf, -torch.inf], device=DEVICE)
    logits[6] = -torch.inf
    found, expected = triton_backend().greedy_tokens(logits), reference_greedy_tokens(logits)
    fine = expected[:, 1].isfinite()
    assert fine.sum() == 62
    assert torch.equal(found[fine, 0], expected[fine, 0])
    torch.testing.assert_close(found[:, 1], expected[:, 1], atol=1e-4, rtol=1e-5, equal_nan=True)


def random_pools(layers=8 if DEVICE == "cuda" else 2):
    shape = cache_shape(64, 16, 8, 128)
    return [torch.randn(shape, device=DEVICE).to(torch.bfloat16) for _ in range(layers)]


def copy_blocks_is_bit_equal_to_the_reference(overlap):
    """Catches a write that overtakes a read among programs that really run at the same time."""
    expected = random_pools()
    actual = [pool.clone() for pool in expected]
    shuffled = torch.randperm(64)
    copies = (shuffled[:40], shuffled[20:60]) if overlap else (shuffled[:32], shuffled[32:])
    reference_cache.copy_blocks(expected, *copies)
    triton_backend().copy_blocks(actual, *copies)
    assert all(map(torch.equal, actual, expected))


def blocks_swapped_out_and_in_are_bit_equal():
    """Catches ids mixed up between the pools, and a host pool the device cannot reach."""
    device = random_pools()
    original = [pool.clone() for pool in device]
    host = [torch.empty_like(pool[:40], device="cpu", pin_memory=DEVICE == "cuda") for pool in device]
    blocks = torch.randperm(64)[:40]
    places = torch.randperm(40)
    triton_backend().swap_blocks(device, host, blocks, places)
    for pool in device:
        pool[blocks.to(DEVICE)] = 0
    triton_backend().swap_blocks(host, device, places, blocks)
    assert all(map(torch.equal, device, original))


def a_host_pool_that_is_not_pinned_is_refused():
    """Catches an illegal access, which ends the process and its GPU context."""
    if DEVICE == "cpu":
        raise NotRunError("all memory is the host's")
    device = random_pools(layers=1)
    host = [torch.empty_like(pool, device="cpu") for pool in device]
    message = "accepted"
    try:
        triton_backend().swap_blocks(device, host, torch.tensor([0]), torch.tensor([0]))
    except ValueError as error:
        message = str(error)
    assert "not pinned" in message, message


def named(function: Callable[..., None], *arguments: object, **options: object) -> tuple[str, Callable]:
    """A check with its arguments in its name."""
    words = [*map(str, arguments), *(f"{key}={value}" for key, value in options.items())]
    name = function.__name__ + f"({', '.join(words)})".replace("torch.", "") * bool(words)
    return name, partial(function, *arguments, **options)


CHECKS: dict[str, Callable[[], None]] = dict(
    [
        *(named(attention, batch, dtype=dtype) for batch, dtype in product(BATCHES, DTYPES)),
        *(named(attention, batch, **features) for batch, features in product(BATCHES, FEATURES)),
        *(named(write_kv_is_bit_equal_to_the_reference, dtype) for dtype in DTYPES),
        *(
            named(passes_between_products_equal_their_formulas, dtype, *shape)
            for dtype, shape in product(
                DTYPES, [(1, 2048, 64), (100, 2560, 80), (1000, 4096, 128), (3, 8192, 256), (33, 999, 30)]
            )
        ),
        *(
            named(greedy_tokens_are_those_of_torch, dtype, vocab_size)
            for dtype, vocab_size in product(DTYPES, [1000, 32000, 151_936])
        ),
        *(named(copy_blocks_is_bit_equal_to_the_reference, overlap) for overlap in (False, True)),
        named(blocks_swapped_out_and_in_are_bit_equal),
        named(a_host_pool_that_is_not_pinned_is_refused),
        named(how_long_other_contexts_are_changes_no_bit),
        *(
            named(attention, batch, heads=(8, 2), head_dims=dims, dtype=dtype)
            for dims, dtype, batch in product(
                [(32, 32), (64, 64), (80, 80), (192, 128), (256, 256)], [torch.float32, NARROW], BATCHES
            )
        ),
        *(
            named(attention, batch, heads=heads)
            for heads, batch in product([(8, 8), (24, 8), (32, 2), (16, 1)], BATCHES)
        ),
        *(named(attention, batch, block_size=size) for size, batch in product([8, 32, 128, 256], BATCHES)),
    ]
)
ALONE = dict([named(a_pool_of_more_than_2_to_the_31_elements_is_addressed)])


def has_context() -> bool:
    """Whether the device still answers: after an illegal access no call of this process succeeds."""
    try:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def run(checks: dict[str, Callable[[], None]], records: Records, seconds: float) -> bool:
    """Run them all, however many fail; whether none did, and all had the time to."""
    failures, late, lost, started = 0, 0, "", time.monotonic()
    torch.use_deterministic_algorithms(DEVICE == "cpu")  # fresh memory is NaN
    for name, check in checks.items():
        began = time.monotonic()
        record = {"check": name, "result": "passed"}
        if lost:
            record |= {"result": "not run", "reason": f"the context is lost after {lost}"}
        elif began - started > seconds:
            late += 1
            record |= {"result": "not run", "reason": f"{seconds:.0f} seconds are over"}
        else:
            try:
                torch.manual_seed(0)
                check()
            except NotRunError as reason:
                record |= {"result": "not run", "reason": str(reason)}
            except Exception as error:  # it must not end the others
                traceback.print_exc()
                failures += 1
                record |= {"result": "failed", "reason": reason_of(error)}
                lost = "" if has_context() else name
        records.add(record | {"seconds": round(time.monotonic() - began, 2)})
        print(f"  {record['result']:<8} {name}  {record.get('reason', '')}", flush=True)
    if late:
        print(f"{late} of {len(checks)} checks were not run, for lack of time: give them more --seconds")
    return failures == late == 0


def main() -> int:
    """Exit status 0 if nothing failed and no time was lacking."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--seconds", type=float, default=200, help="start no check later than that")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--share", type=int, default=0, help="which of the jobs this is")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if (missing := why_not_triton(torch.device(DEVICE))) is not None:
        print(f"no kernel can be checked: {missing}", file=sys.stderr)
        return 2
    if arguments.dry_run:
        from tests.gpu.interpreter import accept_new_numpy

        accept_new_numpy()
    others = [
        subprocess.Popen([sys.executable, "-m", "tests.gpu.check_kernels", *sys.argv[1:], f"--share={share}"])
        for share in range(1, arguments.jobs if arguments.share == 0 else 1)
    ]
    names = list(ALONE if arguments.alone else CHECKS)[arguments.share :: arguments.jobs]
    records = Records(arguments.out / "correctness.jsonl")
    fine = run({name: (ALONE | CHECKS)[name] for name in names}, records, arguments.seconds)
    return max([int(not fine), *(abs(other.wait()) for other in others)])


if __name__ == "__main__":
    raise SystemExit(main())
