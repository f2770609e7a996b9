"""Layer 3: every Triton kernel compiled for chips that are not here, and what it needs of them.

A spill to local memory, a lost 16-byte copy or an idle matrix unit costs a factor and gives right results all
the same: it shows in the compiled code alone.
"""

import os
import re
from functools import partial

import pytest
import torch

from tests.kernels.cases import make_case

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles nothing in the interpreter: set TRITON_INTERPRET=0", allow_module_level=True)
pytest.importorskip("triton", reason="needs the package triton")

from minipaged.kernels.triton import cache, elementwise, greedy
from minipaged.kernels.triton.config import decode_config, prefill_config
from minipaged.kernels.triton.decode import paged_decode
from minipaged.kernels.triton.prefill import paged_prefill
from tests.kernels.offline import SHARED_MEMORY_BYTES, compiling_for

pytestmark = pytest.mark.compile_only

CHIPS = list(SHARED_MEMORY_BYTES)
MATRIX_PRODUCT = {
    **dict.fromkeys(("sm_80", "sm_86", "sm_89", "sm_120"), "mma.sync"),
    "sm_90": "wgmma.mma_async",
    **dict.fromkeys(("sm_100", "sm_103"), "tcgen05.mma"),
    **dict.fromkeys(("gfx942", "gfx950"), "v_mfma"),
}
SHAPES = {  # dtype, (Hq, Hkv), (Dk, Dv)
    "bf16 128": (torch.bfloat16, (8, 2), (128, 128)),
    "fp16 64": (torch.float16, (4, 4), (64, 64)),
    "bf16 80": (torch.bfloat16, (4, 4), (80, 80)),
    "bf16 192-128": (torch.bfloat16, (16, 1), (192, 128)),
    "bf16 256": (torch.bfloat16, (8, 2), (256, 256)),
    "bf16 512": (torch.bfloat16, (8, 1), (512, 512)),
    "fp32 64": (torch.float32, (8, 2), (64, 64)),
    "fp32 256": (torch.float32, (8, 2), (256, 256)),
}


def assert_fits(kernel, chip):
    assert kernel.shared_bytes <= SHARED_MEMORY_BYTES[chip], kernel.name
    assert kernel.spilled == 0, f"{kernel.name} spills: {kernel.spilled}"


def assert_overlap(code, shape, chip, chips):
    """On these chips a tile's products wait for its own loads, not for those of the tile after it."""
    if chip in chips:
        in_flight = [int(groups) for groups in re.findall(r"cp\.async\.wait_group\s+(\d+)", code)]
        assert max(in_flight) >= 3, f"{shape}: waits for all but {in_flight} loads"


def assert_three_to_a_multiprocessor(kernel, num_warps=4):
    """One program's products overlap with the loads of the two beside it."""
    assert 3 * 32 * num_warps * kernel.registers <= 65_536
    assert 3 * (kernel.shared_bytes + 1024) <= 228 * 1024


def decode_tiling(chip, head_dim, dtype):
    """That of a batch of middling size."""
    return decode_config(chip, head_dim, dtype, num_pairs=256)


def check_compiled(attend, config, lengths, shape, chip, with_features=False):
    dtype, heads, head_dims = SHAPES[shape]
    case = make_case(lengths, heads=heads, head_dims=head_dims, block_size=16, dtype=dtype)
    features = {"sliding_window": 600, "softcap": 30.0, "sinks": case.sinks} if with_features else {}
    with compiling_for(chip) as kernels:
        attend(
            case.query.new_empty(*case.query.shape[:2], head_dims[1]),
            case.query,
            case.key_cache,
            case.value_cache,
            case.metadata,
            scale=0.1,
            config=config(chip, max(head_dims), dtype),
            **features,
        )
    for kernel in kernels:
        assert_fits(kernel, chip)
    return {kernel.name: kernel for kernel in kernels}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_fits_the_chip_and_copies_16_bytes_at_a_time(shape, chip):
    """Catches lost alignment hints (2-byte loads, 255 registers) and a pipeline that is not one."""
    kernels = check_compiled(paged_decode, decode_tiling, [(1, 700), (1, 3)], shape, chip)
    assert set(kernels) == {"decode_kernel", "reduce_kernel"}
    decode = kernels["decode_kernel"]
    dtype, _, head_dims = SHAPES[shape]
    if chip == "sm_90" and max(head_dims) <= 128 and dtype != torch.float32:
        assert_three_to_a_multiprocessor(decode)
    else:
        assert_overlap(decode.assembly, shape, chip, ("sm_90", "sm_100", "sm_103"))
    wide = "cp.async.cg.shared.global" if chip.startswith("sm_") else "_load_dwordx4"
    assert wide in decode.assembly


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_reduce_that_starts_early_waits_before_it_reads_a_partial_result(shape, chip):
    """Catches a race that no test on a CPU can see, and a reduce that starts late after all."""
    kernels = check_compiled(paged_decode, decode_tiling, [(1, 700), (1, 3)], shape, chip)
    decode, reduce = kernels["decode_kernel"], kernels["reduce_kernel"]
    dtype, _, head_dims = SHAPES[shape]
    if chip == "sm_90" and max(head_dims) <= 128 and dtype != torch.float32:
        assert reduce.starts_early
        assert "ld.global" not in decode.assembly.split("griddepcontrol.launch_dependents")[0]
        before, after = reduce.assembly.split("griddepcontrol.wait")
        assert before.count("ld.global") == 3  # its row, its query length, its context
        assert "st.global" not in before
        assert after.count("ld.global") >= 3
    else:
        assert not reduce.starts_early
        assert "griddepcontrol" not in decode.assembly + reduce.assembly


