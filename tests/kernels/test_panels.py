"""Products by panels against float64, in every format, for every way the source compiles."""

from __future__ import annotations

import ctypes
import platform
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from minipaged.kernels.cpp import build
from minipaged.kernels.cpp.build import find_compiler
from minipaged.kernels.dispatch import why_not_cpp

if missing := why_not_cpp(torch.device("cpu")):
    pytest.skip(missing, allow_module_level=True)

from minipaged.execution.accel import panel_linear
from minipaged.execution.accel.packed_linear import PackedLinear, can_pack
from minipaged.execution.accel.panel_linear import PanelLinear, use_panels
from minipaged.kernels.cpp import decode, panels
from minipaged.kernels.cpp.panels import Prefetch
from tests.kernels.rounding import STEPS, rounded
from tests.slow import slow_but

FLOATS = build.DTYPES
NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in FLOATS}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest result
SHAPES = [(1, 1), (40, 96), (64, 64), (130, 65), (200, 331), (700, 150)]  # outputs and inputs
OTHER_CPUS = {
    "avx2": ["-mavx2", "-mfma"],
    "avx2 with float16": ["-mavx2", "-mfma", "-mf16c"],
    "avx2 with 8-bit dot products": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "avx512 without bfloat16": ["-mavx512f"],
    "avx512 with 16-bit dot products": ["-mavx512f", "-mavx512bw"],
    "any": [],
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Functions of the source compiled for other CPUs: name -> {function: it}."""
    if platform.machine() != "x86_64":
        pytest.skip("the other instruction sets are those of x86-64")
    built = {}
    for name, flags in OTHER_CPUS.items():
        path = tmp_path_factory.mktemp("panels") / "library.so"
        own = [flag for flag in build.FLAGS if not flag.startswith(("-march", "-O"))] + ["-O1"]
        source = str(next(source for source in build.SOURCES if source.stem == "panel_product"))
        subprocess.run([*find_compiler(), *own, *flags, source, "-o", str(path)], check=True)
        library = ctypes.CDLL(str(path))
        built[name] = {function: getattr(library, f"multiply_{function}") for function in panels._FORMATS}
    return built


@pytest.fixture(
    params=["this processor", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_CPUS)]
)
def processor(request, monkeypatch):
    """Multiply as compiled for this CPU, or with fewer instructions."""
    if request.param != "this processor":
        flags = OTHER_CPUS[request.param]
        if "-mavx512f" in flags and "AVX512" not in torch.backends.cpu.get_cpu_capability():
            pytest.skip("this processor has no AVX-512")
        if "-mavxvnni" in flags and "avx_vnni" not in Path("/proc/cpuinfo").read_text().split():
            pytest.skip("this processor has no AVX-VNNI")
        monkeypatch.setattr(panels, "_multiply", request.getfixturevalue("libraries")[request.param])
        alternating = Prefetch.INTO_L2 if "-mavx512f" in flags else Prefetch.BY_HARDWARE  # few rows
        monkeypatch.setattr(panels, "best_prefetch", lambda: alternating)
    return request.param


def rounds(format, processor):
    """Whether rows are quantized: in w8a8 always, in int8 and int4 with integer dot products."""
    if processor != "this processor":
        has_integer_dot = processor not in ("any", "avx512 without bfloat16")
    elif platform.machine() == "x86_64":
        has_integer_dot = "AVX" in torch.backends.cpu.get_cpu_capability()
    else:
        has_integer_dot = sys.platform == "darwin" or "asimddp" in Path("/proc/cpuinfo").read_text()
    return format == "w8a8" or (format in STEPS and has_integer_dot)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_near(actual, exact, slack=0):
    most = TOLERANCES[actual.dtype] * exact.abs().max() + slack
    assert ((actual.double() - exact).abs() <= most).all()


def check_layer(layer, dtype, row_counts, bias, format="own", rounds=False):
    """The layer computes what float64 does with the weights that it says it has, and with rounded rows."""
    weight = layer.weight.double().T
    for num_rows in row_counts:
        rows = random(num_rows, layer.in_features, dtype=dtype)
        seen, either = rounded(rows, format) if rounds else (rows.double(), 0 * rows.double())
        exact = seen @ weight + (0 if bias is None else bias.double())
        actual = layer(rows)
        assert actual.dtype == dtype
        assert_near(actual, exact, either @ weight.abs())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", ["own", "int8", "int4", "w8a8"])
@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
def test_a_layer_of_panels_multiplies(processor, dtype, format, shape):
    """Catches a wrong lane, half of a pair, the end of a row or panel, a lost bias or zero point."""
    bias = random(shape[0], dtype=dtype)
    layer = PanelLinear(random(*shape, dtype=dtype), bias, NAMES[dtype] if format == "own" else format)
    check_layer(layer, dtype, [*range(1, 9), 13, 100], bias, format, rounds(format, processor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 64), (64, 1), (128, 64), (1, 1)])
def test_a_transposed_weight_is_packed_as_any_other(dtype, num_outputs, num_inputs):
    """GPT-2 of width 64 could not be loaded: "stride(-1) must be 1 to view Float as Byte"."""
    weight = torch.randn(num_inputs, num_outputs).to(dtype).T
    assert torch.equal(panels.pack(weight), panels.pack(weight.contiguous()))


def test_a_layer_may_have_no_outputs():
    """Catches a division by the number of panels, which ends the process."""
    layer = PanelLinear(random(0, 64, dtype=torch.bfloat16), None, "bfloat16")
    assert layer(random(3, 64, dtype=torch.bfloat16)).shape == (3, 0)


needs_amx = pytest.mark.skipif(
    not (torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()), reason="no AMX on this machine"
)


@needs_amx
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 64, 97, 400])
@pytest.mark.parametrize(
    "shape", [(64, 32), (40, 96), (130, 64), (200, 256), (200, 1024), (70, 800), (70, 777)]
)
def test_amx_multiplies(shape, num_rows, monkeypatch):
    """Catches a tile in the wrong place, a row left out, sums that are lost between 256 k and the next."""
    weight, bias = random(*shape, dtype=torch.bfloat16), random(shape[0], dtype=torch.bfloat16)
    layer = PanelLinear(weight, bias, "bfloat16")
    wider = random(num_rows, shape[1] + 3, dtype=torch.bfloat16)  # (an odd stride, so rows are copied)
    for rows in (wider[:, : shape[1]], random(num_rows, 2, shape[1], dtype=torch.bfloat16)[:, 1]):
        product = layer(rows)
        assert_near(product, rows.double() @ weight.double().T + bias.double())
        for part in (1, num_rows // 2 + 1):  # in other passes
            assert torch.equal(layer(rows[:part]), product[:part])
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: 3)
            assert torch.equal(layer(rows), product)


@needs_amx
def test_amx_is_used():
    """Catches a compiler's macro that has another name, and a way that nobody goes."""
    weight, rows = torch.ones(64, 32, dtype=torch.bfloat16), torch.ones(20, 32, dtype=torch.bfloat16)
    weight[:, ::2] = 0
    weight[:, 0], weight[:, 30] = 2**24, -(2**24)
    # AMX adds up even and odd k apart; in one sum, 2^24 absorbs the ones.
    assert PanelLinear(weight, None, "bfloat16")(rows).eq(16).all()


ASKED_BY_NOBODY_ELSE = """
import ctypes, sys
import torch
from minipaged.kernels.cpp import panels

def may_use_amx():
    permitted = ctypes.c_uint64()
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(permitted)) == 0  # ARCH_GET_XCOMP_PERM
    return bool(permitted.value >> 18 & 1)

ones, format = torch.ones(64, 64, dtype=torch.bfloat16), sys.argv[1]
packed = panels.pack(ones) if format == "bfloat16" else panels.quantize(ones, format)
own = panels.Panels(packed.data_ptr(), packed.nbytes, 64, 64, format)
assert not may_use_amx()
assert (panels.panel_product(ones, own) - 64).abs().max() <= 1
assert may_use_amx()
"""


@needs_amx
@pytest.mark.parametrize("format", ["bfloat16", "int8"])
def test_amx_is_asked_for(format):
    """Catches an illegal instruction, where oneDNN has not asked Linux for AMX, and int8 without it."""
    command = [sys.executable, "-c", ASKED_BY_NOBODY_ELSE, format]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN packs no bfloat16 on this processor")
@pytest.mark.parametrize(
    ("machine", "has_onednn", "kinds"),
    [
        ("x86_64", True, [PanelLinear, PanelLinear, PanelLinear]),
        ("AMD64", False, [PanelLinear, PanelLinear, PanelLinear]),
        ("aarch64", True, [PackedLinear, PackedLinear, PanelLinear]),
        ("arm64", False, [nn.Linear, PanelLinear, PanelLinear]),
    ],
)
def test_onednn_multiplies_only_on_arm(machine, has_onednn, kinds, monkeypatch):
    """Catches a type that nobody packs, and tokens that depend on the batch where they need not."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    if not has_onednn:
        monkeypatch.setattr(panel_linear, "can_pack", lambda dtype=torch.float32: False)
    model = nn.Sequential(*(nn.Linear(64, 64, dtype=dtype) for dtype in FLOATS)).requires_grad_(False)
    use_panels(model)
    assert list(map(type, model)) == kinds


@pytest.mark.parametrize("size", [1e-25, 1e-3, 1, 1e25])
@pytest.mark.parametrize("format", STEPS)
def test_quantized_rows_err_by_half_a_step_at_most(processor, format, size):
    """Catches a scale that overflows, or one a row, in which a large element leaves the others no steps."""
    layer = PanelLinear(random(70, 200), None, format)
    rows = random(100, 200) * size
    rows[:, 64:128] *= 1000
    weight = layer.weight.double().T
    steps = nn.functional.pad(rows, (0, 56)).unflatten(1, (-1, 64)).abs().amax(2).double() / STEPS[format]
    most = steps.repeat_interleave(64, 1)[:, :200] / 2 @ weight.abs()
    exact = rows.double() @ weight
    error = (layer(rows).double() - exact).abs()
    assert (error <= most * 1.0001 + 1e-6 * exact.abs().amax(1, keepdim=True)).all()
    if rounds(format, processor):
        assert error.max() > most.max() / 100


def test_16_bit_activations_add_little_to_the_error_of_8_bit_weights(processor):
    """Catches rows that lose more than is lost in the weights anyway."""
    weight = random(200, 640)
    layer = PanelLinear(weight, None, "int8")
    rows = random(50, 640)
    rows[:, ::100] *= 30  # as in models, a few are far larger
    exact = rows.double() @ layer.weight.double().T
    of_rows = (layer(rows) - exact).norm()
    of_weights = (rows.double() @ weight.double().T - exact).norm()
    assert of_rows < of_weights / 30


@pytest.mark.parametrize("format", STEPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
def test_quantized_rows_are_batch_invariant(processor, dtype, format):
    """Catches tokens that depend on the batch: the next layer may round a differing sum otherwise."""
    if not rounds(format, processor):
        pytest.skip("rows stay floats, which many rows may add up in another order")
    layer = PanelLinear(random(130, 331), None, format)
    rows = random(100, 331, dtype=dtype)
    together = layer(rows)
    for num_rows in (1, 2, 7, 13):
        assert torch.equal(layer(rows[:num_rows]), together[:num_rows])


@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
@pytest.mark.parametrize("num_outputs", [64, 330, 700])
def test_a_row_has_the_same_bits_alone_and_beside_any_others(processor, dtype, num_outputs):
    """Catches another order of sums where panels are read alternately, or weights converted for many rows."""
    layer = PanelLinear(random(num_outputs, 331, dtype=dtype), random(num_outputs, dtype=dtype), NAMES[dtype])
    rows = random(800, 331, dtype=dtype)
    together = layer(rows)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 13, 33, 97, 200, 385):
        assert torch.equal(layer(rows[:num_rows]), together[:num_rows])


@pytest.mark.parametrize("format", ["own", "int8"])
@pytest.mark.parametrize("num_rows", [3, 97, 193, 300, 385])
def test_any_number_of_threads_multiplies_every_row_by_every_panel(num_rows, format, monkeypatch):
    """Catches a block of rows that no thread multiplies, or two, where there are more threads than panels."""
    layer = PanelLinear(random(192, 700), None, NAMES[torch.float32] if format == "own" else format)
    rows, results = random(num_rows, 700), []
    for num_threads in (1, 2, 5, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda own=num_threads: own)
        results.append(layer(rows))
        assert torch.equal(results[0], results[-1])


@pytest.mark.parametrize("size", [80, 128, 331])
@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
def test_rows_may_be_part_of_a_wider_tensor(processor, dtype, size):
    """Catches elements read beside the rows, where rows are multiplied without a copy."""
    layer = PanelLinear(random(70, size, dtype=dtype), None, NAMES[dtype])
    for width in (size + 1, size + 2):
        wide = torch.full((400, width), float("nan"), dtype=dtype)
        wide[:, 1 : 1 + size] = random(400, size, dtype=dtype)
        rows = wide[:, 1 : 1 + size]
        assert torch.equal(layer(rows), layer(rows.clone()))


@pytest.mark.parametrize("format", ["own", "int8", "int4", "w8a8"])
@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
def test_prefetching_changes_no_bit(processor, dtype, format, monkeypatch):
    """Catches weights that are skipped to be prefetched, or another order of sums where panels alternate."""
    layer = PanelLinear(random(330, 331, dtype=dtype), None, NAMES[dtype] if format == "own" else format)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 19, 40):
        rows, results = random(num_rows, 331, dtype=dtype), []
        for prefetch in Prefetch:
            monkeypatch.setattr(panels, "best_prefetch", lambda own=prefetch: own)
            results.append(layer(rows))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


TRIALS = {  # seconds of each trial without software prefetching, past L2 and into L2, and the answer
    "equal": ([3.0] * 12, [3.0] * 12, [3.0] * 12, Prefetch.BY_HARDWARE),
    "faster without": ([3.0] * 12, [3.9] * 12, [3.8] * 12, Prefetch.BY_HARDWARE),
    "hardly faster with": ([3.0] * 12, [2.8] * 12, [3.4] * 12, Prefetch.BY_HARDWARE),
    "clearly faster with": ([3.0] * 12, [2.6] * 12, [3.4] * 12, Prefetch.PAST_L2),
    "faster with": ([3.0] * 12, [2.0] * 12, [2.0] * 12, Prefetch.PAST_L2),
    "hardly faster into L2": ([3.0] * 12, [2.1] * 12, [2.0] * 12, Prefetch.PAST_L2),
    "clearly faster into L2": ([3.0] * 12, [9.0] * 12, [2.0] * 12, Prefetch.INTO_L2),
    "a little faster into L2": ([3.0] * 12, [5.8] * 12, [2.8] * 12, Prefetch.INTO_L2),
    "into L2 as fast as without": ([3.0] * 12, [9.0] * 12, [3.0] * 12, Prefetch.BY_HARDWARE),
    "one slow trial of the faster": ([3.0] * 11 + [90.0], [3.9] * 12, [3.9] * 12, Prefetch.BY_HARDWARE),
    "one fast trial": ([9.0] * 5 + [3.0] + [9.0] * 6, [3.9] * 12, [3.9] * 12, Prefetch.BY_HARDWARE),
}


@pytest.mark.parametrize("has_amx", [False, True])
@pytest.mark.parametrize("name", TRIALS)
def test_weights_are_prefetched_only_where_that_is_clearly_faster(name, has_amx, monkeypatch):
    """Catches the slower way on every CPU of a kind, a choice by noise, and trials in AMX, all alike."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    *trials, answer = TRIALS[name]
    times = dict(zip(Prefetch, map(iter, trials)))
    seen = []

    def seconds(multiply, call):
        assert multiply == panels._multiply["float32_float32" if has_amx else "bfloat16_bfloat16"]
        seen.append(panels._PRODUCT.unpack(call)[-1])
        return next(times[seen[-1]])

    monkeypatch.setattr(panels, "_seconds", seconds)
    with torch.device("meta"):  # the memory is ours, whatever new tensors get
        assert panels.best_prefetch.__wrapped__() == answer
    assert seen == [*Prefetch] * 12  # alternating


def test_without_memory_for_a_trial_prefetching_is_left_to_the_hardware(monkeypatch):
    """Catches a model that cannot be loaded because the trial lacks memory."""
    monkeypatch.setattr(panels, "_seconds", None)
    monkeypatch.setattr(panels, "TRIAL_BYTES", 1 << 60)
    assert panels.best_prefetch.__wrapped__() == Prefetch.BY_HARDWARE


@pytest.mark.parametrize("prefetch", Prefetch)
def test_a_decode_step_prefetches_as_python_does(prefetch, monkeypatch):
    """Catches a choice that does not reach C++. (Only timing could show what C++ does with it.)"""
    monkeypatch.setattr(decode, "best_prefetch", lambda: prefetch)
    layer = PanelLinear(random(64, 64), None, "int8")
    packed = decode._pack_linear(layer.panels, None, torch.float32)
    assert panels._PRODUCT.unpack_from(packed)[-1] == prefetch


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("format", ["float32", "int8", "w8a8"])
@pytest.mark.parametrize("num_outputs", [64, 330, 1400])
def test_threads_share_the_panels(processor, threads, format, num_outputs):
    """Catches a panel that nobody multiplies, or two do, and more threads than panels."""
    layer = PanelLinear(random(num_outputs, 640), None, format)
    before = torch.get_num_threads()
    try:
        for num_rows in (1, 3, 100):
            rows = random(num_rows, 640)
            torch.set_num_threads(1)
            alone = layer(rows)
            torch.set_num_threads(threads)
            assert torch.equal(layer(rows), alone)
    finally:
        torch.set_num_threads(before)


AT_THE_END_OF_MEMORY = """
import ctypes, mmap, sys
import torch
from minipaged.kernels.cpp import panels

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def at_the_end(tensor, num_missing=0):
    # A copy that ends where memory does; `num_missing` of its bytes are beyond.
    size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    start = size - tensor.nbytes + num_missing
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
    copy.copy_(tensor)
    end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
    assert libc.mprotect(end, mmap.PAGESIZE, 0) == 0
    return copy

num_threads, num_missing = map(int, sys.argv[1:])
torch.set_num_threads(num_threads)
formats = [*panels.ZERO_POINTS, "float32", "bfloat16", "float16"]
for format, size in [(format, size) for format in formats for size in (6, 70, 96, 150)]:
    dtype = torch.float32 if format in panels.ZERO_POINTS else getattr(torch, format)
    rows = [at_the_end(torch.ones(num_rows, size, dtype=dtype)) for num_rows in (1, 2, 3, 4, 13, 40, 100)]
    for num_panels in range(1, 13):
        weight = torch.ones(64 * num_panels, size, dtype=dtype)
        if format in panels.ZERO_POINTS:
            data = panels.quantize(weight, format)
        else:  # without padding behind the last k, but for what AMX reads
            read = -(-size // 32) * 32 if dtype == torch.bfloat16 else size
            data = panels.pack(weight)[:, : 64 * read * dtype.itemsize].contiguous()
        placed = at_the_end(data, num_missing)
        own = panels.Panels(placed.data_ptr(), data.shape[1], 64 * num_panels, size, format)
        for some in rows:
            print(format, size, num_panels, len(some), flush=True)
            assert (panels.panel_product(some, own) - size).abs().max() <= size / 64
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a fault beyond the end needs mprotect of the C library")
@pytest.mark.parametrize("threads", slow_but([1], [1, 3]))
def test_nothing_is_read_behind_the_last_panel_or_row(threads):
    """Catches a stream, a group or a tile that goes on in memory that is not there: it seldom crashes."""
    run = partial(subprocess.run, capture_output=True, text=True, timeout=120)
    command = [sys.executable, "-c", AT_THE_END_OF_MEMORY, str(threads)]
    whole = run([*command, "0"])
    assert whole.returncode == 0, f"after {whole.stdout.splitlines()[-1:]}: {whole.stderr}"
    assert len(whole.stdout.splitlines()) == 6 * 4 * 12 * 7
    one_line_short = run([*command, "64"])
    assert one_line_short.returncode == -signal.SIGSEGV, "memory behind the end was not protected"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("format", ["float16", "int8", "int4", "w8a8"])
@pytest.mark.parametrize("num_rows", [2, 8, 20])
def test_a_row_that_is_not_finite_spoils_only_itself(processor, format, bad, num_rows):
    """Catches a NaN that reaches the other requests of a step, or one that is lost."""
    layer = PanelLinear(random(70, 100, dtype=torch.float16), None, format)
    rows = random(num_rows, 100, dtype=torch.float16)
    clean = layer(rows)
    rows[1, 99] = bad
    spoiled = layer(rows)
    assert not spoiled[1].isfinite().any()
    others = [row for row in range(num_rows) if row != 1]
    assert torch.equal(spoiled[others], clean[others])


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_weights_that_are_not_finite_stay_so(format):
    """Catches a damaged checkpoint that is quantized to zeros."""
    weight = random(64, 128)
    weight[3, 70] = torch.nan
    assert PanelLinear(weight, None, format)(torch.ones(1, 128))[0, 3].isnan()


def test_float16_is_exact_at_its_edges(processor):
    """Catches subnormal numbers flushed, and infinities that become numbers."""
    edges = torch.tensor([6e-8, -6e-8, 6.1e-5, 65504, -65504, torch.inf, 0.0, 1.0], dtype=torch.float16)
    layer = PanelLinear(edges[:, None], None, "float16")
    torch.testing.assert_close(layer(torch.ones(1, 1, dtype=torch.float16))[0], edges, atol=0, rtol=0)


def test_float16_is_rounded_to_even(processor):
    """Catches results cut off, which pass as rounded ones under any tolerance, and ties that all go up."""
    near_one = [1 + 2**-11, 1 + 3 * 2**-11, 2049, 2051]
    sums = torch.tensor([*near_one, 65519, 65520, 2**-25, 3 * 2**-25, -(2**-26), 5 * 2**-26])
    large = sums.half().clamp(max=65504)  # each is large + middle + 2^-12 small
    middle = (sums - large).half()
    small = ((sums - large - middle) * 2**12).half()
    factors = torch.tensor([[1, 1, 2**-12]], dtype=torch.float16)
    weight = torch.stack([large, middle, small], 1)
    weight[6:, :2], weight[6:, 2] = 0, (sums[6:] * 2**12).half()
    assert torch.equal(weight.float() @ factors[0].float(), sums)
    assert torch.equal(PanelLinear(weight, None, "float16")(factors)[0], sums.half())


@pytest.mark.parametrize(("format", "error"), [("int8", 0.0075), ("int4", 0.11)])
def test_quantized_weights_are_near(format, error):
    """Catches scales by the wrong group: errors of the size of the weights. Zeros stay zeros."""
    weight = random(200, 300)
    weight[5] = 0
    weight[:, 128:192] *= 100
    layer = PanelLinear(weight, None, format)
    groups = (layer.weight - weight)[:, :256].unflatten(1, (-1, 64)).square().mean((0, 2)).sqrt()
    sizes = weight[:, :256].unflatten(1, (-1, 64)).square().mean((0, 2)).sqrt()
    assert (groups / sizes).max() < error
    assert layer.weight[5].eq(0).all()


def test_rows_that_do_not_lie_side_by_side(processor):
    """Catches every second row taken for the next, and columns taken for rows."""
    layer = PanelLinear(random(64, 64), None, "int8")
    rows = random(8, 128)
    assert torch.equal(layer(rows[::2, :64]), layer(rows[::2, :64].contiguous()))
    assert torch.equal(layer(rows[:, ::2]), layer(rows[:, ::2].contiguous()))
    assert layer(rows[:, :64].view(2, 4, 64)).shape == (2, 4, 64)
