"""The C++ kernels for other CPUs and by other compilers: no warning, and the same numbers.

Small cases go through a file to `run_cases.cpp`, compiled for the target and run there; aarch64 under qemu.
Debian's packages: clang libomp-dev g++-aarch64-linux-gnu qemu-user.
"""

import shutil
import struct
import subprocess
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from minipaged.kernels.cpp.build import DTYPES, SOURCES
from minipaged.kernels.dispatch import why_not_cpp
from minipaged.kernels.reference import oracle
from tests.kernels.cases import RELATIVE_ERROR, assert_close, make_case
from tests.kernels.layer_formulas import exact_delta_rule, exact_mamba2
from tests.kernels.rounding import rounded

COMMON = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-Wall", "-Werror")
WITH_OPENMP = ("-fopenmp", "-Wextra")
WITHOUT_OPENMP = ("-Wno-unknown-pragmas",)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest result


class Target(NamedTuple):
    """A compiler, its options for a processor, and what runs the result (nothing: this machine)."""

    compiler: str
    options: tuple[str, ...]
    emulator: tuple[str, ...] = ()


TARGETS = {
    "clang AVX2": Target("clang++", ("-march=x86-64-v3",)),
    "clang SSE2": Target("clang++", ("-march=x86-64", "-Wno-psabi")),
    "gcc AVX2": Target("g++", ("-march=x86-64-v3",)),
    "gcc aarch64": Target("aarch64-linux-gnu-g++", ("-mcpu=neoverse-n1",), ("qemu-aarch64",)),
    "clang aarch64": Target("clang++", ("--target=aarch64-linux-gnu", "-mcpu=apple-m1"), ("qemu-aarch64",)),
}


@pytest.fixture(params=TARGETS)
def target(request) -> Target:
    """A target whose tools are installed; skipped, with the reason, where one is missing."""
    found = TARGETS[request.param]
    headers = ("aarch64-linux-gnu-g++",) if found.emulator else ()  # clang brings no C++ library of its own
    for tool in (found.compiler, *headers, *found.emulator):
        if shutil.which(tool) is None:
            pytest.skip(f"{request.param}: {tool} is not installed")
    if not found.emulator and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"{request.param}: this processor is another")
    return found