@pytest.mark.parametrize("num_pairs", [1, 1000])
def test_decode_of_few_or_many_sequences_fits_too(num_pairs):
    """Catches a split length, compiled in, with which the kernel needs more registers."""
    for shape in ("bf16 128", "fp16 64"):
        config = partial(decode_config, num_pairs=num_pairs)
        kernels = check_compiled(paged_decode, config, [(1, 1700), (1, 3)], shape, "sm_90")
        assert_three_to_a_multiprocessor(kernels["decode_kernel"])


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_fits_the_chip_and_uses_its_matrix_units(shape, chip):
    """Catches tiles too small for a warpgroup's matrix product, and tiles too large for the registers."""
    kernels = check_compiled(paged_prefill, prefill_config, [(3, 70), (1, 1)], shape, chip)
    code = kernels["prefill_kernel"].assembly
    if SHAPES[shape][0] != torch.float32:
        too_few_rows = shape == "bf16 512" and chip.startswith("sm_")  # those of a warp, then, not of a group
        assert ("mma.sync" if too_few_rows else MATRIX_PRODUCT[chip]) in code
        assert_overlap(code, shape, chip, ("sm_90",))


@pytest.mark.parametrize("chip", CHIPS)
def test_window_softcap_and_sinks_fit_too(chip):
    """Catches a feature that the compiler refuses, or that pushes the kernel over its registers."""
    check_compiled(paged_decode, decode_tiling, [(1, 700), (1, 3)], "bf16 128", chip, with_features=True)
    check_compiled(paged_decode, decode_tiling, [(1, 70)], "bf16 128", chip, with_features=True)
    check_compiled(paged_prefill, prefill_config, [(3, 70)], "bf16 128", chip, with_features=True)


@pytest.mark.parametrize("chip", CHIPS)
def test_writes_and_moves_fit_and_move_16_bytes_at_a_time(chip):
    """Catches block moves of 8 bytes: an address read from a table carries no alignment of its own."""
    case = make_case([(3, 70)], heads=(8, 8), head_dims=(128, 128), block_size=16, dtype=torch.bfloat16)
    with compiling_for(chip) as kernels:
        cache.write_kv(
            case.new_key, case.new_value, case.key_cache, case.value_cache, case.metadata.slot_mapping
        )
        cache.copy_blocks([case.key_cache, case.value_cache], torch.tensor([0]), torch.tensor([1]))
    for kernel in kernels:
        assert_fits(kernel, chip)
    code = {kernel.name: kernel.assembly for kernel in kernels}
    assert set(code) == {"write_kernel", "move_kernel"}
    if chip.startswith("sm_"):
        assert "ld.global.v2.b64" in code["move_kernel"]
        assert "st.global.v2.b64" in code["move_kernel"]
    else:
        assert "global_load_dwordx4" in code["move_kernel"]
        assert "global_store_dwordx4" in code["move_kernel"]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy_tokens_fit_and_logits_are_read_many_at_a_time(dtype, chip):
    """Catches lanes too many for the registers of their warps, and logits read one by one."""
    with compiling_for(chip) as kernels:
        greedy.greedy_tokens(torch.zeros(3, 128_256, dtype=dtype))
    assert kernels[0].spilled == 0
    wide = "ld.global.v4.b32" if chip.startswith("sm") else "load_dwordx4"
    assert wide in kernels[0].assembly


def pass_through_layer(dtype, num_tokens, hidden, head_dim, gate, num_heads=10):
    """Every pass between the products of a layer, once."""
    rows, residual = torch.zeros(2, num_tokens, hidden, dtype=dtype)
    heads, angles = (
        torch.zeros(num_tokens, num_heads, head_dim, dtype=dtype),
        torch.zeros(num_tokens, head_dim),
    )
    weight, head_weight = torch.zeros(hidden, dtype=dtype), torch.zeros(head_dim, dtype=dtype)
    elementwise.rms_norm(rows, weight, 1e-5)
    elementwise.add_rms_norm_(rows, residual, weight, 1e-5)
    elementwise.rms_norm_heads_(heads[:, :8], head_weight, 1e-5)
    elementwise.rotate_heads_(heads[:, :9], angles.to(dtype), angles.to(dtype))
    elementwise.silu_gate(torch.zeros(num_tokens, 2 * gate, dtype=dtype))
    elementwise.gelu_gate(torch.zeros(num_tokens, 2 * gate, dtype=dtype))
    elementwise.rms_norm(rows, weight.float(), 1e-5)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("dtype", "hidden", "head_dim", "gate"),
    [
        (torch.bfloat16, 2048, 64, 8192),
        (torch.float16, 2560, 80, 10240),
        (torch.bfloat16, 4096, 128, 14336),
        (torch.bfloat16, 8192, 256, 28672),
        (torch.float32, 16384, 128, 53248),
    ],
)
def test_what_lies_between_products_fits_and_moves_many_bytes_at_a_time(dtype, hidden, head_dim, gate, chip):
    """Catches rows too long for the registers of their warps, and rows moved one number at a time."""
    with compiling_for(chip) as kernels:
        pass_through_layer(dtype, 3, hidden, head_dim, gate)
    names = [*["norm_kernel"] * 3, "rotate_kernel", "gate_kernel", "gate_kernel", "norm_kernel"]
    assert [kernel.name for kernel in kernels] == names
    for kernel in kernels:
        assert_fits(kernel, chip)
        if chip.startswith("sm_"):
            assert "ld.global.v4.b32" in kernel.assembly
            stores = re.findall(r"st\.global\.([\w.]+)", kernel.assembly)
            assert set(stores) == {"v4.b32"}, kernel.name
        else:  # of 8 or 16 bytes
            stores = re.findall(r"(?:global|buffer)_store_(\w+)", kernel.assembly)
            assert set(stores) <= {"dwordx2", "dwordx4"}, kernel.name


def test_steps_of_any_number_of_tokens_share_the_kernels_of_a_layer():
    """Catches a number of tokens, or a stride of one row alone, that is compiled in."""
    with compiling_for("sm_90") as kernels:
        for num_tokens in (1, 7, 16, 1000):
            pass_through_layer(torch.bfloat16, num_tokens, 2048, 64, 8192)
    assert len(kernels) == 4 * 7
    assert len({kernel.fingerprint for kernel in kernels}) == 7


def test_batches_of_any_lengths_share_one_compiled_kernel():
    """Catches an integer that changes every step and is compiled in: each step would compile anew."""
    config = decode_tiling("sm_90", 32, torch.bfloat16), prefill_config("sm_90", 32, torch.bfloat16)
    with compiling_for("sm_90") as kernels:
        # 696 and 1592 tokens: tables of a multiple of 16 entries, which Triton would compile in
        for lengths in ([(1, 513)], [(1, 696)] * 16, [(1, 90000), (1, 3)], [(2, 5)], [(1, 700), (300, 1592)]):
            case = make_case(lengths, dtype=torch.bfloat16)
            inputs = (case.query.clone(), case.query, case.key_cache, case.value_cache, case.metadata)
            if case.metadata.max_decode_len:
                paged_decode(*inputs, scale=0.1, config=config[0])
            if case.metadata.max_query_len > 1:
                paged_prefill(*inputs, scale=0.1, config=config[1])
            cache.write_kv(
                case.new_key, case.new_value, case.key_cache, case.value_cache, case.metadata.slot_mapping
            )
    assert len(kernels) == 4 * 2 + 2 + 5
    assert len({kernel.fingerprint for kernel in kernels}) == 4