def check_compile(target: Target, *arguments: object) -> None:
    command = [target.compiler, *COMMON, *target.options, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("openmp", [WITH_OPENMP, WITHOUT_OPENMP], ids=["OpenMP", "one thread"])
def test_the_sources_compile_without_a_warning(target, openmp, tmp_path):
    """Catches what only one compiler takes: a Mac builds these sources with clang, and without OpenMP."""
    if openmp is WITH_OPENMP and target.emulator and target.compiler == "clang++":
        pytest.skip("no OpenMP for another processor's clang")
    # (Without OpenMP, the small cases below are compiled whole.)
    made = ("-fsyntax-only",) if openmp is WITHOUT_OPENMP else ("-c", "-o", tmp_path / "kernel.o")
    for source in SOURCES:
        check_compile(target, *openmp, *made, source)


def packed(*parts: Tensor | str | int | float | None) -> bytes:
    """Arrays with their sizes before them, integers, reals; None is an empty array."""
    stream = b""
    for part in parts:
        if isinstance(part, int):
            stream += struct.pack("q", part)
        elif isinstance(part, float):
            stream += struct.pack("d", part)
        else:
            if isinstance(part, Tensor):
                data = part.contiguous().view(torch.uint8).numpy().tobytes()
            else:
                data = (part or "").encode()
            stream += struct.pack("q", len(data)) + data
    return stream


class Run:
    """Cases for one program, each with the check of its result."""

    def __init__(self) -> None:
        self.cases: list[bytes] = []
        self.checks: list = []

    def add(self, name: str, dtype: torch.dtype, *parts, check) -> None:
        self.cases.append(packed(name, DTYPES.index(dtype), *parts))
        self.checks.append(check)

    def add_attention(self, lengths, dtype, softcap=None, sliding_window=None, with_sinks=False, **shape):
        case = make_case(lengths, dtype=dtype, sliding_window=sliding_window, **shape)
        sinks = case.sinks if with_sinks else None
        inputs = (case.query, case.key_cache, case.value_cache, case.metadata)
        options = {"scale": 0.3, "softcap": softcap, "sliding_window": sliding_window, "sinks": sinks}
        expected = oracle.paged_attention(*inputs, **options)
        num_tokens, num_heads, key_dim = case.query.shape
        _, num_kv_heads, block_size, value_dim = case.value_cache.shape
        metadata = case.metadata

        def check(data: bytearray) -> None:
            actual = torch.frombuffer(data, dtype=dtype).view(num_tokens, num_heads, value_dim)
            assert_close(actual, expected, case)

        self.add(
            *("attention", dtype, case.query, case.key_cache, case.value_cache),
            torch.zeros(num_tokens, num_heads, value_dim, dtype=dtype),
            *(metadata.block_tables, metadata.query_start, metadata.context_len),
            None if sinks is None else sinks.float(),
            *(case.query.stride(0), case.query.stride(1), metadata.block_tables.stride(0), len(lengths)),
            *(num_heads, num_kv_heads, block_size, key_dim, value_dim, sliding_window or 2**40, 1, 1),
            *(0.3, softcap or 0.0),
            check=check,
        )

    def add_elementwise(self, dtype, dim: int) -> None:
        torch.manual_seed(dim)
        rows, weight = torch.randn(5, 3, dim).to(dtype), torch.randn(dim).to(dtype)
        angles = torch.randn(5, 1, dim // 2).repeat(1, 1, 2)
        cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
        wide = rows.double()
        normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        norm, wide_norm = normed.to(dtype).double() * weight.double(), normed * (1 + weight.double())
        turned = torch.cat((-wide[..., dim // 2 :], wide[..., : dim // 2]), -1)
        both = torch.randn(5, 2 * dim).to(dtype)
        gates, ups = both.double().chunk(2, dim=1)
        gate, gelu_gate = functional.silu(gates) * ups, functional.gelu(gates, approximate="tanh") * ups
        rotated = wide * cosines.double() + turned * sines.double()

        self.add("norm", dtype, rows, weight, None, 5, 3, dim, check=near(norm, dtype))
        self.add("wide norm", dtype, rows, 1 + weight.float(), None, 5, 3, dim, check=near(wide_norm, dtype))
        self.add("rotate", dtype, rows, cosines, sines, 5, 3, dim, check=near(rotated, dtype))
        output = torch.zeros(5, dim, dtype=dtype)
        self.add("gate", dtype, both, output, None, 5, 1, dim, check=near(gate, dtype))
        self.add("gelu gate", dtype, both, output, None, 5, 1, dim, check=near(gelu_gate, dtype))

    def add_recurrent(self, dtype: torch.dtype, channels: int, size: int) -> None:
        torch.manual_seed(channels)
        states, rows = torch.randn(3, channels, size).to(dtype), torch.randn(3, channels).to(dtype)
        weight, bias = torch.randn(channels, size).to(dtype), torch.randn(channels).to(dtype)
        last = torch.cat([states[..., 1:], rows[..., None]], dim=-1)
        exact = (last.double() * weight.double()).sum(-1) + bias.double()
        self.add(
            *("convolution", dtype, states, rows, weight, bias, torch.zeros_like(rows), 3, channels, size),
            check=near(exact, dtype),
        )
        tokens = torch.randn(2, 5, channels).to(dtype)
        padded = functional.pad(tokens.mT.double(), (size - 1, 0))
        exact = functional.conv1d(padded, weight.double()[:, None], bias.double(), groups=channels).mT
        self.add(
            *("whole convolution", dtype, tokens, weight, bias, torch.zeros_like(tokens)),
            *(2, 5, channels, size),
            check=near(exact, dtype),
        )
        query, key = (torch.randn(2, 3, 2, size).to(dtype) for _ in range(2))
        matrices, value = torch.randn(2, 4, size, channels), torch.randn(2, 3, 4, channels).to(dtype)
        decay, beta = -torch.rand(2, 3, 4), torch.rand(2, 3, 4)
        exact, after = torch.zeros(value.shape, dtype=torch.float64), matrices
        for token in range(3):
            parts = (part[:, token] for part in (query, key, value, decay, beta))
            exact[:, token], after = exact_delta_rule(after, *parts)
        self.add(
            *("delta rule", dtype, matrices, query, key, value, decay, beta, torch.zeros_like(value)),
            *(2 * size, 2 * size, 4 * channels, 2, 3, 4, 2, size, channels, 1),
            check=near(exact, dtype),
        )
        key, query = (torch.randn(2, 2, channels).to(dtype) for _ in range(2))
        matrices, value = torch.randn(2, 4, size, channels), torch.randn(2, 4, size).to(dtype)
        dt, A, D = torch.rand(2, 4), -torch.rand(4), torch.randn(4)
        exact, _ = exact_mamba2(matrices, value, dt, A, key, query, D)
        self.add(
            *("mamba2", dtype, matrices, value, key, query, dt, A, D, torch.zeros_like(value)),
            *(2, 4, 2, size, channels, 1),
            check=near(exact, dtype),
        )

    def add_greedy(self, dtype: torch.dtype, vocab_size: int) -> None:
        logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(vocab_size)).to(dtype)

        def check(data: bytearray) -> None:
            tokens, logprobs = torch.frombuffer(data, dtype=torch.float32).view(6, 2).unbind(1)
            assert tokens.tolist() == logits.argmax(-1).tolist()
            torch.testing.assert_close(logprobs, logits.float().log_softmax(-1).amax(-1))

        self.add("greedy", dtype, logits, torch.zeros(6, 2), None, 6, 1, vocab_size, check=check)

    def add_product(self, dtype: torch.dtype, format: str, num_rows: int, prefetch: int) -> None:
        from minipaged.kernels.cpp import panels  # (compiles the kernels)

        num_outputs, size = 330, 331
        generator = torch.Generator().manual_seed(num_rows)
        weight, rows, bias = (
            torch.randn(*shape, generator=generator).to(dtype)
            for shape in ((num_outputs, size), (num_rows, size), (num_outputs,))
        )
        data = panels.pack(weight) if format == "own" else panels.quantize(weight, format)
        if format != "own":
            weight = panels.dequantize(data, format, num_outputs, size)
        seen, either = rounded(rows, format) if format == "w8a8" else (rows.double(), 0 * rows.double())
        exact, slack = seen @ weight.double().T + bias.double(), either @ weight.double().T.abs()
        if format in ("int8", "int4"):  # some processors round the rows
            slack = slack + 1e-4 * exact.abs().max()

        def check(result: bytearray) -> None:
            error = (torch.frombuffer(result, dtype=dtype).view(exact.shape).double() - exact).abs()
            bound = TOLERANCES[dtype] * exact.abs().max() + slack
            assert (error <= bound).all(), (format, num_rows, prefetch)

        self.add(
            *("product", dtype, format, data, rows, bias, torch.zeros(num_rows, num_outputs, dtype=dtype)),
            *(num_rows, size, num_outputs, size, data.shape[1], 1, prefetch),
            check=check,
        )

    def check_results(self, data: bytes) -> None:
        for check in self.checks:
            (size,) = struct.unpack_from("q", data)
            check(bytearray(data[8 : 8 + size]))
            data = data[8 + size :]
        assert not data


def near(expected: Tensor, dtype: torch.dtype):
    def check(data: bytearray) -> None:
        actual = torch.frombuffer(data, dtype=dtype).double().view(expected.shape)
        error = (actual - expected).norm() / expected.norm()
        assert error < RELATIVE_ERROR[dtype], error

    return check


def small_cases() -> Run:
    run = Run()
    mixed = [(1, 9), (7, 7), (3, 12), (1, 1), (2, 140), (33, 70)]
    for dtype in DTYPES:
        for head_dims in ((64, 64), (80, 40), (33, 63), (8, 24)):
            run.add_attention(mixed, dtype, head_dims=head_dims, heads=(6, 2))
        for block_size in (1, 3, 16):
            run.add_attention(mixed, dtype, block_size=block_size)
        run.add_attention(mixed, dtype, softcap=0.7, sliding_window=5, with_sinks=True)
        for dim in (6, 32, 80):
            run.add_elementwise(dtype, dim)
        for channels, size in ((5, 3), (77, 4), (32, 20)):
            run.add_recurrent(dtype, channels, size)
        for vocab_size in (5, 1000):
            run.add_greedy(dtype, vocab_size)
        for format, num_rows in product(("own", "int8", "int4", "w8a8"), (1, 2, 4, 5, 13, 40)):
            for prefetch in (0, 1, 2):
                run.add_product(dtype, format, num_rows, prefetch)
    return run


@pytest.mark.slow
def test_small_cases_equal_the_oracle_on_every_target(target, tmp_path):
    """Catches lanes in another order, other rounding, an alignment taken for granted."""
    if (missing := why_not_cpp(torch.device("cpu"))) is not None:
        pytest.skip(f"the weights are packed by this machine's kernels: {missing}")
    run, program = small_cases(), tmp_path / "run_cases"
    static = ("-static",) if target.emulator else ()
    harness = Path(__file__).with_name("run_cases.cpp")
    check_compile(target, *WITHOUT_OPENMP, *static, "-I", SOURCES[0].parent, harness, "-o", program)
    cases, results = tmp_path / "cases", tmp_path / "results"
    cases.write_bytes(struct.pack("q", len(run.cases)) + b"".join(run.cases))
    subprocess.run([*target.emulator, program, cases, results], check=True, timeout=250)
    run.check_results(results.read_bytes())
